"""Twelve stores and 10+2: two are lost and no request notices, a third costs time and nothing else, what is missing
is made again on two new stores while requests run, and then two more may go.

etc/local-ec as it is, as machines that are network namespaces, messages under CURVE and pages over TCP, and over verbs,
which are softverbs, beside the same over TCP: the times of both are printed.
"""

import contextlib
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import PATIENCE, SOURCE, SURE_HIT, Fleet, main, members, wait_for, words, write_backs_done  # noqa: E402
from network import Network, Unavailable  # noqa: E402
from spread import GrowingFleet, SpreadFleet  # noqa: E402
from verbs import SOFTVERBS, VERBS, OverVerbs  # noqa: E402

SAMPLE = SOURCE / "etc/local-ec"
GREEDY = dict(temperature=0, max_tokens=12, ignore_eos=True)
# A part of a page, one page, and stripes of whole pages: the demo model has a page for 1,024 tokens.
# A sanitizer's engine reads a twentieth as fast.
LENGTHS = [600, 1100, 3000, 7000, 12000] if PATIENCE <= 1 else [600, 1100, 6000]
BLOCK_TOKENS = 32
STORES = 12
SPARE = 2


def ask(fleet, prompt):
    reply = fleet.chat(prompt, **GREEDY)
    assert reply.status == 200 and reply.done and not reply.cut, (reply.status, reply.error)
    return reply


def cacheable(reply):
    """What a cache that lost nothing serves: all full blocks before the last token, which is always computed."""
    return (reply.usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def read_all(fleet, prompts, expected, whole=True):
    """Every prompt with nothing of it in the arena: the text as it was, and whole: every page of it was cached."""
    cached = []
    for prompt, text in zip(prompts, expected):
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        reply = ask(fleet, prompt)
        assert reply.text == text, "another text"
        cached.append((reply.cached(), cacheable(reply), reply.request_id))
    for got, all_of_it, request in cached if whole else ():
        assert got == all_of_it, (cached, fleet.explain(request))
    return cached


def rebuilt(fleet):
    return fleet.metric("di-kvd.host0", "di_kv_pages_rebuilt_total")


def repair(fleet):
    return fleet.ctl("-d", "di-meta.0", "kv", "repair")[0]


@contextlib.contextmanager
def writing(fleet):
    """New prompts are read and written back meanwhile; every one is answered."""
    stop = threading.Event()
    failed = []

    def write():
        seed = 1000
        while not stop.is_set():
            try:
                ask(fleet, words(900, seed=seed))
            except Exception as error:  # told by whoever waits
                failed.append(error)
                return
            seed += 1
    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, failed[0]


def lose(fleet, *stores):
    for store in stores:
        fleet.kill(f"di-kvd.{store}")
    wait_for(lambda: not {f"di-kvd.{store}" for store in stores} & members(fleet), f"{stores} to be missed")


def written(fleet):
    """The prompts, and the answers without any cache."""
    prompts = [words(length, seed=i) for i, length in enumerate(LENGTHS)]
    cold = [ask(fleet, prompt) for prompt in prompts]
    assert max(reply.cached() for reply in cold) == 0, [reply.usage for reply in cold]
    write_backs_done(fleet)
    expected = [reply.text for reply in cold]
    read_all(fleet, prompts, expected)
    return prompts, expected


def two_stores_of_the_sample_are_lost():
    with Fleet("etc/local-ec", SURE_HIT) as fleet:
        prompts, expected = written(fleet)
        lose(fleet, "node2", "node11")
        before = rebuilt(fleet)  # not 0 when a column was late
        read_all(fleet, prompts, expected)
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
    prompts, expected = written(fleet)
    with writing(fleet):
        lose(fleet, "node3", "node7")
        before = rebuilt(fleet)
        read_all(fleet, prompts, expected)
        assert rebuilt(fleet) > before
    # A third: what cannot be read is computed.
    lose(fleet, "node9")
    read_all(fleet, prompts, expected, whole=False)
    # It comes back with what it had.  The others do not: two new ones take their place.
    with writing(fleet):
        replace(fleet, "node3", "node12")
        replace(fleet, "node7", "node13")  # di-up starts node9 too
        wait_for(lambda: repair(fleet)["columns_repaired"] > 0 and repair(fleet)["waiting"] == 0 and
                 repair(fleet)["running"] == 0, "repair to be done", 120)
    lose(fleet, "node0", "node5")
    read_all(fleet, prompts, expected)
    fleet.await_idle(60)


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
            assert f"kind={kind}" in (fleet.run / "di-kvd.host0.log").read_text()
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
