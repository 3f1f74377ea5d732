"""A trace is played while processes are killed at random, and the supervisor starts them again: every answer is whole and
what it would have been, each is charged once, and when all is over nothing is held and the books of every daemon balance.

DI_TRACE=FILE plays the beginning of a recorded trace, in place of a generated one.
"""

import concurrent.futures
import contextlib
import pathlib
import random
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import books  # noqa: E402
import trace  # noqa: E402
from faults import engine_overrides  # noqa: E402
from fleet import PATIENT_FETCH, Fleet, everybody_is_there, main, wait_for  # noqa: E402

SEED = 31
REQUESTS = 300
CLIENTS = 6
KILLS = 32
ANSWER = [f"w{i} " for i in range(48)]  # of engine_overrides
# Of each kind as likely; stores two at a time, which is what the code has parity for.
VICTIMS = [["di-meta.0"], ["di-kvd.host0"], ["di-prefill.0"], ["di-decode.0"], *([f"di-kvd.node{i}", f"di-kvd.node{(i + 5) % 12}"]
                                                                                for i in range(0, 12, 3))]


class Kills:
    """Every so many ended requests the next victims die; not while those before are still being started."""

    def __init__(self, fleet, rng, every):
        self.fleet = fleet
        self.rng = rng
        self.every = every
        self.ended = 0
        self.killed = []
        self.lock = threading.Lock()

    def request_ended(self):
        with self.lock:
            self.ended += 1
            if self.ended % self.every or len(self.killed) >= KILLS:
                return
            victims = self.rng.choice(VICTIMS)
            # One that is being started has no process yet.
            wait_for(lambda: all(self.fleet.alive(victim) for victim in victims), f"{victims} to be alive", 60)
            self.killed.append(victims)
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    self.fleet.kill(victim)


def play(fleet, rows, kills):
    def one(row):
        tokens = min(trace.answer_tokens(row), len(ANSWER))
        reply = fleet.chat(trace.prompt_of(row), temperature=0, max_tokens=tokens)
        kills.request_ended()
        return reply, tokens
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, rows))


def a_trace_with_random_kills_leaves_nothing_behind():
    print(f"  seed {SEED}", flush=True)
    rows = trace.recorded(REQUESTS) or trace.generated(REQUESTS, SEED)
    with Fleet("etc/local-ec", [*engine_overrides(False), PATIENT_FETCH], supervise=True) as fleet:
        kills = Kills(fleet, random.Random(SEED), len(rows) // (KILLS + 1))
        replies = play(fleet, rows, kills)
        print(f"  killed: {kills.killed}", flush=True)
        assert len(kills.killed) == KILLS, kills.killed
        for number, (reply, tokens) in enumerate(replies):
            told = (number, rows[number]["input_length"], reply.status, reply.error, reply.cut, reply.text)
            assert reply.status == 200 and reply.done and not reply.error, told
            assert reply.text == "".join(ANSWER[:tokens]) and reply.usage["completion_tokens"] == tokens, told
        everybody_is_there(fleet)
        fleet.await_idle(60)
        unread = books.unread(fleet.ctl("show", "metrics"))
        assert not unread, unread
        by_request = {charge["request_id"]: charge for charge in fleet.charges()}
        assert len(by_request) == len(fleet.charges()) == len(replies), (len(by_request), len(fleet.charges()), len(replies))
        for reply, _ in replies:
            charge = by_request[reply.request_id]
            assert charge["output_tokens"] == reply.usage["completion_tokens"], (charge, reply.usage)
            assert charge["cached_tokens"] == reply.cached(), (charge, reply.usage)
            assert charge["cached_tokens"] + charge["uncached_tokens"] == reply.usage["prompt_tokens"], (charge, reply.usage)
        cached = sum(reply.cached() for reply, _ in replies)
        asked = sum(reply.usage["prompt_tokens"] for reply, _ in replies)
        print(f"  {len(replies)} requests, {asked} prompt tokens, {cached} of them cached", flush=True)
        assert cached > 0


if __name__ == "__main__":
    main([a_trace_with_random_kills_leaves_nothing_behind])
