"""Limits of API keys, as clients meet them: one count over all replicas, and what a key has left in every answer."""

import asyncio
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from services.api.limits import LimitKeeper, _duration, refuse
from shared.broker.limits import Claim, Levels, Limits
from shared.broker.streams import Opened
from shared.messages import Delta, ErrorBody
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import MODEL, TOO_LONG, Answer, EngineSide
from tests.api.streams import RESUME, opening
from tests.api.test_keys import bearer
from tests.redis_keys import command, find_keys
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def ask(api: RunningApi, key: str = "k", **body: Any) -> httpx.Response:
    return api.post(CHAT, {**HI, **body}, headers=bearer(key))


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 429, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    return error


def test_requests_per_minute_are_counted_over_replicas(start_api: StartApi, engine: EngineSide) -> None:
    apis = [start_api(api_keys="a=k requests=4,b=other"), start_api(api_keys="a=k requests=4,b=other")]
    for api in apis:
        api.wait_ready()
    answers = [ask(apis[i % 2], stream=i == 3) for i in range(4)]
    assert [a.status_code for a in answers] == [200] * 4
    left = [int(a.headers["x-ratelimit-remaining-requests"]) for a in answers]
    assert left == sorted(left, reverse=True)
    assert answers[0].headers["x-ratelimit-limit-requests"] == "4"
    assert re.fullmatch(r"[0-9.]+m?s", answers[0].headers["x-ratelimit-reset-requests"])
    late = ask(apis[0])
    assert "4 requests per minute" in refused(late)["message"]
    assert late.headers["x-ratelimit-remaining-requests"] == "0"
    free = ask(apis[0], "other")
    assert free.status_code == 200
    assert not [name for name in free.headers if name.startswith("x-ratelimit")]
    assert 'millrace_requests_refused_total{reason="key_limits"} 1.0' in apis[0].get("/metrics").text


def test_tokens_are_reserved_at_the_start_and_charged_at_the_end(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys="k", key_tokens_per_minute=100_000)
    api.wait_ready()
    engine.script = lambda request: Answer([" a"] * 3, "stop")
    first = ask(api, max_tokens=50_000)
    assert first.status_code == 200
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 50_000
    eventually(lambda: not api.service.limits._settled and not api.service.limits._held, "it is settled")
    assert int(ask(api).headers["x-ratelimit-remaining-tokens"]) > 99_000
    engine.hold()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, api, max_tokens=90_000)
        eventually(lambda: engine.running, "it is under way")
        assert "100000 tokens per minute" in refused(ask(api, max_tokens=90_000))["message"]
        engine.release()
        assert running.result().status_code == 200


def test_requests_under_way_hold_their_places(start_api: StartApi, engine: EngineSide) -> None:
    apis = [start_api(api_keys="a=k concurrency=2") for _ in range(2)]
    for api in apis:
        api.wait_ready()
    engine.hold()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, api) for api in apis]
        eventually(lambda: len(engine.running) == 2, "two are under way")
        for api in apis:
            assert "2 requests at a time" in refused(ask(api))["message"]
        engine.release()
        assert [r.result().status_code for r in running] == [200, 200]
    eventually(lambda: ask(apis[0]).status_code == 200, "places are free again")


def _fail(engine: EngineSide) -> None:
    engine.reject = lambda request: TOO_LONG


def _tell_ids(engine: EngineSide) -> None:
    engine.tell = lambda request: Delta(0, [], "", finish="stop")


def _say_an_error(engine: EngineSide) -> None:
    engine.script = lambda request: Answer([" a"], error=ErrorBody(500, "no", "server_error", "engine_crashed"))


