"""Our data plane and store against those of others, over loopback: units of 1 MiB, or what is said.

    NIXL (UCX over TCP)   from one process's memory to another's: transfer_bench "write", and "write, sealed", in which
                          every unit is authenticated where it arrives, which NIXL does not do
    Mooncake Store        put and get over TCP between a client and the process that lends the memory: transfer_bench
                          "write" and "read"
    Redis                 set and get through a Unix socket: store_bench "write" and "read", columns of 512 KiB from and
                          into a mapped arena, on a volume in /dev/shm, so that both are memory; Redis checks no sum

The rounds alternate, ours and then theirs; a row is the median rate, the ratio the median of the rounds' ratios.  Their
bytes are new in every round and compared where they arrive.

NIXL spins, also between its transfers: a peer is stopped while ours is measured, and of NIXL's processes only the owner
has a thread that spins, as the writer asks for the state of its transfer all the time.  On a machine with other work, or
with fewer than two free cores, its rate says more about the scheduler than about its data plane.

    python3 tests/bench/peers_bench.py --build build --peers VENV [--rounds 9]

VENV is a Python environment outside the tree that has numpy and one or both of nixl and
mooncake-transfer-engine-non-cuda; redis-server is the system's.  Who is not there is said to be skipped.
"""

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from keys import free_port  # noqa: E402

UNIT_BYTES = 1 << 20
UNITS = 64  # of both arenas, and of one transfer
TRANSFERS = 2  # a round; transfer_bench gets as many units
ROUND_DEADLINE_S = 120


def nixl_agent_of(name, spins):
    import numpy
    from nixl._api import nixl_agent, nixl_agent_config
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=spins, backends=["UCX"]))
    memory = numpy.zeros(UNIT_BYTES * UNITS, numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory, [(memory.ctypes.data + i * UNIT_BYTES, UNIT_BYTES, 0) for i in range(UNITS)]


def random_bytes(seed):
    import numpy
    return numpy.random.default_rng(seed).integers(0, 256, UNIT_BYTES * UNITS, dtype=numpy.uint8)


def cpu_s(pid):
    return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) gives


def nixl_owner(pipe):
    agent, memory, units = nixl_agent_of("owner", spins=True)
    pipe.send((agent.get_agent_metadata(), units))
    while (seed := pipe.recv()) is not None:
        pipe.send(bool((memory == random_bytes(seed)).all()))


