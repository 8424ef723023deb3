"""Calls of tools and thoughts over HTTP: offered, forced, streamed, whole, with everything else a request may ask."""

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shared.dialect import CallShapes, Dialect, Opening, Thoughts
from shared.messages import GenerateRequest
from tests.api.conftest import RunningApi
from tests.api.engine_side import MODEL, Answer, EngineSide
from tests.api.streams import opening, rest
from tests.api.test_chat import CHAT, events
from tests.waiting import eventually

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL, OTHER]}
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}
THOUGHTS = Thoughts("<think>", "</think>", close_id=3)


@pytest.fixture
def client(api: RunningApi) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def speak(api: RunningApi, engine: EngineSide, *openings: Opening, tools: Any = "hermes") -> None:
    """Have the tokenizer tell another dialect, and wait until the api knows it."""
    default, on, off = openings or ("free", "free", "free")
    engine.dialect = Dialect(tools, THOUGHTS if openings else None, (default, on, off))
    eventually(lambda: api.service.fleet.dialect(MODEL) == engine.dialect, "the api knows the dialect")


@pytest.fixture(autouse=True)
def hermes(api: RunningApi, engine: EngineSide) -> Iterator[None]:
    """Whatever dialect a test has the tokenizer tell, the next one finds the common one."""
    yield
    speak(api, engine)


def says(engine: EngineSide, text: str, size: int = 3, finish: Any = "stop", logprobs: bool = False) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    engine.script = lambda request: Answer(list(pieces), finish, logprobs=logprobs)


