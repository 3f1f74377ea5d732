"""The arena outlives its di-kvd: kill -9, a clean restart, an upgrade of the engines, with a holder process and
with systemd's descriptor store."""

import concurrent.futures
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_cold, ask_hit  # noqa: E402
from fleet import BIN, SOURCE, SURE_HIT, Fleet, main, members, running, wait_for, words, write_backs_done  # noqa: E402

HOST = "di-kvd.host0"
HOLDER = "di-hold.host0"
# The pages of a prompt are written to the store when they are wanted a second time.
ONLY_ARENA = f"{HOST}:kv.admit=second_sighting"
SHORT = dict(max_tokens=24)


def arena_row(fleet):
    return fleet.ctl("-d", HOST, "show", "kv")[0]


def serves_again(fleet, dead):
    """The host's di-kvd is another process, and the ranks have its arena."""
    wait_for(lambda: fleet.pid(HOST) != dead and fleet.alive(HOST) and HOST in members(fleet), "di-kvd to be back", 60)
    wait_for(lambda: arena_row(fleet)["clients"] >= 2, "the ranks to attach", 60)
    wait_for(lambda: fleet.request("GET", "/health/ready")[0] == 200, "the fleet to serve", 60)


def await_recovered(fleet, pages):
    wait_for(lambda: fleet.metric(HOST, "di_kv_pages_recovered_total") >= pages, "the pages of before", 60)


def hit_out_of_the_arena(fleet, prompt, cold):
    """The whole prompt is cached, with the same answer, and the store was not read."""
    hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], **SHORT)
    assert hit.text == cold.text, (hit.text, cold.text)
    assert fleet.metric(HOST, "di_kv_reads_total") == 0, "the pages came from somewhere else"


def survives(sig):
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA], supervise=True) as fleet:
        prompt = words(900)
        cold = ask_cold(fleet, prompt, **SHORT)
        fleet.await_idle(60)
        before = arena_row(fleet)
        assert before["pages"] > 0, before
        holder = fleet.pid(HOLDER)
        serves_again(fleet, fleet.kill(HOST, sig))
        await_recovered(fleet, before["pages"])
        assert fleet.pid(HOLDER) == holder
        hit_out_of_the_arena(fleet, prompt, cold)
        fleet.await_idle(60)
        for rank in ("di-prefill.0", "di-decode.0"):
            assert "mapping_kept=true" in fleet.log(rank), fleet.log(rank)
        # And once more, on what was recovered.
        serves_again(fleet, fleet.kill(HOST, signal.SIGKILL))
        await_recovered(fleet, before["pages"])
        hit_out_of_the_arena(fleet, prompt, cold)
        fleet.await_idle(60)
        fleet.down()
        assert not running(holder), "the holder outlives the fleet"
        assert fleet.holders() == []


def survives_kill_nine():
    survives(signal.SIGKILL)


def survives_a_clean_restart():
    survives(signal.SIGTERM)


def survives_its_engines():
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA, f"{HOST}:kv.prefault=true"], supervise=True) as fleet:
        prompt = words(900, seed=2)
        cold = ask(fleet, prompt, **SHORT)
        dead = {i: fleet.kill(i) for i in ("di-prefill.0", "di-decode.0", HOST)}
        for instance, pid in dead.items():
            wait_for(lambda i=instance, p=pid: fleet.pid(i) != p and fleet.alive(i), f"{instance} to be back", 60)
        serves_again(fleet, dead[HOST])
        await_recovered(fleet, 1)
        hit_out_of_the_arena(fleet, prompt, cold)
        fleet.await_idle(60)


def streams_go_on_over_a_restart():
    with Fleet(overrides=[*SURE_HIT], supervise=True) as fleet:
        prompt = words(300, seed=3)
        sampled = dict(temperature=1, seed=11, max_tokens=160, ignore_eos=True)
        undisturbed = ask(fleet, prompt, **sampled)
        for sig in (signal.SIGKILL, signal.SIGTERM):
            seen = 0
            killed = []

            def on_chunk(_event):
                nonlocal seen
                seen += 1
                if seen == 40:
                    killed.append(fleet.kill(HOST, sig))
            reply = ask(fleet, prompt, on_chunk=on_chunk, **sampled)
            assert killed, "the stream was over before anything was killed"
            assert reply.text == undisturbed.text, reply.text
            serves_again(fleet, killed[0])
            fleet.await_idle(60)


def requests_under_way_when_it_dies_are_right():
    """Prompts are being read and handed over while di-kvd is killed again and again."""
    with Fleet(overrides=[*SURE_HIT], supervise=True) as fleet:
        prompts = [words(250 + 50 * i, seed=20 + i) for i in range(4)]
        want = [ask(fleet, p, **SHORT).text for p in prompts]
        for _ in range(3):
            with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
                asked = [pool.submit(ask, fleet, prompt, **SHORT) for prompt in prompts]
                dead = fleet.kill(HOST)
                assert [one.result().text for one in asked] == want
            serves_again(fleet, dead)
        fleet.await_idle(60)


