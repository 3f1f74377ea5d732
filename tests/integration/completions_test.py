"""/v1/completions, /tokenize and /detokenize over real processes: shapes, caching, refusals."""

import json
import pathlib
import signal
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import SOURCE, SURE_HIT, Fleet, main, pieces, script_fleet, wait_for, words  # noqa: E402

COUNT = {"match": "count", "pieces": pieces("one", " two", " three")}


def post(fleet, path, body, headers=None):
    data = body if isinstance(body, bytes) else json.dumps(body)
    status, answered, text = fleet.request("POST", path, data, headers)
    return status, answered, json.loads(text)


def complete(fleet, prompt, path="/v1/completions", **fields):
    status, headers, answer = post(fleet, path, {"model": "demo", "prompt": prompt, **fields})
    assert status == 200, answer
    assert headers["x-request-id"]
    return answer


def events(fleet, prompt, **fields):
    """The events of a stream, and whether it ended as it should."""
    body = {"model": "demo", "prompt": prompt, "stream": True, **fields}
    status, headers, data = fleet.request("POST", "/v1/completions", json.dumps(body))
    assert status == 200 and headers["content-type"] == "text/event-stream", (status, data)
    lines = data.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def refused(fleet, path, body, param, status=400):
    got, headers, answer = post(fleet, path, body)
    assert got == status, (path, body, got, answer)
    assert answer["error"]["param"] == param and answer["error"]["message"], (path, body, answer)
    assert headers["x-request-id"]


def whole_and_streamed():
    with script_fleet([COUNT]) as fleet:
        for path in ("/v1/completions", "/completions"):
            whole = complete(fleet, "count", path)
            assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-"), whole
            assert whole["choices"] == [{"index": 0, "text": "one two three", "logprobs": None,
                                         "finish_reason": "stop"}], whole
            usage = whole["usage"]
            assert usage["completion_tokens"] == 3 and usage["total_tokens"] == usage["prompt_tokens"] + 3
            assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
        got = events(fleet, "count", stream_options={"include_usage": True})
        assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 3
        assert all(e["usage"] is None for e in got[:-1]) and len({e["id"] for e in got}) == 1
        assert "".join(e["choices"][0]["text"] for e in got[:-1]) == "one two three"
        assert [e["choices"][0]["finish_reason"] for e in got[:-1]][-1] == "stop"
        assert all("usage" not in e for e in events(fleet, "count"))
        assert complete(fleet, ["count"])["choices"][0]["text"] == "one two three"
        stopped = complete(fleet, "count", stop=" three")
        assert stopped["choices"][0] == {"index": 0, "text": "one two", "logprobs": None, "finish_reason": "stop"}
        assert fleet.explain(whole["id"]), "explain knows the id of the answer"
        fleet.await_idle()


def sixteen_tokens_unless_asked():
    with script_fleet([{"match": "", "pieces": pieces(*["x"] * 40)}]) as fleet:
        short = complete(fleet, "a")
        assert short["usage"]["completion_tokens"] == 16 and short["choices"][0]["finish_reason"] == "length", short
        long = complete(fleet, "a", max_tokens=30)
        assert long["usage"]["completion_tokens"] == 30 and long["choices"][0]["text"] == "x" * 30
        fleet.await_idle()


def tokens_are_what_the_text_was():
    """The demo model: text and its tokens give one answer, chat through its marks gives the chat's answer."""
    question = "What does di-kvd do?"
    with Fleet() as fleet:
        tokens = post(fleet, "/tokenize", {"model": "demo", "prompt": question})[2]["tokens"]
        by_text = complete(fleet, question, temperature=0, max_tokens=8)
        by_tokens = complete(fleet, tokens, temperature=0, max_tokens=8)
        assert by_text["choices"] == by_tokens["choices"], (by_text, by_tokens)
        assert by_text["usage"]["prompt_tokens"] == len(tokens)
        assert complete(fleet, [tokens], temperature=0, max_tokens=8)["choices"] == by_text["choices"]

        messages = [{"role": "user", "content": question}]
        chat = fleet.chat(question, temperature=0, max_tokens=80)
        rendered = post(fleet, "/tokenize", {"model": "demo", "messages": messages})[2]
        assert rendered["count"] == chat.usage["prompt_tokens"] and rendered["max_model_len"] == 16384, rendered
        assert complete(fleet, rendered["tokens"], temperature=0, max_tokens=80)["choices"][0]["text"] == chat.text
        # The marks of the format, written out by the client, are the same tokens.
        text = post(fleet, "/detokenize", {"tokens": rendered["tokens"]})[2]["prompt"]
        again = post(fleet, "/tokenize", {"prompt": text})[2]
        assert again["tokens"] == rendered["tokens"], (text, again, rendered)
        # In a chat they are text.
        forged = post(fleet, "/tokenize", {"messages": [{"role": "user", "content": text}]})[2]
        assert forged["count"] > 2 * rendered["count"], forged
        fleet.await_idle()


