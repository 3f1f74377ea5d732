"""Hostile clients and careless operators: others are not held up, answers stay right, nothing stays held."""

import concurrent.futures
import json
import os
import pathlib
import random
import signal
import socket
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask  # noqa: E402
from fleet import PATIENCE, Fleet, main, pieces, script_fleet, wait_for, words  # noqa: E402

ANSWER = [f"w{i} " for i in range(60)]
SLOW = {"match": "", "pieces": pieces(*ANSWER, delay_ms=20)}


def ask_many(fleet, count, seed):
    pool = concurrent.futures.ThreadPoolExecutor(count)
    return [pool.submit(fleet.chat, words(200 + 20 * i, seed=seed + i)) for i in range(count)]


def check(asked):
    for one in asked:
        reply = one.result()
        assert reply.status == 200 and reply.done and not reply.error, (reply.status, reply.error)
        assert reply.text == "".join(ANSWER), reply.text


def huge_bodies_hold_up_nobody():
    with script_fleet([SLOW]) as fleet:
        ask = {"model": "demo", "messages": [{"role": "user", "content": "a" * 30_000_000}]}
        deep = '{"model":"demo","ignored":[' + "[]," * 10_000_000 + "0]}"
        expected = [(json.dumps(ask), "context_length_exceeded"), (deep, None)]
        running = ask_many(fleet, 4, seed=1)
        for body, code in expected:
            answers = []
            sender = threading.Thread(
                target=lambda body=body: answers.append(fleet.request("POST", "/v1/chat/completions", body)))
            sender.start()
            longest = 0.0
            while sender.is_alive():
                start = time.monotonic()
                assert fleet.request("GET", "/health/live", headers={})[0] == 200
                longest = max(longest, time.monotonic() - start)
                sender.join(0.01)
            status, head, data = answers[0]
            assert status == 400 and json.loads(data)["error"]["code"] == code, (status, data)
            # Reading all of it on the loop takes more than ten seconds, which is no peer's patience either.
            assert longest < 1.5 * PATIENCE, longest
        check(running)
        # What fits is answered the same way.
        assert fleet.chat("a" * 16000, stream=False).text == "".join(ANSWER)
        # A client that leaves while its prompt is read.
        request = json.dumps(ask).encode()
        with socket.create_connection(fleet.address) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                           + fleet.key.encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(request) + request)
        fleet.await_idle()
        assert len(fleet.charges()) == 5, fleet.charges()


def every_answer_has_a_request_id():
    with script_fleet([SLOW]) as fleet:
        for request in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n"):
            with socket.create_connection(fleet.address, timeout=30) as client:
                client.sendall(request)
                assert b"\r\nx-request-id: " in client.recv(65536), request


def clients_leave_at_every_moment():
    with script_fleet([SLOW]) as fleet:
        rng = random.Random(5)
        body = json.dumps({"model": "demo", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
        request = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + fleet.key.encode()
                   + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        moments = [(kind, rng.randrange(1, len(request)), rng.random()) for kind in range(4) for _ in range(25)]

        def leave(moment):
            kind, cut, share = moment
            with socket.create_connection(fleet.address) as client:
                client.sendall(request[:cut] if kind == 0 else request)
                if kind == 1:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if kind == 2:
                    client.settimeout(share * 1.2)
                    try:
                        while client.recv(4096):
                            pass
                    except TimeoutError:
                        pass
                if kind == 3:
                    client.shutdown(socket.SHUT_WR)
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            list(pool.map(leave, moments))
        fleet.await_idle()
        assert fleet.chat("x").text == "".join(ANSWER)

        # The record of an answer follows its last byte.
        wait_for(lambda: fleet.metric("di-router.0", "di_http_chat_requests_total") == len(fleet.charges()),
                 "a charge record for each request")
        assert len({c["charge_id"] for c in fleet.charges()}) == len(fleet.charges())


def frozen_decode_is_asked_again_when_it_wakes():
    with script_fleet([SLOW]) as fleet:
        router = fleet.pid("di-router.0")
        frozen = fleet.kill("di-decode.0", signal.SIGSTOP)
        asked = ask_many(fleet, 8, seed=100)
        wait_for(lambda: fleet.request("GET", "/health")[0] == 503, "the frozen rank to be lost")
        os.kill(frozen, signal.SIGCONT)
        check(asked)
        assert fleet.pid("di-router.0") == router and fleet.alive("di-router.0")
        fleet.await_idle()


def two_that_die_at_once_both_come_back():
    with script_fleet([SLOW], supervise=True) as fleet:
        for pair in (("di-prefill.0", "di-decode.0"), ("di-kvd.host0", "di-meta.0")):
            old = {}
            asked = ask_many(fleet, 6, seed=200)
            for instance in pair:
                old[instance] = fleet.kill(instance)
            for instance in pair:
                wait_for(lambda: fleet.pid(instance) != old[instance] and fleet.alive(instance), f"{instance} to be back")
            check(asked)
        fleet.await_idle()


def what_fits_no_pool_is_refused():
    with Fleet(overrides=["di-decode.0:kv.pool=4MiB"]) as fleet:  # 4,369 tokens
        assert fleet.chat("hi", max_tokens=4, temperature=0).done
        for content, fields in (("hi", {"max_tokens": 5000}), ("a " * 3000, {})):
            reply = fleet.chat(content, stream=False, **fields)
            assert reply.status == 400 and "longer" in reply.error["message"], (reply.status, reply.error)
        fleet.await_idle()


def damaged_volume_is_never_served():
    def ask_three(fleet):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            replies = list(pool.map(lambda i: ask(fleet, words(500 + 60 * i, seed=i), max_tokens=16, ignore_eos=True), range(3)))
        return [r.text for r in replies], [r.cached() for r in replies]

    with Fleet(supervise=True) as fleet:
        cold, none_cached = ask_three(fleet)
        assert none_cached == [0, 0, 0]
        fleet.await_idle()
        volume = fleet.run / "di-kvd.store0.volume"
        data = volume.read_bytes()
        rng = random.Random(7)
        with open(volume, "r+b") as file:
            for at in range(4096 * 16, len(data), 4096):  # behind the superblocks
                if any(data[at:at + 4096]):
                    file.seek(at + rng.randrange(4096))
                    file.write(os.urandom(1))
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        text, _ = ask_three(fleet)
        assert text == cold
        fleet.await_idle()
        # And a volume that lost its second half, read by a store that had it open, then by a new one.
        os.truncate(volume, len(data) // 2)
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        assert ask_three(fleet)[0] == cold
        fleet.await_idle()


if __name__ == "__main__":
    main([huge_bodies_hold_up_nobody, every_answer_has_a_request_id, clients_leave_at_every_moment,
          frozen_decode_is_asked_again_when_it_wakes, two_that_die_at_once_both_come_back,
          what_fits_no_pool_is_refused, damaged_volume_is_never_served])
