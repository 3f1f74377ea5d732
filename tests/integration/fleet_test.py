"""di-up, di-down and di-ctl: starting, supervising, asking and stopping a fleet as a whole."""

import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, read_back  # noqa: E402
from fleet import BIN, PATIENCE, SOURCE, SURE_HIT, Fleet, main, wait_for, words, write_backs_done  # noqa: E402
from stores import inventories_taken  # noqa: E402

INSTANCES = ["di-decode.0", "di-kvd.host0", "di-kvd.store0", "di-meta.0", "di-prefill.0", "di-router.0"]


def processes_of(run):
    """Command lines that name this run directory, zombies not counted."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"run.dir={run}" in words or (str(run) in words and ("--supervisor" in words or words[0].endswith("di-hold"))):
            found.append(f"{entry.name}: {' '.join(words)[:100]}")
    return found


def script_run(fleet, name, *arguments):
    return subprocess.run([str(SOURCE / "scripts" / name), *arguments], cwd=SOURCE, env=fleet.environment(),
                          capture_output=True, text=True, timeout=120 * PATIENCE)


def ctl(fleet, *arguments):
    return subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run), *arguments], capture_output=True, text=True,
                          timeout=60 * PATIENCE)


def up_again(fleet, *arguments):
    return subprocess.run([*fleet.command(), *arguments], cwd=SOURCE, env=fleet.environment(), capture_output=True,
                          text=True, timeout=120 * PATIENCE)


def up_is_idempotent_and_starts_what_is_missing():
    with Fleet() as fleet:
        assert fleet.instances() == INSTANCES, fleet.instances()
        pids = {i: fleet.pid(i) for i in INSTANCES}
        key = (fleet.run / "key").read_text()
        assert re.fullmatch(r"sk-di-[A-Za-z0-9_-]{8}-[A-Za-z0-9_-]{43}\n", key), key
        assert (fleet.run / "key").stat().st_mode & 0o777 == 0o600
        again = up_again(fleet)
        assert again.returncode == 0 and again.stdout == f"ready http://{fleet.address[0]}:{fleet.address[1]}\n", again
        assert {i: fleet.pid(i) for i in INSTANCES} == pids
        dead = fleet.kill("di-decode.0")
        wait_for(lambda: not fleet.alive("di-decode.0"), "the end of di-decode.0")
        fleet.up()
        assert fleet.pid("di-decode.0") != dead
        assert {i: fleet.pid(i) for i in INSTANCES if i != "di-decode.0"} == {
            i: p for i, p in pids.items() if i != "di-decode.0"}
        assert (fleet.run / "key").read_text() == key
        down = script_run(fleet, "di-down", "-r", str(fleet.run))
        assert down.returncode == 0, down
        assert processes_of(fleet.run) == []
        assert script_run(fleet, "di-down", "-r", str(fleet.run)).returncode == 0, "nothing to stop is no error"


def up_bare(fleet, *arguments):
    """Without the parameters of the fleet, which are said to have no effect on what runs."""
    return script_run(fleet, "di-up", "-c", fleet.conf, "-r", str(fleet.run), *arguments)


# An upgrade of one daemon: kill -TERM, di-up.
def what_was_asked_to_stop_is_started_anew_when_it_has_ended():
    for supervise in (False, True):
        with Fleet(supervise=supervise, overrides=["di-decode:engine.step_delay_ms=100", "di-decode:drain.timeout=60s"]) as fleet:
            replies = []
            seen = threading.Event()
            asking = threading.Thread(target=lambda: replies.append(fleet.chat(
                "hi", on_chunk=lambda _: seen.set(), temperature=0, max_tokens=30, ignore_eos=True)))
            asking.start()
            assert seen.wait(60)
            old = fleet.kill("di-decode.0", signal.SIGTERM)
            again = up_bare(fleet, "-t", f"{20 * PATIENCE:.0f}")
            assert again.returncode == 0 and again.stdout.startswith("ready "), again
            assert again.stderr == "di-up: di-decode.0 is stopping: it is started when it has ended\n", again.stderr
            assert fleet.pid("di-decode.0") != old and status(fleet, "di-decode.0")["state"] == "ready"
            asking.join()
            assert replies[0].done, (replies[0].error, replies[0].text)
            # Asked, but it has not heard of it.
            old = fleet.kill("di-decode.0", signal.SIGSTOP)
            fleet.kill("di-decode.0", signal.SIGTERM)
            said = up_bare(fleet, "-t", "0")
            assert said.returncode == 1 and said.stderr.splitlines()[1:] == [
                f"di-up: di-decode.0 is stopping as process {old}, and has not ended after 0 s"], said
            fleet.kill("di-decode.0", signal.SIGCONT)
            assert up_bare(fleet).returncode == 0
            assert fleet.pid("di-decode.0") != old and status(fleet, "di-decode.0")["state"] == "ready"


def a_process_that_ends_while_it_is_looked_at_spoils_no_other_look():
    script = f'''. {SOURCE}/scripts/fleet.sh
        for ((i = 0; i < 100; i++)); do
          (exit 0) & asked_to_stop $!; asked_to_stop $!; asked_to_stop $!
          read -r line </proc/self/stat; [[ $line == "$BASHPID (bash) "* ]] || echo "$line"
          wait $!
        done'''
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert done.returncode == 0 and done.stdout == done.stderr == "", done


def a_fleet_that_does_not_serve_says_what_it_lacks():
    with Fleet() as fleet:
        fleet.ctl("drain", "di-decode.0")
        wait_for(lambda: fleet.request("GET", "/health/ready")[0] == 503, "the router not to serve")
        with (fleet.run / "di-router.0.log").open("a") as log:
            log.write("2026-01-01T00:00:00.000000Z error di-router.0[1] http: the word of an earlier start\n")
        said = up_bare(fleet, "-t", "0")
        assert said.returncode == 1 and said.stdout == "", said
        assert said.stderr.startswith(
            "di-up: di-router.0: does not serve after 0 s: it has no di-decode that takes work"), said
        assert said.stderr.count("\n") == 1 and "earlier" not in said.stderr and "di-prefill" not in said.stderr, said
        # Its own word is of use.
        with (fleet.run / "di-router.0.log").open("a") as log:
            log.write(f"2026-01-01T00:00:00.000000Z error di-router.0[{fleet.pid('di-router.0')}] http: of this start\n")
        assert up_bare(fleet, "-t", "0").stderr.endswith("http: of this start\n")


def supervisor_restarts_what_dies_and_can_be_replaced():
    with Fleet(supervise=True) as fleet:
        def restarted(instance):
            dead = fleet.kill(instance)
            start = time.monotonic()
            wait_for(lambda: fleet.pid(instance) != dead and fleet.alive(instance), f"{instance} to live again")
            print(f"{instance} lives again after {(time.monotonic() - start) * 1000:.0f} ms")
            wait_for(lambda: ctl(fleet, "-d", instance, "show", "status").returncode == 0, f"{instance} to answer")

        restarted("di-decode.0")
        restarted("di-kvd.host0")
        told = re.findall(r"restart instance=(\S+) status=(\d+) deaths=(\d+)", fleet.log("supervisor"))
        assert told == [("di-decode.0", "137", "1"), ("di-kvd.host0", "137", "1")], told
        # What the next supervisor finds running is supervised too.
        supervisor = int((fleet.run / ".up" / "supervisor.pid").read_text())
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: not pathlib.Path(f"/proc/{supervisor}").exists(), "the end of the supervisor")
        pids = {i: fleet.pid(i) for i in INSTANCES}
        assert up_again(fleet).returncode == 0
        wait_for(lambda: int((fleet.run / ".up" / "supervisor.pid").read_text()) != supervisor, "another supervisor")
        assert {i: fleet.pid(i) for i in INSTANCES} == pids
        restarted("di-meta.0")
        fleet.down()
        assert processes_of(fleet.run) == []


def down_kills_what_does_not_stop():
    with Fleet() as fleet:
        fleet.kill("di-decode.0", signal.SIGSTOP)
        fleet.kill("di-router.0", signal.SIGKILL)
        down = script_run(fleet, "di-down", "-r", str(fleet.run), "-t", "3")
        assert down.returncode == 0, down
        assert processes_of(fleet.run) == []


# After a reboot every number is somebody else's.
def numbers_of_others_are_not_taken_for_ours():
    with tempfile.TemporaryDirectory() as folder, Fleet() as fleet:
        # Another program of the same name, as in another fleet.
        namesake = pathlib.Path(folder, "di-decode")
        shutil.copy(shutil.which("tail"), namesake)
        other = subprocess.Popen([str(namesake), "-f", "/dev/null"])
        try:
            pid_file = fleet.run / "di-decode.0.pid"

            def dead_and_named():
                fleet.kill("di-decode.0")
                wait_for(lambda: not fleet.alive("di-decode.0"), "the end of di-decode.0")
                pid_file.write_text(f"{other.pid}\n")

            dead_and_named()
            (fleet.run / ".up" / "supervisor.pid").write_text(f"{os.getpid()}\n")
            again = up_again(fleet)
            assert again.returncode == 0 and again.stdout.startswith("ready "), again
            assert fleet.pid("di-decode.0") != other.pid and fleet.alive("di-decode.0")
            assert status(fleet, "di-decode.0")["state"] == "ready"
            dead_and_named()
            (fleet.run / ".up" / "supervisor.pid").write_text(f"{other.pid}\n")
            assert script_run(fleet, "di-down", "-r", str(fleet.run)).returncode == 0
            assert other.poll() is None, "di-down ended somebody else's process"
            assert processes_of(fleet.run) == []
        finally:
            other.kill()
            other.wait()


def copy_of_the_local_fleet(folder):
    """A configuration to write in; the model is where its rows say."""
    shutil.copytree(SOURCE / "etc/local", folder / "local")
    (folder / "model-demo").symlink_to(SOURCE / "etc/model-demo")
    return folder / "local"


def what_the_supervisor_gave_up_is_begun_again_by_di_up():
    with tempfile.TemporaryDirectory() as folder:
        conf = copy_of_the_local_fleet(pathlib.Path(folder))
        with Fleet(conf=conf, supervise=True) as fleet:
            good = (conf / "di-decode.toml").read_text()
            (conf / "di-decode.toml").write_text("bogus = 1\n" + good)
            fleet.kill("di-decode.0")
            wait_for(lambda: "gave up instance=di-decode.0 status=78" in fleet.log("supervisor"), "the supervisor to give up")
            assert (fleet.run / ".up" / "di-decode.0.ready").read_text() == "", "it is not ready"
            said = [line for line in fleet.log("supervisor").splitlines() if "gave up" in line]
            assert len(said) == 1 and " error di-up[" in said[0] and "unknown key 'bogus'" in said[0], said
            done = up_again(fleet)
            assert done.returncode == 78 and "bogus" in done.stderr, done
            (conf / "di-decode.toml").write_text(good)
            done = up_again(fleet, "-o", "di-decode:decode.requests_max=64")
            assert done.returncode == 0 and done.stdout.startswith("ready "), done
            said = [line for line in done.stderr.splitlines() if "di-decode.0 is started by the supervisor" in line]
            assert len(said) == 1 and "-o di-decode:decode.requests_max=64 has no effect" in said[0], done.stderr
            assert status(fleet, "di-decode.0")["state"] == "ready"
            # And it is supervised as before.
            dead = fleet.kill("di-decode.0")
            wait_for(lambda: fleet.pid("di-decode.0") != dead and fleet.alive("di-decode.0"), "di-decode.0 to live again")
            assert fleet.ctl("show", "fleet")
            fleet.down()
            assert processes_of(fleet.run) == []


def down_ends_what_was_only_just_started():
    with tempfile.TemporaryDirectory() as folder:
        conf = copy_of_the_local_fleet(pathlib.Path(folder))
        # It never gets to its pid file; only its configuration can be checked.
        slow = f'exec = ["{sys.executable}", "-c", "import signal, sys; \'-n\' in sys.argv or signal.pause()"]'
        text = (conf / "fleet.toml").read_text()
        (conf / "fleet.toml").write_text(text.replace('program = "di-decode"\n', f'program = "di-decode"\n{slow}\n'))
        for supervise in (False, True):
            fleet = Fleet(conf=conf, supervise=supervise, expect_failure=True)
            with subprocess.Popen(fleet.command(), cwd=SOURCE, env=fleet.environment(), stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL) as up:
                wait_for((fleet.run / ".up" / "di-decode.0.child").exists, "di-decode to be started")
                up.kill()
            down = script_run(fleet, "di-down", "-r", str(fleet.run))
            assert down.returncode == 0, down
            assert processes_of(fleet.run) == [], (supervise, processes_of(fleet.run))
            fleet.close()


def failed_start_is_one_error_and_leaves_nothing():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for supervise in (False, True):
            fleet = Fleet(expect_failure=True, supervise=supervise,
                          overrides=[f"di-router:http.listen=127.0.0.1:{port}"])
            done = up_again(fleet)
            assert done.returncode == 1, done
            assert done.stdout == "", done.stdout
            lines = done.stderr.splitlines()
            assert len(lines) == 1 and lines[0].startswith("di-up: di-router.0: ") and "in use" in lines[0], done.stderr
            assert processes_of(fleet.run) == []
            assert list(fleet.run.glob("di-*.pid")) == [], "numbers of processes that are gone"
            fleet.close()


def what_one_program_knows_is_asked_of_nobody_else():
    with Fleet() as fleet:
        fleet.kill("di-kvd.store0")
        row, = fleet.ctl("kv", "repair")
        assert row["instance"] == "di-meta.0" and row["waiting"] == 0, row
        wrong = subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run), "kv", "repair", "nwo"], capture_output=True, text=True)
        assert wrong.returncode == 1 and wrong.stderr.startswith("di-ctl: di-meta.0: "), wrong
        fleet.kill("di-meta.0")
        wait_for(lambda: not fleet.alive("di-meta.0"), "di-meta to be gone")
        gone = subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run), "kv", "repair"], capture_output=True, text=True)
        assert gone.returncode == 1 and gone.stderr == "di-ctl: di-meta.0: not running\n", gone


def a_planned_stop_that_is_too_short_ends_streams_with_an_error_and_charges_them():
    rows = ["di-router:drain.timeout=300ms", "di-decode:engine.step_delay_ms=100"]
    with Fleet(overrides=rows) as fleet:
        replies = []
        seen = threading.Event()
        asking = threading.Thread(target=lambda: replies.append(fleet.chat(
            "hi", on_chunk=lambda _: seen.set(), temperature=0, max_tokens=200, ignore_eos=True, headers={"x-request-id": "stop-1"})))
        asking.start()
        assert seen.wait(60)
        fleet.kill("di-router.0", signal.SIGTERM)
        asking.join()
        wait_for(lambda: not fleet.alive("di-router.0"), "the router to be gone")
        assert replies[0].error is not None and "the service stops" in replies[0].error["message"], (replies[0].error, replies[0].text)
        assert not replies[0].done
        charges = fleet.charges()
        mine = [charge for charge in charges if charge["request_id"] == "stop-1"]
        assert len(mine) == 1 and mine[0]["status"] == "failed" and mine[0]["output_tokens"] > 0, charges
        log = fleet.log("di-router.0")
        assert 'access: request failed req=stop-1 code=busy reason="the service stops"' in log, log


def a_rank_that_is_to_stop_does_not_take_work_again():
    with Fleet(overrides=["di-decode:engine.step_delay_ms=100", "di-decode:drain.timeout=60s"]) as fleet:
        replies = []
        seen = threading.Event()
        asking = threading.Thread(target=lambda: replies.append(fleet.chat(
            "hi", on_chunk=lambda _: seen.set(), temperature=0, max_tokens=100, ignore_eos=True)))
        asking.start()
        assert seen.wait(60)
        state = lambda: next(r["state"] for r in fleet.ctl("show", "fleet") if r["instance"] == "di-decode.0")
        fleet.kill("di-decode.0", signal.SIGTERM)
        wait_for(lambda: state() == "draining", "di-decode.0 to drain")
        done = ctl(fleet, "resume", "di-decode.0")
        assert done.returncode == 1 and done.stderr == "di-ctl: di-decode.0: it is stopping\n", done
        assert state() == "draining"
        asking.join()
        assert replies[0].done, (replies[0].error, replies[0].text)
        wait_for(lambda: not fleet.alive("di-decode.0"), "di-decode.0 to be gone")


def what_was_learnt_and_is_not_readable_is_learnt_anew():
    fleet = Fleet(expect_failure=True)
    garbled = [fleet.run / f"{who}.cost" for who in ("di-prefill.0.0", "di-decode.0.0", "di-kvd.host0")]
    for path in garbled:
        path.write_bytes(b"step 1e300 \xff")
    with fleet.up():
        for path in garbled:
            log = (fleet.run / f"{'.'.join(path.name.split('.')[:2])}.log").read_text()
            said = [line for line in log.splitlines() if "what the last run learnt is not readable" in line]
            assert len(said) == 1 and " warn " in said[0] and str(path) in said[0], log
        assert fleet.chat("hi", max_tokens=4, temperature=0).done
        fleet.down()
        for path in garbled:
            assert path.read_text().startswith(("step ", "arena ")), path.read_bytes()


def wrong_configuration_is_found_before_anything_starts():
    fleet = Fleet(expect_failure=True, overrides=["di-kvd:bogus=1"])
    done = up_again(fleet)
    assert done.returncode == 78 and done.stderr == "di-kvd: -o bogus=1: unknown key 'bogus'\n", done
    assert list(fleet.run.glob("*.log")) == []
    done = up_again(fleet, "-o", "di-vision:a=1")
    assert done.returncode == 64 and "the fleet has no di-vision" in done.stderr, done
    with tempfile.TemporaryDirectory() as conf:
        (pathlib.Path(conf) / "fleet.toml").write_text('[[instance]]\nprogram = "di-meta"\nnmae = "1"\n')
        done = script_run(fleet, "di-up", "-c", conf, "-r", str(fleet.run))
        assert done.returncode == 78 and done.stderr == f"di-up: {conf}/fleet.toml:3:1: unknown key 'nmae'\n", done
    fleet.close()


def overrides_reach_an_instance_or_a_program():
    with Fleet(overrides=["di-kvd:log.level=debug", "di-kvd.host0:net.rack=r1"]) as fleet:
        values = {(r["instance"], r["key"]): r["value"] for r in fleet.ctl("show", "config")}
        assert values["di-kvd.host0", "log.level"] == values["di-kvd.store0", "log.level"] == '"debug"'
        assert values["di-meta.0", "log.level"] == '"info"'
        assert values["di-kvd.host0", "net.rack"] == '"r1"' and values["di-kvd.store0", "net.rack"] == '""'


def control_words_rows_and_statuses():
    with Fleet() as fleet:
        text = ctl(fleet, "show", "gauges").stdout.splitlines()
        assert text[0].split("\t") == ["instance", "what", "count", "base"], text[0]
        assert all(len(line.split()) == 4 for line in text), text
        rows = fleet.ctl("show", "fleet")
        assert sorted(r["instance"] for r in rows) == INSTANCES
        assert all(r["connected"] is True and r["state"] == "up" for r in rows), rows
        assert {r["instance"] for r in fleet.ctl("show", "status")} == set(INSTANCES)
        assert {r["instance"] for r in fleet.ctl("-d", "di-meta.0", "show", "metrics")} == {"di-meta.0"}
        assert {r["name"] for r in fleet.ctl("show", "faults")} >= {"decode_mid_step", "prefill_mid_chunk"}
        for words, status in [(["bogus"], 64), (["show"], 64), (["log"], 64), (["drain"], 64), ([], 64), (["-x"], 64),
                              (["show", "bogus"], 64), (["log", "loud"], 1), (["log", "debug", "nomodule"], 1), (["clock", "advance", "5"], 1),
                              (["explain", "0" * 32], 1), (["drain", "di-decode.9"], 1), (["log", "info"], 0),
                              (["reload"], 0), (["-h"], 0)]:
            done = ctl(fleet, *words)
            assert done.returncode == status, (words, done)
            assert status == 0 or done.stderr.startswith("di-ctl: "), (words, done)
        # A slip of the hand is told from a fault of the fleet, and what was meant is named.
        for misspelt in (["show", "reqeusts"], ["-j", "show", "reqeusts"], ["-d", "di-meta.0", "show", "reqeusts"]):
            done = ctl(fleet, *misspelt)
            assert done.returncode == 64 and done.stdout == "", done
            assert done.stderr.startswith("di-ctl: nothing to show is called 'reqeusts': did you mean requests? There are "), done
            assert done.stderr.count("\n") == 1 and "gauges" in done.stderr and "kv" in done.stderr, done
        for words in (["-d", "di-decod.0", "show", "status"], ["drain", "di-decod.0"]):
            done = ctl(fleet, *words)
            assert done.returncode == 1, done
            assert done.stderr == ("di-ctl: di-decod.0: no such instance: did you mean di-decode.0? There are " +
                                   ", ".join(INSTANCES) + "\n"), done
        done = ctl(fleet, "log", "debug", "nomodule")
        assert "'nomodule' is no module that logs: want access, " in done.stderr and "store" in done.stderr, done
        assert ctl(fleet, "log", "debug", "store").returncode == 0
        # The figures of a place that say how full it is; all of them when asked, and always as JSON.
        few = ctl(fleet, "show", "kv").stdout.splitlines()[0].split("\t")
        assert few[:8] == ["instance", "place", "tier", "state", "complete", "pages", "blocks", "bytes"], few
        assert len(few) <= 13, few
        every = ctl(fleet, "-a", "show", "kv").stdout.splitlines()[0].split("\t")
        assert set(few) < set(every) and {"pending_writebacks", "segments", "volumes"} <= set(every), every
        assert set(every) == {key for row in fleet.ctl("show", "kv") for key in row}, every
        # scripts/ask says how it is called, and which fleet it looked for.
        done = script_run(fleet, "ask", "-h")
        assert done.returncode == 0 and done.stdout.startswith("usage: ask ") and done.stderr == "", done
        done = script_run(fleet, "ask", "-x", "hello")
        assert done.returncode == 64 and "usage: ask " in done.stderr and done.stderr.count("\n") == 1, done
        done = script_run(fleet, "ask", "-m", "few", "hello")
        assert done.returncode == 64 and done.stderr.startswith("ask: -m few: want a number"), done
        done = script_run(fleet, "check-books", "--help")
        assert done.returncode == 0 and done.stdout.startswith("check-books RUNDIR") and done.stderr == "", done
        # The question that follows goes to the folder that make knows of.
        for option in ("-r elsewhere", "-c elsewhere"):
            done = subprocess.run(["make", "-n", "serve", f"OPTIONS={option}"], cwd=SOURCE, capture_output=True, text=True)
            assert done.returncode == 2 and "RUN=RUNDIR" in done.stderr, done
        done = script_run(fleet, "ask", "-r", str(fleet.run / "none"), "hello")
        assert done.returncode == 1 and "with -r" in done.stderr, done
        assert ctl(fleet, "drain", "di-decode.0").returncode == 0
        state = lambda: next(r["state"] for r in fleet.ctl("show", "fleet") if r["instance"] == "di-decode.0")
        wait_for(lambda: state() == "draining", "di-decode.0 to drain")
        assert ctl(fleet, "resume", "di-decode.0").returncode == 0
        wait_for(lambda: state() == "up", "di-decode.0 to take work")
        # The dead are passed over in a listing, and named.
        fleet.kill("di-decode.0")
        wait_for(lambda: not fleet.alive("di-decode.0"), "the end of di-decode.0")
        done = ctl(fleet, "show", "status")
        assert done.returncode == 0 and "di-ctl: di-decode.0: not running" in done.stderr, done
        assert "di-prefill.0" in done.stdout
        # Without what it left behind, too: the fleet has an instance of that name.
        (fleet.run / "di-decode.0.ctl").unlink()
        done = ctl(fleet, "-d", "di-decode.0", "show", "status")
        assert done.returncode == 1 and done.stderr == "di-ctl: di-decode.0: not running\n", done


# A daemon that refuses, or that cannot be asked, is no daemon that does not know the command: those are passed over.
def whoever_refuses_is_named_when_all_are_asked():
    with tempfile.TemporaryDirectory() as folder:
        conf = copy_of_the_local_fleet(pathlib.Path(folder))
        with Fleet(conf=conf) as fleet, socket.socket(socket.AF_UNIX) as old:
            assert ctl(fleet, "reload").returncode == 0
            with (conf / "di-meta.toml").open("a") as file:
                file.write('\n[[kv.tenants]]\nname = "lab"\nquota = "64MiB"\n')
            done = ctl(fleet, "reload")
            assert done.returncode == 1 and done.stderr == "di-ctl: di-meta.0: needs a restart to change: kv.tenants\n", done

            def answer():
                for _ in range(2):
                    with old.accept()[0] as connection:
                        connection.recv(4096)
                        connection.sendall(bytes(64))
                        while connection.recv(4096):
                            pass
            old.bind(str(fleet.run / "di-decode.old.ctl"))
            old.listen()
            threading.Thread(target=answer, daemon=True).start()
            for words in (["show", "status"], ["log", "info"]):
                done = ctl(fleet, *words)
                assert done.returncode == 1 and "di-ctl: di-decode.old: incompatible di-ctl and the daemon at" in done.stderr, done
            (fleet.run / "di-decode.old.ctl").unlink()


def who_may_only_look_can_look():
    with tempfile.TemporaryDirectory() as folder, Fleet() as fleet:
        program = pathlib.Path(folder, "di-ctl")
        shutil.copy(BIN / "di-ctl", program)
        pathlib.Path(folder).chmod(0o755)
        root = os.getuid() == 0
        if not root:  # nobody else to be: the sockets that steer are closed to us, too
            for path in fleet.run.glob("*.ctl"):
                path.chmod(0)

        def outsider(*words):
            return subprocess.run([str(program), "-r", str(fleet.run), *words], capture_output=True, text=True, cwd="/",
                                  timeout=60 * PATIENCE, **({"user": 65534, "group": 65534, "extra_groups": []} if root else {}))

        if root:  # the folder is as mkdtemp made it, nobody else's
            for words in (["show", "fleet"], ["chat"]):
                done = outsider(*words)
                assert done.returncode == 1 and f"cannot read {fleet.run}: Permission denied" in done.stderr, done
        fleet.run.chmod(0o755)
        done = outsider("show", "status")
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 + len(INSTANCES), done
        done = outsider("log", "info")
        assert done.returncode == 1 and "Permission denied" in done.stderr, done


def who_is_gone_is_shown_as_away_until_it_is_back_or_forgotten():
    with Fleet(overrides=SURE_HIT) as fleet:
        def rows():
            return {r["instance"]: r for r in fleet.ctl("show", "fleet")}
        assert all(r["state"] == "up" and r["away_s"] == 0 for r in rows().values()), rows()
        assert fleet.chat(words(900), temperature=0, max_tokens=4).status == 200
        write_backs_done(fleet)
        columns = fleet.ctl("-d", "di-kvd.store0", "show", "volumes")[0]["columns"]
        assert columns > 0
        fleet.kill("di-decode.0")
        fleet.kill("di-kvd.store0")
        os.kill(fleet.pid("di-prefill.0"), signal.SIGTERM)
        wait_for(lambda: [rows()[i]["state"] for i in ("di-decode.0", "di-kvd.store0", "di-prefill.0")] ==
                 ["away", "away", "stopped"], "the directory to miss them")
        assert sorted(rows()) == INSTANCES and not rows()["di-decode.0"]["connected"], rows()
        assert fleet.metric("di-meta.0", "di_meta_members_away") == 2
        # Of the store's volume and of what was on it, too.
        volumes = [r for r in fleet.ctl("show", "volumes") if r["place"] == "di-kvd.store0"]
        assert [(r["volume"], r["state"]) for r in volumes] == [(0, "away")], volumes
        assert volumes[0]["capacity_bytes"] > 0, volumes
        places = {r["place"]: r for r in fleet.ctl("-d", "di-meta.0", "show", "kv")}
        assert places["di-kvd.store0"]["state"] == "away" and places["di-kvd.store0"]["pages"] == columns, places
        # Nothing is forgotten that may come back with something.
        for instance, why in (("di-kvd.store0", "kv drop store di-kvd.store0"), ("di-router.0", "is away"),
                              ("di-decode.9", "there are di-decode.0, di-kvd.store0, di-prefill.0")):
            done = ctl(fleet, "forget", instance)
            assert done.returncode == 1 and why in done.stderr, done
        for store, why in (("di-kvd.host0", "no store"), ("di-kvd.store9", "there are di-kvd.store0")):
            done = ctl(fleet, "kv", "drop", "store", store)
            assert done.returncode == 1 and why in done.stderr, done
        fleet.ctl("forget", "di-prefill.0")
        dropped = fleet.ctl("kv", "drop", "store", "di-kvd.store0")
        assert [(r["columns"], r["stripes_lost"] > 0) for r in dropped] == [(columns, True)], dropped
        assert {"di-prefill.0", "di-kvd.store0"}.isdisjoint(rows()) and "di-decode.0" in rows(), rows()
        assert [r["place"] for r in fleet.ctl("-d", "di-meta.0", "show", "kv")] == ["di-kvd.host0"]
        assert fleet.ctl("show", "volumes") == []
        # They come back as if nothing had been said, and with what they had.
        assert up_again(fleet).returncode == 0
        wait_for(lambda: sorted(rows()) == INSTANCES and all(r["state"] == "up" for r in rows().values()), "everybody")
        done = ctl(fleet, "kv", "drop", "store", "di-kvd.store0")
        assert done.returncode == 1 and "is up: stop it first, or empty it with kv drain di-kvd.store0" in done.stderr, done
        wait_for(lambda: fleet.ctl("-d", "di-kvd.store0", "show", "volumes")[0]["columns"] == columns and
                 {r["place"]: r["pages"] for r in fleet.ctl("-d", "di-meta.0", "show", "kv")}["di-kvd.store0"] == columns,
                 "what the store had")
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        reply = fleet.chat(words(900), temperature=0, max_tokens=4)
        assert reply.status == 200 and reply.cached() > 0, reply.error
        fleet.await_idle()


def a_fleet_goes_on_with_a_copy_of_the_catalogue():
    with Fleet() as fleet, tempfile.TemporaryDirectory() as folder:
        def rows():
            return {r["instance"]: r for r in fleet.ctl("show", "fleet")}
        def all_up():
            return sorted(rows()) == INSTANCES and all(r["state"] == "up" and r["connected"] for r in rows().values())
        # A relative name is below the folder of di-ctl, not of di-meta.
        done = subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run.resolve()), "-j", "backup", "copy"], cwd=folder,
                              capture_output=True, text=True, timeout=60 * PATIENCE)
        assert done.returncode == 0, done
        copy = pathlib.Path(folder) / "copy"
        made = json.loads(done.stdout)
        assert pathlib.Path(made["file"]).samefile(copy) and made["bytes"] == copy.stat().st_size, made
        done = ctl(fleet, "backup", str(copy))
        assert done.returncode == 1 and "it is there" in done.stderr, done
        # One starts anew after it, and di-meta is lost with its catalogue.
        fleet.kill("di-decode.0")
        wait_for(lambda: not fleet.alive("di-decode.0"), "the end of di-decode.0")
        assert up_again(fleet).returncode == 0
        wait_for(all_up, "everybody")
        before = {instance: (row["id"], row["generation"]) for instance, row in rows().items()}
        fleet.kill("di-meta.0")
        wait_for(lambda: not fleet.alive("di-meta.0"), "the end of di-meta.0")
        for suffix in ("-wal", "-shm"):
            (fleet.run / f"di-meta.0.catalogue{suffix}").unlink(missing_ok=True)
        shutil.copy(copy, fleet.run / "di-meta.0.catalogue")
        assert up_again(fleet).returncode == 0
        wait_for(all_up, "everybody to go on")
        after = {instance: (row["id"], row["generation"]) for instance, row in rows().items()}
        assert after.pop("di-meta.0") > before.pop("di-meta.0") and after == before, (before, after)
        assert fleet.chat("hello", temperature=0, max_tokens=4).status == 200


def a_fleet_starts_anew_when_its_catalogue_was_moved_away():
    with Fleet(supervise=True) as fleet:
        before = {instance: fleet.pid(instance) for instance in INSTANCES}
        # Between its end and its next start by the supervisor.
        catalogue = fleet.run / "di-meta.0.catalogue"
        os.kill(fleet.pid("di-meta.0"), signal.SIGSTOP)
        for suffix in ("", "-wal", "-shm"):
            pathlib.Path(f"{catalogue}{suffix}").unlink(missing_ok=True)
        fleet.kill("di-meta.0")
        # Nobody stays behind in the cluster that was.
        wait_for(lambda: all(fleet.alive(i) and fleet.pid(i) != before[i] for i in INSTANCES), "everybody to start anew")
        def all_up():
            rows = fleet.ctl("show", "fleet", check=False)
            return sorted(r["instance"] for r in rows) == INSTANCES and all(
                r["state"] == "up" and r["connected"] for r in rows)
        wait_for(all_up, "everybody")
        assert "di-meta has another catalogue since it started" in fleet.log("di-router.0")


def a_second_router_of_the_name_waits_and_the_first_one_serves():
    with Fleet(overrides=["di-decode:engine.step_delay_ms=20"]) as fleet, tempfile.TemporaryDirectory() as other:
        router = fleet.pid("di-router.0")
        replies = []
        seen = threading.Event()
        asking = threading.Thread(target=lambda: replies.append(fleet.chat(
            "hi", on_chunk=lambda _: seen.set(), temperature=0, max_tokens=100, ignore_eos=True, headers={"x-request-id": "twin-1"})))
        asking.start()
        assert seen.wait(60)
        log = pathlib.Path(other) / "log"
        rows = [f"run.dir={other}", f"meta.endpoint=ipc://{fleet.run}/di-meta.0.sock", "http.listen=127.0.0.1:0",
                "admin.listen=127.0.0.1:0", f"auth.key_file={fleet.run}/key"]
        with log.open("w") as stderr:
            second = subprocess.Popen([str(BIN / "di-router"), "-f", str(SOURCE / "etc/local/di-router.toml"),
                                       *[word for row in rows for word in ("-o", row)]], stderr=stderr)
        try:
            wait_for(lambda: "di-meta cannot register us yet" in log.read_text(), "the second router to be refused")
            assert "di-router.0 is taken by a process on" in log.read_text(), log.read_text()
            asking.join()
            assert replies[0].done and replies[0].error is None, (replies[0].error, replies[0].text)
            assert fleet.alive("di-router.0") and fleet.pid("di-router.0") == router
            def charges():
                return [charge for charge in fleet.charges() if charge["request_id"] == "twin-1"]
            wait_for(charges, "the charge")
            mine = charges()
            assert len(mine) == 1 and mine[0]["output_tokens"] == 100, mine
            assert second.poll() is None, log.read_text()
            # It takes over from one that is frozen.
            os.kill(router, signal.SIGSTOP)
            try:
                wait_for(lambda: "daemon: ready" in log.read_text(), "the second router to serve")
            finally:
                os.kill(router, signal.SIGCONT)
            wait_for(lambda: not fleet.alive("di-router.0"), "the first router to end")
            assert "another process has taken this name since" in fleet.log("di-router.0")
        finally:
            second.terminate()
            second.wait(60)


def a_router_that_cannot_go_on_ends_streams_with_an_error_and_charges_them():
    with Fleet(supervise=True, overrides=["di-decode:engine.step_delay_ms=100"]) as fleet:
        replies = []
        seen = threading.Event()
        asking = threading.Thread(target=lambda: replies.append(fleet.chat(
            "hi", on_chunk=lambda _: seen.set(), temperature=0, max_tokens=1000, ignore_eos=True, headers={"x-request-id": "fail-1"})))
        asking.start()
        assert seen.wait(60)
        catalogue = fleet.run / "di-meta.0.catalogue"
        os.kill(fleet.pid("di-meta.0"), signal.SIGSTOP)
        for suffix in ("", "-wal", "-shm"):
            pathlib.Path(f"{catalogue}{suffix}").unlink(missing_ok=True)
        fleet.kill("di-meta.0")
        asking.join()
        assert replies[0].error is not None and not replies[0].done, replies[0].text
        wait_for(lambda: "daemon: stopped status=1" in fleet.log("di-router.0"), "the router to end")
        mine = [charge for charge in fleet.charges() if charge["request_id"] == "fail-1"]
        assert len(mine) == 1 and mine[0]["status"] == "failed" and mine[0]["output_tokens"] > 0, mine


def an_error_of_a_command_says_what_to_do():
    with Fleet() as fleet:
        for command, why in (
                ("kv fsck di-kvd.host0", "'kv fsck' is for a di-kvd store"),
                ("kv scrub di-router.0", "'kv scrub' is for a di-kvd store"),
                ("kv drop arena di-kvd.store0", "'kv drop arena' is for a di-kvd host"),
                ("drain di-kvd.store0", "'drain' is for di-prefill and di-decode; there is 'kv drain', too"),
                ("-d di-kvd.store0 show tenants", "'show tenants' is for di-meta"),
                ("kv drain di-kvd.store0 on", "want off, or nothing"),
                ("kv drop 5", "no stripe 5: that is a page of show kv pages, divided by 256"),
                ("kv drop five", "'five' is no stripe number: that is a page of show kv pages")):
            done = ctl(fleet, *command.split())
            assert done.returncode == 1 and why in done.stderr, (command, done)
        # And what a node that is emptied waits for: with 1+0 there is no other.
        assert fleet.chat(words(900), temperature=0, max_tokens=4).status == 200
        write_backs_done(fleet)
        row = fleet.ctl("kv", "drain", "di-kvd.store0")[0]
        assert row["state"] == "leaves" and row["columns"] > 0, row
        wait_for(lambda: "1+0 wants 1 store nodes, 0 take columns" in fleet.ctl("kv", "drain")[0]["waits_for"],
                 "the drain to say what it waits for")
        assert "0 take columns" in fleet.ctl("kv", "repair")[0]["waits_for"]
        row = fleet.ctl("kv", "drain", "di-kvd.store0", "off")[0]
        assert row["state"] == "up" and row["waits_for"] == "", row
        # Text tells what a volume is, how it is and how full; all of it is asked for.
        few, every = (ctl(fleet, *a, "show", "volumes").stdout.splitlines()[0].split("\t") for a in ([], ["-a"]))
        assert few == "instance place volume path state reason columns used_bytes capacity_bytes error".split(), few
        assert set(few) < set(every) and "days_of_life" in every, every


def a_volume_that_was_cut_short_is_out_of_service_and_its_store_is_not():
    with Fleet(overrides=['di-kvd.store0:store.volumes=["a","b"]', "di-kvd.store0:store.capacity=16MiB"]) as fleet:
        states = lambda: {pathlib.Path(r["path"]).suffix: r["state"] for r in fleet.ctl("show", "volumes")}
        assert states() == {".a": "up", ".b": "up"}, states()
        fleet.kill("di-kvd.store0")
        wait_for(lambda: not fleet.alive("di-kvd.store0"), "the end of di-kvd.store0")
        os.truncate(fleet.run / "di-kvd.store0.a", 1_000_001)
        done = up_again(fleet)
        assert done.returncode == 0, done
        assert states() == {".a": "failed", ".b": "up"}, states()
        # Whoever starts it hears of that, and so does whoever looks at the fleet; it is ready all the same.
        path = str(fleet.run / "di-kvd.store0.a")
        warned = [line for line in done.stderr.splitlines() if "warning" in line]
        assert len(warned) == 1 and all(w in warned[0] for w in ("di-kvd.store0", "volume 0", path, "no multiple of 4 KiB")), done
        degraded = lambda: {r["instance"]: r["degraded"] for r in fleet.ctl("show", "fleet") if r["degraded"]}
        wait_for(lambda: degraded() == {"di-kvd.store0": "volume 0 failed"}, "the fleet to hear of it")
        assert "no multiple of 4 KiB" in fleet.ctl("-d", "di-kvd.store0", "show", "volumes")[0]["error"]
        status, body = fleet.health("di-kvd.store0")
        assert status == 200 and body.startswith("ready\ndegraded: volume 0 "), body
        assert fleet.metric("di-kvd.store0", "di_degraded") == 1
        # Again, of one that runs already; and no more when it is mended.
        assert warned[0] in up_again(fleet).stderr
        os.unlink(path)
        fleet.ctl("kv", "volume", "return", "0", "di-kvd.store0")
        wait_for(lambda: not degraded(), "the fleet to hear that it is mended")
        assert fleet.health("di-kvd.store0") == (200, "ready\n")
        assert "warning" not in up_again(fleet).stderr


def a_store_whose_only_volume_is_out_of_service_is_up_and_not_ready():
    with Fleet(overrides=["di-kvd.store0:store.capacity=16MiB"]) as fleet:
        path = pathlib.Path(fleet.ctl("-d", "di-kvd.store0", "show", "volumes")[0]["path"])
        fleet.kill("di-kvd.store0")
        wait_for(lambda: not fleet.alive("di-kvd.store0"), "the end of di-kvd.store0")
        os.truncate(path, 1_000_001)
        done = up_again(fleet)
        assert done.returncode == 0 and str(path) in done.stderr, done
        status, body = fleet.health("di-kvd.store0")
        assert status == 503 and body.startswith("out of service: volume 0 ") and str(path) in body, (status, body)
        assert fleet.ctl("-d", "di-kvd.store0", "show", "status")[0]["state"] == "out of service"
        path.unlink()
        fleet.ctl("kv", "volume", "return", "0", "di-kvd.store0")
        wait_for(lambda: fleet.health("di-kvd.store0") == (200, "ready\n"), "the store to be ready")


def a_volume_that_is_cut_short_while_it_serves_is_left_and_returns_when_it_is_mended():
    store = "di-kvd.store0"
    bytes_of_a_volume = 16 << 20
    with Fleet(overrides=[*SURE_HIT, f'{store}:store.volumes=["a","b"]', f"{store}:store.capacity=16MiB"]) as fleet:
        def volumes():
            return {r["volume"]: r for r in fleet.ctl("show", "volumes")}

        # Each volume has its part of them.
        texts = {words(900, seed=seed): None for seed in range(4)}
        for prompt in texts:
            texts[prompt] = ask(fleet, prompt, max_tokens=8).text
            write_backs_done(fleet)
        before = volumes()
        assert all(before[n]["columns"] > 0 for n in (0, 1)), before
        path = pathlib.Path(before[0]["path"])
        os.truncate(path, 1 << 20)
        wait_for(lambda: volumes()[0]["state"] == "failed", "the store to see it")
        after = volumes()
        assert after[0]["reason"] == "short" and after[0]["columns"] < before[0]["columns"], after
        assert after[1]["state"] == "up" and after[1]["columns"] == before[1]["columns"], after
        assert fleet.metric(store, "di_store_columns_dropped_total") == before[0]["columns"] - after[0]["columns"]
        assert fleet.request("GET", "/health/ready")[0] == 200
        # What was there is computed again, and nothing else is served in its place.
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        cached = {prompt: ask(fleet, prompt, max_tokens=8) for prompt in texts}
        assert {p: r.text for p, r in cached.items()} == texts
        assert any(r.cached() == 0 for r in cached.values()) and any(r.cached() > 0 for r in cached.values()), \
            [r.cached() for r in cached.values()]
        # It does not come back as it is.
        done = ctl(fleet, "kv", "volume", "return", "0", store)
        assert done.returncode == 1 and "shorter than the volume" in done.stderr and "put a whole" in done.stderr, done
        done = ctl(fleet, "kv", "volume", "return", "1", store)
        assert done.returncode == 1 and "is in service" in done.stderr, done
        done = ctl(fleet, "kv", "volume", "return", "x", store)
        assert done.returncode == 1 and "no number" in done.stderr, done
        assert volumes()[0]["reason"] == "not open", volumes()
        os.truncate(path, bytes_of_a_volume)
        row = fleet.ctl("kv", "volume", "return", "0", store)[0]
        assert row["state"] == "up", row
        wait_for(lambda: fleet.metric("di-meta.0", "di_meta_pending_frees") == 0, "what is lost to be freed")
        # And both take columns again.
        put = volumes()[0]["columns"]
        for seed in range(10, 14):
            ask(fleet, words(900, seed=seed), max_tokens=8)
            write_backs_done(fleet)
        assert volumes()[0]["columns"] > put, volumes()
        # Every prompt is in the store again.
        read_back(fleet, texts, "di-kvd.host0", max_tokens=8)
        fleet.await_idle(60)


def a_disk_that_does_not_answer_keeps_no_other_volume_from_its_return():
    store = "di-kvd.store0"
    bytes_of_a_volume = 16 << 20
    with Fleet(overrides=[f'{store}:store.volumes=["a","b"]', f"{store}:store.capacity=16MiB"]) as fleet:
        volumes = lambda: {r["volume"]: r for r in fleet.ctl("show", "volumes")}
        paths = [fleet.run / f"{store}.{name}" for name in "ab"]
        fleet.kill(store)
        wait_for(lambda: not fleet.alive(store), "the end of the store")
        for path in paths:
            os.truncate(path, 1_000_001)
        up_again(fleet)
        assert {r["state"] for r in volumes().values()} == {"failed"}, volumes()
        for path in paths:
            os.truncate(path, bytes_of_a_volume)
        # Who opens the file of the first waits until this process lets go of it.
        with open(paths[0], "r+b") as leased:
            signal.signal(signal.SIGIO, signal.SIG_IGN)
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            late = subprocess.Popen([str(BIN / "di-ctl"), "-r", str(fleet.run), "kv", "volume", "return", "0", store],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_for(lambda: fcntl.fcntl(leased, fcntl.F_GETLEASE) != fcntl.F_WRLCK, "the store to wait for the file")
            row = fleet.ctl("kv", "volume", "return", "1", store)[0]
            assert row["state"] == "up", row
            done = ctl(fleet, "kv", "volume", "return", "0", store)
            assert done.returncode == 1 and "volume 0 is being opened" in done.stderr, done
            _, told = late.communicate(timeout=60 * PATIENCE)
            assert late.returncode == 1 and "does not answer yet" in told, told
            assert volumes()[0]["state"] == "failed" and volumes()[1]["state"] == "up", volumes()
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        wait_for(lambda: volumes()[0]["state"] == "up", "the first volume")


def a_volume_that_is_written_once_asks_systemd_for_time():
    store = "di-kvd.store0"
    with Fleet() as fleet, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        fleet.kill(store)
        wait_for(lambda: not fleet.alive(store), "the end of the store")
        os.unlink(fleet.run / f"{store}.volume")
        manager.bind(str(fleet.run / "notify"))
        manager.settimeout(60 * PATIENCE)
        command = [str(BIN / "di-kvd"), "-f", str(SOURCE / "etc/local/di-kvd.store.toml"), "-o", f"run.dir={fleet.run}",
                   "-o", f"run.instance={store}", "-o", "store.prewrite=true"]
        with open(fleet.run / f"{store}.log", "a") as log:
            process = subprocess.Popen(command, env=dict(os.environ, NOTIFY_SOCKET=str(fleet.run / "notify")),
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            said = []
            while "READY=1" not in said:
                said += manager.recv(4096).decode().splitlines()
            assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in said[:said.index("READY=1")]), said
        finally:
            process.terminate()
            process.wait(60 * PATIENCE)


def manual_clock_moves_every_daemon():
    with Fleet(overrides=[f"{p}:clock.manual=true" for p in ("di-meta", "di-kvd", "di-prefill", "di-decode",
                                                             "di-router")]) as fleet:
        before = {r["instance"]: r["now_ms"] for r in fleet.ctl("clock", "advance", "0")}
        after = {r["instance"]: r["now_ms"] for r in fleet.ctl("clock", "advance", "90000")}
        assert set(after) == set(INSTANCES)
        assert all(after[i] - before[i] == 90000 for i in INSTANCES), (before, after)
        # Product time is not liveness: nobody was lost.
        assert all(r["connected"] for r in fleet.ctl("show", "fleet"))


def status(fleet, instance):
    return fleet.ctl("-d", instance, "show", "status")[0]


def late_in_metrics(fleet, instance):
    return {name for name, late in fleet.metric_by(instance, "di_heartbeat_late", "loop").items() if late}


def a_directory_that_cannot_write_its_catalogue_is_late():
    with Fleet(overrides=["di-meta:clock.manual=true"]) as fleet:
        assert status(fleet, "di-meta.0")["state"] == "ready"
        fleet.ctl("-d", "di-meta.0", "clock", "advance", "600000")
        assert status(fleet, "di-meta.0")["state"] == "ready", "loops that have nothing to do are not late"
        other = sqlite3.connect(fleet.run / "di-meta.0.catalogue", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        fleet.chat(words(900, seed=1), temperature=0, max_tokens=4)
        wait_for(lambda: fleet.metric("di-meta.0", "di_meta_stripes") > 0, "a stripe to be published")
        fleet.ctl("-d", "di-meta.0", "clock", "advance", "61000")
        assert status(fleet, "di-meta.0")["late"] == "meta-catalogue", status(fleet, "di-meta.0")
        assert status(fleet, "di-meta.0")["state"] == "late"
        assert late_in_metrics(fleet, "di-meta.0") == {"meta-catalogue"}, late_in_metrics(fleet, "di-meta.0")
        other.execute("ROLLBACK")
        other.close()
        wait_for(lambda: fleet.metric("di-meta.0", "di_meta_catalogue_rows_total") > 0, "the row to be written")
        fleet.ctl("-d", "di-meta.0", "clock", "advance", "1000")
        assert status(fleet, "di-meta.0")["state"] == "ready", status(fleet, "di-meta.0")


def a_host_whose_write_backs_stand_still_is_late():
    host = "di-kvd.host0"
    # The commit of a stripe is lost, and nothing wakes the host to notice.
    with Fleet(overrides=[f"{host}:clock.manual=true",
                          f"{host}:fault.at=kvd_before_wait=drop,kvd_before_put_commit=drop"]) as fleet:
        inventories_taken(fleet)  # before, a put is told to come again later, and there is no later for this host
        fleet.chat(words(900, seed=2), temperature=0, max_tokens=4)
        wait_for(lambda: fleet.fired(host, "kvd_before_put_commit"), "the commit to be lost")
        fleet.ctl("-d", host, "clock", "advance", "60000")
        assert status(fleet, host)["state"] == "ready", status(fleet, host)
        fleet.ctl("-d", host, "clock", "advance", "121000")
        assert status(fleet, host)["late"] == "host-writeback", status(fleet, host)
        assert late_in_metrics(fleet, host) == {"host-writeback"}, late_in_metrics(fleet, host)


# G09: the first start of all, a restart before anything was asked, and a second directory beside it.
def a_fleet_that_was_never_asked_starts_again():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        fleet.kill_all()
        fleet.up()
        second = subprocess.run([str(BIN / "di-meta"), "-f", str(SOURCE / "etc/local/di-meta.toml"), "-o", f"run.dir={fleet.run}",
                                 "-o", "run.instance=di-meta.1", "-o", f"meta.catalogue={fleet.run}/di-meta.0.catalogue"],
                                capture_output=True, text=True, timeout=60 * PATIENCE)
        assert second.returncode == 1 and "another di-meta has it open" in second.stderr, second
        assert fleet.metric("di-meta.0", "di_meta_stripes") == 0
        prompt = words(600, seed=9)
        cold = ask(fleet, prompt, max_tokens=8)
        write_backs_done(fleet)
        stripes = fleet.metric("di-meta.0", "di_meta_stripes")
        assert stripes > 0
        fleet.kill_all()
        fleet.up()
        inventories_taken(fleet)
        assert fleet.metric("di-meta.0", "di_meta_stripes") == stripes
        read_back(fleet, {prompt: cold.text}, "di-kvd.host0", max_tokens=8)
        fleet.await_idle(60)


def fleets_run_beside_each_other():
    with Fleet() as one, Fleet() as other:
        assert one.address != other.address
        one.down()
        assert processes_of(one.run) == []
        # Nobody was lost who only stopped.
        logs = {path.name: path.read_text() for path in one.run.glob("*.log")}
        warnings = [line for text in logs.values() for line in text.splitlines() if " warn " in line or " error " in line]
        assert warnings == [], warnings
        assert any("net: peer left" in text for text in logs.values()), "nobody saw anybody stop"
        assert other.request("GET", "/health/ready")[0] == 200


main([
    up_is_idempotent_and_starts_what_is_missing,
    what_was_asked_to_stop_is_started_anew_when_it_has_ended,
    a_process_that_ends_while_it_is_looked_at_spoils_no_other_look,
    a_fleet_that_does_not_serve_says_what_it_lacks,
    supervisor_restarts_what_dies_and_can_be_replaced,
    down_kills_what_does_not_stop,
    numbers_of_others_are_not_taken_for_ours,
    what_the_supervisor_gave_up_is_begun_again_by_di_up,
    down_ends_what_was_only_just_started,
    failed_start_is_one_error_and_leaves_nothing,
    what_one_program_knows_is_asked_of_nobody_else,
    what_was_learnt_and_is_not_readable_is_learnt_anew,
    a_planned_stop_that_is_too_short_ends_streams_with_an_error_and_charges_them,
    a_second_router_of_the_name_waits_and_the_first_one_serves,
    a_router_that_cannot_go_on_ends_streams_with_an_error_and_charges_them,
    a_rank_that_is_to_stop_does_not_take_work_again,
    wrong_configuration_is_found_before_anything_starts,
    overrides_reach_an_instance_or_a_program,
    control_words_rows_and_statuses,
    whoever_refuses_is_named_when_all_are_asked,
    who_may_only_look_can_look,
    who_is_gone_is_shown_as_away_until_it_is_back_or_forgotten,
    a_fleet_goes_on_with_a_copy_of_the_catalogue,
    a_fleet_starts_anew_when_its_catalogue_was_moved_away,
    an_error_of_a_command_says_what_to_do,
    a_volume_that_was_cut_short_is_out_of_service_and_its_store_is_not,
    a_store_whose_only_volume_is_out_of_service_is_up_and_not_ready,
    a_volume_that_is_cut_short_while_it_serves_is_left_and_returns_when_it_is_mended,
    a_disk_that_does_not_answer_keeps_no_other_volume_from_its_return,
    a_volume_that_is_written_once_asks_systemd_for_time,
    manual_clock_moves_every_daemon,
    a_directory_that_cannot_write_its_catalogue_is_late,
    a_host_whose_write_backs_stand_still_is_late,
    a_fleet_that_was_never_asked_starts_again,
    fleets_run_beside_each_other,
])
