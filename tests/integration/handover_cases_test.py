"""Faults of hand-overs that others have reported, end to end: a client that leaves between the legs, a prefill
process that dies under fifty streams, a hand-over that is repeated, a prompt that is new.

The number in front of each test is that of the collection of cases this project was given; what can be shown without
processes is beside the code: tests/unit/host, tests/unit/transfer, tests/unit/rank.
"""

import concurrent.futures
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import cacheable  # noqa: E402
from fleet import PATIENCE, PATIENT_MATCH, main, pieces, script_fleet, wait_for, words  # noqa: E402

SLOW = [f"s{i} " for i in range(250)]
QUICK = [f"q{i} " for i in range(24)]


class Leaves(Exception):
    pass


def e01_a_client_that_leaves_between_the_legs_leaves_nothing_behind():
    """The only seat is taken, so the request has token 0 and its pages, and waits; then its client goes."""
    lines = [{"match": "occupy", "pieces": pieces(*SLOW, delay_ms=int(40 * PATIENCE)), "finish": "stop"},
             {"match": "", "pieces": pieces(*QUICK), "finish": "stop"}]
    with script_fleet(lines, overrides=["di-decode:decode.requests_max=1", PATIENT_MATCH]) as fleet:
        occupied = []

        def leave_at_first_chunk(event):
            if any(choice["delta"].get("content") for choice in event["choices"]):
                raise Leaves

        def occupy(event):
            if any(choice["delta"].get("content") for choice in event["choices"]):
                occupied.append(event)

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            blocker = pool.submit(fleet.chat, "occupy", on_chunk=occupy, timeout=120)
            wait_for(lambda: len(occupied) > 2, "the seat to be taken")
            base = fleet.held()
            for i in range(20):
                try:
                    fleet.chat(words(150, seed=i), on_chunk=leave_at_first_chunk)
                    raise AssertionError("the client did not leave")
                except Leaves:
                    pass
                # Long before the hold (60 s) ends: within the second that design.md promises, stretched for busy machines.
                wait_for(lambda: set(fleet.held()) <= set(base), "what the client left behind", 5)
            assert not blocker.done(), "the seat was free meanwhile"
            assert blocker.result().text == "".join(SLOW)
        reply = fleet.chat("the next one")
        assert reply.text == "".join(QUICK), reply.text
        fleet.await_idle()


def e06_a_dead_prefill_takes_only_its_own_requests_along_and_these_move():
    lines = [{"match": "", "pieces": pieces(*QUICK, delay_ms=20), "finish": "stop"}]
    with script_fleet(lines, conf="etc/local-2p2d", overrides=["di-prefill:engine.step_delay_ms=20"]) as fleet:
        generations = {row["instance"]: row["generation"] for row in fleet.ctl("show", "fleet")}
        started = []
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            jobs = [pool.submit(fleet.chat, words(60, seed=i), on_chunk=started.append, timeout=120) for i in range(50)]
            wait_for(lambda: len(started) > 100, "streams to run")
            fleet.kill("di-prefill.a")
            replies = [job.result() for job in jobs]
        for reply in replies:
            assert reply.status == 200 and reply.done and reply.text == "".join(QUICK), (reply.status, reply.error, reply.text)
        for row in fleet.ctl("show", "fleet"):
            if row["instance"].startswith("di-decode"):
                assert row["state"] == "up" and row["generation"] == generations[row["instance"]], row
        fleet.await_idle()


def two_ranks_of_one_process_have_seats_at_once():
    """Prefill takes its time, so that both seats are there; each rank has one place."""
    lines = [{"match": "", "leg": "prefill", "pieces": pieces(QUICK[0], delay_ms=int(1500 * PATIENCE)), "finish": "stop"},
             {"match": "", "pieces": pieces(*QUICK), "finish": "stop"}]
    lines[0]["pieces"] += pieces(*QUICK[1:])
    rows = ["di-prefill:engine.ranks=2", "di-decode:engine.ranks=2", "di-decode:decode.requests_max=1"]
    with script_fleet(lines, overrides=rows) as fleet:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(fleet.chat, words(60, seed=i), timeout=120) for i in range(2)]
            replies = [job.result() for job in jobs]
        for reply in replies:
            assert reply.status == 200 and reply.done and reply.text == "".join(QUICK), (reply.status, reply.error, reply.text)
        fleet.await_idle()


def e10_pages_that_came_from_prefill_are_not_cache_hits():
    lines = [{"match": "", "pieces": pieces(*QUICK), "finish": "stop"}]
    with script_fleet(lines, conf="etc/local-2p2d", overrides=[PATIENT_MATCH]) as fleet:
        fleet.place("a", "b")
        prompt = words(200, seed=7)
        fresh = fleet.chat(prompt)
        assert fresh.cached() == 0, fresh.usage
        again = fleet.chat(prompt)
        assert again.cached() == cacheable(again), again.usage
        assert again.text == fresh.text == "".join(QUICK)


if __name__ == "__main__":
    main([e01_a_client_that_leaves_between_the_legs_leaves_nothing_behind,
          e06_a_dead_prefill_takes_only_its_own_requests_along_and_these_move,
          two_ranks_of_one_process_have_seats_at_once,
          e10_pages_that_came_from_prefill_are_not_cache_hits])
