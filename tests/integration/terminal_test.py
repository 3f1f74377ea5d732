"""di-ctl chat: in a pipe, on a terminal (a pty), and what it says when there is no answer."""

import http.client
import http.server
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import BIN, PATIENCE, SOURCE, Fleet, main, pieces, script_fleet, wait_for  # noqa: E402

COUNT = {"match": "count", "pieces": pieces("one", " two", " three", delay_ms=5)}
SLOW = {"match": "slow", "pieces": pieces(*[f"w{i} " for i in range(500)], delay_ms=20)}
OTHER = {"match": "", "pieces": pieces("other")}
FIGURES = re.compile(r"\[TTFT \d+ ms(?:, [\d.]+ tokens/s)?, (\d+) tokens, cached (\d+) of (\d+) prompt tokens\]")


def chat(fleet, text, *args, run=None):
    """Lines in, lines out: (exit status, standard output, standard error)."""
    data = text if isinstance(text, bytes) else text.encode()
    where = ["-r", str(run or fleet.run)] if fleet or run else []
    done = subprocess.run([str(BIN / "di-ctl"), *where, "chat", *args], input=data, capture_output=True,
                          timeout=60 * PATIENCE)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Terminal:
    """di-ctl on a pty of its own."""

    def __init__(self, fleet, *words):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", LC_ALL="C.UTF-8")
            os.execv(str(BIN / "di-ctl"), ["di-ctl", "-r", str(fleet.run), *(words or ["chat"])])
        self.seen = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def await_text(self, text, seconds=20.0):
        """Waits until `text` was shown since the last call, and returns what came up to and with it."""
        deadline = time.monotonic() + seconds * PATIENCE
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"waited for {text!r}; shown: {self.seen!r}"
            if not select.select([self.fd], [], [], left)[0]:
                continue
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                assert text in self.seen, f"ended before {text!r}; shown: {self.seen!r}"
        end = self.seen.index(text) + len(text)
        shown, self.seen = self.seen[:end], self.seen[end:]
        return shown

    def exit_status(self):
        # What is still shown must be read, or the other end cannot close.
        def gone():
            if select.select([self.fd], [], [], 0)[0]:
                try:
                    os.read(self.fd, 65536)
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return [os.waitstatus_to_exitcode(status)] if pid else None
        return wait_for(gone, "di-ctl to end", 20)[0]


def a_pipe_asks_line_by_line():
    with script_fleet([COUNT, OTHER]) as fleet:
        code, out, err = chat(fleet, "count\n\nother\n/new\ncount\n/help\ncount")
        assert code == 0, err
        assert out == "one two three\nother\none two three\none two three\n", out
        figures = FIGURES.findall(err)
        assert [int(f[0]) for f in figures] == [3, 1, 3, 3], err
        first, second, again, last = (int(f[2]) for f in figures)
        assert first == again < second, "the conversation grew, and /new forgot it"
        assert last > again, err
        assert "/quit" in err
        assert chat(fleet, "count\n/quit\ncount\n")[1] == "one two three\n"
        assert chat(fleet, "") == (0, "", "")
        # Named in full, as another client would.
        url = "http://%s:%d" % fleet.address
        for where in (url, url + "/v1", url + "/v1/", "%s:%d" % fleet.address):
            code, out, err = chat(None, "count\n", "-u", where, "-k", str(fleet.run / "key"), "-m", "demo")
            assert (code, out) == (0, "one two three\n"), (where, err)
        fleet.await_idle()


