"""Calls of tools by the real model, which knows none and is made to write them, through the whole stack."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.stack import Stack

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
        },
        "strict": True,
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(real: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(real: Stack, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = real.chat_body("Weather in Paris?", tools=[WEATHER, NOW], max_tokens=100)
    return {**body, **fields}


def test_a_named_function_is_called_whole_and_streamed(real: Stack, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ask(real, tool_choice=NAMED)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    with client.chat.completions.stream(**ask(real, tool_choice=NAMED)) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments and final.finish_reason == "tool_calls"


def test_a_required_call_and_its_result(real: Stack, client: openai.OpenAI) -> None:
    fields = ask(real, tool_choice="required", parallel_tool_calls=False)
    choice = client.chat.completions.create(**fields).choices[0]
    (call,) = choice.message.tool_calls or []
    talk = [
        *fields["messages"],
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(**ask(real, messages=talk, tool_choice="none", max_tokens=5))
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None and choice.finish_reason == "tool_calls"


def test_a_schema_that_cannot_be_used_is_refused_by_its_field(real: Stack, client: openai.OpenAI) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask(real, tools=[WEATHER, bad], tool_choice="required"))
    assert refused.value.param == "tools[1].function.parameters"
