"""How fast whole stripes are put and fetched over TCP on one machine, verified, against plain sockets; and fetched with two
stores of twelve dead.

etc/local-ec with the script engine, which computes nothing, and the KV layout of DeepSeek-V3 (a page is 64 tokens, 4.5 MB;
a stripe ten pages and two columns of parity).  Volumes are in FOLDER, memory by default: it is the way there that is
measured.  Every byte of them was written before, and rounds that are not counted touch the arena and the buffers: memory that
a process has for the first time costs more than the way.  In each round, one after the other:

    sockets   as many bytes over as many plain connections as there are stores, between two processes
    put       a prompt's pages out of the arena, from the question that wants them again to the last stripe published
    fetch     the same prompt with an empty arena, from the bind until every layer group of every page is there and verified

and, with a Python environment that has mooncake-transfer-engine-non-cuda and numpy (outside the tree),

    Mooncake put, get   units of 1 MiB over TCP into and out of another process's memory: one copy, no parity, no disk and
                        no sum, where ours are written twelve tenths to twelve stores, and compared when they come back

Afterwards, since stores that were dead begin with new memory, in rounds of their own:

    healthy   the fetch of before
    degraded  the same with two stores dead, others each round: a fifth of the data columns is made of the rest

    DI_BUILD_DIR=build python3 tests/bench/stripe_bench.py [--peers VENV] [ROUNDS [FOLDER]]
"""

import argparse
import contextlib
import multiprocessing
import pathlib
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import peers_bench  # noqa: E402
from asking import ask  # noqa: E402
from fleet import SURE_HIT, members, pieces, script_fleet, wait_for, words  # noqa: E402

BLOCK_TOKENS = 64
PAGE_BYTES = 64 * 70272
PAGES = 80  # eight stripes
STORES = 12
WARM_ROUNDS = 3  # then no process touches memory for the first time
UNIT = 1 << 20
# Looking all the time would take one of few cores from what is measured; of a put this is a hundredth.
LOOK_S = 0.002
EARLY_LOOK_S = 0.01  # while most of a put is still to come
HOST = "di-kvd.host0"


