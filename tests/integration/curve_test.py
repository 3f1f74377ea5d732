"""A fleet whose daemons talk over TCP: encrypted, and with nobody whose key is not listed."""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask  # noqa: E402
from fleet import BIN, PATIENCE, SOURCE, Fleet, main, members, wait_for  # noqa: E402
from keys import Keyed, Stranger, keygen, refused  # noqa: E402

INSTANCES = ["di-meta.0", "di-kvd.store0", "di-kvd.host0", "di-prefill.0", "di-decode.0", "di-router.0"]


@contextlib.contextmanager
def keyed_fleet(**kwargs):
    keys = Keyed(INSTANCES)
    try:
        with Fleet(overrides=keys.overrides(), **kwargs) as fleet:
            yield fleet, keys
    finally:
        keys.close()


def answer(fleet):
    return ask(fleet, "What is a seat?", max_tokens=16).text


def a_fleet_over_tcp_with_keys_answers():
    with keyed_fleet() as (fleet, keys):
        first = answer(fleet)
        assert answer(fleet) == first
        rows = fleet.ctl("-d", "di-meta.0", "show", "fleet")
        assert {r["instance"] for r in rows} == set(INSTANCES), rows
        assert all(re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", r["control"]) for r in rows), rows
        assert fleet.message_sockets() == []
        for instance in INSTANCES:
            assert set(refused(fleet, instance).values()) == {0}, (instance, refused(fleet, instance))
        fleet.await_idle()
    # The same answer as in the clear over Unix sockets.
    with Fleet() as fleet:
        assert answer(fleet) == first


def a_killed_daemon_comes_back_with_its_key():
    with keyed_fleet(supervise=True) as (fleet, keys):
        text = answer(fleet)
        for instance in ("di-decode.0", "di-meta.0"):
            dead = fleet.kill(instance)
            wait_for(lambda: fleet.pid(instance) != dead and members(fleet, check=False) == set(INSTANCES), f"{instance} to be back")
        wait_for(lambda: answer(fleet) == text, "the same answer")


def a_key_that_is_not_listed_does_not_join_until_it_is():
    with keyed_fleet() as (fleet, keys):
        keygen(keys.folder, "di-decode.9")
        listed = (keys.folder / "public_keys").read_text()
        keys.list_only(lambda name: name != "di-decode.9")
        with Stranger(fleet, keys, "di-decode.9") as stranger:
            wait_for(lambda: stranger.log().count("its net.public_keys does not have our key") >= 3, "three tries")
            assert "handshake failed" in stranger.log() and keys.meta in stranger.log()
            assert stranger.process.poll() is None, "it goes on trying"
            assert refused(fleet, "di-meta.0")["key"] >= 3, refused(fleet, "di-meta.0")
            assert "key refused" in fleet.log("di-meta.0")
            assert "di-decode.9" not in members(fleet)
            answer(fleet)
            # Listed, everywhere, and it joins.
            (keys.folder / "public_keys").write_text(listed)
            for instance in INSTANCES:
                fleet.ctl("-d", instance, "reload")
            wait_for(lambda: "di-decode.9" in members(fleet), "di-decode.9 to join")
            wait_for(lambda: any(r["peer"] == "di-decode.9" for r in fleet.ctl("-d", "di-router.0", "show", "peers")),
                     "the router to meet it")
            # Removed, and its connections end.
            keys.list_only(lambda name: name != "di-decode.9")
            for instance in INSTANCES:
                fleet.ctl("-d", instance, "reload")
            wait_for(lambda: "di-decode.9" not in members(fleet), "di-decode.9 to be out")
            wait_for(lambda: not any(r["peer"] == "di-decode.9" for r in fleet.ctl("-d", "di-router.0", "show", "peers")),
                     "the router to lose it")
            assert refused(fleet, "di-meta.0")["revoked"] == 1, refused(fleet, "di-meta.0")
        answer(fleet)


def a_name_that_is_another_keys_is_refused():
    with keyed_fleet() as (fleet, keys):
        keygen(keys.folder, "di-decode.8")
        keygen(keys.folder, "di-decode.9")
        fleet.ctl("-d", "di-meta.0", "reload")
        secret = keys.folder / "di-decode.9.secret"
        with Stranger(fleet, keys, "di-decode.8", f"net.secret_key={secret}") as liar:
            assert liar.process.wait(timeout=60 * PATIENCE) == 1
            assert "di-meta refused di-decode.8: net.public_keys does not have its key under this name" in liar.log()
        assert refused(fleet, "di-meta.0")["name"] == 1, refused(fleet, "di-meta.0")
        assert "di-decode.8" not in members(fleet)


def a_di_meta_with_another_key_is_not_believed():
    with keyed_fleet() as (fleet, keys):
        keygen(keys.folder, "di-decode.9")
        fleet.ctl("-d", "di-meta.0", "reload")
        other = keygen(pathlib.Path(tempfile.mkdtemp(prefix="other-", dir=keys.folder)), "di-meta.0")
        with Stranger(fleet, keys, "di-decode.9", f"meta.public_key={other}") as deceived:
            wait_for(lambda: deceived.log().count("it does not hold the key that we have of it") >= 3, "three tries")
            assert deceived.process.poll() is None
            assert "registered" not in deceived.log()
        assert refused(fleet, "di-meta.0")["handshake"] >= 3


def without_keys_nothing_is_bound_beyond_loopback():
    fleet = Fleet(expect_failure=True, overrides=["di-meta:net.bind=tcp://0.0.0.0:0", "di-meta:net.advertise=tcp://127.0.0.1:0"])
    done = subprocess.run(fleet.command(), cwd=SOURCE, env=fleet.environment(), capture_output=True, text=True,
                          timeout=120 * PATIENCE)
    assert done.returncode == 78, done
    assert done.stderr == ("di-meta: -o net.bind=tcp://0.0.0.0:0: net.bind: tcp://0.0.0.0:0 would serve other machines "
                           "without keys: set net.secret_key, or net.insecure in a closed network\n"), done.stderr
    assert list(fleet.run.glob("*.log")) == []
    fleet.close()


def keygen_replaces_nothing():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "keys"
        key = keygen(folder, "di-decode.0")
        secret = (folder / "di-decode.0.secret").read_text()
        assert (folder / "di-decode.0.secret").stat().st_mode & 0o777 == 0o600
        again = subprocess.run([str(BIN / "di-ctl"), "keygen", "di-decode.0", str(folder)], capture_output=True, text=True)
        assert again.returncode == 1 and again.stdout == "" and "File exists" in again.stderr, again
        assert (folder / "di-decode.0.secret").read_text() == secret
        other = keygen(folder, "di-decode.1")
        assert (folder / "public_keys").read_text() == f"{key} di-decode.0\n{other} di-decode.1\n"
        for wrong in ("decode", "../di-decode.0", "", "di-decode.0 x"):
            done = subprocess.run([str(BIN / "di-ctl"), "keygen", wrong, str(folder)], capture_output=True, text=True)
            assert done.returncode == 64, (wrong, done)
        assert len(list(folder.iterdir())) == 3


def an_api_key_and_the_row_that_lets_it_in():
    made = subprocess.run([str(BIN / "di-ctl"), "keygen", "api", 'la"b'], capture_output=True, text=True)
    assert made.returncode == 0 and re.fullmatch(r"sk-di-[A-Za-z0-9_-]{8}-[A-Za-z0-9_-]{43}\n", made.stdout), made
    digest = hashlib.sha256(made.stdout.strip().encode()).hexdigest()
    assert tomllib.loads(made.stderr) == {"auth": {"keys": [{"key": f"sha256:{digest}", "tenant": 'la"b'}]}}, made
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "di-router.toml"
        file.write_text(made.stderr)
        checked = subprocess.run([str(BIN / "di-router"), "-n", "-f", str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked
    again = subprocess.run([str(BIN / "di-ctl"), "keygen", "api"], capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout != made.stdout and 'tenant = "default"' in again.stderr, again
    with open("/dev/full", "w") as full:
        assert subprocess.run([str(BIN / "di-ctl"), "keygen", "api"], stdout=full, stderr=subprocess.DEVNULL).returncode == 1


def exec_starts_a_fleet_in_a_network_namespace():
    name = f"di-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) if shutil.which("ip") else None
    if made is None or made.returncode != 0:
        print(f"[SKIP] network namespaces: {made.stderr.strip() if made else 'no ip(8)'}", flush=True)
        return
    inside = ["ip", "netns", "exec", name]
    conf = pathlib.Path(tempfile.mkdtemp(prefix="di-conf-"))
    fleet = None
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        for file in (SOURCE / "etc/local").glob("*.toml"):
            text = file.read_text().replace("[[instance]]\n", f'[[instance]]\nexec = ["ip", "netns", "exec", "{name}"]\n')
            text = text.replace('"../model-demo"', f'"{SOURCE}/etc/model-demo"')
            (conf / file.name).write_text(text)
        fleet = Fleet(conf=str(conf), supervise=True)
        for instance in INSTANCES:
            owner = subprocess.run(["ip", "netns", "identify", str(fleet.pid(instance))], capture_output=True, text=True)
            assert owner.stdout.strip() == name, (instance, owner)
        with socket.socket() as outside:
            assert outside.connect_ex(fleet.address) != 0, "its loopback is another"
        dead = fleet.kill("di-decode.0", signal.SIGKILL)
        wait_for(lambda: fleet.pid("di-decode.0") != dead and "di-decode.0" in members(fleet), "di-decode.0 to be back")
        owner = subprocess.run(["ip", "netns", "identify", str(fleet.pid("di-decode.0"))], capture_output=True, text=True)
        assert owner.stdout.strip() == name, owner
        fleet.down()
        left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        assert left.stdout.strip() == "", left.stdout
    except BaseException:
        if fleet is not None:
            sys.stderr.write(fleet.logs())
        raise
    finally:
        if fleet is not None:
            fleet.close()
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(conf, ignore_errors=True)


main([
    a_fleet_over_tcp_with_keys_answers,
    a_killed_daemon_comes_back_with_its_key,
    a_key_that_is_not_listed_does_not_join_until_it_is,
    a_name_that_is_another_keys_is_refused,
    a_di_meta_with_another_key_is_not_believed,
    without_keys_nothing_is_bound_beyond_loopback,
    keygen_replaces_nothing,
    an_api_key_and_the_row_that_lets_it_in,
    exec_starts_a_fleet_in_a_network_namespace,
])
