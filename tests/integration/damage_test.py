"""Twelve stores, 10+2, whose disks damage what is on them while requests run: bits flip, writes are torn and go to another
place, each stripe losing what its code can repair.  No answer changes and none is computed again; what no read comes by
the scrub finds; what was damaged is made again, byte for byte, which is compared from outside; and stripes are
cross-checked all the while.
"""

import collections
import concurrent.futures
import hashlib
import itertools
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import volume  # noqa: E402
from asking import ask, meanwhile, read_back  # noqa: E402
from faults import engine_overrides  # noqa: E402
from fleet import SURE_HIT, Fleet, main, wait_for, words, write_backs_done  # noqa: E402
from stores import nothing_is_wrong, repairs_done, stores  # noqa: E402

SEED = 11
SHORT = dict(max_tokens=8)
PARITY = 2
HOST = "di-kvd.host0"
# A part of a page, one page, and stripes of parts and of whole pages.
LENGTHS = [300, 600, 900, 1100, 1800, 2600, 3500, 5000, 7000, 12000]
ROUNDS = 2
# Of each store in a round: a disk with more than ten wrong checksums in an hour is taken out of service.
PER_STORE = 2


def on_disks(fleet):
    """The columns of all volumes, by name; none when one is there twice, or the table is behind the headers."""
    found = {}
    for store in stores(fleet):
        for column in volume.Volume(fleet.run / f"{store}.volume").columns():
            if column.name in found:
                return None
            found[column.name] = column
    return found


def digest(column):
    return hashlib.sha256(volume.payload(column)).digest()


def everything_stored(fleet):
    """Every column of every stripe is on a disk, and nothing else is: as the directory has it."""
    pages = fleet.ctl("-d", "di-meta.0", "show", "kv", "pages")
    if any(page["columns"] != page["columns_stored"] for page in pages):
        return None
    wanted = collections.Counter({page["page"] >> 8: page["columns_stored"] for page in pages})
    wanted = {stripe: max(page["columns_stored"] for page in pages if page["page"] >> 8 == stripe) for stripe in wanted}
    found = on_disks(fleet)
    if found is None or collections.Counter(stripe for stripe, _ in found) != wanted:
        return None
    return found if all(volume.is_named(column) for column in found.values()) else None


def damage(columns, rng):
    """Some columns of each disk, of no stripe more than the code repairs: what was done to which."""
    done = {}
    of_stripe = collections.Counter()
    of_store = collections.Counter()
    names = sorted(columns)
    rng.shuffle(names)
    for name in names:
        column = columns[name]
        if of_stripe[column.stripe] >= PARITY or of_store[column.path] >= PER_STORE:
            continue
        other = rng.choice([c for c in columns.values() if c.path == column.path and c.name not in done] or [column])
        what = rng.choice(volume.DAMAGES)(column, other, rng)
        if what is None:
            continue
        done[name] = what
        of_stripe[column.stripe] += 1
        of_store[column.path] += 1
    return done


def found_damage(fleet):
    """Columns of which di-meta heard that they are damaged, by reads and by scrubs."""
    return fleet.metric("di-meta.0", "di_meta_read_failed_total{code=corrupt}")


def load(fleet, texts, seed):
    """Two clients: one asks what is stored, in any order, the other what was never asked."""
    rng = random.Random(seed)
    numbers = itertools.count(seed * 1000)

    def old():
        prompt = rng.choice(sorted(texts))
        assert ask(fleet, prompt, **SHORT).text == texts[prompt], "another text under load"

    def new():
        ask(fleet, words(700, seed=next(numbers)), **SHORT)
    return old, new


def scrub(fleet):
    """All stores at once, each to the end of a pass."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for rows in pool.map(lambda store: fleet.ctl("kv", "scrub", store), stores(fleet)):
            assert rows[-1]["state"] == "done" and rows[-1]["unreadable"] == 0, rows[-1]


def damage_and_repair(fleet, texts, original, rng, number):
    columns = wait_for(lambda: everything_stored(fleet), "the disks to have what the directory has", 60)
    for name, column in columns.items():
        original.setdefault(name, digest(column))
    before = found_damage(fleet)
    with meanwhile(*load(fleet, texts, SEED * 100 + number)):
        done = damage(columns, rng)
        read_back(fleet, texts, HOST, **SHORT)
    by_reads = found_damage(fleet) - before
    scrub(fleet)
    by_all = found_damage(fleet) - before
    kinds = collections.Counter(what.split(":")[0].split(" of ")[0] for what in done.values())
    print(f"  {len(done)} columns damaged {dict(kinds)}: {by_reads} found by reads, {by_all - by_reads} by the scrub", flush=True)
    # Nothing was freed meanwhile, so all of them were allocated; and what is not damaged is not called so.
    assert by_all == len(done), (by_all, done)
    repairs_done(fleet)
    write_backs_done(fleet)
    columns = wait_for(lambda: everything_stored(fleet), "every column to be there again", 60)
    wrong = [name for name, was in original.items() if name not in columns or digest(columns[name]) != was]
    assert not wrong, (wrong, [done.get(name) for name in wrong])


def cross_checked(fleet):
    """Stripes that were damaged and made whole are still what their data columns make."""
    def count(outcome):
        return fleet.metric("di-meta.0", f"di_meta_cross_checks_total{{outcome={outcome}}}")
    before = count("right")
    wait_for(lambda: count("right") >= before + 3, "three stripes to be cross-checked", 60)
    assert count("wrong") == 0


def the_disks_damage_what_is_on_them(real):
    print(f"  seed {SEED}", flush=True)
    rng = random.Random(SEED)
    with Fleet("etc/local-ec", [*engine_overrides(real), *SURE_HIT, "di-meta:store.cross_check=500ms"]) as fleet:
        lengths = LENGTHS[3:7] if real else LENGTHS
        texts = {}
        for number, length in enumerate(lengths):
            prompt = words(length, seed=SEED * 10 + number)
            texts[prompt] = ask(fleet, prompt, **SHORT).text
        write_backs_done(fleet)
        ranks = {i: fleet.pid(i) for i in fleet.instances()}
        original = {}
        for number in range(1 if real else ROUNDS):
            damage_and_repair(fleet, texts, original, rng, number)
        read_back(fleet, texts, HOST, **SHORT)
        nothing_is_wrong(fleet)
        cross_checked(fleet)
        # The script engine compares every byte that is swapped in, and a difference ends its process.
        assert {i: fleet.pid(i) for i in ranks if fleet.alive(i)} == ranks
        fleet.await_idle(60)


def every_byte_is_compared_by_the_engine():
    the_disks_damage_what_is_on_them(real=False)


def the_answers_of_a_model_do_not_change():
    the_disks_damage_what_is_on_them(real=True)


if __name__ == "__main__":
    main([every_byte_is_compared_by_the_engine, the_answers_of_a_model_do_not_change])
