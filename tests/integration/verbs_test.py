"""Two hosts and a store on a third machine (etc/local-2p2d), everything between them over RDMA, which is softverbs: the
shipped di-kvd with a software provider in the place of libibverbs (tests/support/softverbs).
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import SURE_HIT, Fleet, chat_hit, main, wait_for, words, write_backs_done  # noqa: E402
from verbs import SOFTVERBS, VERBS, OverVerbs  # noqa: E402

CONF = "etc/local-2p2d"
GREEDY = dict(temperature=0, max_tokens=24, ignore_eos=True)


class VerbsFleet(OverVerbs, Fleet):
    def __init__(self, *overrides):
        super().__init__(CONF, [*SURE_HIT, *VERBS, *overrides])


def pages_and_hand_overs_go_over_verbs():
    with VerbsFleet() as fleet:
        assert "kind=verbs" in (fleet.run / "di-kvd.hosta.log").read_text()
        prompts = [words(2000, seed=11), words(2000, seed=12)]
        fleet.place("a", "a")
        cold = [fleet.chat(prompt, **GREEDY) for prompt in prompts]
        for reply in cold:
            assert reply.status == 200 and reply.done and reply.cached() == 0, (reply.error, reply.usage)
        write_backs_done(fleet)
        # Read by one host, written by the other; then the pages of one that is gone, from the store.
        fleet.place("b", "a")
        hit = chat_hit(fleet, prompts[0], 0.9 * cold[0].usage["prompt_tokens"], **GREEDY)
        assert hit.text == cold[0].text
        assert fleet.metric("di-kvd.hostb", "di_kv_pushed_bytes_total") > 0
        fleet.place("b", "b")
        fleet.kill_host("a")
        hit = chat_hit(fleet, prompts[1], 0.9 * cold[1].usage["prompt_tokens"], **GREEDY)
        assert hit.text == cold[1].text
        fleet.await_idle(60)


def killed_store_is_missed_and_comes_back():
    with VerbsFleet() as fleet:
        fleet.place("a", "a")
        prompt = words(2000, seed=13)
        cold = fleet.chat(prompt, **GREEDY)
        assert cold.status == 200 and cold.done, cold.error
        write_backs_done(fleet)
        connected = lambda: fleet.metric("di-kvd.store0", "di_transfer_connections")
        wait_for(lambda: connected() > 0 or None, "a data connection", 60)
        fleet.kill("di-kvd.store0")
        alone = fleet.chat(words(2000, seed=14), **GREEDY)
        assert alone.status == 200 and alone.done, alone.error
        fleet.up()
        fleet.place("b", "b")
        hit = chat_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], **GREEDY)
        assert hit.text == cold.text


if __name__ == "__main__":
    if not SOFTVERBS.exists():
        print("SKIP: this build has no libibverbs")
        sys.exit(77)
    main([pages_and_hand_overs_go_over_verbs, killed_store_is_missed_and_comes_back])
