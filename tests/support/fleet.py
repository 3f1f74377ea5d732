"""A fleet of real processes for integration tests: started with scripts/di-up in a directory of its own,
spoken to over HTTP and di-ctl, and always stopped.

Tests await conditions with a deadline (`wait_for`), they never sleep for a fixed time.
"""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import books

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("DI_BUILD_DIR", SOURCE / "build"))
BIN = BUILD / "bin"
SANITIZER = re.compile(r"(Thread|Address|Leak|UndefinedBehavior)Sanitizer|runtime error:")
# Whoever stops us from outside (a time limit) stops our fleets too, as Ctrl-C does.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# Sanitizer builds are several times slower: deadlines stretch, assertions do not change.
PATIENCE = float(os.environ.get("DI_TEST_PATIENCE", "1"))


def wait_for(condition, what, seconds=30.0, every=0.02):
    """Polls until condition() is truthy and returns it; fails with the last value seen."""
    deadline = time.monotonic() + seconds * PATIENCE
    tick = threading.Event()
    last = None
    while True:
        try:
            last = condition()
            if last:
                return last
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:  # half written files too
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {seconds * PATIENCE:.0f} s for {what}; last seen: {last!r}")
        tick.wait(every)


def process_stat(pid):
    """Its fields from the state on (proc(5))."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def running(pid):
    """Whether it still does anything: who has ended is there until somebody has looked after it, which may take
    seconds where daemons are left to the system."""
    try:
        state, *fields = process_stat(pid)
    except OSError:
        return False
    return state not in "ZX" or int(fields[16]) > 1  # threads


class Reply:
    """What a client saw of one request."""

    def __init__(self):
        self.status = None
        self.headers = {}
        self.text = ""
        self.chunks = []        # parsed events, in order
        self.finish = None
        self.usage = None
        self.error = None
        self.done = False       # data: [DONE] came
        self.cut = False        # the body ended without its terminating chunk
        self.body = ""

    @property
    def request_id(self):
        return self.headers.get("x-request-id")

    def cached(self):
        return self.usage["prompt_tokens_details"]["cached_tokens"]


class Fleet:
    def __init__(self, conf="etc/local", overrides=(), supervise=False, run_dir=None, expect_failure=False):
        self.conf = conf
        self.overrides = list(overrides)
        self.supervise = supervise
        self.run = pathlib.Path(run_dir or tempfile.mkdtemp(prefix="di-test-"))
        self.keep = run_dir is not None
        self.address = None
        if not expect_failure:
            self.up()

    # ---- Life -----------------------------------------------------------------------------------

    def command(self, extra=()):
        args = [str(SOURCE / "scripts" / "di-up"), "-c", str(SOURCE / self.conf), "-r", str(self.run)]
        if self.supervise:
            args.append("--supervise")
        for item in ["di-router:http.listen=127.0.0.1:0", "di-router:admin.listen=127.0.0.1:0", *self.overrides, *extra]:
            args += ["-o", item]
        return args

    def environment(self):
        return dict(os.environ, DI_BIN=str(BIN))

    def up(self, extra=()):
        done = subprocess.run(self.command(extra), cwd=SOURCE, env=self.environment(), capture_output=True, text=True,
                              timeout=120 * PATIENCE)
        if done.returncode != 0:
            raise AssertionError(f"di-up failed ({done.returncode}):\n{done.stdout}{done.stderr}\n{self.logs()}")
        last = done.stdout.strip().splitlines()[-1]
        assert last.startswith("ready http://"), f"last line of di-up: {last!r}"
        host, port = last.split("//", 1)[1].rsplit(":", 1)
        self.address = (host, int(port))
        self.key = (self.run / "key").read_text().split()[0]
        return self

    def up_fails(self):
        """What di-up says when it cannot start the fleet, or what is missing of it; it leaves nothing of its own behind."""
        before = self.instances()
        done = subprocess.run(self.command(), cwd=SOURCE, env=self.environment(), capture_output=True, text=True,
                              timeout=120 * PATIENCE)
        assert done.returncode != 0, done.stdout
        left = [i for i in self.instances() if i not in before and self.alive(i)]
        assert not left, f"something was left running: {left}"
        return done.stderr

    def down(self):
        subprocess.run([str(SOURCE / "scripts" / "di-down"), "-r", str(self.run)], cwd=SOURCE, env=self.environment(),
                       capture_output=True, text=True, timeout=120 * PATIENCE)

    def close(self):
        self.down()
        # A daemon that a sanitizer ends is one more loss that the others heal: it must not pass for that.
        reports = [line for path in self.run.glob("*.log") for line in path.read_text(errors="replace").splitlines()
                   if SANITIZER.search(line)]
        if not self.keep:
            shutil.rmtree(self.run, ignore_errors=True)
        assert not reports, reports[:5]

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None:
            sys.stderr.write(self.logs())
        self.close()

    def logs(self, lines=40):
        out = []
        for path in sorted(self.run.glob("*.log")):
            out.append(f"==> {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) + "\n")
        return "".join(out)

    def pid(self, instance):
        return int((self.run / f"{instance}.pid").read_text().split()[0])

    def instances(self):
        return sorted(path.stem for path in self.run.glob("*.pid")
                      if path.stem.startswith("di-") and not path.stem.startswith("di-hold."))

    def holders(self):
        """The processes that keep an arena while its di-kvd is dead."""
        return sorted(path.stem for path in self.run.glob("di-hold.*.pid"))

    def alive(self, instance):
        try:
            return running(self.pid(instance))
        except (OSError, ValueError):
            return False

    def message_sockets(self):
        """Unix sockets that messages go through.  A di-hold takes descriptors from its own di-kvd, no messages."""
        return sorted(path.name for path in self.run.glob("*.sock") if not path.name.startswith("di-hold."))

    def fired(self, instance, point):
        """Whether the fault that is armed there has come to pass."""
        return (self.run / "faults" / f"{instance}.{point}").exists()

    def stopped_at(self, instance, point):
        """The same of `point=stop`, and that it stands still: it marks the fault a moment before it stops, and a SIGCONT
        of that moment would be lost and leave it standing."""
        return self.fired(instance, point) and process_stat(self.pid(instance))[0] == "T"

    def kill(self, instance, sig=signal.SIGKILL):
        pid = self.pid(instance)
        os.kill(pid, sig)
        return pid

    def kill_all(self):
        """kill -9 of every daemon and of what keeps the arenas, and no di-down."""
        everything = self.instances() + self.holders()
        for instance in everything:
            with contextlib.suppress(OSError, ValueError):
                self.kill(instance)
        wait_for(lambda: not any(self.alive(i) for i in everything), "all daemons to be gone")

    # ---- di-ctl ---------------------------------------------------------------------------------

    def ctl(self, *words, check=True):
        done = subprocess.run([str(BIN / "di-ctl"), "-r", str(self.run), "-j", *words], capture_output=True, text=True,
                              timeout=60 * PATIENCE)
        if check and done.returncode != 0:
            raise AssertionError(f"di-ctl {' '.join(words)}: {done.returncode} {done.stderr}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.strip()]

    def held(self, *, ignore=()):
        """Everything acquirable that is not at its base, over all daemons."""
        rows = self.ctl("show", "gauges")
        return {f"{r['instance']}.{r['what']}": r["count"] for r in rows
                if r["count"] != r.get("base", 0) and r["what"] not in ignore}

    def await_idle(self, seconds=30.0):
        """Gauges return to their base: nothing leaks."""
        def settled():
            held = self.held()
            return True if not held else None
        try:
            wait_for(settled, "gauges to return to their base", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; held: {self.held()}") from None
        self.books_balance()

    def books_balance(self):
        """Nothing that was begun is neither ended nor held (books.py), where all daemons answer."""
        def unbalanced():
            return books.broken(self.ctl("show", "metrics"))
        try:
            wait_for(lambda: not unbalanced(), "the books to balance", 10)
        except AssertionError as error:
            raise AssertionError(f"{error}: {unbalanced()}") from None

    def explain(self, request_id):
        return self.ctl("explain", request_id)

    def metric(self, instance, term):
        """The sum over the labels of a counter or gauge, or over those that the term picks: name{label=value}."""
        return self.metric_each([instance], term)[instance]

    def metric_each(self, instances, term):
        """The same of several instances."""
        rows = self.ctl(*(["-d", instances[0]] if len(instances) == 1 else []), "show", "metrics")
        found = {i: books.total([row for row in rows if row["instance"] == i], term) for i in instances}
        assert None not in found.values(), f"no metric {term}: {found}"
        return found

    def metric_by(self, instance, name, label):
        """A counter or gauge by the values of its label."""
        return {books.labels(row)[label]: row["value"] for row in self.ctl("-d", instance, "show", "metrics")
                if row["name"] == name}

    # ---- What it writes -------------------------------------------------------------------------------------

    def log(self, instance):
        return (self.run / f"{instance}.log").read_text(errors="replace")

    def charges(self):
        return [json.loads(line) for line in (self.run / "journal" / "charges.jsonl").read_text().splitlines()]

    def data_port(self, instance):
        """Where a di-kvd takes pages over TCP; None when it does not."""
        said = re.search(r"data: listening endpoint=tcp://[\d.]+:(\d+)", self.log(instance))
        return int(said[1]) if said else None

    def health(self, instance):
        """Status and body of /health/ready on the instance's own socket."""
        with socket.socket(socket.AF_UNIX) as own:
            own.settimeout(30 * PATIENCE)
            own.connect(str(self.run / f"{instance}.http"))
            own.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = http.client.HTTPResponse(own)
            answer.begin()
            return answer.status, answer.read().decode()

    # ---- Hosts: fleets of which instances are named after them, as etc/local-2p2d --------------------------

    def of_host(self, host):
        return [f"di-kvd.host{host}", f"di-prefill.{host}", f"di-decode.{host}"]

    def kill_host(self, host):
        """kill -9 of every process of a compute host at once, with its arena."""
        holders = [i for i in [f"di-hold.host{host}"] if (self.run / f"{i}.pid").exists()]
        for pid in [self.pid(instance) for instance in self.of_host(host) + holders]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def place(self, prefill, decode):
        """From now on prompts are read on the one host and answers written on the other: the rest is drained."""
        wanted = {}
        for program, host in (("di-prefill", prefill), ("di-decode", decode)):
            # Resumed before anything is drained: somebody always serves.
            for instance in sorted((i for i in self.instances() if i.startswith(program + ".") and self.alive(i)),
                                   key=lambda i: i != f"{program}.{host}"):
                word = "resume" if instance == f"{program}.{host}" else "drain"
                self.ctl(word, instance)
                wanted[f"{instance}/0"] = "up" if word == "resume" else "draining"

        def known():
            seen = {row["rank"]: row["state"] for row in self.ctl("-d", "di-router.0", "show", "ranks")}
            return all(seen.get(rank) == state for rank, state in wanted.items())
        wait_for(known, f"the router to know of {wanted}")

    # ---- HTTP -----------------------------------------------------------------------------------

    def connection(self, timeout):
        return http.client.HTTPConnection(*self.address, timeout=timeout)

    def request(self, method, path, body=None, headers=None, timeout=120.0):
        connection = self.connection(timeout * PATIENCE)
        connection.request(method, path, body=body, headers=headers if headers is not None else self.auth())
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, data

    def auth(self):
        return {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}

    def chat(self, content, stream=True, on_chunk=None, timeout=120.0, headers=None, **fields):
        """One chat completion; `content` is the user's text or a list of messages."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {"model": "demo", "messages": messages, "stream": stream, **fields}
        if stream and "stream_options" not in body:
            body["stream_options"] = {"include_usage": True}
        reply = Reply()
        connection = self.connection(timeout * PATIENCE)
        try:
            connection.request("POST", "/v1/chat/completions", body=json.dumps(body),
                               headers={**self.auth(), **(headers or {})})
            answer = connection.getresponse()
            reply.status = answer.status
            reply.headers = {k.lower(): v for k, v in answer.getheaders()}
            if not stream or answer.status != 200:
                reply.body = answer.read().decode()
                parsed = json.loads(reply.body)
                reply.error = parsed.get("error")
                if reply.error is None:
                    reply.text = parsed["choices"][0]["message"]["content"]
                    reply.finish = parsed["choices"][0]["finish_reason"]
                    reply.usage = parsed["usage"]
                return reply
            try:
                while True:
                    line = answer.readline()
                    if not line:
                        break
                    line = line.decode().rstrip("\n")
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        reply.done = True
                        continue
                    event = json.loads(line[6:])
                    reply.chunks.append(event)
                    if "error" in event:
                        reply.error = event["error"]
                        continue
                    for choice in event["choices"]:
                        reply.text += choice["delta"].get("content") or ""
                        reply.finish = choice.get("finish_reason") or reply.finish
                    reply.usage = event.get("usage") or reply.usage
                    if on_chunk is not None:
                        on_chunk(event)
            except (http.client.IncompleteRead, ConnectionError):
                reply.cut = True
            return reply
        finally:
            connection.close()


# A machine that is busy with other things must not turn a hit into a cold start.
PATIENT_MATCH = "di-router:request.match_wait=10s"
# The demo model computes a block about as fast as a busy machine fetches one, so a rank that may choose computes what
# is cached when the disk or a process of the fleet was descheduled for a few milliseconds.  A test that counts hits, or
# says which way pages came, or has to reach a place behind a fetch, does not leave the choice to the machine.
PATIENT_FETCH = "di-prefill:kv.arbiter=false"
SURE_HIT = [PATIENT_MATCH, PATIENT_FETCH]


def members(fleet, check=True):
    """The instances that di-meta is connected to, itself too.  Without `check` nobody when it does not answer."""
    return {r["instance"] for r in fleet.ctl("-d", "di-meta.0", "show", "fleet", check=check) if r["connected"]}


def everybody_is_there(fleet):
    """As many daemons as were started are members."""
    wait_for(lambda: members(fleet, check=False) >= set(fleet.instances()), "every daemon to be a member", 60)


def write_backs_done(fleet):
    wait_for(lambda: not any(r["count"] for r in fleet.ctl("show", "gauges") if r["what"] == "pending_writebacks"),
             "write-backs to be done", 60)


def words(count, seed=1):
    """A prompt of about `count` tokens of the demo tokenizer, the same for the same seed."""
    import random
    rng = random.Random(seed)
    vocabulary = ["page", "block", "stripe", "lease", "seat", "hold", "router", "decode", "prefill", "arena", "store", "host"]
    return " ".join(rng.choice(vocabulary) for _ in range(count))


def script(run_dir, lines):
    path = pathlib.Path(run_dir) / "script.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def script_rows(path):
    """The ranks play that script (di-script(5))."""
    return [f"{program}:{row}" for program in ("di-prefill", "di-decode")
            for row in ("engine.backend=script", f"engine.script={path}")]


def script_fleet(lines, conf="etc/local", overrides=(), **kwargs):
    """A fleet whose ranks play `lines`."""
    run_dir = tempfile.mkdtemp(prefix="di-test-")
    fleet = Fleet(conf, [*script_rows(script(run_dir, lines)), *overrides], run_dir=run_dir, **kwargs)
    fleet.keep = False
    return fleet


def pieces(*texts, **common):
    return [{**({"hex": t[1:]} if t.startswith("\\") else {"text": t}), **common} for t in texts]


def main(tests):
    """Runs the given functions in order; the names on the command line select some."""
    chosen = sys.argv[1:]
    failed = 0
    ran = 0
    for test in tests:
        if chosen and test.__name__ not in chosen:
            continue
        ran += 1
        start = time.monotonic()
        try:
            test()
            print(f"[ OK ] {test.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as error:  # the next test still runs
            import traceback
            traceback.print_exc()
            print(f"[FAIL] {test.__name__} ({time.monotonic() - start:.1f} s): {error}", flush=True)
            failed += 1
    print(f"{ran - failed} passed, {failed} failed", flush=True)
    sys.exit(1 if failed or not ran else 0)
