"""A compute host and a store join a fleet that answers requests, take their part, and leave it again as an operator has them
leave: no request notices, and what was cached stays.
"""

import itertools
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_cold, meanwhile, read_back  # noqa: E402
from fleet import SOURCE, SURE_HIT, main, members, wait_for, words, write_backs_done  # noqa: E402
from spread import GrowingFleet  # noqa: E402

CONF = SOURCE / "etc/local-2p2d"
HOST = ["di-kvd.hostb", "di-prefill.b", "di-decode.b"]
STORE = "di-kvd.store1"
SHORT = dict(max_tokens=8, ignore_eos=True)


def a_host_and_a_store_join_and_leave_under_load():
    spare = {**{instance: (instance, {}) for instance in HOST}, STORE: ("di-kvd.store0", {"store0": "store1"})}
    with GrowingFleet(CONF, SURE_HIT, spare=spare) as fleet:
        known = {words(900, seed=seed): None for seed in range(6)}
        for prompt in known:
            known[prompt] = ask_cold(fleet, prompt, **SHORT).text
        again, fresh = itertools.cycle(list(known)), itertools.count(1000)
        turn = threading.Lock()
        new = {}

        def one_that_comes_back():
            with turn:
                prompt = next(again)
            assert ask(fleet, prompt, **SHORT).text == known[prompt]

        def one_that_is_new():
            with turn:
                prompt = words(400, seed=next(fresh))
            new[prompt] = ask(fleet, prompt, **SHORT).text

        with meanwhile(one_that_comes_back, one_that_comes_back, one_that_is_new, one_that_is_new):
            fleet.add_spare(*HOST)
            wait_for(lambda: fleet.metric("di-decode.b", "di_decode_tokens_total") > 0, "the new host to write answers", 60)
            wait_for(lambda: fleet.metric("di-prefill.b", "di_prefill_tokens_total") > 0, "the new host to read prompts", 60)
            fleet.add_spare(STORE)
            wait_for(lambda: fleet.metric(STORE, "di_store_slots") > 0, "the new store to get pages", 60)

            for rank in HOST[1:]:
                fleet.ctl("drain", rank)
            wait_for(lambda: not any(r["instance"] in HOST and r["count"] for r in fleet.ctl("show", "gauges")
                                     if r["what"] == "requests"), "the host to be empty", 60)
            fleet.retire(*reversed(HOST))
            fleet.ctl("kv", "drain", STORE)
            wait_for(lambda: fleet.ctl("kv", "drain")[0]["columns"] == 0, "the store to be empty", 120)
            fleet.retire(STORE)
            wait_for(lambda: not members(fleet) & {STORE, *HOST}, "them to be missed", 60)
        write_backs_done(fleet)
        print(f"{len(new)} new prompts meanwhile")
        # Whatever was written on the host and the store that left is in what stayed.
        read_back(fleet, {**known, **new}, "di-kvd.hosta", **SHORT)
        fleet.await_idle(60)


if __name__ == "__main__":
    main([a_host_and_a_store_join_and_leave_under_load])
