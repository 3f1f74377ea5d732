"""Machines that are network namespaces, for integration tests: each has one address in 10.77.0.0/24, and every
packet between them passes through one small program, which can drop, lose, slow or falsify them per pair and
direction.  Nothing of the machine's own network is touched.

    with Network(["a", "b"]) as network:
        network.set("a", "b", drop=True)      # from a to b only

The program (this file, run) makes the namespaces and unmakes them when its standard input ends, however the test
ended.  It needs ip(8), /dev/net/tun and the right to make namespaces; Unavailable says which is missing.
"""

import collections
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

MTU = 1500
QUEUE_S = 0.1  # of a slow link; what does not fit is dropped


class Unavailable(Exception):
    """This machine makes no network namespaces."""


def inside(namespace):
    """A context in which this thread makes its sockets in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    @contextlib.contextmanager
    def there():
        with open("/proc/thread-self/ns/net") as here, open(f"/var/run/netns/{namespace}") as target:
            for_network = 0x40000000  # CLONE_NEWNET
            if libc.setns(target.fileno(), for_network) != 0:
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
            try:
                yield
            finally:
                if libc.setns(here.fileno(), for_network) != 0:
                    os.abort()  # this thread is lost
    return there()


class Network:
    numbers = itertools.count()

    def __init__(self, names, seed=1):
        self.names = list(names)
        # Unique on this machine, and at most 15 characters with the device.
        self.prefix = f"di-{os.getpid()}-{next(self.numbers)}-"
        self.process = subprocess.Popen([sys.executable, __file__, self.prefix, str(seed), *self.names],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        answer = json.loads(self.process.stdout.readline() or '"it did not start"')
        if answer != "ready":
            self.close()
            raise Unavailable(answer)

    def namespace(self, name):
        return self.prefix + name

    def address(self, name):
        return address_of(self.names.index(name))

    def inside(self, name):
        return inside(self.namespace(name))

    def set(self, source, target, drop=False, loss=0.0, bytes_per_s=0, flip=0, port=0):
        """What happens to packets from one to the other from now on; without words they pass.

        flip: so many full TCP segments from or to that port get a wrong bit that no TCP checksum shows.
        """
        self.process.stdin.write(json.dumps({"from": source, "to": target, "drop": drop, "loss": loss,
                                             "bytes_per_s": bytes_per_s, "flip": flip, "port": port}) + "\n")
        self.process.stdin.flush()
        assert json.loads(self.process.stdout.readline()) == "done"

    def between(self, one, other, **words):
        self.set(one, other, **words)
        self.set(other, one, **words)

    def close(self):
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def bytes_per_s(self, source, target, count=8 << 20):
        """What one connection moves as things are."""
        with self.inside(target):
            listener = socket.create_server((self.address(target), 0))
        with listener:
            took = []

            def read():
                connection, _ = listener.accept()
                with connection:
                    begin = time.monotonic()
                    left = count
                    while left > 0:
                        left -= len(connection.recv(1 << 16))
                    took.append(time.monotonic() - begin)
            reader = threading.Thread(target=read)
            reader.start()
            with self.inside(source):
                sender = socket.socket()
            with sender:
                sender.connect(listener.getsockname())
                sender.sendall(bytes(count))
                reader.join()
        return count / took[0]


# ---- The program -------------------------------------------------------------------------------------------

def address_of(index):
    return f"10.77.0.{index + 1}"


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"ip {' '.join(words)}: {done.stderr.strip()}")


def open_tun(namespace, device):
    with inside(namespace):
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, 0x400454ca, struct.pack("16sH22x", device.encode(), 0x1001))  # TUNSETIFF: TUN, no header
        except OSError as error:
            raise Unavailable(f"/dev/net/tun: {error}") from None
    return tun


def is_full_segment(packet, port):
    at = (packet[0] & 15) * 4
    return (len(packet) >= MTU - 100 and packet[9] == socket.IPPROTO_TCP
            and port in struct.unpack_from("!HH", packet, at))


def falsified(packet):
    """With one bit of its last byte but one flipped, and a TCP checksum to match (RFC 1624)."""
    out = bytearray(packet)
    at = (out[0] & 15) * 4
    word = len(out) - 2 - (len(out) - at) % 2  # an even offset within the segment
    old, = struct.unpack_from("!H", out, word)
    struct.pack_into("!H", out, word, old ^ 1)
    checksum, = struct.unpack_from("!H", out, at + 16)
    total = (~checksum & 0xffff) + (~old & 0xffff) + (old ^ 1)
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    struct.pack_into("!H", out, at + 16, ~total & 0xffff)
    return bytes(out)


class Switch:
    """Packets of all machines, in one thread.  Bound: QUEUE_S of each slow direction."""

    def __init__(self, names, seed):
        self.names = names
        self.random = random.Random(seed)
        self.tuns = {}  # by name
        self.rules = collections.defaultdict(dict)  # (from, to) -> words of set()
        self.busy_until = collections.defaultdict(float)
        self.waiting = []  # (when, number, to, packet)
        self.number = itertools.count()
        self.targets = {socket.inet_aton(address_of(i)): name for i, name in enumerate(names)}

    def forward(self, source, packet, now):
        if packet[0] >> 4 != 4:
            return
        target = self.targets.get(packet[16:20])
        if target is None:
            return
        rule = self.rules[source, target]
        if rule.get("drop") or (rule.get("loss") and self.random.random() < rule["loss"]):
            return
        if rule.get("flip") and is_full_segment(packet, rule["port"]):
            rule["flip"] -= 1
            packet = falsified(packet)
        if not rule.get("bytes_per_s"):
            return self.deliver(target, packet)
        until = max(now, self.busy_until[source, target])
        if until - now <= QUEUE_S:
            until += len(packet) / rule["bytes_per_s"]
            self.busy_until[source, target] = until
            heapq.heappush(self.waiting, (until, next(self.number), target, packet))

    def deliver(self, target, packet):
        with contextlib.suppress(OSError):  # its queue is full: dropped, as anywhere
            os.write(self.tuns[target], packet)

    def run(self, commands):
        by_fd = {tun: name for name, tun in self.tuns.items()}
        poll = select.poll()
        for fd in [*by_fd, commands]:
            poll.register(fd, select.POLLIN)
        text = b""
        while True:
            now = time.monotonic()
            while self.waiting and self.waiting[0][0] <= now:
                _, _, target, packet = heapq.heappop(self.waiting)
                self.deliver(target, packet)
            wait_ms = max(1, int((self.waiting[0][0] - now) * 1000)) if self.waiting else None
            for fd, _ in poll.poll(wait_ms):
                if fd == commands:
                    data = os.read(commands, 1 << 16)
                    if not data:
                        return
                    text += data
                    while b"\n" in text:
                        line, text = text.split(b"\n", 1)
                        words = json.loads(line)
                        self.rules[words.pop("from"), words.pop("to")] = words
                        print(json.dumps("done"), flush=True)
                    continue
                now = time.monotonic()
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        self.forward(by_fd[fd], os.read(fd, 1 << 16), now)


def end_namespace(namespace):
    """Nothing runs in it any more, and it is gone."""
    if not pathlib.Path(f"/var/run/netns/{namespace}").exists():
        return
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def program(prefix, seed, names):
    switch = Switch(names, int(seed))
    try:
        if not shutil.which("ip"):
            raise Unavailable("there is no ip(8)")
        for index, name in enumerate(names):
            namespace = prefix + name
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            switch.tuns[name] = open_tun(namespace, "net0")
            ip("-n", namespace, "address", "add", f"{address_of(index)}/24", "dev", "net0")
            ip("-n", namespace, "link", "set", "net0", "mtu", str(MTU), "up")
        print(json.dumps("ready"), flush=True)
        switch.run(sys.stdin.fileno())
    except (Unavailable, OSError) as error:
        print(json.dumps(str(error)), flush=True)
    finally:
        for name in names:
            end_namespace(prefix + name)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program(sys.argv[1], sys.argv[2], sys.argv[3:])
