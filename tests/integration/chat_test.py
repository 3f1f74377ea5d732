"""Streams as clients see them, over real processes and the script engine (cases A01 to A05 and the rules
of the stream), and the demo model answering a question."""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import SOURCE, Fleet, main, pieces, script_fleet, wait_for  # noqa: E402


def demo_model_answers():
    with Fleet() as fleet:
        reply = fleet.chat("What does di-kvd do?", temperature=0, max_tokens=80)
        assert reply.status == 200 and reply.done and reply.finish == "stop", reply.chunks[-3:]
        assert "di-kvd" in reply.text or "KV" in reply.text, reply.text
        assert reply.usage["prompt_tokens"] > 5 and reply.usage["completion_tokens"] > 5
        assert reply.usage["total_tokens"] == reply.usage["prompt_tokens"] + reply.usage["completion_tokens"]
        again = fleet.chat("What does di-kvd do?", stream=False, temperature=0, max_tokens=80)
        assert again.text == reply.text
        fleet.await_idle()


def demo_model_answers_every_listed_question():
    rows = [json.loads(line) for line in (SOURCE / "etc" / "model-demo" / "questions.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    with Fleet() as fleet:
        trained = held_out = held_out_right = 0
        for row in rows:
            for wording in row["wordings"]:
                reply = fleet.chat(wording, temperature=0, max_tokens=100)
                assert reply.text == row["answer"], (wording, reply.text)
                trained += 1
            for wording in row.get("held_out", []):
                held_out += 1
                held_out_right += fleet.chat(wording, temperature=0, max_tokens=100).text == row["answer"]
        print(f"  {trained} trained wordings right, {held_out_right} of {held_out} held-out ones")
        fleet.await_idle()


def stream_rules():
    # The delays keep the pieces apart: tokens that come together share an event.
    lines = [{"match": "usage", "pieces": pieces("a", "b", "c", delay_ms=20)}, {"match": "", "pieces": pieces("x")}]
    with script_fleet(lines) as fleet:
        reply = fleet.chat("usage", stream_options={"include_usage": True})
        assert reply.headers["content-type"] == "text/event-stream"
        first = reply.chunks[0]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}, first
        assert [c for c in reply.chunks if c.get("usage")] == [reply.chunks[-1]]
        assert reply.chunks[-1]["choices"] == []
        assert reply.usage["completion_tokens"] == 3 and reply.done
        for options in ({}, None):
            fields = {} if options is None else {"stream_options": options}
            bare = fleet.chat("usage", **{"stream_options": None, **fields})
            assert all(not c.get("usage") for c in bare.chunks), bare.chunks
        fleet.await_idle()


def a01_characters_over_several_tokens():
    hexes = ["f09f", "a699", "20", "ec82", "bceab2", "b9", "ec82b4"]
    with script_fleet([{"match": "", "pieces": [{"hex": h} for h in hexes]}]) as fleet:
        reply = fleet.chat("x")
        assert reply.text == "🦙 삼겹살", reply.text
        assert "�" not in reply.text
        assert reply.usage["completion_tokens"] == 7
        assert fleet.chat("x", stream=False).text == reply.text


def a02_bytes_that_never_become_a_character():
    lines = [{"match": "cut", "pieces": [{"hex": "61"}, {"hex": "f09f"}], "finish": "length"},
             {"match": "", "pieces": [{"hex": h} for h in ("61", "ff", "62", "63")]}]
    with script_fleet(lines) as fleet:
        assert fleet.chat("x").text == "a�bc"
        cut = fleet.chat("cut", max_tokens=2)
        assert cut.finish == "length" and cut.text.startswith("a"), cut.text


def a03_a04_stop_strings_across_tokens():
    lines = [{"match": "fox", "pieces": pieces("The quick br", "own", " fox", " jumps")},
             {"match": "count", "pieces": pieces("one, ", "two, ", "three", " four", " five", " six"), "lag": 3}]
    with script_fleet(lines) as fleet:
        for stream in (True, False):
            reply = fleet.chat("fox", stream=stream, stop=["own fox"])
            assert reply.text == "The quick br" and reply.finish == "stop", reply.text
            late = fleet.chat("count", stream=stream, stop=["three"])
            assert late.text == "one, two, " and late.finish == "stop", late.text
            assert late.usage["completion_tokens"] <= 6
        fleet.await_idle()


def a_client_that_leaves_frees_everything():
    lines = [{"match": "", "pieces": pieces(*[f"t{i} " for i in range(200)], delay_ms=20)}]
    with script_fleet(lines) as fleet:
        import http.client
        connection = http.client.HTTPConnection(*fleet.address, timeout=30)
        connection.request("POST", "/v1/chat/completions", headers=fleet.auth(), body=json.dumps(
            {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "x"}]}))
        answer = connection.getresponse()
        answer.readline()
        wait_for(lambda: fleet.ctl("show", "requests"), "the request to be listed")
        answer.close()
        connection.close()
        wait_for(lambda: not fleet.ctl("show", "requests"), "the request to be gone", 10)
        fleet.await_idle(10)


def a_script_that_refuses_is_tried_again():
    lines = [{"match": "", "pieces": [], "finish": "refuse"}, {"match": "", "pieces": pieces("a", "b")}]
    with script_fleet(lines) as fleet:
        assert fleet.chat("x").text == "ab"
        fleet.await_idle()


if __name__ == "__main__":
    main([stream_rules, a01_characters_over_several_tokens, a02_bytes_that_never_become_a_character,
          a03_a04_stop_strings_across_tokens, a_client_that_leaves_frees_everything,
          a_script_that_refuses_is_tried_again, demo_model_answers,
          demo_model_answers_every_listed_question])
