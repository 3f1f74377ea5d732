"""kill -9 at every fault point of the write path of twelve stores, 10+2: what was acknowledged is there, byte for byte,
and nothing else is to be seen.

The loop is over `di-ctl show faults`, less what only reads or hands over, so a new fault point is tested as soon as it
exists.  A point of the stores takes two of them at once: that many may go.
"""

import concurrent.futures
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, read_back  # noqa: E402
from faults import fault_points  # noqa: E402
from fleet import SURE_HIT, Fleet, everybody_is_there, main, wait_for, words, write_backs_done  # noqa: E402
from stores import repairs_done, stores  # noqa: E402

SEED = 4
SHORT = dict(max_tokens=8, ignore_eos=True)
# Three pages: a stripe whose pages are split over the ten columns.
TOKENS = 2600
HOST = "di-kvd.host0"
NOT_WRITING = {"meta_before_plan", "kvd_before_fetch", "kvd_mid_segment", "kvd_before_handover_sealed",
               "kvd_before_handover_ack"}


def reached_by(name):
    if name.startswith("meta_"):
        return ["di-meta.0"]
    return ["di-kvd.node0", "di-kvd.node7"] if name.startswith("store_") else [HOST]


def settled(fleet):
    """Nothing is written any more that was not asked for: a repair would reach the next fault point."""
    everybody_is_there(fleet)
    write_backs_done(fleet)
    repairs_done(fleet)


def written_again(fleet, prompt, text):
    """What was on its way and never acknowledged is written when it is asked for again: all of it is there then."""
    again = ask(fleet, prompt, **SHORT)
    assert again.text == text, "another text after a kill"
    settled(fleet)


def nothing_else_is_seen(fleet, what):
    """Every column of every store belongs to a stripe of the directory."""
    def columns():
        return sum(fleet.metric_each(stores(fleet), "di_store_slots").values())
    wait_for(lambda: fleet.metric("di-meta.0", "di_meta_pending_frees") == 0, f"{what}: columns to be freed", 60)
    stripes = fleet.metric("di-meta.0", "di_meta_stripes")
    assert columns() <= 12 * stripes, (what, columns(), stripes)


def every_point_of_the_write_path():
    print(f"  seed {SEED}", flush=True)
    with Fleet("etc/local-ec", SURE_HIT) as fleet:
        points = fault_points(fleet)
        names = sorted((points["di-kvd"] | points["di-meta"]) - NOT_WRITING)
        assert {"meta_before_commit", "meta_after_commit", "store_mid_slot_write"} <= set(names), names
        first = words(TOKENS, seed=SEED)
        texts = {first: ask(fleet, first, **SHORT).text}
        settled(fleet)
        for number, name in enumerate(names, 1):
            print(f"  {name}", flush=True)
            victims = reached_by(name)
            for victim in victims:
                fleet.kill(victim)
            wait_for(lambda: not any(fleet.alive(v) for v in victims), "them to be gone")
            fleet.up([f"{victim}:fault.at={name}=kill" for victim in victims])
            settled(fleet)
            prompt = words(TOKENS, seed=SEED * 1000 + number)
            with concurrent.futures.ThreadPoolExecutor(1) as asked:
                reply = asked.submit(ask, fleet, prompt, **SHORT)
                wait_for(lambda: all(fleet.fired(v, name) for v in victims), f"{name}", 60)
                wait_for(lambda: not any(fleet.alive(v) for v in victims), "them to die there")
                fleet.up()
                text = reply.result().text
            settled(fleet)
            read_back(fleet, texts, HOST, name, **SHORT)
            fleet.ctl("kv", "drop", "arena", HOST)
            written_again(fleet, prompt, text)
            texts[prompt] = text
            read_back(fleet, {prompt: text}, HOST, name, **SHORT)
            nothing_else_is_seen(fleet, name)
        fleet.await_idle(60)


if __name__ == "__main__":
    main([every_point_of_the_write_path])