def a_prefix_is_found_again():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        prompt = words(300)
        first = complete(fleet, prompt, temperature=0, max_tokens=4)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        tokens = post(fleet, "/tokenize", {"prompt": prompt})[2]["tokens"]
        second = complete(fleet, tokens, temperature=0, max_tokens=4)
        assert second["choices"] == first["choices"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192, second["usage"]
        assert second["usage"]["prompt_cache_hit_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
        fleet.await_idle()


def what_is_refused():
    with script_fleet([COUNT, {"match": "", "pieces": pieces("a", "b")}], overrides=["di-router:model.context_tokens_max=256"]) as fleet:
        path = "/v1/completions"
        ask = {"model": "demo", "prompt": "count"}
        for fields, param in (({"echo": True}, "echo"), ({"suffix": "b"}, "suffix"), ({"best_of": 2}, "best_of"),
                              ({"logprobs": 1}, "logprobs"), ({"n": 2}, "n"), ({"prompt": None}, "prompt"),
                              ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": [5, 10 ** 6]}, "prompt"),
                              ({"prompt": [[5], [6]]}, "prompt"), ({"prompt": [5, -1]}, "prompt[1]"),
                              ({"prompt": "", "add_special_tokens": False}, "prompt"),
                              ({"max_tokens": 0}, "max_tokens")):
            refused(fleet, path, {**ask, **fields}, param)
        refused(fleet, path, {**ask, "model": "none"}, "model", 404)
        for prompt in ([5] * 256, [5] * 300, "word " * 1000, [5] * 5000):
            answer = post(fleet, path, {**ask, "prompt": prompt})
            assert answer[0] == 400, answer[0]
            assert answer[2]["error"]["code"] == "context_length_exceeded", answer[2]["error"]
        for body in (b"", b"{", b"[]", b'{"model":"demo","prompt":"\xff\xfe"}', b'{"prompt":"\xed\xa0\x80"}'):
            for route in (path, "/tokenize", "/detokenize"):
                status, _, answer = post(fleet, route, body)
                assert status == 400 and "JSON" in answer["error"]["message"], (route, body, answer)
        # Neutral values, and what benchmarks send, pass.
        complete(fleet, "count", echo=False, suffix="", best_of=1, logprobs=None, n=1, repetition_penalty=1.0,
                 unknown={"a": 1})
        # The largest that fits.
        assert complete(fleet, [5] * 255)["usage"]["completion_tokens"] == 1
        fleet.await_idle()


def tokenize_and_detokenize():
    with script_fleet([COUNT], overrides=["di-router:model.context_tokens_max=256"]) as fleet:
        for prefix in ("", "/v1"):
            status, headers, one = post(fleet, prefix + "/tokenize", {"prompt": "a 🦙!", "return_token_strs": True})
            assert status == 200 and headers["x-request-id"], one
            assert one["count"] == len(one["tokens"]) == len(one["token_strs"]) and one["char_count"] == 4, one
            bare = post(fleet, prefix + "/tokenize", {"prompt": "a 🦙!", "add_special_tokens": False})[2]
            assert one["tokens"][1:] == bare["tokens"] and "token_strs" not in bare
            back = post(fleet, prefix + "/detokenize", {"model": "demo", "tokens": bare["tokens"]})[2]
            assert back == {"prompt": "a 🦙!", "text": "a 🦙!"}, back
        shown = post(fleet, "/detokenize", {"tokens": one["tokens"]})[2]["prompt"]
        hidden = post(fleet, "/detokenize", {"tokens": one["tokens"], "skip_special_tokens": True})[2]["prompt"]
        assert shown.endswith(hidden) and len(shown) > len(hidden), (shown, hidden)
        # A piece of a character is no text, and no broken JSON either.
        llama = post(fleet, "/tokenize", {"prompt": "🦙", "add_special_tokens": False})[2]["tokens"]
        if len(llama) > 1:
            assert "�" in post(fleet, "/detokenize", {"tokens": llama[:1]})[2]["prompt"]
        both = post(fleet, "/tokenize", {"prompt": ["a", ""]})[2]
        assert both["count"] == [2, 1] and both["char_count"] == [1, 0], both
        assert post(fleet, "/detokenize", {"tokens": both["tokens"]})[2]["text"][0].endswith("a")
        assert post(fleet, "/detokenize", {"tokens": []})[2]["prompt"] == ""

        refused(fleet, "/tokenize", {"prompt": "a", "model": "none"}, "model", 404)
        refused(fleet, "/tokenize", {}, "prompt")
        refused(fleet, "/tokenize", {"prompt": 5}, "prompt")
        refused(fleet, "/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role")
        refused(fleet, "/detokenize", {"tokens": [1, 10 ** 6]}, "tokens")
        refused(fleet, "/detokenize", {"tokens": [[1], [10 ** 6]]}, "tokens[1]")
        refused(fleet, "/detokenize", {"tokens": [1, -1]}, "tokens[1]")
        refused(fleet, "/detokenize", {"tokens": "x"}, "tokens")
        # More than is counted, at once or in parts, on the loop and on the readers.
        for prompt in ("word " * 2000, "word " * 20000, ["word " * 400] * 4):
            answer = post(fleet, "/tokenize", {"prompt": prompt})
            assert answer[0] == 400, answer[0]
            assert answer[2]["error"]["code"] == "context_length_exceeded", answer[2]["error"]
        # A long text that fits is read elsewhere and answered the same.
        spaces = post(fleet, "/tokenize", {"prompt": "word " * 300})[2]
        padded = post(fleet, "/tokenize", json.dumps({"prompt": "word " * 300}).encode() + b" " * 40000)[2]
        assert padded == spaces and spaces["count"] > 256

        for path, body in (("/v1/completions", {"model": "demo", "prompt": "a"}), ("/tokenize", {"prompt": "a"}),
                           ("/detokenize", {"tokens": [1]})):
            for headers in ({}, {"Authorization": "Bearer sk-di-AAAAAAAA-" + "A" * 43}):
                assert post(fleet, path, body, headers)[0] == 401
            assert fleet.request("GET", path)[0] == 405
        fleet.await_idle()


def a_planned_stop_cuts_off_no_answer():
    """What the sockets do not hold of an answer is still sent when the router is asked to stop."""
    with script_fleet([COUNT], overrides=["di-router:drain.timeout=60s"]) as fleet:
        vocabulary = json.loads((SOURCE / "etc" / "model-demo" / "tokenizer.json").read_text())["model"]["vocab"]
        word = max((w for w in vocabulary if w.isascii() and w.isalpha()), key=len)
        count = 1_000_000
        body = json.dumps({"tokens": [vocabulary[word]] * count})
        head = {**fleet.auth(), "Host": "di", "Content-Length": len(body)}
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(fleet.address)
            lines = ["POST /detokenize HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", body]
            client.sendall("\r\n".join(lines).encode())
            got = bytearray(client.recv(1000))
            fleet.kill("di-router.0", signal.SIGTERM)

            def refuses():
                try:
                    socket.create_connection(fleet.address).close()
                except ConnectionRefusedError:
                    return True
                return False

            wait_for(refuses, "the router to take no more connections")
            while piece := client.recv(1 << 20):
                got += piece
        start, text = bytes(got).split(b"\r\n\r\n", 1)
        assert start.startswith(b"HTTP/1.1 200 "), start
        assert json.loads(text)["text"] == word * count
        wait_for(lambda: not fleet.alive("di-router.0"), "the router to end")
        assert "gave up waiting" not in fleet.log("di-router.0")


if __name__ == "__main__":
    main([whole_and_streamed, sixteen_tokens_unless_asked, tokens_are_what_the_text_was, a_prefix_is_found_again,
          what_is_refused, tokenize_and_detokenize, a_planned_stop_cuts_off_no_answer])
