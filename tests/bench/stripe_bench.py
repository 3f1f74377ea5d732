"""How fast whole stripes are put and fetched over TCP on one machine, verified, against plain sockets; and fetched with two
stores of twelve dead.

etc/local-ec with the script engine, which computes nothing, and the KV layout of DeepSeek-V3 (a page is 64 tokens, 4.5 MB;
a stripe ten pages and two columns of parity).  Volumes are in FOLDER, memory by default: it is the way there that is
measured.  Where it can be had that is a tmpfs of huge pages, mounted for the bench alone: in one of 4 KiB pages the kernel
takes 0.13 s of CPU for a GB that it writes, most of it for its books, where a disk is budgeted with 0.03 s, and one of huge
pages takes 0.05.  Every byte of them was written before, and rounds that are not counted touch the arena and the buffers:
memory that a process has for the first time costs more than the way.  In each round, one after the other:

    sockets   as many bytes over as many plain connections as there are stores, between two processes, from as much memory
              into as much memory
    hot       the same of one MiB again and again into one for each connection, which never leaves the cache: no transfer of
              a prompt can be that
    put       a prompt's pages out of the arena, from the last look at which none was queued, after the question that wants
              them again, to the last stripe published
    columns   what a put sends: its pages and as much parity as two tenths of them (against sockets this is put against
              ten twelfths of sockets)
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
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
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
DATA_COLUMNS = 10
WARM_ROUNDS = 3  # then no process touches memory for the first time
UNIT = 1 << 20
# Looking all the time would take one of few cores from what is measured; of a put this is a hundredth.
LOOK_S = 0.002
QUEUED_LOOK_S = 0.0005  # until all pages are queued: a few looks
EARLY_LOOK_S = 0.01  # while most of a put is still to come
HOST = "di-kvd.host0"
SHARED_MEMORY = "/dev/shm"
ALONE = "DI_STRIPE_BENCH_ALONE"  # in the environment: nobody else sees what is mounted


def each(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Sockets:
    """Two processes with a plain connection for each store: the ceiling."""

    def __init__(self, total):
        self.units = total // STORES // UNIT
        self.wanted, there = multiprocessing.Pipe()
        with socket.create_server(("127.0.0.1", 0), backlog=STORES) as listener:
            self.sender = multiprocessing.Process(target=self.send, args=(listener.getsockname()[1], there), daemon=True)
            self.sender.start()
            self.connections = [listener.accept()[0] for _ in range(STORES)]
        self.memory = self.touched()

    def close(self):
        self.wanted.send(None)
        self.sender.join()
        for connection in self.connections:
            connection.close()

    def touched(self):
        """Of each connection, all that it moves."""
        return [memoryview(bytearray(b"d") * (self.units * UNIT)) for _ in range(STORES)]

    def send(self, port, orders):
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(STORES)]
        memory = self.touched()
        while (places := orders.recv()) is not None:
            def one(i, places=places):
                for unit in range(self.units):
                    at = unit % places * UNIT
                    connections[i].sendall(memory[i if places > 1 else 0][at:at + UNIT])
            each(STORES, one)

    def rate(self, places):
        """Bytes a second; through so many places of UNIT bytes for each connection."""
        def receive(i):
            for unit in range(self.units):
                at = unit % places * UNIT
                piece = self.memory[i][at:at + UNIT]
                while piece:
                    piece = piece[self.connections[i].recv_into(piece):]
        begin = time.perf_counter()
        self.wanted.send(places)
        each(STORES, receive)
        return STORES * self.units * UNIT / (time.perf_counter() - begin)


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

    def all_queued():
        nonlocal begin
        look = time.perf_counter()
        now = counted(fleet, "di_kv_writebacks_queued_total")
        if now == queued:
            begin = look
        return now >= queued + PAGES
    wait_for(all_queued, "its pages to be queued", every=QUEUED_LOOK_S)
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


def own_memory():
    """A folder in memory, of huge pages where that can be had; begins the process anew, to be alone with it."""
    mount = ["mount", "-t", "tmpfs", "-o", "huge=always,size=90%", "di-stripe-bench", SHARED_MEMORY]
    if os.environ.get(ALONE):
        subprocess.run(mount, check=True)
    elif subprocess.run(["unshare", "--mount", *mount]).returncode == 0:
        os.environ[ALONE] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    else:
        print("volumes are in memory of 4 KiB pages", file=sys.stderr)
    return SHARED_MEMORY


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=9)
    parser.add_argument("folder", nargs="?", help="where the volumes are")
    parser.add_argument("--peers", default="", help="a Python environment with mooncake")
    options = parser.parse_args()
    if not options.folder:
        options.folder = own_memory()
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
    compared = [("sockets", "sockets", 1), ("hot", "sockets", ""), ("put", "sockets", 0.45), ("columns", "sockets", 0.45),
                ("fetch", "sockets", 0.6), ("put", "hot", ""), ("fetch", "hot", ""), ("degraded", "healthy", 0.7)]
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
            sockets = stack.enter_context(contextlib.closing(Sockets(PAGES * PAGE_BYTES)))
            for i in range(WARM_ROUNDS):
                warm = words(PAGES * BLOCK_TOKENS, seed=90 + i)
                put(fleet, warm)
                fetch(fleet, warm)
            prompts = [words(PAGES * BLOCK_TOKENS, seed=100 + i) for i in range(options.rounds)]
            for i, prompt in enumerate(prompts):
                with mooncake.stopped() if rivals else contextlib.nullcontext():
                    rates["sockets"].append(sockets.rate(sockets.units))
                    rates["hot"].append(sockets.rate(1))
                    rates["put"].append(put(fleet, prompt))
                    rates["columns"].append(rates["put"][-1] * STORES / DATA_COLUMNS)
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
