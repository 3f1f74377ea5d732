"""Strangers at every port of a fleet over TCP, in the clear on loopback and under CURVE: frame headers that promise
16 GiB, headers that end after three bytes, noise, and two hundred that drip.  All are shown the door, none costs memory, and
requests go on.
"""

import contextlib
import os
import pathlib
import random
import re
import selectors
import socket
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, meanwhile  # noqa: E402
from fleet import Fleet, main, wait_for, words  # noqa: E402
from keys import Keyed, free_port, refused  # noqa: E402

SEED = 20
CONF = "etc/local-2p2d"
SHORT = dict(max_tokens=16, ignore_eos=True)
HUGE = 16 << 30
# Memory is what is looked at here: an address sanitizer is not to keep what was freed (256 MiB of it otherwise).
os.environ["ASAN_OPTIONS"] = ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), "quarantine_size_mb=1"]))
# What all strangers together may cost a daemon; one of their headers promises a thousand times as much.
GROWTH_MAX = 16 << 20
EXPLAINED = 1000  # RouterCore::Options::explain_max
DRIPPING = 200
INSTANCES = ["di-meta.0", "di-kvd.store0", "di-kvd.hosta", "di-kvd.hostb", "di-prefill.a", "di-prefill.b", "di-decode.a",
             "di-decode.b", "di-router.0"]


def greeting(mechanism):
    """ZMTP 3.0, 64 bytes."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.encode().ljust(20, b"\0") + bytes(32)


READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + struct.pack(">I", 0)
# What a stranger says at a port for messages.
LIES = {
    "a message of 16 GiB": greeting("NULL") + bytes([4, len(READY)]) + READY + b"\x02" + struct.pack(">Q", HUGE),
    "a command of 16 GiB": greeting("NULL") + b"\x06" + struct.pack(">Q", HUGE),
    "a CURVE command of 16 GiB": greeting("CURVE") + b"\x06" + struct.pack(">Q", HUGE),
    "a frame of ZMTP 1 of 16 GiB": b"\xff" + struct.pack(">Q", HUGE),
    "three bytes": b"\xff\x00\x00",
    "no greeting": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
}


@contextlib.contextmanager
def over_tcp(keyed):
    """The fleet; and its ports, what is behind them, and whether messages are."""
    keys = Keyed(INSTANCES)
    plain = {"di-router.0": ("admin", free_port()), "di-meta.0": ("metrics", free_port()),
             "di-kvd.store0": ("metrics", free_port()), "di-kvd.hosta": ("metrics", free_port())}
    rows = keys.overrides()
    if not keyed:
        rows = [row for row in rows if not re.search(r"net\.(secret|public)_key|meta\.public_key", row)]
    try:
        rows += [f"{instance}:{what}.listen=127.0.0.1:{port}" for instance, (what, port) in plain.items()]
        with Fleet(CONF, rows) as fleet:
            ports = {}
            for row in fleet.ctl("-d", "di-meta.0", "show", "fleet"):
                ports[int(row["control"].rsplit(":", 1)[1])] = (row["instance"], True)
            for instance in INSTANCES:
                if port := fleet.data_port(instance):
                    ports[port] = (instance, False)
            ports[fleet.address[1]] = ("di-router.0", False)
            ports.update({port: (instance, False) for instance, (_, port) in plain.items()})
            assert len(ports) == len(INSTANCES) + 3 + 1 + len(plain), ports
            yield fleet, ports
            fleet.await_idle(60)
    finally:
        keys.close()


def resident(fleet, instance):
    return int(pathlib.Path(f"/proc/{fleet.pid(instance)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Strangers:
    """Connections that only ever hear a goodbye; one thread looks after all of them."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.open = {}

    def add(self, port, data, drip=b""):
        one = socket.create_connection(("127.0.0.1", port), timeout=30)
        with contextlib.suppress(OSError):
            one.sendall(data)
        one.setblocking(False)
        self.selector.register(one, selectors.EVENT_READ)
        self.open[one] = [port, memoryview(drip)]

    def look(self):
        """Hears who was sent away; those that drip say one byte more.  The ports that still hold somebody."""
        for key, _ in self.selector.select(0.05):
            with contextlib.suppress(BlockingIOError):
                try:
                    over = key.fileobj.recv(4096) == b""
                except ConnectionError:
                    over = True
                if over:
                    self.forget(key.fileobj)
        for one, stranger in list(self.open.items()):
            if stranger[1]:
                try:
                    one.send(stranger[1][:1])
                    stranger[1] = stranger[1][1:]
                except BlockingIOError:
                    pass
                except OSError:
                    self.forget(one)
        return sorted({port for port, _ in self.open.values()})

    def forget(self, one):
        self.selector.unregister(one)
        del self.open[one]
        one.close()

    def close(self):
        for one in list(self.open):
            self.forget(one)
        self.selector.close()


def all_are_sent_away(strangers, ports):
    left = None

    def gone():
        nonlocal left
        left = [ports[port] for port in strangers.look()]
        return not left
    try:
        wait_for(gone, "every stranger to be sent away", 90)
    except AssertionError as error:
        raise AssertionError(f"{error}: still at {left}") from None


def asking(fleet):
    """Requests all the while; their answers do not change."""
    prompt = words(300, seed=SEED)
    expected = ask(fleet, prompt, **SHORT).text

    def same_again():
        text = ask(fleet, prompt, **SHORT).text
        assert text == expected, (text, expected)
    return meanwhile(same_again)


# F20.
def headers_that_promise_too_much(keyed):
    rng = random.Random(SEED)
    with over_tcp(keyed) as (fleet, ports):
        # What requests take is not the strangers': a router keeps so many that are over to be explained.
        with asking(fleet):
            wait_for(lambda: len(fleet.charges()) > EXPLAINED, "requests", 90)
        before = {instance: resident(fleet, instance) for instance in INSTANCES}
        told = {instance: refused(fleet, instance)["handshake"] for instance in INSTANCES}
        strangers = Strangers()
        with asking(fleet), contextlib.closing(strangers):
            for port, (_, messages) in ports.items():
                for lie in LIES.values() if messages else (b"\xff" * 3, struct.pack("<4sQ", b"DIDP", HUGE) + bytes(64)):
                    strangers.add(port, lie)
                strangers.add(port, rng.randbytes(4096))
            all_are_sent_away(strangers, ports)
        for instance in INSTANCES:
            grown = resident(fleet, instance) - before[instance]
            assert grown < GROWTH_MAX, (instance, grown)
            assert refused(fleet, instance)["handshake"] > told[instance], (instance, refused(fleet, instance))


def headers_in_the_clear():
    headers_that_promise_too_much(keyed=False)


def headers_under_curve():
    headers_that_promise_too_much(keyed=True)


# F21.
def peers_that_drip():
    with over_tcp(keyed=True) as (fleet, ports):
        strangers = Strangers()
        with contextlib.closing(strangers):
            at = sorted(ports)
            for number in range(DRIPPING):
                port = at[number % len(at)]
                # Slower than any handshake is allowed to be: one byte at each look, as long as it takes.
                data = greeting("CURVE") if ports[port][1] else b"POST /v1/chat/completions HTTP/1.1\r\nx: " + b"y" * 1000
                strangers.add(port, b"", drip=data[:-1])
            with asking(fleet):
                all_are_sent_away(strangers, ports)


if __name__ == "__main__":
    main([headers_in_the_clear, headers_under_curve, peers_that_drip])