@pytest.mark.parametrize(
    ("path", "body", "headers", "prepare", "status"),
    [
        (CHAT, HI, {}, None, 200),
        (CHAT, HI | {"stream": True}, {}, None, 200),
        (CHAT, HI | {"stream": True, "n": 3}, {}, None, 200),
        (CHAT, HI | {"stream": True}, RESUME, None, 200),
        (CHAT, HI | {"stream": True, "n": 2}, RESUME, None, 200),
        ("/generate", {"prompt": "hi", "max_tokens": 2}, {}, None, 200),
        ("/generate", {"prompt": "hi", "max_tokens": 2, "stream": True}, {}, None, 200),
        ("/tokenize", {"prompt": "hi"}, {}, _tell_ids, 200),
        (CHAT, HI, {}, _fail, 400),
        (CHAT, HI | {"stream": True}, RESUME, _fail, 400),
        ("/tokenize", {"prompt": "hi"}, {}, _fail, 400),
        (CHAT, HI | {"stream": True, "n": 2}, {}, _say_an_error, None),
        (CHAT, HI | {"stream": True, "n": 2}, RESUME, _say_an_error, None),
    ],
)
def test_who_has_read_an_answer_may_ask_again(
    start_api: StartApi,
    engine: EngineSide,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    prepare: Callable[[EngineSide], None] | None,
    status: int | None,
) -> None:
    """Nobody tidies up behind the answers here: what is not free when a client has read the last byte stays taken."""
    monkeypatch.setattr(LimitKeeper, "run", _never)
    api = start_api(api_keys="k", key_concurrency=1, key_tokens_per_minute=100_000)
    api.wait_ready()
    if prepare is not None:
        prepare(engine)
    with httpx.Client(base_url=api.url, headers={**bearer("k"), **headers}, timeout=20) as client:
        for _ in range(3):
            answer = client.post(path, json=body)
            assert answer.status_code == (status or answer.status_code) != 429, answer.text
    assert not api.service.limits._held and not api.service.limits._settled


async def _never(keeper: LimitKeeper) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("reader", [0, 1])
def test_who_comes_back_and_reads_to_the_end_may_ask_again(
    start_api: StartApi, engine: EngineSide, monkeypatch: pytest.MonkeyPatch, reader: int
) -> None:
    """Also at another replica than the one that opened the stream; and what was not used is given back once."""
    monkeypatch.setattr(LimitKeeper, "run", _never)
    apis = [start_api(api_keys="a=k concurrency=1 tokens=100000") for _ in range(2)]
    for api in apis:
        api.wait_ready()
    engine.hold()
    with opening(apis[0].url, CHAT, HI | {"max_tokens": 40_000}, **bearer("k")) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        next(events)
    eventually(lambda: apis[0].service.limits._left, "its client is gone")
    assert ask(apis[reader]).status_code == 429
    for running in engine.running.values():
        running.answer.pieces[2:] = []
    engine.release()
    assert "[DONE]" in apis[reader].get(f"/v1/streams/{stream}", headers=bearer("k")).text
    answer = ask(apis[reader])
    assert answer.status_code == 200
    assert 99_000 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 100_000


def test_who_has_deleted_a_stream_may_ask_again(
    start_api: StartApi, engine: EngineSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LimitKeeper, "run", _never)
    api = start_api(api_keys="k", key_concurrency=1)
    api.wait_ready()
    engine.hold()
    with opening(api.url, CHAT, HI, **bearer("k")) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        next(events)
    eventually(lambda: api.service.limits._left, "its client is gone")
    assert httpx.delete(f"{api.url}/v1/streams/{stream}", headers=bearer("k")).status_code == 204
    engine.release()
    assert ask(api).status_code == 200


def test_a_client_that_leaves_frees_its_place(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys="k", key_concurrency=1)
    api.wait_ready()
    engine.hold()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(api.url + CHAT, json=HI, headers=bearer("k"), timeout=0.5)
    engine.release()
    eventually(lambda: ask(api).status_code == 200, "its place is free")


def test_a_dead_replica_frees_its_places(start_api: StartApi, engine: EngineSide) -> None:
    """The living hold theirs for longer than a place lasts by itself; nobody holds the dead one's."""
    api = start_api(api_keys="a=k concurrency=1")
    api.wait_ready()
    slots = engine.broker.keys.slots("a")
    engine.hold()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, api)
        eventually(lambda: engine.running, "one is under way")
        [uid] = engine.running
        before = engine.broker.run(command("ZSCORE", slots, uid))
        eventually(lambda: engine.broker.run(command("ZSCORE", slots, uid)) != before, "its place is held")
        engine.broker.run(command("ZREM", slots, uid))
        engine.broker.run(command("ZADD", slots, 1, "of a dead replica"))
        assert ask(api, n=1, timeout=0.5).status_code == 504, "it got in, and waits for the engine"
        engine.release()
        assert running.result().status_code == 200


def _read_elsewhere(apis: list[RunningApi], engine: EngineSide, stream: str) -> None:
    engine.release()
    assert "[DONE]" in apis[1].get(f"/v1/streams/{stream}", headers=bearer("k")).text


