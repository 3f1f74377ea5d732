"""What a decode rank waits for when a request is handed to another host (Must show 4 of the two-host work).

Two hosts with the script engine and the KV layout of DeepSeek-V3 (70,272 bytes a token), prefill on one and decode on
the other.  The wait is from token 0 to the start of decode, on the router's clock.  With pages that go while later chunks
compute, it should not depend on how long the prompt is: at most the last chunk's own pages are left to move.  Beside it,
the same prompt when its pages go at the end only (the seat is asked for when prefill is done).

    DI_BUILD_DIR=build python3 tests/bench/handover_bench.py
"""

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask  # noqa: E402
from fleet import pieces, script_fleet, words  # noqa: E402

BLOCK_TOKENS = 64
BLOCK_BYTES = 64 * 70272
CHUNK_MS = 40
ROUNDS = 9


def fleet(seat_ahead):
    lines = [{"match": "", "pieces": pieces(*"abcdef"), "finish": "stop"}]
    wide = ["engine.script_layout=v3", "kv.pool=2GiB"]
    made = script_fleet(lines, conf="etc/local-2p2d", overrides=[
        *(f"{program}:{row}" for program in ("di-prefill", "di-decode") for row in wide),
        f"di-prefill:prefill.chunk_tokens={BLOCK_TOKENS}", f"di-prefill:engine.step_delay_ms={CHUNK_MS}",
        "di-kvd.hosta:kv.arena_bytes=2147483648", "di-kvd.hostb:kv.arena_bytes=2147483648",
        "di-kvd.store0:store.capacity=1GiB", "di-kvd.store0:store.segment_bytes=67108864",
        f"di-router:request.seat_ahead={seat_ahead}"])
    made.place("a", "b")
    return made


def wait_us(fleet, blocks, seed):
    reply = ask(fleet, words(blocks * BLOCK_TOKENS, seed=seed), max_tokens=4)
    assert reply.text == "abcd", reply.text
    at = {}
    for row in fleet.ctl("explain", reply.request_id):
        at.setdefault(row["event"], row["at_us"])
    return at["decode_started"] - at["token"], at["token"] - at["bound"], reply.usage["prompt_tokens"]


def main():
    print(f"{'pages':<10}{'MB':>6}{'prefill ms':>12}{'decode waits ms, median of ' + str(ROUNDS):>36}")
    waits = {}
    for name, seat_ahead in (("overlapped", "10s"), ("at the end", "1us")):
        with fleet(seat_ahead) as f:
            for blocks in (2, 15):
                rows = [wait_us(f, blocks, 1000 * blocks + i) for i in range(ROUNDS)]
                waits[name, blocks] = statistics.median(r[0] for r in rows)
                prefill = statistics.median(r[1] for r in rows)
                megabytes = rows[0][2] // BLOCK_TOKENS * BLOCK_BYTES / 1e6
                print(f"{name:<10}{megabytes:>6.0f}{prefill / 1000:>12.0f}{waits[name, blocks] / 1000:>36.1f}")
    ratio = waits["overlapped", 15] / waits["at the end", 15]
    print(f"64 MB overlapped over at the end: {ratio:.2f}; over 4 MB overlapped: "
          f"{waits['overlapped', 15] / waits['overlapped', 2]:.2f}")


if __name__ == "__main__":
    main()
