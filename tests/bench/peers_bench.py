"""The data plane over TCP against NIXL's (UCX over TCP): 1 MiB units from memory to memory, two processes, loopback.

The rounds alternate, ours and then theirs; a row is the median rate, the ratio the median of the rounds' ratios.
NIXL's bytes are new in every round and compared at the owner.  Ours is transfer_bench: "write" is the rate to compare,
and "write, sealed" the one in which every unit is authenticated where it arrives, which NIXL does not do.

NIXL spins while it waits and we do not: on a machine with other work, or with fewer free cores than both of its
processes and their threads want, its rate says more about the scheduler than about its data plane.

    python3 tests/bench/peers_bench.py --build build --peers VENV [--rounds 9]

VENV is a Python environment outside the tree that has the package nixl; without it this says SKIP.
"""

import argparse
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time

UNIT_BYTES = 1 << 20
UNITS = 64  # of both arenas, and of one transfer
TRANSFERS = 2  # a round; transfer_bench gets as many units
ROUND_DEADLINE_S = 120


def nixl_agent_of(name):
    import numpy
    from nixl._api import nixl_agent, nixl_agent_config
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    memory = numpy.zeros(UNIT_BYTES * UNITS, numpy.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory, [(memory.ctypes.data + i * UNIT_BYTES, UNIT_BYTES, 0) for i in range(UNITS)]


def nixl_bytes(seed):
    import numpy
    return numpy.random.default_rng(seed).integers(0, 256, UNIT_BYTES * UNITS, dtype=numpy.uint8)


def nixl_owner(pipe):
    agent, memory, units = nixl_agent_of("owner")
    pipe.send((agent.get_agent_metadata(), units))
    while (seed := pipe.recv()) is not None:
        pipe.send(bool((memory == nixl_bytes(seed)).all()))


def nixl_rounds():
    """The other side of Nixl: a round for each line of standard input, answered by its rate in GB/s."""
    os.environ.update({"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "ERROR"})
    multiprocessing.set_start_method("spawn")
    pipe, far = multiprocessing.Pipe()
    owner = multiprocessing.Process(target=nixl_owner, args=(far,))
    owner.start()
    metadata, theirs = pipe.recv()
    agent, memory, mine = nixl_agent_of("writer")
    peer = agent.add_remote_agent(metadata)
    source, target = agent.get_xfer_descs(mine, "DRAM"), agent.get_xfer_descs(theirs, "DRAM")
    for line in sys.stdin:
        memory[:] = nixl_bytes(int(line))
        begin = time.perf_counter()
        for _ in range(TRANSFERS):
            handle = agent.initialize_xfer("WRITE", source, target, peer, b"")
            state = agent.transfer(handle)
            while state != "DONE":
                state = agent.check_xfer_state(handle)
                assert state != "ERR", "NIXL refused the transfer"
            agent.release_xfer_handle(handle)
        rate = TRANSFERS * memory.nbytes / (time.perf_counter() - begin) / 1e9
        pipe.send(int(line))
        assert pipe.recv(), "NIXL delivered other bytes"
        print(f"rate {rate}", flush=True)
    pipe.send(None)
    owner.join()


class Nixl:
    def __init__(self, python):
        self.process = subprocess.Popen([python, __file__, "--nixl"], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def round(self, seed):
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:  # the library prints there too
            if line.startswith("rate "):
                return float(line.split()[1])
        raise SystemExit("peers: NIXL ended")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def ours(build, case):
    out = subprocess.run([build / "bin" / "transfer_bench", "1", str(UNITS * TRANSFERS), case], check=True, text=True,
                         stdout=subprocess.PIPE, timeout=ROUND_DEADLINE_S).stdout
    return next(float(row.split("\t")[1]) for row in out.splitlines() if row.startswith(case + "\t"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default="build")
    parser.add_argument("--peers", default="", help="a Python environment with nixl")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nixl", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nixl:
        nixl_rounds()
        return
    python = pathlib.Path(options.peers) / "bin" / "python3"
    if not options.peers or subprocess.run([python, "-c", "import nixl, numpy"], check=False).returncode != 0:
        print("SKIP peers: no Python environment with nixl (--peers VENV, or make bench PEERS=VENV)")
        return
    nixl = Nixl(python)
    nixl.round(0)  # connects
    rates = {"write": [], "write, sealed": [], "NIXL write": []}
    for seed in range(1, options.rounds + 1):
        for case in ("write", "write, sealed"):
            rates[case].append(ours(options.build, case))
        rates["NIXL write"].append(nixl.round(seed))
    nixl.close()
    print("case\tGB/s\tours over NIXL")
    for case, row in rates.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(row, rates["NIXL write"]))
        print(f"{case}\t{statistics.median(row):.2f}\t{ratio:.2f}")


if __name__ == "__main__":
    main()
