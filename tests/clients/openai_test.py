"""The openai Python client, as it comes from PyPI, against a fleet (tests/clients/run)."""

import asyncio
import pathlib
import sys

import openai

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import PATIENCE, Fleet, main, pieces, script_fleet  # noqa: E402

ASK = [{"role": "user", "content": "count"}]
COUNT = {"match": "count", "pieces": pieces("one", " two", " three")}


def client_of(fleet, cls=openai.OpenAI, **options):
    host, port = fleet.address
    return cls(**{"base_url": f"http://{host}:{port}/v1", "api_key": fleet.key, "timeout": 60 * PATIENCE,
                  "max_retries": 0, **options})


def failure(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def chat_streamed_and_whole():
    with script_fleet([COUNT]) as fleet:
        client = client_of(fleet)
        chunks = list(client.chat.completions.create(model="demo", messages=ASK, stream=True,
                                                     stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "one two three", text
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        usage = chunks[-1].usage
        assert not chunks[-1].choices and usage.completion_tokens == 3, chunks[-1]
        assert usage.total_tokens == usage.prompt_tokens + 3
        assert usage.prompt_tokens_details.cached_tokens == 0
        assert len({c.id for c in chunks}) == 1

        whole = client.chat.completions.create(model="demo", messages=ASK)
        assert whole.choices[0].message.content == text
        assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens == 3
        raw = client.chat.completions.with_raw_response.create(model="demo", messages=ASK)
        assert fleet.explain(raw.headers["x-request-id"]), "explain knows the id that the client got"
        fleet.await_idle()


def completions_streamed_and_whole():
    with script_fleet([COUNT, {"match": "", "pieces": pieces("x")}]) as fleet:
        client = client_of(fleet)
        whole = client.completions.create(model="demo", prompt="count", max_tokens=20)
        assert whole.object == "text_completion" and whole.choices[0].text == "one two three", whole
        assert whole.choices[0].finish_reason == "stop" and whole.choices[0].logprobs is None
        assert whole.usage.completion_tokens == 3 and whole.usage.prompt_tokens_details.cached_tokens == 0
        chunks = list(client.completions.create(model="demo", prompt=["count"], stream=True,
                                                stream_options={"include_usage": True}))
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "one two three"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 3
        assert client.completions.create(model="demo", prompt=[5, 6], best_of=1, echo=False, n=1).usage.prompt_tokens == 2
        for fields, param in (({"echo": True}, "echo"), ({"logprobs": 2}, "logprobs"), ({"suffix": "b"}, "suffix"),
                              ({"best_of": 3}, "best_of"), ({"prompt": ["a", "b"]}, "prompt")):
            error = failure(openai.BadRequestError, lambda fields=fields: client.completions.create(
                **{"model": "demo", "prompt": "count", **fields}))
            assert error.param == param and error.type == "invalid_request_error", error
        fleet.await_idle()


def models():
    with script_fleet([COUNT]) as fleet:
        client = client_of(fleet)
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").object == "model"
        error = failure(openai.NotFoundError, lambda: client.models.retrieve("none"))
        assert error.code == "model_not_found" and error.request_id, error


def typed_errors():
    with script_fleet([COUNT], overrides=["di-router:model.context_tokens_max=256"]) as fleet:
        client = client_of(fleet)
        create = client.chat.completions.create

        def ask(**fields):
            return lambda: create(**{"model": "demo", "messages": ASK, **fields})

        stranger = client_of(fleet, api_key="sk-di-AAAAAAAA-" + "A" * 43)
        error = failure(openai.AuthenticationError,
                        lambda: stranger.chat.completions.create(model="demo", messages=ASK))
        assert error.status_code == 401 and error.code == "invalid_api_key", error
        error = failure(openai.NotFoundError, ask(model="none"))
        assert error.code == "model_not_found" and error.param == "model", error
        assert failure(openai.BadRequestError, ask(logprobs=True)).param == "logprobs"
        assert failure(openai.BadRequestError, ask(temperature=9)).param == "temperature"
        assert failure(openai.BadRequestError, ask(n=2)).param == "n"
        long = [{"role": "user", "content": "word " * 1000}]
        assert failure(openai.BadRequestError, ask(messages=long)).code == "context_length_exceeded"
        assert failure(openai.NotFoundError, lambda: client.embeddings.create(model="demo", input="x"))
        fleet.await_idle()


def the_tenants_limit():
    lines = [{"match": "", "pieces": pieces("a", "b"), "finish": "stall"}]
    with script_fleet(lines, overrides=["di-router:limits.concurrency_max=1"]) as fleet:
        client = client_of(fleet)
        with client.chat.completions.create(model="demo", messages=ASK, stream=True) as stream:
            next(iter(stream))
            error = failure(openai.RateLimitError,
                            lambda: client.chat.completions.create(model="demo", messages=ASK))
            assert error.status_code == 429 and error.response.headers["retry-after"] == "1"
        # Leaving the stream gave the place back.
        fleet.await_idle()


def many_at_once():
    async def all_of(fleet):
        async with client_of(fleet, openai.AsyncOpenAI) as client:
            async def one():
                stream = await client.chat.completions.create(model="demo", messages=ASK, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])
            return await asyncio.gather(*(one() for _ in range(24)))

    with script_fleet([COUNT]) as fleet:
        assert set(asyncio.run(all_of(fleet))) == {"one two three"}
        fleet.await_idle()


def the_demo_model():
    ask = {"model": "demo", "temperature": 0, "messages": [{"role": "user", "content": "What does di-kvd do?"}]}
    with Fleet() as fleet:
        client = client_of(fleet)
        streamed = "".join(c.choices[0].delta.content or ""
                           for c in client.chat.completions.create(**ask, stream=True))
        assert streamed.startswith("di-kvd holds the KV cache"), streamed
        answer = client.chat.completions.create(**ask)
        assert answer.choices[0].message.content == streamed
        assert answer.choices[0].finish_reason == "stop"


if __name__ == "__main__":
    main([chat_streamed_and_whole, completions_streamed_and_whole, models, typed_errors, the_tenants_limit, many_at_once,
          the_demo_model])