def gathered(raw: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Put the deltas of a stream together as clients do."""
    *chunks, done = events(raw)
    assert done == "[DONE]"
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(found["calls"]):
                    found["calls"].append([call["id"], call["type"], call["function"]["name"], ""])
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                found["calls"][call["index"]][3] += call["function"]["arguments"]
            found["finish"] = choice["finish_reason"] or found["finish"]
    return found, chunks


def test_a_call_whole_and_streamed(api: RunningApi, engine: EngineSide) -> None:
    says(engine, f"Let me see.\n{CALL}\n{NOW}")
    choice = api.post(CHAT, ASK).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": PARIS},
        {"name": "now", "arguments": "{}"},
    ]
    assert all(c["type"] == "function" and c["id"].startswith("call_") for c in message["tool_calls"])
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    found, chunks = gathered(api.post(CHAT, {**ASK, "stream": True}).content)
    assert found["content"] == "Let me see."
    assert [c[1:] for c in found["calls"]] == [["function", "get_weather", PARIS], ["function", "now", "{}"]]
    assert found["finish"] == "tool_calls"
    arguments = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", []) if "id" not in c]
    assert len(arguments) > 3, "arguments come as they grow"


def test_a_call_without_text_has_no_content(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    assert api.post(CHAT, ASK).json()["choices"][0]["message"]["content"] is None
    found, _ = gathered(api.post(CHAT, {**ASK, "stream": True}).content)
    assert found["content"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(api: RunningApi, engine: EngineSide, stream: bool) -> None:
    text = '<tool_call>\n{"name": "unheard_of", "arguments": {}}\n</tool_call>'
    says(engine, text)
    answer = api.post(CHAT, {**ASK, "stream": stream})
    if stream:
        found, _ = gathered(answer.content)
        assert (found["content"], found["calls"], found["finish"]) == (text, [], "stop")
    else:
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}


def test_calls_stay_text_where_none_may_be_made(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    choice = api.post(CHAT, {**ASK, "tool_choice": "none"}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert engine.queued[-1].tools is None


def test_a_call_that_the_limit_cuts(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL[:-20], finish="length")
    choice = api.post(CHAT, ASK).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert PARIS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_at_most_one_call(api: RunningApi, engine: EngineSide) -> None:
    says(engine, f"{CALL}\n{NOW}")
    found, _ = gathered(api.post(CHAT, {**ASK, "parallel_tool_calls": False, "stream": True}).content)
    assert [c[2] for c in found["calls"]] == ["get_weather"]


def test_a_forced_call_is_drawn_by_a_grammar(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    wanted: list[tuple[dict[str, Any], list[str], bool]] = [
        ({"tool_choice": "required"}, ["get_weather", "now"], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["get_weather", "now"], False),
        ({"tool_choice": NAMED}, ["get_weather"], False),
        ({"tool_choice": allowed}, ["get_weather"], True),
    ]
    for change, names, parallel in wanted:
        choice = api.post(CHAT, {**ASK, **change}).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
        grammar = engine.queued[-1].params.grammar
        assert grammar is not None and grammar.kind == "calls"
        shapes = json.loads(grammar.text)
        assert [f[0] for f in shapes[1]] == names and shapes[2] is parallel
        assert json.loads(shapes[1][0][1])["additionalProperties"] is False
    assert engine.queued[-1].tools == [TOOL, OTHER]


@pytest.mark.parametrize(
    ("parameters", "others"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"properties": {"a": {}}, "required": ["a"]}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"properties": {"a": {}}, "required": ["b"]}, None),
        ({"properties": {"a": {}}, "required": [[]]}, None),
        ({"properties": 7, "required": "a"}, None),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, None),
    ],
)
def test_a_forced_call_has_the_parameters_that_are_declared(
    api: RunningApi, engine: EngineSide, parameters: Any, others: bool | None
) -> None:
    says(engine, NOW)
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
    assert api.post(CHAT, {**ASK, "tools": [tool], "tool_choice": "required"}).status_code == 200
    grammar = engine.queued[-1].params.grammar
    assert grammar is not None and grammar.field == "tools[0].function.parameters"
    assert json.loads(json.loads(grammar.text)[1][0][1]).get("additionalProperties") is others


def test_strict_holds_calls_to_their_schemas_also_where_none_is_forced(api: RunningApi, engine: EngineSide) -> None:
    says(engine, "Fine.")
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    api.post(CHAT, ASK)
    assert engine.queued[-1].params.grammar is None
    assert api.post(CHAT, {**ASK, "tools": [strict, OTHER]}).json()["choices"][0]["message"]["content"] == "Fine."
    grammar = engine.queued[-1].params.grammar
    assert grammar is not None and json.loads(grammar.text)[3] is True


def test_an_answer_by_schema_or_a_call(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert api.post(CHAT, {**ASK, "response_format": form}).json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = engine.queued[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert isinstance(grammar.calls, CallShapes) and len(grammar.calls.functions) == 2
    api.post(CHAT, {**ASK, "response_format": form, "tool_choice": "required"})
    grammar = engine.queued[-1].params.grammar
    assert grammar is not None and grammar.kind == "calls"


def test_other_formats(api: RunningApi, engine: EngineSide) -> None:
    speak(api, engine, tools="mistral")
    says(engine, f'Yes.[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]')
    found, _ = gathered(api.post(CHAT, {**ASK, "stream": True}).content)
    assert (found["content"], [c[2:] for c in found["calls"]]) == ("Yes.", [["get_weather", PARIS]])
    speak(api, engine, tools="llama3")
    says(engine, f'{{"name": "get_weather", "parameters": {PARIS}}}')
    assert api.post(CHAT, ASK).json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
    speak(api, engine, tools="")
    says(engine, CALL)
    assert api.post(CHAT, ASK).json()["choices"][0]["message"]["content"] == CALL
    assert api.post(CHAT, {**ASK, "tool_choice": "required"}).json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_taken_apart_each_by_itself(api: RunningApi, engine: EngineSide, stream: bool) -> None:
    texts = iter([CALL, "Sunny.", NOW])

    def script(request: GenerateRequest) -> Answer:
        return Answer(list(next(texts)), "stop")

    engine.script = script
    answer = api.post(CHAT, {**ASK, "n": 3, "stream": stream})
    if stream:
        *chunks, _ = events(answer.content)
        finishes = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    else:
        finishes = {c["index"]: c["finish_reason"] for c in answer.json()["choices"]}
    assert sorted(finishes.values()) == ["stop", "tool_calls", "tool_calls"]


def test_log_probabilities_of_an_answer_that_is_taken_apart(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL, logprobs=True)
    body = {**ASK, "logprobs": True, "stream": True}
    found, chunks = gathered(api.post(CHAT, body).content)
    entries = [e for c in chunks for one in c["choices"] for e in (one["logprobs"] or {}).get("content") or []]
    assert "".join(e["token"] for e in entries) == CALL
    assert found["content"] == "" and found["calls"][0][3] == PARIS


def test_usage_goes_on_while_text_is_held_back(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = gathered(api.post(CHAT, {**ASK, "stream": True, "stream_options": options}).content)
    assert all(c["usage"] for c in chunks)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(range(0, len(CALL), 3))


THINKING = "<think>\nIt may rain.\n</think>\n\nSunny."


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_told_apart(api: RunningApi, engine: EngineSide, stream: bool) -> None:
    speak(api, engine, "free", "free", "never")
    engine.script = lambda request: Answer(["<think>", "\nIt may rain.\n", "</think>", "\n\nSunny", "."], "stop")
    body = {k: v for k, v in ASK.items() if k != "tools"}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = api.post(CHAT, {**body, **options})
    if stream:
        found, chunks = gathered(answer.content)
        usage = chunks[-1]["usage"]
    else:
        found, usage = answer.json()["choices"][0]["message"], answer.json()["usage"]
    assert (found["reasoning_content"], found["content"]) == ("It may rain.", "Sunny.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert usage["completion_tokens"] == 5
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = api.post(CHAT, {**body, **off}).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": THINKING, "refusal": None}
        assert engine.queued[-1].template_kwargs["enable_thinking"] is False


def test_thoughts_that_the_prompt_has_begun(api: RunningApi, engine: EngineSide) -> None:
    speak(api, engine, "begun", "begun", "never")
    body = {k: v for k, v in ASK.items() if k != "tools"}
    says(engine, "hm", finish="length")
    message = api.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    says(engine, f"hm</think>{CALL}")
    choice = api.post(CHAT, ASK).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "hm"
    says(engine, 'hm</think>{"a": 1}')
    message = api.post(CHAT, {**body, "response_format": {"type": "json_object"}}).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'
    grammar = engine.queued[-1].params.grammar
    assert grammar is not None and grammar.thoughts is not None and grammar.thoughts.begun
    for content, thought in (("<think>\nso", "x"), ("<think>so</think> it", None), ("it", None)):
        says(engine, "x</think>y")
        talk = [*body["messages"], {"role": "assistant", "content": content}]
        message = api.post(CHAT, {**body, "messages": talk, "continue_final_message": True}).json()["choices"][0]
        assert message["message"].get("reasoning_content") == thought


def test_token_ids_are_returned(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    body = {**ASK, "return_token_ids": True}
    whole = api.post(CHAT, body).json()
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    assert engine.queued[-1].params.returns_prompt and "prompt_token_ids" in whole
    _, chunks = gathered(api.post(CHAT, {**body, "stream": True}).content)
    assert [i for c in chunks for one in c["choices"] for i in one.get("token_ids", [])] == ids
    says(engine, "three tok")
    plain = {"model": MODEL, "prompt": "x", "return_token_ids": True, "max_tokens": 3}
    choice = api.post("/v1/completions", plain).json()["choices"][0]
    assert choice["token_ids"] == [1, 2, 3]
    *chunks, _ = events(api.post("/v1/completions", {**plain, "stream": True}).content)
    assert [i for c in chunks for one in c["choices"] for i in one.get("token_ids", [])] == [1, 2, 3]


def test_an_unknown_model_is_not_found_with_tools_too(api: RunningApi) -> None:
    assert api.post(CHAT, {**ASK, "model": "other"}).json()["error"]["code"] == "model_not_found"


def test_the_typed_objects_of_the_openai_client(client: openai.OpenAI, engine: EngineSide) -> None:
    says(engine, f"One moment. {CALL}")
    whole = client.chat.completions.create(**ASK)
    call = (whole.choices[0].message.tool_calls or [])[0]
    assert call.type == "function" and call.function.name == "get_weather"
    with client.chat.completions.stream(**ASK) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].finish_reason == "tool_calls"
    assert (final.choices[0].message.tool_calls or [])[0].function.arguments == PARIS
    talk: list[Any] = [
        *ASK["messages"],
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    says(engine, "Sunny.")
    again = client.chat.completions.create(**{**ASK, "messages": talk})
    assert again.choices[0].message.content == "Sunny." and again.choices[0].message.tool_calls is None
    told = (engine.queued[-1].prompts[0].messages or [])[1]
    assert told["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": PARIS}


def test_a_stream_of_calls_can_be_come_back_to_at_any_event(api: RunningApi, engine: EngineSide) -> None:
    speak(api, engine, "begun", "begun", "never")
    says(engine, f"hm</think>So. {CALL}", logprobs=True)
    body = {**ASK, "return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
    with opening(api.url, CHAT, body) as (stream, heard):
        told = list(heard)
    found, _ = gathered("".join(f"data: {event.data}\n\n" for event in told).encode())
    assert found["calls"][0][2:] == ["get_weather", PARIS]
    for number, event in enumerate(told, 1):
        assert rest(api.url, stream, event.id) == told[number:]


def test_a_takeover_in_the_middle_of_a_call(api: RunningApi, engine: EngineSide) -> None:
    says(engine, CALL)
    engine.hold()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(api.post, CHAT, {**ASK, "stream": True})
        eventually(lambda: engine.running, "it runs")
        for _ in range(17):
            engine.step_once()
        engine.fence_again()
        engine.release()
        found, _ = gathered(asked.result(30).content)
    assert [c[2:] for c in found["calls"]] == [["get_weather", PARIS]]
    assert (found["content"], found["finish"]) == ("", "tool_calls")
