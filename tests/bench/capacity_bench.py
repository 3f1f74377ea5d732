"""How the rate at which a prefix is fetched grows with the stores: 1, 2, 4 and 8 of them, each behind a link of a fixed
rate that is low enough for the processors to have nothing to do.

A page is on one store (1+0).  Prompts are read and stored, the arena is emptied, and the same prompts are asked again,
several at a time: a row is the median rate over the rounds, its ratio to what the links together carry, and to as many
times the rate of one store.  "even" is the mean share of a store over the largest: all are done when the fullest one is.
A link sends the first 4 MiB after a pause at once; what each store sends is much more than that.

    DI_BUILD_DIR=build python3 tests/bench/capacity_bench.py [ROUNDS]
"""

import concurrent.futures
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask  # noqa: E402
from faults import engine_overrides  # noqa: E402
from fleet import SOURCE, SURE_HIT, words, write_backs_done  # noqa: E402
from spread import GrowingFleet  # noqa: E402

NODES = [1, 2, 4, 8]
LINK_MIB_PER_S = 2
PAGE_TOKENS = 1024
PAGES = 8  # of a prompt
PROMPTS_A_NODE = 5
CLIENTS = 8
HOST = "di-kvd.host0"


class SomeStores(GrowingFleet):
    def __init__(self, nodes, rows):
        self.nodes = nodes
        super().__init__(SOURCE / "etc/local-ec", rows)

    def read_sample(self, sample, spare):
        super().read_sample(sample, spare)
        kept = {f"di-kvd.node{i}" for i in range(self.nodes)}
        self.blocks = {name: block for name, block in self.blocks.items() if "node" not in name or name in kept}


def fetched(fleet):
    return fleet.metric(HOST, "di_kv_read_bytes_total")


def rate(fleet, prompts):
    """Bytes a second from the stores, everything that is to be fetched being asked for at once."""
    fleet.ctl("kv", "drop", "arena", HOST)
    before = fetched(fleet)
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda prompt: ask(fleet, prompt, max_tokens=2), prompts))
    took = time.perf_counter() - begin
    assert all(reply.cached() >= PAGES * PAGE_TOKENS for reply in replies), [reply.cached() for reply in replies]
    return (fetched(fleet) - before) / took


def measure(nodes, rounds):
    rows = [*engine_overrides(False), *SURE_HIT, "di-meta:store.geometry=1+0", f"{HOST}:kv.arena_bytes=1073741824",
            # All of them at once: they come faster than such links take them.
            f"{HOST}:kv.writeback_queue_pages={PAGES * PROMPTS_A_NODE * nodes}",
            *(f"di-kvd.node{i}:{row}" for i in range(nodes)
              for row in (f"transfer.link_bytes_per_s={LINK_MIB_PER_S}MiB", "store.capacity=256MiB"))]
    with SomeStores(nodes, rows) as fleet:
        prompts = [words(PAGES * PAGE_TOKENS + 8, seed=100 * nodes + i) for i in range(PROMPTS_A_NODE * nodes)]
        for prompt in prompts:
            ask(fleet, prompt, max_tokens=2)
        write_backs_done(fleet)
        pages = [fleet.metric(f"di-kvd.node{i}", "di_store_payload_bytes") for i in range(nodes)]
        return statistics.median(rate(fleet, prompts) for _ in range(rounds)), statistics.mean(pages) / max(pages)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print("stores\tMB/s\tof the links\tof linear\teven")
    one = None
    for nodes in NODES:
        found, even = measure(nodes, rounds)
        one = one or found
        print(f"{nodes}\t{found / 1e6:.1f}\t{found / (nodes * (LINK_MIB_PER_S << 20)):.2f}\t{found / (nodes * one):.2f}\t{even:.2f}", flush=True)


if __name__ == "__main__":
    main()