def each(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send(port, total):
    buffer = bytes(UNIT)

    def one(_):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for _ in range(total // STORES // UNIT):
                connection.sendall(buffer)
    each(STORES, one)


def sockets(total):
    """Bytes a second."""
    with socket.create_server(("127.0.0.1", 0), backlog=STORES) as listener:
        sender = multiprocessing.Process(target=send, args=(listener.getsockname()[1], total))
        sender.start()
        connections = [listener.accept()[0] for _ in range(STORES)]
        got = [0] * STORES
        begin = time.perf_counter()

        def receive(i):
            buffer = bytearray(UNIT)
            while count := connections[i].recv_into(buffer):
                got[i] += count
        each(STORES, receive)
        took = time.perf_counter() - begin
        sender.join()
        for connection in connections:
            connection.close()
    return sum(got) / took


def ask_two(fleet, prompt):
    reply = ask(fleet, prompt, max_tokens=2)
    assert reply.text == "ab", reply.text
    return reply


def counted(fleet, name):
    """The host's counter, from its metrics socket: a process for each look would cost as much as a page."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(fleet.run / f"{HOST}.http"))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: di\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(UNIT), b"")).decode()
    return int(re.search(rf"^{name} (\d+)$", text, re.MULTILINE)[1])


def published(fleet):
    return counted(fleet, "di_kv_writebacks_total")


def put(fleet, prompt):
    """Bytes of pages a second.  They are in the arena, and written when they are asked for once more; the rank that asks
    stands still meanwhile, or it would copy as many bytes beside it."""
    before = published(fleet)
    queued = counted(fleet, "di_kv_writebacks_queued_total")
    ask_two(fleet, prompt)
    assert published(fleet) == before
    again = threading.Thread(target=ask_two, args=(fleet, prompt))
    begin = time.perf_counter()
    again.start()
    wait_for(lambda: counted(fleet, "di_kv_writebacks_queued_total") >= queued + PAGES, "its pages to be queued", every=LOOK_S)
    fleet.kill("di-prefill.0", signal.SIGSTOP)
    try:
        wait_for(lambda: published(fleet) - before >= PAGES // 2, "half of its pages to be published", every=EARLY_LOOK_S)
        pages = wait_for(lambda: (done := published(fleet) - before) >= PAGES and done, "its pages to be published", every=LOOK_S)
        took = time.perf_counter() - begin
    finally:
        fleet.kill("di-prefill.0", signal.SIGCONT)
    again.join()
    return pages * PAGE_BYTES / took


def fetch(fleet, prompt):
    fleet.await_idle()  # what is held is not dropped
    fleet.ctl("kv", "drop", "arena", HOST)
    read = fleet.metric(HOST, "di_kv_read_bytes_total")
    reply = ask_two(fleet, prompt)
    rows = fleet.explain(reply.request_id)
    at = {r["event"]: r["at_us"] for r in rows if r["where"] == "di-router"}
    # Without overlap a step begins when everything is there; what it took is on the rank's own clock.
    step = sum(r["length_us"] for r in rows if r["event"] == "compute" and r["where"].startswith("di-prefill"))
    read = fleet.metric(HOST, "di_kv_read_bytes_total") - read
    assert read >= (PAGES - 1) * PAGE_BYTES, read
    return read / (at["token"] - at["bound"] - step) * 1e6


def degraded(fleet, prompt, dead):
    for name in dead:
        fleet.kill(name)
    wait_for(lambda: not members(fleet) & set(dead), "two stores to be lost", 60)
    made = fleet.metric(HOST, "di_kv_pages_rebuilt_total")
    found = fetch(fleet, prompt)
    assert fleet.metric(HOST, "di_kv_pages_rebuilt_total") > made
    fleet.up()
    wait_for(lambda: members(fleet) >= set(dead), "the stores to be back", 60)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=9)
    parser.add_argument("folder", nargs="?", default="/dev/shm", help="where the volumes are")
    parser.add_argument("--peers", default="", help="a Python environment with mooncake")
    options = parser.parse_args()
    python = pathlib.Path(options.peers) / "bin" / "python3"
    rivals = bool(options.peers) and peers_bench.has(python, "mooncake.store")
    folder = tempfile.mkdtemp(prefix="di-stripe-bench-", dir=options.folder)
    tempfile.tempdir = folder  # the fleet's run directory too
    stores = [f"di-kvd.node{i}" for i in range(STORES)]
    wide = ["engine.script_layout=v3", "kv.pool=1GiB"]
    rows = [*(f"{program}:{row}" for program in ("di-prefill", "di-decode") for row in wide), *SURE_HIT,
            f"di-prefill:prefill.chunk_tokens={PAGES * BLOCK_TOKENS}", f"{HOST}:kv.arena_bytes=536870912",
            f"{HOST}:kv.admit=second_sighting", "di-prefill:kv.overlap=false",
            "di-meta:store.repair=off",
            *(f"{name}:{row}" for name in stores
              for row in ("store.capacity=1GiB", "store.segment_bytes=67108864", "store.prewrite=true"))]
    lines = [{"match": "", "pieces": pieces(*"abcdef"), "finish": "stop"}]
    compared = [("sockets", "sockets", 1), ("put", "sockets", 0.45), ("fetch", "sockets", 0.6), ("degraded", "healthy", 0.7)]
    if rivals:
        compared += [("put", "Mooncake put", 1), ("fetch", "Mooncake get", 1)]
    rates = {name: [] for pair in compared for name in pair[:2]}
    try:
        with contextlib.ExitStack() as stack:
            if rivals:
                mooncake = stack.enter_context(contextlib.closing(
                    peers_bench.Helper(python, "--mooncake", f"--rounds={options.rounds}")))
                mooncake.round(0)  # connects
            fleet = stack.enter_context(script_fleet(lines, conf="etc/local-ec", overrides=rows))
            for i in range(WARM_ROUNDS):
                warm = words(PAGES * BLOCK_TOKENS, seed=90 + i)
                put(fleet, warm)
                fetch(fleet, warm)
            prompts = [words(PAGES * BLOCK_TOKENS, seed=100 + i) for i in range(options.rounds)]
            for i, prompt in enumerate(prompts):
                with mooncake.stopped() if rivals else contextlib.nullcontext():
                    rates["sockets"].append(sockets(PAGES * PAGE_BYTES))
                    rates["put"].append(put(fleet, prompt))
                    rates["fetch"].append(fetch(fleet, prompt))
                if rivals:
                    for name, (rate,) in zip(("Mooncake put", "Mooncake get"), mooncake.round(i + 1)):
                        rates[name].append(rate * 1e9)
            for i, prompt in enumerate(prompts):
                rates["healthy"].append(fetch(fleet, prompt))
                rates["degraded"].append(degraded(fleet, prompt, [stores[i % STORES], stores[(i + 5) % STORES]]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("way\tMB/s\tratio\tto\tat least")
    for name, against, least in compared:
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates[against]))
        print(f"{name}\t{statistics.median(rates[name]) / 1e6:.0f}\t{ratio:.2f}\t{against}\t{least}")
    for name in ("Mooncake put", "Mooncake get") if rivals else ():
        print(f"{name}\t{statistics.median(rates[name]) / 1e6:.0f}")
    if not rivals:
        print("SKIP Mooncake: no Python environment with mooncake-transfer-engine-non-cuda and numpy (--peers VENV, or make bench PEERS=VENV)")


if __name__ == "__main__":
    main()