def a_holder_that_dies_is_replaced():
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA], supervise=True) as fleet:
        prompt = words(600, seed=4)
        cold = ask(fleet, prompt, **SHORT)
        old = fleet.kill(HOLDER)
        wait_for(lambda: fleet.pid(HOLDER) != old and fleet.alive(HOLDER), "another holder", 30)
        wait_for(lambda: "parked again" in fleet.log(HOST), "the arena to be parked again", 30)
        serves_again(fleet, fleet.kill(HOST))
        await_recovered(fleet, 1)
        hit_out_of_the_arena(fleet, prompt, cold)


def parked_memory(fleet):
    """The arena, opened through its holder."""
    fds = pathlib.Path(f"/proc/{fleet.pid(HOLDER)}/fd")
    return open(next(fd for fd in fds.iterdir() if os.readlink(fd).startswith("/memfd:")), "r+b", buffering=0)


def damage(memory, first, last, rng):
    """One bit of each 4 KiB that holds anything."""
    flipped = 0
    at = first
    while at < last:
        try:
            at = os.lseek(memory.fileno(), at, os.SEEK_DATA)  # over what was never touched
        except OSError:
            break
        if at >= last:
            break
        memory.seek(at)
        data = memory.read(min(4096, last - at))
        if any(data):
            byte = rng.randrange(len(data))
            memory.seek(at + byte)
            memory.write(bytes([data[byte] ^ 1 << rng.randrange(8)]))
            flipped += 1
        at += 4096
    return flipped


def damaged_memory_is_never_served():
    rng = random.Random(9)
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA]) as fleet:
        prompt = words(600, seed=9)
        cold = ask(fleet, prompt, **SHORT)
        fleet.await_idle(60)
        for what in ("payload", "index"):
            dead = fleet.kill(HOST)
            wait_for(lambda: not fleet.alive(HOST), "di-kvd to be dead")
            with parked_memory(fleet) as memory:
                header = memory.read(128)
                payload, length = struct.unpack_from("<QQ", header, 24)
                first, last = (payload, payload + length) if what == "payload" else (128, payload)
                assert damage(memory, first, last, rng) > 0
            fleet.up()
            serves_again(fleet, dead)
            if what == "payload":
                wait_for(lambda: fleet.metric(HOST, "di_kv_pages_recovery_bad_total") > 0, "the damage to be found", 60)
                assert fleet.metric(HOST, "di_kv_pages_recovered_total") == 0
            again = ask(fleet, prompt, **SHORT)
            assert again.text == cold.text, again.text
            fleet.await_idle(60)


def without_parking_a_restart_is_cold():
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA, f"{HOST}:kv.park=off"], supervise=True) as fleet:
        prompt = words(600, seed=5)
        cold = ask(fleet, prompt, **SHORT)
        assert fleet.holders() == []
        serves_again(fleet, fleet.kill(HOST))
        again = ask(fleet, prompt, **SHORT)
        assert again.text == cold.text and again.cached() == 0, again.usage


def another_size_makes_a_new_arena():
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA]) as fleet:
        prompt = words(600, seed=6)
        cold = ask(fleet, prompt, **SHORT)
        dead = fleet.kill(HOST)
        fleet.up([f"{HOST}:kv.arena_bytes=134217728"])
        serves_again(fleet, dead)
        assert "the parked arena is of no use" in fleet.log(HOST)
        # The ranks, which did nothing, let go of the old one before there was a new one.
        assert "a process keeps the former arena" not in fleet.log(HOST)
        for rank in ("di-prefill.0", "di-decode.0"):
            assert "mapping ended" in fleet.log(rank), fleet.log(rank)
        again = ask(fleet, prompt, **SHORT)
        assert again.text == cold.text and again.cached() == 0, again.usage
        fleet.await_idle(60)


def a_stop_does_not_wait_for_who_keeps_the_former_arena():
    with Fleet() as fleet:
        frozen = fleet.kill("di-decode.0", signal.SIGSTOP)
        dead = fleet.kill(HOST)
        wait_for(lambda: not fleet.alive(HOST), "di-kvd to be dead")
        with open(fleet.run / f"{HOST}.log", "a") as log:
            process = subprocess.Popen([str(BIN / "di-kvd"), "-f", str(SOURCE / "etc/local/di-kvd.host.toml"),
                                        "-o", f"run.dir={fleet.run}", "-o", f"run.instance={HOST}",
                                        "-o", "kv.arena_bytes=134217728"],
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: "the parked arena is of no use" in fleet.log(HOST), "the start to give the arena up")
        process.terminate()
        assert process.wait(60) == 0, fleet.log(HOST)
        assert "stopped before it had started" in fleet.log(HOST)
        assert "a process keeps the former arena" not in fleet.log(HOST)
        os.kill(frozen, signal.SIGCONT)
        fleet.up()
        serves_again(fleet, dead)


