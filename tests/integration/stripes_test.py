"""Twelve stores and 10+2: two are lost and no request notices, a third costs time and nothing else, what is missing
is made again on two new stores while requests run, and then two more may go.

etc/local-ec as it is, as machines that are network namespaces, messages under CURVE and pages over TCP, and over verbs,
which are softverbs, beside the same over TCP: the times of both are printed.
"""

import itertools
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_cold, meanwhile, read_back  # noqa: E402
from fleet import PATIENCE, SOURCE, SURE_HIT, Fleet, main, members, wait_for, words, write_backs_done  # noqa: E402
from network import Network, Unavailable  # noqa: E402
from spread import GrowingFleet, SpreadFleet  # noqa: E402
from stores import repairs_done  # noqa: E402
from verbs import SOFTVERBS, VERBS, OverVerbs  # noqa: E402

SAMPLE = SOURCE / "etc/local-ec"
SHORT = dict(max_tokens=12, ignore_eos=True)
# A part of a page, one page, and stripes of whole pages: the demo model has a page for 1,024 tokens.
# A sanitizer's engine reads a twentieth as fast.
LENGTHS = [600, 1100, 3000, 7000, 12000] if PATIENCE <= 1 else [600, 1100, 6000]
HOST = "di-kvd.host0"
STORES = 12
SPARE = 2


def rebuilt(fleet):
    return fleet.metric(HOST, "di_kv_pages_rebuilt_total")


def lose(fleet, *stores):
    for store in stores:
        fleet.kill(f"di-kvd.{store}")
    wait_for(lambda: not {f"di-kvd.{store}" for store in stores} & members(fleet), f"{stores} to be missed")


def written(fleet):
    """The prompts, and the answers without any cache."""
    prompts = [words(length, seed=i) for i, length in enumerate(LENGTHS)]
    texts = {prompt: ask_cold(fleet, prompt, **SHORT).text for prompt in prompts}
    write_backs_done(fleet)
    read_back(fleet, texts, HOST, **SHORT)
    return texts


def two_stores_of_the_sample_are_lost():
    with Fleet("etc/local-ec", SURE_HIT) as fleet:
        texts = written(fleet)
        lose(fleet, "node2", "node11")
        before = rebuilt(fleet)  # not 0 when a column was late
        read_back(fleet, texts, HOST, **SHORT)
        assert rebuilt(fleet) > before
        fleet.await_idle(60)


SPARES = {f"di-kvd.node{i}": ("di-kvd.node0", {'"node0"': f'"node{i}"', "net.host=n0": f"net.host=n{i}"})
          for i in range(STORES, STORES + SPARE)}
ROWS = ["di-meta:store.repair_after=2s", "di-meta:store.repair_bytes_per_s=1000000000", *SURE_HIT]


def replace(fleet, lost, by):
    """The machine is gone for good, and there is another."""
    del fleet.blocks[f"di-kvd.{lost}"]
    fleet.add_spare(f"di-kvd.{by}")
    wait_for(lambda: f"di-kvd.{by}" in members(fleet), f"{by} to be there")


def lost_and_replaced(fleet):
    """What takes how long is printed: it is compared between transports."""
    begun = time.monotonic()

    def passed(what):
        nonlocal begun
        print(f"    {what}: {time.monotonic() - begun:.1f} s", flush=True)
        begun = time.monotonic()
    texts = written(fleet)
    passed("written")
    seeds = itertools.count(1000)

    def write():
        ask(fleet, words(900, seed=next(seeds)), **SHORT)
    with meanwhile(write):
        lose(fleet, "node3", "node7")
        before = rebuilt(fleet)
        read_back(fleet, texts, HOST, **SHORT)
        assert rebuilt(fleet) > before
    passed("two are lost")
    # A third: what cannot be read is computed.
    lose(fleet, "node9")
    read_back(fleet, texts, HOST, whole=False, **SHORT)
    passed("a third is lost")
    # It comes back with what it had.  The others do not: two new ones take their place.
    with meanwhile(write):
        replace(fleet, "node3", "node12")
        replace(fleet, "node7", "node13")  # di-up starts node9 too
        repairs_done(fleet, some=True, seconds=120)
    passed("replaced and repaired")
    lose(fleet, "node0", "node5")
    read_back(fleet, texts, HOST, **SHORT)
    passed("two more are lost")
    fleet.await_idle(60)
    passed("idle")


# F25: with 10+2.
def two_machines_are_lost_and_replaced_while_requests_run():
    names = ["m", "c", *(f"n{i}" for i in range(STORES + SPARE))]
    with Network(names) as network, SpreadFleet(network, SAMPLE, ROWS, spare=SPARES) as fleet:
        lost_and_replaced(fleet)


class VerbsFleet(OverVerbs, GrowingFleet):
    pass


def the_same_over_verbs_and_beside_it_over_tcp():
    if not SOFTVERBS.exists():
        print("SKIP: this build has no libibverbs", flush=True)
        return
    seconds = {}
    for kind, fleet_kind, rows in (("tcp", GrowingFleet, []), ("verbs", VerbsFleet, VERBS)):
        with fleet_kind(SAMPLE, [*ROWS, *rows], spare=SPARES) as fleet:
            assert f"kind={kind}" in fleet.log(HOST)
            start = time.monotonic()
            lost_and_replaced(fleet)
            seconds[kind] = time.monotonic() - start
    print(f"twelve stores: tcp {seconds['tcp']:.1f} s, verbs {seconds['verbs']:.1f} s, "
          f"ratio {seconds['verbs'] / seconds['tcp']:.2f}", flush=True)


if __name__ == "__main__":
    try:
        main([two_stores_of_the_sample_are_lost, the_same_over_verbs_and_beside_it_over_tcp,
              two_machines_are_lost_and_replaced_while_requests_run])
    except Unavailable as why:
        print(f"SKIP: {why}")
        sys.exit(77)