def _delete(apis: list[RunningApi], engine: EngineSide, stream: str) -> None:
    assert httpx.delete(f"{apis[1].url}/v1/streams/{stream}", headers=bearer("k")).status_code == 204
    engine.release()


def _let_it_end(apis: list[RunningApi], engine: EngineSide, stream: str) -> None:
    engine.release()
    eventually(lambda: not engine.running, "it was computed to its end")


@pytest.mark.parametrize("end", [_read_elsewhere, _delete, _let_it_end])
def test_a_stream_that_was_left_keeps_its_place_until_it_is_over(
    start_api: StartApi,
    engine: EngineSide,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[list[RunningApi], EngineSide, str], None],
) -> None:
    """By itself the place would not be free within this test."""
    monkeypatch.setattr("shared.broker.limits.SLOT_TTL_MS", 600_000)
    apis = [start_api(api_keys="a=k concurrency=1") for _ in range(2)]
    for api in apis:
        api.wait_ready()
    engine.hold()
    with opening(apis[0].url, CHAT, HI, **bearer("k")) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        next(events)
    eventually(lambda: apis[0].service.limits._left, "its client is gone")
    answer = ask(apis[1])
    assert "try again when one of them is over" in refused(answer)["message"]
    assert answer.headers["retry-after"] == "1"
    end(apis, engine, stream)
    slots = engine.broker.keys.slots("a")
    eventually(lambda: not engine.broker.run(command("ZCARD", slots)), "its place is free")
    assert ask(apis[1]).status_code == 200


def test_a_stream_that_nobody_came_back_to_frees_its_place(
    start_api: StartApi, engine: EngineSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.broker.limits.SLOT_TTL_MS", 600_000)
    api = start_api(api_keys="k", key_concurrency=1, resume_for=1.0)
    api.wait_ready()
    engine.hold()
    with opening(api.url, CHAT, HI, **bearer("k")) as (_, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        next(events)
    eventually(lambda: api.service.metrics.abandoned._value.get() == 1, "it was given up")
    engine.release()
    eventually(lambda: ask(api).status_code == 200, "its place is free")


def test_what_a_left_stream_did_not_use_is_given_back_once(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys="k", key_concurrency=1, key_tokens_per_minute=100_000)
    api.wait_ready()
    engine.hold()
    with opening(api.url, CHAT, {**HI, "max_tokens": 90_000}, **bearer("k")) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        next(events)
    eventually(lambda: api.service.limits._left, "its client is gone")
    for status in (204, 404):
        answer = httpx.delete(f"{api.url}/v1/streams/{stream}", headers=bearer("k"))
        assert answer.status_code == status
    engine.release()
    limits = api.service.limits
    eventually(lambda: not limits._left and not limits._settled and not limits._held, "it is settled")
    assert 99_000 < int(ask(api).headers["x-ratelimit-remaining-tokens"]) < 100_000


@pytest.mark.parametrize(("free_ms", "wait", "words"), [(14_900, 1, "is over"), (7_200, 8, "7.2s"), (300, 1, "1s")])
def test_a_place_that_nobody_holds_is_waited_for(free_ms: int, wait: int, words: str) -> None:
    opened = Opened("LIMITED", limited="concurrency", levels=Levels(1, 0, 0, free_ms))
    error = refuse(Claim("a", "u", Limits(concurrency=1), 0), opened)
    assert error.retry_after_s is not None and math.ceil(error.retry_after_s) == wait
    assert error.message.endswith(words)
    assert "1 request at a time" in error.message


def test_what_the_limits_leave_behind_has_a_life(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys="k", key_concurrency=5, key_requests_per_minute=5, key_tokens_per_minute=5000)
    api.wait_ready()
    assert ask(api).status_code == 200
    kept = [k for k in find_keys(engine.broker) if b":bucket:" in k or b":slots:" in k]
    assert kept
    for key in kept:
        assert engine.broker.run(command("PTTL", key)) != -1, key


def test_the_openai_client_understands(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys="k", key_requests_per_minute=1)
    api.wait_ready()
    client = openai.OpenAI(base_url=api.url + "/v1", api_key="k", max_retries=0)
    messages: Any = HI["messages"]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"
    client.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.44, "1.5s"), (60, "1m0s"), (371.2, "6m11.2s")]
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
