"""The power of all twelve stores goes at once while requests run: their disks lose what was not flushed, or have it in
part.  With store.durability = strict every stripe that was published is there, by default every one that was published
before the last flush of 100 ms; nobody sees another byte.

The disk is that of the fault point store_before_flush: the end of the process is its loss of power.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import random
import signal
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from faults import engine_overrides  # noqa: E402
from fleet import SURE_HIT, Fleet, main, members, wait_for, words, write_backs_done  # noqa: E402

SEED = 21
GREEDY = dict(temperature=0, max_tokens=8)
HOST = "di-kvd.host0"
CLIENTS = 3
# A flush that never comes: the point is there, and the disk with it.
HELD_BACK = "di-kvd:fault.at=store_before_flush:1000000000=kill"
ROUNDS = 4
# By default a round loses something, or it does not: the window is 100 ms.
ROUNDS_MAX = 20


def ask(fleet, prompt):
    reply = fleet.chat(prompt, **GREEDY)
    assert reply.status == 200 and reply.done and not reply.cut, (reply.status, reply.error)
    return reply


def stores(fleet):
    return [i for i in fleet.instances() if i.startswith("di-kvd.node")]


def published(fleet):
    """Pages that di-meta has told to be stored, by their stripe; what is written anew has another."""
    return {page["page"] for page in fleet.ctl("-d", "di-meta.0", "show", "kv", "pages") if page["readable"]}


def counted(fleet, name, label):
    return sum(row["value"] for row in fleet.ctl("-d", "di-meta.0", "show", "metrics")
               if row["name"] == name and f'"{label}"' in row["labels"])


def syncs(fleet):
    return {store: fleet.metric(store, "di_store_syncs_total") for store in stores(fleet)}


def flushed(fleet):
    """What was acknowledged before this was called cannot be lost when it returns."""
    before = syncs(fleet)

    def over():
        # The first may have begun before; a store with nothing to flush has no second.
        now = syncs(fleet)
        return all(now[s] >= before[s] + 2 or fleet.metric(s, "di_store_segments_open") == 0 for s in before)
    wait_for(over, "two flushes of every store", 60)


@contextlib.contextmanager
def load(fleet, texts, first):
    """New prompts, one after the other; what was answered, and its text."""
    stop = threading.Event()

    def client(number):
        while not stop.is_set():
            prompt = words(300 + 150 * (number % 4), seed=first + number)
            texts[prompt] = ask(fleet, prompt).text
            number += CLIENTS
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
    for done in clients:
        done.result()


def power_goes(fleet):
    pids = [fleet.pid(store) for store in stores(fleet)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(fleet.alive(store) for store in stores(fleet)), "the stores to be gone")


def power_comes_back(fleet):
    fleet.up()
    wait_for(lambda: members(fleet) >= set(fleet.instances()) - {"di-meta.0"}, "every daemon to be a member", 60)
    places = lambda: [p for p in fleet.ctl("-d", "di-meta.0", "show", "kv") if p["tier"] == "store"]  # noqa: E731
    wait_for(lambda: all(p["state"] == "up" and p["complete"] for p in places()), "the inventories to be taken", 60)


def a_loss_of_power(fleet, texts, first, strict):
    """What was published before it and is lost by it, and how much was published."""
    with load(fleet, texts, first):
        have = len(texts)
        wait_for(lambda: len(texts) >= have + CLIENTS, "some answers", 60)
        safe = set()
        if not strict:
            safe = published(fleet)
            flushed(fleet)
        before = published(fleet)
        power_goes(fleet)
    power_comes_back(fleet)
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
        assert not counted(fleet, "di_meta_stripes_total", "evicted"), "a store was full"
        # The disk of this test does lose: otherwise strict shows nothing.
        assert strict or lost > 0, "nothing was ever lost"
        for prompt in random.Random(SEED).sample(sorted(texts), min(12, len(texts))):
            fleet.ctl("kv", "drop", "arena", HOST)
            assert ask(fleet, prompt).text == texts[prompt], "another text"
        write_backs_done(fleet)
        for store in stores(fleet):
            for row in fleet.ctl("kv", "fsck", store):
                assert row["state"] == "up" and row["corrupt"] == row["unreadable"] == row["orphans"] == 0, row
        fleet.await_idle(60)


def strict_loses_nothing():
    power_is_lost("strict")


def standard_loses_what_no_flush_covered():
    power_is_lost("standard")


if __name__ == "__main__":
    main([strict_loses_nothing, standard_loses_what_no_flush_covered])
