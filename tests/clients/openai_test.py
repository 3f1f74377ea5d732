"""The unmodified `openai` client against the demo model: a streamed chat with usage, models, typed errors."""

import pathlib
import sys

import openai

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import Fleet, main, words  # noqa: E402


def client_of(fleet, **kwargs):
    host, port = fleet.address
    return openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key=kwargs.pop("api_key", fleet.key), max_retries=0, **kwargs)


def a_streamed_chat_with_usage():
    with Fleet() as fleet:
        client = client_of(fleet)
        stream = client.chat.completions.create(model="demo", stream=True, stream_options={"include_usage": True},
                                                temperature=0, messages=[{"role": "user", "content": "What does di-kvd do?"}])
        text, usage, finish = "", None, None
        for chunk in stream:
            if chunk.usage is not None:
                usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert text.startswith("di-kvd holds the KV cache"), text
        assert finish == "stop"
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_tokens_details.cached_tokens == 0
        whole = client.chat.completions.create(model="demo", temperature=0,
                                               messages=[{"role": "user", "content": "What does di-kvd do?"}])
        assert whole.choices[0].message.content == text


def models_are_listed():
    with Fleet() as fleet:
        client = client_of(fleet)
        assert [m.id for m in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"


def errors_are_typed():
    with Fleet() as fleet:
        client = client_of(fleet)
        ask = dict(model="demo", messages=[{"role": "user", "content": "x"}])

        def fails(kind, make):
            try:
                make()
            except kind as error:
                return error
            raise AssertionError(f"{kind.__name__} was not raised")
        error = fails(openai.BadRequestError, lambda: client.chat.completions.create(**ask, n=3))
        assert error.param == "n", error
        error = fails(openai.NotFoundError, lambda: client.chat.completions.create(**{**ask, "model": "gpt-4"}))
        assert error.code == "model_not_found", error
        error = fails(openai.BadRequestError, lambda: client.chat.completions.create(
            **{**ask, "messages": [{"role": "user", "content": words(20000)}]}))
        assert error.code == "context_length_exceeded", error
        wrong = client_of(fleet, api_key="sk-di-wrong")
        error = fails(openai.AuthenticationError, lambda: wrong.models.list())
        assert error.code == "invalid_api_key", error
        fleet.kill("di-decode.0")
        error = fails(openai.NotFoundError, lambda: client.models.retrieve("other"))
        assert error.request_id, error


if __name__ == "__main__":
    main([a_streamed_chat_with_usage, models_are_listed, errors_are_typed])