def what_is_wrong_is_said():
    with script_fleet([COUNT, SLOW], overrides=["di-router:limits.concurrency_max=1"]) as fleet, \
            tempfile.TemporaryDirectory() as empty:
        def failed(expected, text="count\n", *args, **where):
            code, out, err = chat(where.pop("fleet", fleet), text, *args, **where)
            assert code == 1 and out == "" and expected in err and err.startswith("di-ctl: "), (code, out, err)
            assert err.count("\n") == 1, err

        failed(f"no fleet in {empty}", run=empty, fleet=None)
        pathlib.Path(empty, "di-router.0.listen").write_text("127.0.0.1:1\n")
        failed("nobody answers at 127.0.0.1:1", run=empty, fleet=None)
        pathlib.Path(empty, "di-router.0.listen").write_text("%s:%d\n" % fleet.address)
        failed("401: no API key", run=empty, fleet=None)
        pathlib.Path(empty, "key").write_text("sk-di-AAAAAAAA-" + "A" * 43 + "\n")
        failed("401: the API key is not known (another key: -k KEYFILE)", run=empty, fleet=None)
        # The fleet's key does not go to a service that was named.
        failed("no key was sent", "count\n", "-u", "http://%s:%d" % fleet.address)
        failed("no-such-file", "count\n", "-k", str(fleet.run / "no-such-file"))
        failed("there is no TLS", "count\n", "-u", "https://example.org")
        failed("404: ", "count\n", "-m", "none")
        failed("404: ", "count\n", "-u", "http://%s:%d/nowhere" % fleet.address, "-k", str(fleet.run / "key"))
        failed("not UTF-8", b"\xff\xfe\n")
        failed("there is no /nothing", "/nothing\n")
        failed("a line has more than", "a" * (1 << 20) + "a\n")
        code, out, err = chat(fleet, "count\n", "-d", "di-router.0")
        assert code == 0, err
        done = subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run), "-m", "demo", "show", "fleet"],
                              capture_output=True, timeout=60)
        assert done.returncode == 64, done.stderr

        # The one place is taken.
        connection = http.client.HTTPConnection(*fleet.address, timeout=60)
        connection.request("POST", "/v1/chat/completions", headers=fleet.auth(), body=json.dumps(
            {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "slow"}]}))
        answer = connection.getresponse()
        answer.readline()
        failed("429: too many requests of this tenant at a time (try again in 1 s)")
        answer.close()
        connection.close()
        fleet.await_idle()


# One that was killed leaves its address; one that stops takes it away.
def the_address_of_a_router_that_is_gone_is_passed_over():
    with script_fleet([COUNT]) as fleet:
        def ask():
            return subprocess.run([str(SOURCE / "scripts/ask"), "-r", str(fleet.run), "count"], capture_output=True, text=True,
                                  timeout=60 * PATIENCE)
        (fleet.run / "di-router.-a.listen").write_text("127.0.0.1:1\n")
        code, out, err = chat(fleet, "count\n")
        assert (code, out) == (0, "one two three\n"), err
        done = ask()
        assert done.returncode == 0 and "one two three" in done.stdout and done.stderr == "", done
        fleet.kill("di-router.0", signal.SIGTERM)
        wait_for(lambda: not fleet.alive("di-router.0"), "the router to stop")
        assert not (fleet.run / "di-router.0.listen").exists()
        code, out, err = chat(fleet, "count\n")
        assert code == 1 and "nobody answers at 127.0.0.1:1" in err, err
        done = ask()
        assert done.returncode == 1 and done.stderr == (
            f"ask: nobody answers at 127.0.0.1:1: see the log of the router in {fleet.run}\n"), done


class Cut(http.server.BaseHTTPRequestHandler):
    """A service whose answer ends before its length, with `rest` as its last bytes."""
    rest = b""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(b'{"data": [{"id": "demo"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n' + self.rest, missing=9)

    def answer(self, body, missing=0):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


def an_answer_that_breaks_off_is_one_error_of_ask():
    with tempfile.TemporaryDirectory() as run, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pathlib.Path(run, "key").write_text("k\n")
        pathlib.Path(run, "di-router.0.listen").write_text("127.0.0.1:%d\n" % server.server_port)
        for Cut.rest, message in ((b'data: {"error": {"message": "boom"}}\n\n', "boom"),
                                  (b'data: {"choi', "the connection broke off"), (b"", "the connection broke off")):
            done = subprocess.run([str(SOURCE / "scripts/ask"), "-r", run, "hi"], capture_output=True, text=True,
                                  timeout=60 * PATIENCE)
            lines = done.stderr.strip().splitlines()
            assert done.returncode == 1 and lines[0] == f"error: {message}", done
            assert len(lines) == 2 and lines[1].startswith(f"See what happened: di-ctl -r {run} explain ask-"), done
        server.shutdown()