def nixl_rounds():
    """The other side of Nixl: a round for each line of standard input, answered by its rate in GB/s and the CPU seconds
    of both processes for a GB."""
    os.environ.update({"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "ERROR"})
    multiprocessing.set_start_method("spawn")
    pipe, far = multiprocessing.Pipe()
    owner = multiprocessing.Process(target=nixl_owner, args=(far,))
    owner.start()
    metadata, theirs = pipe.recv()
    agent, memory, mine = nixl_agent_of("writer", spins=False)
    peer = agent.add_remote_agent(metadata)
    source, target = agent.get_xfer_descs(mine, "DRAM"), agent.get_xfer_descs(theirs, "DRAM")
    for line in sys.stdin:
        memory[:] = random_bytes(int(line))
        begin, cpu = time.perf_counter(), cpu_s(os.getpid()) + cpu_s(owner.pid)
        for _ in range(TRANSFERS):
            handle = agent.initialize_xfer("WRITE", source, target, peer, b"")
            state = agent.transfer(handle)
            while state != "DONE":
                state = agent.check_xfer_state(handle)
                assert state != "ERR", "NIXL refused the transfer"
            agent.release_xfer_handle(handle)
        gigabytes = TRANSFERS * memory.nbytes / 1e9
        rate = gigabytes / (time.perf_counter() - begin)
        cpu = (cpu_s(os.getpid()) + cpu_s(owner.pid) - cpu) / gigabytes
        pipe.send(int(line))
        assert pipe.recv(), "NIXL delivered other bytes"
        print(f"rate {rate}:{cpu}", flush=True)
    pipe.send(None)
    owner.join()


# ---- Mooncake

def mooncake_store(name, lends, master):
    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    code = store.setup(name, "P2PHANDSHAKE", lends, UNIT_BYTES * UNITS, "tcp", "", master)
    assert code == 0, f"Mooncake: setup {code}"
    return store


def mooncake_owner(pipe, name, lends, master):
    store = mooncake_store(name, lends, master)
    pipe.send("ready")
    pipe.recv()
    store.close()


def mooncake_rounds(rounds):
    """The other side of Mooncake: a round for each line of standard input, answered by the rates of put and get."""
    import numpy
    os.environ.update({"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"})
    multiprocessing.set_start_method("spawn")
    ports = [free_port() for _ in range(4)]
    master_at = f"127.0.0.1:{ports[0]}"
    master = subprocess.Popen([pathlib.Path(sys.executable).parent / "mooncake_master", f"--rpc_port={ports[0]}",
                               f"--metrics_port={ports[1]}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_port(ports[0])
        pipe, far = multiprocessing.Pipe()
        # What was put stays under a lease for a while: room for all rounds.
        owner = multiprocessing.Process(target=mooncake_owner, args=(
            far, f"127.0.0.1:{ports[2]}", (rounds + 3) * UNITS * UNIT_BYTES, master_at))
        owner.start()
        assert pipe.recv() == "ready"
        store = mooncake_store(f"127.0.0.1:{ports[3]}", 0, master_at)
        source, target = (numpy.zeros(UNIT_BYTES * UNITS, numpy.uint8) for _ in range(2))
        for memory in (source, target):
            assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        at = [i * UNIT_BYTES for i in range(UNITS)]
        sizes = [UNIT_BYTES] * UNITS
        for line in sys.stdin:
            source[:] = random_bytes(int(line))
            target[:] = 0
            names = [f"{int(line)}/{i}" for i in range(UNITS)]
            begin = time.perf_counter()
            put = store.batch_put_from(names, [source.ctypes.data + i for i in at], sizes)
            middle = time.perf_counter()
            got = store.batch_get_into(names, [target.ctypes.data + i for i in at], sizes)
            end = time.perf_counter()
            assert set(put) == {0} and set(got) == {UNIT_BYTES}, (set(put), set(got))
            assert (source == target).all(), "Mooncake delivered other bytes"
            print(f"rate {source.nbytes / (middle - begin) / 1e9} {source.nbytes / (end - middle) / 1e9}", flush=True)
        store.close()
        pipe.send("over")
        owner.join()
    finally:
        master.kill()
        master.wait()


def await_port(port):
    deadline = time.monotonic() + ROUND_DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
    raise SystemExit(f"peers: nobody listens at {port}")


# ---- Redis

class Redis:
    """A server with nothing but memory behind it, spoken to in its own protocol; a round has as many values at a time as
    the answers find room for."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="di-redis-")
        path = f"{self.folder}/socket"
        self.server = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no",
                                        "--dir", self.folder], stdout=subprocess.DEVNULL)
        self.socket = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + ROUND_DEADLINE_S
        while True:
            try:
                self.socket.connect(path)
                break
            except OSError:
                assert time.monotonic() < deadline, "Redis did not start"
        self.into = bytearray(UNIT_BYTES * UNITS)

    def stopped(self):
        return contextlib.nullcontext()  # it sleeps when nobody asks

    def answer(self, count):
        return self.socket.recv(count, socket.MSG_WAITALL)

    def round(self, seed):
        values = memoryview(os.urandom(UNIT_BYTES * UNITS))
        begin = time.perf_counter()
        for i in range(UNITS):
            self.socket.sendall(b"*3\r\n$3\r\nSET\r\n$4\r\n%04d\r\n$%d\r\n" % (i, UNIT_BYTES))
            self.socket.sendall(values[i * UNIT_BYTES:(i + 1) * UNIT_BYTES])
            self.socket.sendall(b"\r\n")
        for _ in range(UNITS):
            assert self.answer(5) == b"+OK\r\n", "Redis refused a value"
        middle = time.perf_counter()
        self.socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$4\r\n%04d\r\n" % i for i in range(UNITS)))
        into = memoryview(self.into)
        for i in range(UNITS):
            header = b"$%d\r\n" % UNIT_BYTES
            assert self.answer(len(header)) == header, "Redis lost a value"
            self.socket.recv_into(into[i * UNIT_BYTES:(i + 1) * UNIT_BYTES], UNIT_BYTES, socket.MSG_WAITALL)
            self.answer(2)
        end = time.perf_counter()
        assert into == values, "Redis delivered other bytes"
        return (len(values) / (middle - begin) / 1e9,), (len(values) / (end - middle) / 1e9,)

    def close(self):
        self.socket.close()
        self.server.terminate()
        self.server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- Rounds

class Helper:
    """A peer that lives in the Python environment of `python`."""

    def __init__(self, python, *words):
        self.process = subprocess.Popen([python, __file__, *words], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, start_new_session=True)

    @contextlib.contextmanager
    def stopped(self):
        """All of its processes, whose threads spin also when there is nothing to do."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def round(self, seed):
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # the libraries print there too
            if line.startswith("rate "):
                return tuple(tuple(map(float, word.split(":"))) for word in line.split()[1:])
        raise SystemExit("peers: a peer ended")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def transferred(build, case):
    out = subprocess.run([build / "bin" / "transfer_bench", "1", str(UNITS * TRANSFERS), case], check=True, text=True,
                         stdout=subprocess.PIPE, timeout=ROUND_DEADLINE_S).stdout
    row = next(row for row in out.splitlines() if row.startswith(case + "\t")).split("\t")
    return float(row[1]), float(row[3])


def stored(build, case):
    """The rate of store_bench: of reads of which the host compares the sums, and of writes."""
    out = subprocess.run([build / "bin" / "store_bench", "1", "/dev/shm", "0", case], check=True, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=ROUND_DEADLINE_S).stdout
    row = f"di-kvd {case}\t"
    return (next(float(line.split("\t")[1]) / 1000 for line in out.splitlines() if line.startswith(row)),)


def compare(name, peer, theirs, ours, rounds):
    """`theirs` are the names of a round's rates; `ours` what is measured beside them, and against which.  A rate may come
    with the CPU seconds for a GB."""
    rates = {case: [] for case in (*(case for case, _, _ in ours), *theirs)}
    with contextlib.closing(peer):
        peer.round(0)  # connects
        for seed in range(1, rounds + 1):
            with peer.stopped():
                for case, _, measure in ours:
                    rates[case].append(measure())
            for case, rate in zip(theirs, peer.round(seed)):
                rates[case].append(rate)
    print(f"case\tGB/s\tours over {name}\tCPU s/GB")
    against = {case: other for case, other, _ in ours}
    for case, row in rates.items():
        ratio = ""
        if case in against:
            ratio = f"{statistics.median(mine[0] / other[0] for mine, other in zip(row, rates[against[case]])):.2f}"
        cpu = f"{statistics.median(each[1] for each in row):.2f}" if len(row[0]) > 1 else ""
        print(f"{case}\t{statistics.median(each[0] for each in row):.2f}\t{ratio}\t{cpu}", flush=True)


def has(python, *modules):
    return python.exists() and subprocess.run([python, "-c", f"import numpy, {', '.join(modules)}"], check=False,
                                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default="build")
    parser.add_argument("--peers", default="", help="a Python environment with nixl, or mooncake")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nixl", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mooncake", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nixl:
        return nixl_rounds()
    if options.mooncake:
        return mooncake_rounds(options.rounds)
    build, python = options.build, pathlib.Path(options.peers) / "bin" / "python3"
    skipped = []
    if options.peers and has(python, "nixl"):
        compare("NIXL", Helper(python, "--nixl"), ["NIXL write"],
                [(case, "NIXL write", lambda case=case: transferred(build, case)) for case in ("write", "write, sealed")],
                options.rounds)
    else:
        skipped.append("NIXL: no Python environment with nixl and numpy")
    if options.peers and has(python, "mooncake.store"):
        compare("Mooncake", Helper(python, "--mooncake", f"--rounds={options.rounds}"), ["Mooncake put", "Mooncake get"],
                [(case, theirs, lambda case=case: transferred(build, case))
                 for case, theirs in (("write", "Mooncake put"), ("write, sealed", "Mooncake put"),
                                      ("read", "Mooncake get"), ("read, sealed", "Mooncake get"))], options.rounds)
    else:
        skipped.append("Mooncake: no Python environment with mooncake-transfer-engine-non-cuda and numpy")
    if shutil.which("redis-server"):
        compare("Redis", Redis(), ["Redis set", "Redis get"],
                [(f"store {case}", theirs, lambda case=case: stored(build, case))
                 for case, theirs in (("write", "Redis set"), ("read", "Redis get"))], options.rounds)
    else:
        skipped.append("Redis: no redis-server")
    for why in skipped:
        print(f"SKIP {why} (--peers VENV, or make bench PEERS=VENV)" if "Python" in why else f"SKIP {why}")


if __name__ == "__main__":
    main()
