"""The form of streams and of errors, as clients in the field rely on it."""

import json
from typing import Any

import pytest

from tests.e2e.stack import Json, Stack, finish_of, text_of

LONG = {"2": -100, "0": -100}
HELLO = {"19556": 100}
"""Makes every token "Hello"."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body_of(stack: Stack, path: str, **fields: Any) -> Json:
    return stack.chat_body(**fields) if path == CHAT else stack.complete_body("hi", **fields)


def error_of(response: Any) -> Json:
    """Give the error of a response, whose envelope must be whole."""
    assert response.headers["content-type"].startswith("application/json")
    error: Json = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert "Traceback" not in error["message"] and ".py" not in error["message"]
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_events_are_lines_of_data_with_an_empty_line_between(real: Stack, path: str) -> None:
    response = real.client.post(path, json={**body_of(real, path, max_tokens=8, logit_bias=LONG), "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in response.headers["cache-control"]
    assert response.headers.get("content-encoding") is None
    assert response.headers.get("content-length") is None
    lines = response.content.replace(b"\r\n", b"\n").split(b"\n")
    assert all(line == b"" or line.startswith((b"data: ", b":")) for line in lines)
    assert response.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chat.completion.chunk"), (COMPLETIONS, "text_completion")])
def test_chunks_of_a_stream_share_one_envelope(real: Stack, path: str, kind: str) -> None:
    body = body_of(real, path, max_tokens=4, logit_bias=LONG)
    first, second = real.stream(path, body), real.stream(path, body)
    for chunks in (first, second):
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert len({chunk["created"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {kind}
        assert {chunk["model"] for chunk in chunks} == {real.model}
        assert all(choice["index"] == 0 for chunk in chunks for choice in chunk["choices"])
        assert finish_of(chunks) == "length"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert all("finish_reason" in choice for chunk in chunks for choice in chunk["choices"])
    assert first[0]["id"] != second[0]["id"]


def test_usage_comes_once_behind_the_last_choice_and_only_when_asked_for(real: Stack) -> None:
    body = real.chat_body(max_tokens=8, logit_bias=LONG)
    asked = real.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert asked[-1]["choices"] == []
    usage = asked[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (31, 8, 39)
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in asked[:-1])
    for options in (None, {"include_usage": False}):
        assert all(c.get("usage") is None for c in real.stream(CHAT, {**body, "stream_options": options}))


def test_every_token_passes_as_soon_as_it_is_there(real: Stack) -> None:
    body = {**real.chat_body(max_tokens=64, logit_bias=LONG), "stream": True}
    with real.client.stream("POST", CHAT, json=body, headers={"Accept-Encoding": "gzip, br"}) as response:
        parts = [part for part in response.iter_raw() if part]
    assert len(parts) >= 20


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": " hello" * 9000}]}, 400, "messages"),
        ({"model": "no-such-model"}, 404, "model"),
        ({"no_such_field": 1}, 400, "no_such_field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_json_with_its_status_streaming_or_not(
    real: Stack, fields: Json, status: int, param: str, stream: bool
) -> None:
    response = real.client.post(CHAT, json={**real.chat_body(), **fields, "stream": stream})
    assert response.status_code == status
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"] in (param, "prompt")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("GET", CHAT, 405),
        ("GET", "/v1/models/no-such-model", 404),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_wrong_paths_and_methods_have_the_same_envelope(real: Stack, method: str, path: str, status: int) -> None:
    response = real.client.request(method, path)
    assert response.status_code == status
    error_of(response)


@pytest.mark.parametrize("raw", ["{", "[]", "null", '"x"', "5", "{}", "", "{'a': 1}", '{"a": NaN}'])
def test_a_body_that_is_no_request_is_a_400(real: Stack, raw: str) -> None:
    response = real.client.post(CHAT, content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_models_are_listed_and_found(real: Stack) -> None:
    listed = real.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == [real.model]
    one = real.client.get(f"/v1/models/{real.model}").json()
    assert (one["id"], one["object"]) == (real.model, "model")


def test_the_token_that_comes_with_the_end_is_not_lost(real: Stack) -> None:
    for num_tokens in (1, 2):
        body = real.chat_body(max_tokens=num_tokens, logit_bias=HELLO)
        chunks = real.stream(CHAT, body)
        assert text_of(chunks) == "Hello" * num_tokens
        assert finish_of(chunks) == "length"


def test_fields_sent_as_null_are_fields_not_sent(real: Stack) -> None:
    names = """top_p n stop seed stream stream_options presence_penalty frequency_penalty logprobs top_logprobs user
        tools tool_choice response_format metadata max_completion_tokens parallel_tool_calls service_tier store"""
    nulls = dict.fromkeys(names.split())
    assert real.chat(**nulls, max_tokens=2, logit_bias=LONG)["usage"]["completion_tokens"] == 2


def test_a_request_id_goes_in_and_comes_out(real: Stack) -> None:
    given = real.client.post(CHAT, json=real.chat_body(max_tokens=1), headers={"X-Request-Id": "my-request.1"})
    assert given.headers["x-request-id"] == "my-request.1"
    made = [real.client.get("/v1/models").headers["x-request-id"] for _ in range(2)]
    assert made[0] and made[0] != made[1]


def test_errors_inside_json_are_strict_json(real: Stack) -> None:
    response = real.client.post(CHAT, content='{"model": "\\ud800"}', headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500
    json.loads(response.content)
