"""Clients that people have, as they come from their makers: LangChain's, LiteLLM's, and OpenAI's errors.

Each chats, streams, has a tool called and an answer of a given structure, against the real model.
"""

import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.e2e.stack import Stack

QUESTION = "Weather in Paris?"
HELLO = "Hello there! How can I assist you today?"


class Weather(pydantic.BaseModel):
    """What the weather is like somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: str = pydantic.Field(max_length=12)
    unit: str = pydantic.Field(pattern="^[cf]$")


@pytest.fixture(scope="module")
def chat_openai(real: Stack) -> Any:
    """LangChain's model; its import takes a while, so only this module pays for it."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=real.model,
        base_url=f"{real.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=80,
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_chats_and_streams(chat_openai: Any) -> None:
    answer = chat_openai.invoke("hi")
    assert answer.content == HELLO
    assert answer.usage_metadata["input_tokens"] == 31
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(chat_openai.stream("hi"))
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == HELLO
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


def test_langchain_has_a_tool_called(chat_openai: Any) -> None:
    bound = chat_openai.bind_tools([Weather], tool_choice="Weather")
    [call] = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "Weather"
    assert set(call["args"]) == {"city", "unit"}
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("Weather", call["args"])]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_has_a_structure_filled(chat_openai: Any, method: str) -> None:
    found = chat_openai.with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(found, Weather)
    assert found.unit in ("c", "f")


@pytest.fixture(scope="module")
def litellm(real: Stack) -> Iterator[Any]:
    """LiteLLM's one function, told where the server is; it reads nothing from the network."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import litellm

        litellm.telemetry = False

        def complete(content: str, **fields: Any) -> Any:
            return litellm.completion(
                model=f"openai/{real.model}",
                api_base=f"{real.url}/v1",
                api_key="none",
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=80,
                max_retries=0,
                **fields,
            )

        yield complete


def test_litellm_chats_and_streams(litellm: Any) -> None:
    answer = litellm("hi")
    assert answer.choices[0].message.content == HELLO
    assert answer.usage.prompt_tokens == 31
    chunks = list(litellm("hi", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == HELLO
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_litellm_has_a_tool_called(litellm: Any) -> None:
    function = {"name": "weather", "parameters": Weather.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    choice = litellm(QUESTION, **asked).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    deltas = [c.choices[0].delta.tool_calls for c in litellm(QUESTION, stream=True, **asked)]
    streamed = "".join(part.function.arguments or "" for parts in deltas for part in parts or ())
    assert streamed == call.function.arguments


def test_litellm_has_a_structure_filled(litellm: Any) -> None:
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
    answer = litellm(QUESTION, response_format={"type": "json_schema", "json_schema": schema})
    assert Weather.model_validate_json(answer.choices[0].message.content).unit in ("c", "f")


def test_litellm_names_errors_as_openai_does(litellm: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        litellm("hi", logit_bias={"x": 1})


ERRORS: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None]] = [
    (openai.BadRequestError, {"extra_body": {"no_such_field": 1}}, "unknown_field"),
    (openai.BadRequestError, {"max_tokens": 10_000}, "context_length_exceeded"),
    (openai.NotFoundError, {"model": "no-such"}, "model_not_found"),
    (openai.APIStatusError, {"messages": [{"role": "user", "content": "a" * (17 << 20)}]}, "body_too_large"),
    (openai.InternalServerError, {"extra_body": {"timeout": 0.0001}}, "deadline_exceeded"),
]


@pytest.mark.parametrize(("kind", "fields", "code"), ERRORS, ids=[str(code) for _, _, code in ERRORS])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(
    real: Stack, kind: type[openai.APIStatusError], fields: dict[str, Any], code: str | None, stream: bool
) -> None:
    asked = {"model": real.model, "messages": [{"role": "user", "content": "hi"}], **fields}
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**asked, stream=stream)
        assert caught.value.code == code
        assert caught.value.request_id
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("no-such")
