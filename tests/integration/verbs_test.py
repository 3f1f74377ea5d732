"""Two hosts and a store on a third machine (etc/local-2p2d), everything between them over RDMA, which is softverbs: the
shipped di-kvd with a software provider in the place of libibverbs (tests/support/softverbs).
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_cold, ask_hit  # noqa: E402
from fleet import SURE_HIT, Fleet, main, wait_for, words, write_backs_done  # noqa: E402
from verbs import SOFTVERBS, VERBS, OverVerbs  # noqa: E402

CONF = "etc/local-2p2d"
SHORT = dict(max_tokens=24, ignore_eos=True)


class VerbsFleet(OverVerbs, Fleet):
    def __init__(self, *overrides):
        super().__init__(CONF, [*SURE_HIT, *VERBS, *overrides])


def pages_and_hand_overs_go_over_verbs():
    with VerbsFleet() as fleet:
        assert "kind=verbs" in fleet.log("di-kvd.hosta")
        prompts = [words(2000, seed=11), words(2000, seed=12)]
        fleet.place("a", "a")
        cold = [ask_cold(fleet, prompt, **SHORT) for prompt in prompts]
        write_backs_done(fleet)
        # Read by one host, written by the other; then the pages of one that is gone, from the store.
        fleet.place("b", "a")
        hit = ask_hit(fleet, prompts[0], 0.9 * cold[0].usage["prompt_tokens"], **SHORT)
        assert hit.text == cold[0].text
        assert fleet.metric("di-kvd.hostb", "di_kv_pushed_bytes_total") > 0
        fleet.place("b", "b")
        fleet.kill_host("a")
        hit = ask_hit(fleet, prompts[1], 0.9 * cold[1].usage["prompt_tokens"], **SHORT)
        assert hit.text == cold[1].text
        fleet.await_idle(60)


def killed_store_is_missed_and_comes_back():
    with VerbsFleet() as fleet:
        fleet.place("a", "a")
        prompt = words(2000, seed=13)
        cold = ask(fleet, prompt, **SHORT)
        write_backs_done(fleet)
        connected = lambda: fleet.metric("di-kvd.store0", "di_transfer_connections")
        wait_for(lambda: connected() > 0 or None, "a data connection", 60)
        fleet.kill("di-kvd.store0")
        alone = ask(fleet, words(2000, seed=14), **SHORT)
        fleet.up()
        fleet.place("b", "b")
        hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], **SHORT)
        assert hit.text == cold.text


if __name__ == "__main__":
    if not SOFTVERBS.exists():
        print("SKIP: this build has no libibverbs")
        sys.exit(77)
    main([pages_and_hand_overs_go_over_verbs, killed_store_is_missed_and_comes_back])
