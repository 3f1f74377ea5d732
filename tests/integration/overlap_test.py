"""Only match is on the critical path, and swap-in overlaps with compute (Must show 4 of the first path)."""

import pathlib
import signal
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_hit  # noqa: E402
from fleet import PATIENCE, PATIENT_MATCH, SURE_HIT, Fleet, main, words, write_backs_done  # noqa: E402

DELAY_MS = 30  # about what a layer group computes for in the first chunk
# Instrumented engines are sixteen times slower: they get a quarter of the work.
WORDS = 2000 if PATIENCE == 1 else 500


def prepared(fleet, seed, fresh=WORDS):
    """Caches about 2,000 tokens and returns a prompt that continues them with so many new ones."""
    head = words(WORDS, seed=seed)
    ask(fleet, head, max_tokens=2)
    ask_hit(fleet, head, 0.75 * WORDS, max_tokens=2)
    # The end of the user's turn differs, so the hit is the head's full blocks.
    return head + " " + words(fresh, seed=seed + 1)


def swap_in(fleet, seed):
    prompt = prepared(fleet, seed)
    reply = ask(fleet, prompt, max_tokens=2)
    assert reply.cached() > 0.75 * WORDS, reply.usage
    rows = fleet.explain(reply.request_id)
    spans = [r for r in rows if r["where"].startswith("di-prefill")]
    return reply, rows, spans


def layer_group_0_computes_before_the_last_group_arrived():
    with Fleet(overrides=[f"di-kvd.host0:kv.fetch_delay_ms={DELAY_MS}", "di-prefill:kv.swap_wait=1s", *SURE_HIT]) as fleet:
        _, rows, spans = swap_in(fleet, 10)
        swaps = [s for s in spans if s["event"] == "swap_in"]
        computes = [s for s in spans if s["event"] == "compute"]
        assert swaps and computes, rows
        last_group = max(s["group"] for s in swaps)
        assert last_group > 0, swaps
        arrived = min(s["at_us"] for s in swaps if s["group"] == last_group)
        first_compute = min(s["at_us"] for s in computes if s["group"] == 0)
        assert first_compute < arrived, (first_compute, arrived, spans)


def overlap_saves_the_transfer():
    def first_token_us(overlap, seed):
        value = "true" if overlap else "false"
        with Fleet(overrides=[f"di-kvd.host0:kv.fetch_delay_ms={DELAY_MS}", f"di-prefill:kv.overlap={value}", *SURE_HIT,
                              "di-prefill:kv.swap_wait=1s"]) as fleet:
            reply, rows, _ = swap_in(fleet, seed)
            bound = next(r["at_us"] for r in rows if r["event"] == "bound")
            token = next(r["at_us"] for r in rows if r["event"] == "token")
            return reply.text, token - bound
    overlapped, with_us = first_token_us(True, 20)
    serial, without_us = first_token_us(False, 20)
    assert overlapped == serial, "the answer depends on the overlap"
    # Printed, not asserted: no test asserts a time.
    print(f"  first token after bind: overlap {with_us} us, serial {without_us} us, "
          f"difference {without_us - with_us} us of {5 * DELAY_MS * 1000} us transfer")


def a_stalled_fetch_does_not_stop_others():
    delay_ms = int(400 * PATIENCE)
    with Fleet(overrides=[f"di-kvd.host0:kv.fetch_delay_ms={delay_ms}", "di-prefill:kv.swap_wait=5ms",
                          *SURE_HIT]) as fleet:
        # Next to nothing to compute: it is the fetch that the request waits for.
        prompt = prepared(fleet, 30, fresh=8)
        done = []
        slow = threading.Thread(target=lambda: done.append(ask(fleet, prompt, max_tokens=2)))
        slow.start()
        others = 0
        while slow.is_alive() and others < 200:
            reply = ask(fleet, f"quick question number {others}", max_tokens=4)
            others += 1
        slow.join()
        assert done[0].cached() > 0.75 * WORDS
        assert others >= 3, f"only {others} requests passed the stalled one"


def a_fetch_slower_than_computing_is_given_up():
    with Fleet(overrides=[f"di-kvd.host0:kv.fetch_delay_ms={int(3000 * PATIENCE)}", PATIENT_MATCH]) as fleet:
        head = words(300, seed=40)
        ask(fleet, head, max_tokens=2)
        given_up = 0
        for turn in range(50):  # the first ones may come before the directory knows of the pages
            reply = ask(fleet, f"{head} {words(8, seed=41 + turn)}", max_tokens=2)
            given_up = fleet.metric("di-prefill.0", "di_prefill_fetches_given_up_total")
            if given_up > 0:
                break
        assert given_up > 0, "fifteen seconds of fetching were waited for"
        assert reply.cached() == 0, reply.usage
        events = [r["event"] for r in fleet.explain(reply.request_id) if r["where"].startswith("di-prefill")]
        assert "wait" in events, events


def what_is_sooner_computed_is_not_waited_for():
    fleet = Fleet(expect_failure=True, overrides=[PATIENT_MATCH])
    # The host has learnt that its store takes seconds.
    (fleet.run / "di-kvd.host0.cost").write_text("arena 20 1\nremote_arena 200 870\nstore 5000000 5000000\n")
    with fleet.up():
        head = words(300, seed=50)
        first = ask(fleet, head, max_tokens=4)
        write_backs_done(fleet)
        assert ask(fleet, head, max_tokens=4).cached() > 200, "what is in the arena is used all the same"
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        fleet.kill("di-kvd.store0", signal.SIGSTOP)  # nothing of what is only hinted at comes in time
        try:
            reply = ask(fleet, head, max_tokens=4)
        finally:
            fleet.kill("di-kvd.store0", signal.SIGCONT)
        assert reply.text == first.text and reply.cached() == 0, reply.usage
        events = [r["event"] for r in fleet.explain(reply.request_id) if r["where"].startswith("di-prefill")]
        assert "cut" in events and "wait" not in events, events
        assert fleet.metric("di-prefill.0", "di_prefill_blocks_cut_total") > 0
        assert fleet.metric("di-kvd.host0", "di_kv_fetches_cut_total") == 1
        fleet.await_idle()
        fleet.books_balance()


if __name__ == "__main__":
    main([layer_group_0_computes_before_the_last_group_arrived, overlap_saves_the_transfer,
          a_stalled_fetch_does_not_stop_others, a_fetch_slower_than_computing_is_given_up,
          what_is_sooner_computed_is_not_waited_for])