def a_stream_that_is_cut_is_no_answer():
    with script_fleet([SLOW]) as fleet:
        process = subprocess.Popen([str(BIN / "di-ctl"), "-r", str(fleet.run), "chat"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdin.write(b"slow\n")
        process.stdin.flush()
        begun = process.stdout.read(3)
        assert begun == b"w0 ", begun
        fleet.kill("di-router.0")
        out, err = process.communicate(timeout=60 * PATIENCE)
        assert process.returncode == 1 and b"the stream was cut" in err, (process.returncode, out[-100:], err)
        assert b"TTFT" not in err


def a_terminal():
    with script_fleet([COUNT, SLOW, OTHER]) as fleet:
        terminal = Terminal(fleet)
        terminal.await_text("demo at ")
        terminal.await_text("> ")
        # Edited: two characters typed wrong, taken back, and one of several bytes in between.
        terminal.type("coüxx\x7f\x7f\x7funt\n")
        assert FIGURES.search(terminal.await_text("prompt tokens]")), "figures follow the answer"
        terminal.await_text("> ")

        terminal.type("slow\n")
        terminal.await_text("w3 ")
        terminal.type("\x03")
        shown = terminal.await_text("[stopped]")
        assert "w499" not in shown
        wait_for(lambda: not fleet.ctl("show", "requests") or None, "the stopped request to be gone", 10)
        terminal.await_text("> ")
        # What was stopped is part of the conversation, and Ctrl-C at the prompt drops a line and nothing else.
        terminal.type("never sent\x03")
        terminal.await_text("> ")
        terminal.type("count\n")
        shown = terminal.await_text("prompt tokens]")
        assert "one two three" in shown, shown
        long = int(FIGURES.search(shown)[3])
        terminal.await_text("> ")
        terminal.type("/new\n")
        terminal.await_text("> ")
        terminal.type("\x1b[A\x1b[A\n")  # the history: count again
        shown = terminal.await_text("prompt tokens]")
        assert "one two three" in shown and int(FIGURES.search(shown)[3]) < long, shown
        terminal.await_text("> ")
        # A failure is said and ends nothing.
        fleet.kill("di-router.0", signal.SIGTERM)
        wait_for(lambda: not fleet.alive("di-router.0"), "the router to stop")
        terminal.type("count\n")
        terminal.await_text("nobody answers")
        terminal.await_text("> ")
        terminal.type("\x04")
        assert terminal.exit_status() == 0


def a_listing_without_a_row_says_so_to_a_terminal():
    with Fleet() as fleet:
        for listing in (("show", "requests"), ("kv", "drain")):
            terminal = Terminal(fleet, *listing)
            terminal.await_text("di-ctl: there is nothing to show")
            assert terminal.exit_status() == 0
            done = subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run), *listing], capture_output=True, timeout=60 * PATIENCE)
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), done


def a_model_cannot_steer_the_terminal():
    with script_fleet([{"match": "", "pieces": [{"hex": "1b5b324a"}, {"text": "ok"}]}]) as fleet:
        terminal = Terminal(fleet)
        terminal.await_text("> ")
        terminal.type("x\n")
        shown = terminal.await_text("prompt tokens]")
        assert "?[2Jok" in shown and "\x1b[2J" not in shown, shown
        terminal.type("/quit\n")
        assert terminal.exit_status() == 0
        assert "\x1b[2Jok" in chat(fleet, "x\n")[1], "in a pipe it is what it is"


if __name__ == "__main__":
    main([a_pipe_asks_line_by_line, what_is_wrong_is_said, the_address_of_a_router_that_is_gone_is_passed_over,
          an_answer_that_breaks_off_is_one_error_of_ask, a_stream_that_is_cut_is_no_answer, a_terminal,
          a_listing_without_a_row_says_so_to_a_terminal, a_model_cannot_steer_the_terminal])
