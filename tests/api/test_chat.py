"""Chat and completions over HTTP, whole and streamed."""

import concurrent.futures
import json
from typing import Any

import httpx
import openai
import pytest

from shared.messages import ErrorBody, GenerateRequest
from tests.api.conftest import RunningApi
from tests.api.engine_side import MODEL, TOO_LONG, Answer, EngineSide
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 3}


def events(raw: bytes) -> list[Any]:
    """Read the events of a stream; [DONE] stays a string."""
    assert raw.endswith(b"\n\n")
    found = [e.removeprefix(b"data: ") for e in raw.split(b"\n\n") if e.startswith(b"data: ")]
    return [e.decode() if e == b"[DONE]" else json.loads(e) for e in found]


def build(client: httpx.Client, api: RunningApi, body: Any) -> httpx.Request:
    return client.build_request("POST", api.url + CHAT, json=body)


def test_a_whole_answer(api: RunningApi) -> None:
    answer = api.post(CHAT, HI)
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " w1 w2 w3", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stream(api: RunningApi) -> None:
    answer = api.post(CHAT, {**HI, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in answer.headers["cache-control"]
    assert answer.headers["x-accel-buffering"] == "no"
    *chunks, done = events(answer.content)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:-1])
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == " w1 w2 w3"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(c["usage"] is None for c in chunks[:-1])


def test_choices_are_interleaved_by_index(api: RunningApi) -> None:
    body = {**HI, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, _ = events(api.post(CHAT, body).content)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == " w1 w2 w3"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 9, 11)


def test_choices_draw_apart_and_a_seed_repeats(api: RunningApi, engine: EngineSide) -> None:
    api.post(CHAT, {**HI, "n": 3, "seed": 42})
    api.post(CHAT, {**HI, "n": 3, "seed": 42})
    api.post(CHAT, HI)
    api.post(CHAT, HI)
    first, again, free, other = (request.seeds for request in engine.queued)
    assert first == again
    assert first[0] == 42
    assert len(set(first)) == 3
    assert free != other


def test_completions_with_several_prompts(api: RunningApi) -> None:
    body = {"model": MODEL, "prompt": ["a", "b c", "d e f"], "n": 2, "echo": True, "max_tokens": 2}
    answer = api.post("/v1/completions", body).json()
    assert [c["text"] for c in answer["choices"]] == [p + " w1 w2" for p in ("a", "b c", "d e f") for _ in (0, 1)]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12


def test_completions_stream(api: RunningApi) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "stream": True}
    *chunks, done = events(api.post("/v1/completions", body).content)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert "".join(c["choices"][0]["text"] for c in chunks) == "".join(f" w{i}" for i in range(1, 17))
    assert all("usage" not in c for c in chunks)


def test_logprobs_of_chat(api: RunningApi) -> None:
    whole = api.post(CHAT, {**HI, "logprobs": True, "top_logprobs": 2}).json()["choices"][0]["logprobs"]["content"]
    *chunks, _ = events(api.post(CHAT, {**HI, "logprobs": True, "top_logprobs": 2, "stream": True}).content)
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == whole
    assert [e["token"] for e in whole] == [" w1", " w2", " w3"]
    assert whole[0]["bytes"] == [32, 119, 49]
    assert [t["token"] for t in whole[0]["top_logprobs"]] == ["t0", "t1"]


def test_logprobs_of_completions(api: RunningApi) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "logprobs": 0}
    found = api.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [" w1", " w2"]
    assert found["token_logprobs"] == [-0.5, -0.5]
    assert found["text_offset"] == [0, 3]
    assert found["top_logprobs"] == [{" w1": -0.5}, {" w2": -0.5}]


def test_the_plain_interface(api: RunningApi, engine: EngineSide) -> None:
    engine.script = lambda request: Answer([" a\nb", "c"], "stop")
    raw = api.post("/generate", {"prompt": "x", "max_tokens": 4, "ignore_eos": True}).content
    assert raw == b"data:  a\ndata: b\n\ndata: c\n\ndata: [DONE]\n\n"
    assert engine.queued[0].params.ignore_eos
    whole = api.post("/generate", {"prompt": "x", "stream": False}).json()
    assert whole["text"] == " a\nbc"
    assert whole["finish_reason"] == "stop"


def test_no_token_at_all(api: RunningApi, engine: EngineSide) -> None:
    engine.script = lambda request: Answer([], "stop")
    body = api.post(CHAT, HI).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 0
    *chunks, done = events(api.post(CHAT, {**HI, "stream": True}).content)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_rejected_request_is_a_plain_http_error(api: RunningApi, engine: EngineSide, stream: bool) -> None:
    engine.reject = lambda request: TOO_LONG
    answer = api.post(CHAT, {**HI, "stream": stream, "n": 2})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "messages"


def test_an_error_in_mid_stream_ends_it_without_done(api: RunningApi, engine: EngineSide) -> None:
    failure = ErrorBody(500, "it broke", "server_error", "nan_logits")
    engine.script = lambda request: Answer([" one", " two"], None, failure)
    engine.hold()
    with httpx.Client(timeout=20) as client, concurrent.futures.ThreadPoolExecutor() as pool:
        began = pool.submit(lambda: client.send(build(client, api, {**HI, "stream": True}), stream=True))
        eventually(lambda: engine.running, "the request runs")
        engine.step_once()
        answer = began.result(20)
        assert answer.status_code == 200
        engine.release()
        raw = answer.read()
    *chunks, error = events(raw)
    assert error["error"]["code"] == "nan_logits"
    assert b"[DONE]" not in raw
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert api.post(CHAT, HI).status_code == 500


def test_one_failed_choice_fails_the_answer_and_ends_the_others(api: RunningApi, engine: EngineSide) -> None:
    made: list[str] = []

    def script(request: GenerateRequest) -> Answer:
        made.append(request.uid)
        if len(made) == 1:
            return Answer([" x"], None, ErrorBody(500, "it broke", "server_error"))
        return Answer([" y"] * 10_000)

    engine.script = script
    assert api.post(CHAT, {**HI, "n": 2}).status_code == 500
    eventually(lambda: engine.ended.get(made[1]) == "refused", "the other choice is ended")


def test_the_openai_client(api: RunningApi, engine: EngineSide) -> None:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    with client:
        whole = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        assert whole.choices[0].message.content == " w1 w2"
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=2, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == " w1 w2"
        assert [m.id for m in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=9)
        assert bad.value.param == "temperature"
        engine.script = lambda request: Answer([" one"], None, ErrorBody(500, "broke", "server_error"))
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True)