def ranks_do_not_keep_the_memory_of_a_host_that_stays_away():
    with Fleet(overrides=[f"{HOST}:kv.park=off"]) as fleet:
        ranks = {rank: fleet.pid(rank) for rank in ("di-prefill.0", "di-decode.0")}

        def has_it(pid):
            return f"/memfd:{HOST}" in pathlib.Path(f"/proc/{pid}/maps").read_text()
        assert all(has_it(pid) for pid in ranks.values())
        dead = fleet.kill(HOST)
        wait_for(lambda: not any(has_it(pid) for pid in ranks.values()), "the ranks to let go of the memory", 60)
        fleet.up()
        serves_again(fleet, dead)
        assert all(has_it(pid) for pid in ranks.values())


def dropping_an_arena_leaves_the_store():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        prompt = words(600, seed=7)
        cold = ask(fleet, prompt, **SHORT)
        fleet.await_idle(60)
        write_backs_done(fleet)
        before = arena_row(fleet)
        row = fleet.ctl("kv", "drop", "arena", HOST)[0]
        assert row["pages"] == before["pages"] > 0 and row["blocks"] == before["blocks"] and row["kept_pages"] == 0, row
        assert row["bytes"] == before["evictable_bytes"], (row, before)
        assert arena_row(fleet)["pages"] == 0
        hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], **SHORT)
        assert hit.text == cold.text
        assert fleet.metric(HOST, "di_kv_reads_total") > 0, "where did the pages come from?"


# D07.
def what_was_dropped_is_matched_by_nobody():
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA]) as fleet:
        prompt = words(600, seed=8)
        cold = ask_cold(fleet, prompt, **SHORT)
        fleet.await_idle(60)

        def known():
            return next(row["blocks"] for row in fleet.ctl("-d", "di-meta.0", "show", "kv") if row["place"] == HOST)
        wait_for(lambda: known() == arena_row(fleet)["blocks"] > 0, "the directory to know what the arena has")
        fleet.ctl("kv", "drop", "arena", HOST)
        wait_for(lambda: known() == 0, "the directory to hear of it")
        again = ask_cold(fleet, prompt, **SHORT)
        assert again.text == cold.text
        # Nothing was promised that was not there.
        assert fleet.metric(HOST, "di_kv_matched_blocks_total") == 0
        fleet.await_idle(60)


class Systemd:
    """The descriptor store of a service manager, and what a service of it is started with."""

    def __init__(self, run):
        self.path = str(run / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(60)
        self.kept = {}

    def until(self, wanted):
        """Handles what the service says until it has said `wanted`."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 4)
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = fields.get("FDNAME")
            if "FDSTORE" in fields:
                self.kept[name] = descriptors[0]
            if "FDSTOREREMOVE" in fields and name in self.kept:
                os.close(self.kept.pop(name))
            if wanted in data.decode().splitlines():
                return

    def start(self, fleet):
        environment = dict(os.environ, NOTIFY_SOCKET=self.path, FDSTORE="1")
        names = list(self.kept)
        command = [str(BIN / "di-kvd"), "-f", str(SOURCE / "etc/local/di-kvd.host.toml"), "-o", f"run.dir={fleet.run}",
                   "-o", f"run.instance={HOST}", "-o", "kv.admit=second_sighting"]
        if names:
            environment.update(LISTEN_FDS=str(len(names)), LISTEN_FDNAMES=":".join(names))
            command = ["/bin/sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh", *command]

        def place():
            for i, name in enumerate(names):
                os.dup2(self.kept[name], 3 + i)
        with open(fleet.run / f"{HOST}.log", "a") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       close_fds=False, preexec_fn=place)
        self.until("READY=1")
        return process


def survives_with_systemd():
    with Fleet(overrides=[*SURE_HIT, ONLY_ARENA]) as fleet:
        fleet.kill(HOST)
        fleet.kill(HOLDER)
        wait_for(lambda: not fleet.alive(HOST), "di-kvd to be dead")
        manager = Systemd(fleet.run)
        process = manager.start(fleet)
        assert list(manager.kept) == ["arena"], manager.kept
        serves_again(fleet, 0)
        prompt = words(600, seed=8)
        cold = ask(fleet, prompt, **SHORT)
        fleet.await_idle(60)
        for _ in range(2):
            process.kill()
            process.wait()
            process = manager.start(fleet)
            assert "parked_with=systemd" in fleet.log(HOST)
            serves_again(fleet, 0)
            await_recovered(fleet, 1)
            hit_out_of_the_arena(fleet, prompt, cold)
            fleet.await_idle(60)
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main([survives_kill_nine, survives_a_clean_restart, survives_its_engines, streams_go_on_over_a_restart,
          requests_under_way_when_it_dies_are_right, a_holder_that_dies_is_replaced,
          damaged_memory_is_never_served, without_parking_a_restart_is_cold,
          another_size_makes_a_new_arena, a_stop_does_not_wait_for_who_keeps_the_former_arena,
          ranks_do_not_keep_the_memory_of_a_host_that_stays_away,
          dropping_an_arena_leaves_the_store, what_was_dropped_is_matched_by_nobody, survives_with_systemd])
