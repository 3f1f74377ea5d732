"""Two hosts and a store on a third machine (etc/local-2p2d), everything between them over TCP: any prefill hits
any page, and a hand-over crosses the network.
"""

import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_cold, ask_hit  # noqa: E402
from fleet import PATIENT_MATCH, SURE_HIT, Fleet, main, wait_for, words, write_backs_done  # noqa: E402

CONF = "etc/local-2p2d"
SEALED = "di-kvd:transfer.seal=true"
SHORT = dict(max_tokens=24, ignore_eos=True)
SAMPLED = dict(temperature=1, seed=77, **SHORT)


def prompt_of_a_is_a_hit_on_b(*overrides):
    """... and still one when a is gone with its arena: the store has it."""
    with Fleet(CONF, [*SURE_HIT, *overrides]) as fleet:
        prompts = [words(2000, seed=11), words(2000, seed=12)]
        fleet.place("a", "a")
        cold = [ask_cold(fleet, prompt, **SHORT) for prompt in prompts]
        tokens = [reply.usage["prompt_tokens"] for reply in cold]
        assert min(tokens) >= 2000, tokens
        write_backs_done(fleet)
        fleet.place("b", "b")
        assert fleet.metric("di-kvd.hostb", "di_kv_read_bytes_total") == 0
        hit = ask_hit(fleet, prompts[0], 0.9 * tokens[0], **SHORT)
        assert hit.text == cold[0].text
        assert fleet.metric("di-kvd.hostb", "di_kv_read_bytes_total") > 0
        arena_reads = fleet.metric("di-kvd.hostb", "di_kv_arena_reads_total")
        fleet.kill_host("a")
        # b has never seen the second prompt, and nobody but the store has it any more.
        hit = ask_hit(fleet, prompts[1], 0.9 * tokens[1], **SHORT)
        assert hit.text == cold[1].text
        assert fleet.metric("di-kvd.hostb", "di_kv_arena_reads_total") == arena_reads
        again = ask_hit(fleet, prompts[0], 0.9 * tokens[0], **SHORT)
        assert again.text == cold[0].text
        fleet.await_idle(60)


def a_prefix_survives_its_host():
    prompt_of_a_is_a_hit_on_b()


def a_prefix_survives_its_host_sealed():
    prompt_of_a_is_a_hit_on_b(SEALED)


def pages_that_no_store_has_come_out_of_the_other_arena():
    with Fleet(CONF, [*SURE_HIT, "di-kvd:kv.admit=second_sighting"]) as fleet:
        from_other_arena(fleet, words(2000, seed=21))
        fleet.await_idle(60)


def pages_come_out_of_the_other_arena_while_the_store_is_down():
    with Fleet(CONF, [*SURE_HIT]) as fleet:
        fleet.kill("di-kvd.store0")
        from_other_arena(fleet, words(2000, seed=22))


# D09: no rank is promised to whom a prefix is, and the second request hits wherever it is read.
def the_second_request_hits_wherever_it_goes():
    with Fleet(CONF, [*SURE_HIT]) as fleet:
        for seed in range(60, 66):
            prompt = words(1000, seed=seed)
            cold = ask_cold(fleet, prompt, **SHORT)
            hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], **SHORT)
            assert hit.text == cold.text
        fleet.await_idle(60)


def from_other_arena(fleet, prompt):
    # So short that decode fills no page: what an answer is made of always goes to the store.
    fields = {**SHORT, "max_tokens": 4}
    fleet.place("a", "a")
    cold = ask_cold(fleet, prompt, **fields)
    assert fleet.metric("di-kvd.hosta", "di_kv_writebacks_total") == 0
    fleet.place("b", "b")
    hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], **fields)
    assert hit.text == cold.text
    assert fleet.metric("di-kvd.hostb", "di_kv_arena_reads_total") > 0
    assert fleet.metric("di-kvd.hosta", "di_kv_served_pages_total") > 0


def hand_over_crosses_the_network(*overrides):
    with Fleet(CONF, [PATIENT_MATCH, *overrides]) as fleet:
        for here, there in (("a", "b"), ("b", "a")):
            for kind, fields in (("greedy", SHORT), ("sampled", SAMPLED)):
                # A length with a tail; the salt keeps what was asked before out of the way.
                prompt = words(700, seed=31)
                fleet.place(here, there)
                pushed = fleet.metric(f"di-kvd.host{here}", "di_kv_pushed_bytes_total")
                apart = ask_cold(fleet, prompt, cache_salt=f"apart {here} {kind}", **fields)
                assert fleet.metric(f"di-kvd.host{here}", "di_kv_pushed_bytes_total") > pushed
                assert took_one_attempt(fleet, apart), fleet.explain(apart.request_id)
                fleet.place(there, there)
                alone = ask_cold(fleet, prompt, cache_salt=f"alone {here} {kind}", **fields)
                assert alone.text and apart.text == alone.text
                fleet.await_idle(60)


def took_one_attempt(fleet, reply):
    rows = fleet.explain(reply.request_id)
    return not any(row.get("event") == "reentry" for row in rows)


def hand_over_in_both_directions():
    hand_over_crosses_the_network()


def hand_over_in_both_directions_sealed():
    hand_over_crosses_the_network(SEALED)


def pages_are_pushed_while_later_chunks_compute():
    slow = ["di-prefill:prefill.chunk_tokens=128", "di-prefill:engine.step_delay_ms=60", "di-router:request.seat_ahead=1m"]
    with Fleet(CONF, slow) as fleet:
        fleet.place("a", "b")
        prompt = words(2000, seed=41)
        first = threading.Event()
        replies = []
        asking = threading.Thread(target=lambda: replies.append(
            ask(fleet, prompt, on_chunk=lambda event: first.set() if has_text(event) else None, **SHORT)))
        asking.start()

        def pushed():
            pages = fleet.metric("di-kvd.hosta", "di_kv_pushed_pages_total")
            return None if pages == 0 else (pages, first.is_set())
        pages, late = wait_for(pushed, "a page to be pushed", 60)
        asking.join()
        reply = replies[0]
        assert not late, "nothing was pushed before the first token"
        total = fleet.metric("di-kvd.hosta", "di_kv_pushed_pages_total")
        assert pages < total, (pages, total)
        assert took_one_attempt(fleet, reply), fleet.explain(reply.request_id)
        fleet.await_idle(60)


def has_text(event):
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


if __name__ == "__main__":
    main([a_prefix_survives_its_host, a_prefix_survives_its_host_sealed,
          the_second_request_hits_wherever_it_goes,
          pages_that_no_store_has_come_out_of_the_other_arena, pages_come_out_of_the_other_arena_while_the_store_is_down,
          hand_over_in_both_directions, hand_over_in_both_directions_sealed, pages_are_pushed_while_later_chunks_compute])
