"""Losses between two hosts (etc/local-2p2d): kill -9 at every fault point while prompts are read on a and answers
written on b, and the loss of a whole compute host, of the store and of di-meta at every step of a request.

Every stream is complete and equal to an undisturbed run, at temperature 0 and at temperature 1 with a seed, none
hangs, and gauges return to their base.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_hit  # noqa: E402
from faults import check, compare, engine_overrides, fault_points, loop, run_all, streams, undisturbed  # noqa: E402
from fleet import SURE_HIT, Fleet, main, wait_for, words, write_backs_done  # noqa: E402
from stores import inventories_taken  # noqa: E402

CONF = "etc/local-2p2d"
# A fleet mostly waits: for its start, for delays of the engine, for its end.
AT_A_TIME = 3


def instance_of_kvd(name):
    if name.startswith("store_") or name == "kvd_mid_segment":
        return "di-kvd.store0"
    return "di-kvd.hostb" if name == "kvd_before_handover_ack" else "di-kvd.hosta"


INSTANCES = {
    "di-prefill": lambda name: "di-prefill.a",
    "di-decode": lambda name: "di-decode.b",
    "di-kvd": instance_of_kvd,
    "di-meta": lambda name: "di-meta.0",
}


def across(fleet):
    fleet.place("a", "b")


def script_engine_across_hosts_supervised():
    loop(False, CONF, INSTANCES, "di-kvd.hosta", steer=across, at_a_time=AT_A_TIME)


def demo_model_across_hosts_supervised():
    loop(True, CONF, INSTANCES, "di-kvd.hosta", steer=across, at_a_time=AT_A_TIME)


def demo_model_unsupervised():
    """Nobody restarts what dies on host a, and nothing is drained: the other host takes over."""
    with Fleet(CONF) as fleet:
        expected = undisturbed(fleet, True)
        points = fault_points(fleet)

    def one(case):
        instance, name = case
        print(f"  {instance} {name}", flush=True)
        with Fleet(CONF, [f"{instance}:fault.at={name}=kill"]) as fleet:
            check(fleet, True, expected, name)
            check(fleet, True, expected, name)
            await_idle(fleet)

    cases = [(f"{program}.a", name) for program in ("di-prefill", "di-decode") for name in sorted(points[program])]
    cases += [("di-kvd.store0" if name.startswith("store_") or name == "kvd_mid_segment" else "di-kvd.hosta", name)
              for name in sorted(points["di-kvd"])]
    cases += [("di-meta.0", name) for name in sorted(points["di-meta"])]
    run_all(one, cases, AT_A_TIME)


def await_idle(fleet):
    """Gauges are at their base, but for pages that wait to be written to a store or by a directory that is gone."""
    def held():
        written = fleet.alive("di-kvd.store0") and fleet.alive("di-meta.0")
        return fleet.held(ignore=() if written else ("pending_writebacks", "pins", "used_bytes"))
    wait_for(lambda: not held(), "gauges to return to their base", 60)


# ---- The loss of a whole host ------------------------------------------------------------------------------
# At a fault point the instance stops itself.  Then every daemon of a host is killed at once, which may be the
# host of what has stopped or the other one; what is stopped and lives goes on.

STEPS = [
    # What stops where, and which host is lost there.
    ("di-prefill.a", "prefill_after_bind", "a"),
    ("di-prefill.a", "prefill_mid_chunk", "a"),
    ("di-prefill.a", "prefill_mid_chunk", "b"),
    ("di-prefill.a", "prefill_before_sealed", "a"),
    ("di-decode.b", "decode_after_seat", "b"),
    ("di-decode.b", "decode_after_seat", "a"),
    ("di-prefill.a", "prefill_before_handover", "a"),
    ("di-prefill.a", "prefill_before_handover", "b"),
    ("di-kvd.hosta", "kvd_before_handover_sealed", "a"),
    ("di-kvd.hosta", "kvd_before_handover_sealed", "b"),
    ("di-kvd.hostb", "kvd_before_handover_ack", "a"),
    ("di-kvd.hostb", "kvd_before_handover_ack", "b"),
    ("di-decode.b", "decode_after_started", "a"),
    ("di-decode.b", "decode_after_started", "b"),
    ("di-decode.b", "decode_after_first_batch", "b"),
    ("di-decode.b", "decode_mid_step:20", "a"),
    ("di-decode.b", "decode_mid_step:20", "b"),
]
# b has everything by then and does not miss the host it came from.
NOT_MISSED = {(name, "a") for name in ("kvd_before_handover_ack", "decode_after_started", "decode_mid_step")}


def lose_a_host(real, supervise):
    overrides = engine_overrides(real)
    with Fleet(CONF, overrides) as fleet:
        across(fleet)
        expected = undisturbed(fleet, real)

    def one(case):
        instance, point, lost = case
        name, _, hit = point.partition(":")
        print(f"  {instance} at {point}, {lost} is lost", flush=True)
        with Fleet(CONF, [*overrides, f"{instance}:fault.at={name}:{hit or 1}=stop"], supervise=supervise) as fleet:
            across(fleet)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                asked = pool.submit(streams, fleet, real)
                wait_for(lambda: fleet.stopped_at(instance, name) or asked.done(), f"{instance} to stop at {name}")
                assert fleet.fired(instance, name), f"{name} was never reached"
                if not supervise:
                    # The other host is all there is.
                    for program in ("di-prefill", "di-decode"):
                        other = f"{program}.{'b' if lost == 'a' else 'a'}"
                        if other != instance:
                            fleet.ctl("resume", other)
                stopped = fleet.pid(instance)
                fleet.kill_host(lost)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)
                replies = asked.result()
                compare(fleet, replies, expected, case)
            if (name, lost) not in NOT_MISSED:
                assert any(went_elsewhere(fleet, reply) for reply in replies), f"{case}: nobody missed {lost}"
            check(fleet, real, expected, case)
            fleet.await_idle(60)

    run_all(one, STEPS, AT_A_TIME)


def went_elsewhere(fleet, reply):
    events = [row.get("event") for row in fleet.explain(reply.request_id)]
    return "reentry" in events or events.count("seat_asked") > 1


def script_engine_loses_a_host_that_comes_back():
    lose_a_host(real=False, supervise=True)


def demo_model_loses_a_host_that_comes_back():
    lose_a_host(real=True, supervise=True)


def demo_model_loses_a_host_for_good():
    lose_a_host(real=True, supervise=False)


# ---- The loss of what both hosts share ---------------------------------------------------------------------

# F25, G05, G13.
def the_store_or_the_directory_is_away_for_a_while():
    """Killed or frozen in the middle of streams, away for others, and back: pages are found again."""
    with Fleet(CONF) as fleet:
        across(fleet)
        expected = undisturbed(fleet, True)
    def one(case):
        instance, how = case
        print(f"  {instance} {how.name}", flush=True)
        with Fleet(CONF, [*SURE_HIT]) as fleet:
            across(fleet)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                asked = pool.submit(streams, fleet, True)
                wait_for(lambda: asked.done() or "decoding" in {r["state"] for r in fleet.ctl("show", "requests")}, "a stream")
                pid = fleet.kill(instance, how)
                compare(fleet, asked.result(), expected, f"{instance} {how.name}")
            wait_for(lambda: not any(row["peer"] == instance for row in fleet.ctl("-d", "di-kvd.hosta", "show", "peers")),
                     f"{instance} to be missed")
            check(fleet, True, expected, f"{instance} away")
            prompt = words(900, seed=51)
            cold = ask(fleet, prompt, max_tokens=8)
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
            fleet.up()
            inventories_taken(fleet)
            # Without the directory a router asks nobody what is cached.
            wait_for(lambda: any(row["peer"] == "di-meta.0" for row in fleet.ctl("-d", "di-router.0", "show", "peers")),
                     "the router to be back at the directory")
            write_backs_done(fleet)
            fleet.await_idle(60)
            # What was computed meanwhile is in the store by now: a host that never had it finds it there.
            fleet.place("b", "b")
            fleet.kill_host("a")
            hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], max_tokens=8)
            assert hit.text == cold.text
            check(fleet, True, expected, f"{instance} back")
            fleet.await_idle(60)

    run_all(one, [(i, how) for i in ("di-kvd.store0", "di-meta.0") for how in (signal.SIGKILL, signal.SIGSTOP)], AT_A_TIME)


if __name__ == "__main__":
    main([script_engine_across_hosts_supervised, demo_model_across_hosts_supervised, demo_model_unsupervised,
          script_engine_loses_a_host_that_comes_back, demo_model_loses_a_host_that_comes_back,
          demo_model_loses_a_host_for_good, the_store_or_the_directory_is_away_for_a_while])
