"""Without the right ticket, transfer, generation or bounds nothing is taken at a data port: it is refused and counted,
and the request it was about completes.

Between the two hosts of etc/local-2p2d stands a proxy that can read and falsify frames in the clear (di-wire(7), "Data
connections"): host b advertises it instead of its own port.
"""

import contextlib
import os
import pathlib
import socket
import struct
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask  # noqa: E402
from fleet import Fleet, main, wait_for, words  # noqa: E402
from keys import free_port  # noqa: E402

CONF = "etc/local-2p2d"
SHORT = dict(max_tokens=16, ignore_eos=True)
HEADER = struct.Struct("<4sHBBIHHQQIIQI12s")
HELLO, WRITE = 1, 3


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def falsified(header, **changes):
    names = "magic version kind flags crc code reserved number transfer slot generation offset bytes rest".split()
    fields = dict(zip(names, HEADER.unpack(header)))
    fields.update({name: change(fields[name]) for name, change in changes.items()}, crc=0)
    fields["crc"] = crc32c(HEADER.pack(*fields.values()))
    return HEADER.pack(*fields.values())


class Proxy:
    """In front of a data port.  `change` is applied to the header of the next write, once."""

    def __init__(self, target):
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.hellos = []
        self.change = None
        self.changed = 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self.requests, args=(near, far), daemon=True).start()
                threading.Thread(target=self.answers, args=(far, near), daemon=True).start()

    def requests(self, near, far):
        with contextlib.suppress(OSError), near.makefile("rb") as incoming:
            while len(header := incoming.read(HEADER.size)) == HEADER.size:
                kind, length = header[6], HEADER.unpack(header)[12]
                if kind == WRITE and self.change is not None:
                    header, self.change = falsified(header, **self.change), None
                    self.changed += 1
                payload = incoming.read(length) if kind in (HELLO, WRITE) else b""
                if kind == HELLO:
                    self.hellos.append(header + payload)
                far.sendall(header + payload)
        self.end(near, far)

    def answers(self, far, near):
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                near.sendall(data)
        self.end(near, far)

    @staticmethod
    def end(*sockets):
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.listener.close()


@contextlib.contextmanager
def watched():
    port = free_port()
    proxy = Proxy(port)
    with Fleet(CONF, [f"di-kvd.hostb:transfer.bind=127.0.0.1:{port}",
                      f"di-kvd.hostb:transfer.advertise=tcp://127.0.0.1:{proxy.port}"]) as fleet:
        try:
            yield fleet, proxy, port
            fleet.await_idle(70)
        finally:
            proxy.close()


def refused(fleet):
    return fleet.metric_by("di-kvd.hostb", "di_transfer_refused_total", "why")


def answer(fleet, seed):
    """A prompt that is read on a and answered on b, and what a alone says to it."""
    prompt = words(600, seed=seed)
    fleet.place("a", "a")
    alone = ask(fleet, prompt, cache_salt="alone", **SHORT)
    fleet.place("a", "b")
    return prompt, alone.text


def closed(port, data):
    """Whether whoever sends this is shown the door."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            return stranger.recv(1) == b""
        return True


def a_ticket_opens_one_connection():
    with watched() as (fleet, proxy, port):
        prompt, expected = answer(fleet, 1)
        assert ask(fleet, prompt, **SHORT).text == expected
        assert proxy.hellos, "the hand-over did not pass the proxy"
        assert refused(fleet)["ticket"] == 0, refused(fleet)
        hellos = list(proxy.hellos)  # the store may come for its column later
        for hello in hellos:
            assert closed(port, hello), "a ticket was taken twice"
        # Another secret under the same name, and the right name of another start.
        assert closed(port, falsified(hellos[0][:64], number=lambda n: n ^ 1) + hellos[0][64:])
        wait_for(lambda: refused(fleet)["ticket"] == len(hellos) + 1, "the refusals to be counted")
        assert ask(fleet, prompt, cache_salt="after", **SHORT).text == expected


def strangers_are_shown_the_door():
    with watched() as (fleet, proxy, port):
        prompt, expected = answer(fleet, 2)
        for size in (1, 63, 64, 4096):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
                stranger.sendall(os.urandom(size))
        assert closed(port, os.urandom(4096))
        assert closed(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
        wait_for(lambda: refused(fleet)["malformed"] >= 2, "the strangers to be counted")
        assert ask(fleet, prompt, **SHORT).text == expected


def falsified_frames_are_refused(why, **change):
    with watched() as (fleet, proxy, _):
        prompt, expected = answer(fleet, 3)
        proxy.change = change
        reply = ask(fleet, prompt, **SHORT)
        assert reply.text == expected, (reply.text, expected)
        assert proxy.changed == 1, "no page passed the proxy"
        # What else was on its way for the same hand-over may come after it has been given up.
        assert refused(fleet)[why] >= 1, refused(fleet)


def another_transfer_is_refused():
    falsified_frames_are_refused("transfer", transfer=lambda n: n + 1000)


def a_slot_that_the_transfer_does_not_open_is_refused():
    falsified_frames_are_refused("transfer", slot=lambda n: n + 1000)


def another_generation_is_refused():
    falsified_frames_are_refused("generation", generation=lambda n: n + 1)


def bytes_past_a_slot_are_refused():
    falsified_frames_are_refused("bounds", offset=lambda n: 1 << 40)


if __name__ == "__main__":
    main([a_ticket_opens_one_connection, strangers_are_shown_the_door, another_transfer_is_refused,
          a_slot_that_the_transfer_does_not_open_is_refused, another_generation_is_refused, bytes_past_a_slot_are_refused])
