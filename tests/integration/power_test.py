"""The power of all twelve stores goes at once while requests run: their disks lose what was not flushed, or have it in
part.  With store.durability = strict every stripe that was published is there, by default every one that was published
before the last flush of 100 ms; nobody sees another byte.

The disk is that of the fault point store_before_flush: the end of the process is its loss of power.
"""

import itertools
import os
import pathlib
import random
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, meanwhile, read_back  # noqa: E402
from faults import engine_overrides  # noqa: E402
from fleet import SURE_HIT, Fleet, everybody_is_there, main, wait_for, words, write_backs_done  # noqa: E402
from stores import inventories_taken, nothing_is_wrong, stores  # noqa: E402

SEED = 21
SHORT = dict(max_tokens=8)
HOST = "di-kvd.host0"
CLIENTS = 3
# A flush that never comes: the point is there, and the disk with it.
HELD_BACK = "di-kvd:fault.at=store_before_flush:1000000000=kill"
# Published in a round, at least.
PAGES = 30
ROUNDS = 4
# By default a round loses something, or it does not: the window is 100 ms.
ROUNDS_MAX = 20


def published(fleet):
    """Pages that di-meta has told to be stored, by their stripe; what is written anew has another."""
    return {page["page"] for page in fleet.ctl("-d", "di-meta.0", "show", "kv", "pages") if page["readable"]}


def flushed(fleet):
    """What was acknowledged before this was called cannot be lost when it returns."""
    before = fleet.metric_each(stores(fleet), "di_store_syncs_total")

    def over():
        # The first may have begun before; a store with nothing to flush has no second.
        rest = [s for s, now in fleet.metric_each(list(before), "di_store_syncs_total").items() if now < before[s] + 2]
        return not rest or not any(fleet.metric_each(rest, "di_store_segments_open").values())
    wait_for(over, "two flushes of every store", 60)


def load(fleet, texts, first):
    """Clients that ask new prompts; what was answered, and its text."""
    def client(numbers):
        number = next(numbers)
        prompt = words(300 + 150 * (number % 4), seed=first + number)
        texts[prompt] = ask(fleet, prompt, **SHORT).text
    return [lambda numbers=itertools.count(number, CLIENTS): client(numbers) for number in range(CLIENTS)]


def power_goes(fleet):
    """What was published up to that moment: stopped first, a store neither acknowledges nor flushes while it is read."""
    pids = [fleet.pid(store) for store in stores(fleet)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    before = published(fleet)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(fleet.alive(store) for store in stores(fleet)), "the stores to be gone")
    return before


def power_comes_back(fleet):
    fleet.up()
    everybody_is_there(fleet)
    inventories_taken(fleet)


def a_loss_of_power(fleet, texts, first, strict):
    """What was published before it and is lost by it, and how much was published."""
    with meanwhile(*load(fleet, texts, first)):
        have = len(published(fleet))
        wait_for(lambda: len(published(fleet)) >= have + PAGES, "some pages to be published", 60)
        safe = set()
        if not strict:
            safe = published(fleet)
            flushed(fleet)
        before = power_goes(fleet)
    power_comes_back(fleet)
    assert not fleet.metric("di-meta.0", "di_meta_stripes_total{event=evicted}"), "a store was full"
    lost = before - published(fleet)
    safe = before if strict else safe
    assert not lost & safe, f"{len(lost & safe)} of {len(safe)} pages are lost that could not be"
    return len(lost), len(before)


def power_is_lost(durability):
    strict = durability == "strict"
    print(f"  seed {SEED}", flush=True)
    # With room for everything: what is evicted is not lost.
    rows = [*engine_overrides(False), *SURE_HIT, HELD_BACK, f"di-kvd:store.durability={durability}",
            *(f"di-kvd.node{i}:store.capacity=256MiB" for i in range(12))]
    with Fleet("etc/local-ec", rows) as fleet:
        texts = {}
        lost = number = 0
        while number < ROUNDS or (not strict and lost == 0 and number < ROUNDS_MAX):
            now, of = a_loss_of_power(fleet, texts, SEED * 10000 + number * 1000, strict)
            print(f"  {durability}: {now} of {of} pages lost", flush=True)
            lost += now
            number += 1
        # The disk of this test does lose: otherwise strict shows nothing.
        assert strict or lost > 0, "nothing was ever lost"
        some = random.Random(SEED).sample(sorted(texts), min(12, len(texts)))
        read_back(fleet, {prompt: texts[prompt] for prompt in some}, HOST, whole=False, **SHORT)
        write_backs_done(fleet)
        nothing_is_wrong(fleet)
        fleet.await_idle(60)


def strict_loses_nothing():
    power_is_lost("strict")


def standard_loses_what_no_flush_covered():
    power_is_lost("standard")


if __name__ == "__main__":
    main([strict_loses_nothing, standard_loses_what_no_flush_covered])
