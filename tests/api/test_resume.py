"""Streams that a client comes back to: exactly the rest, from any replica, and nothing left behind."""

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shared.messages import ErrorBody, GenerateRequest
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import MODEL, TOO_LONG, Answer, EngineSide
from tests.api.streams import RESUME, Event, by_choice, opening, rest, resuming, text_of
from tests.redis_keys import command, find_keys
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
WORDS: dict[str, Any] = {"model": MODEL, "prompt": "one two three", "max_tokens": 6}
TEXT = " w1 w2 w3 w4 w5 w6"
USAGE = {"stream_options": {"include_usage": True}}

StartPair = Callable[..., tuple[RunningApi, RunningApi]]


@pytest.fixture
def pair(start_api: StartApi) -> StartPair:
    """Starts two replicas of one installation."""

    def start(**settings: Any) -> tuple[RunningApi, RunningApi]:
        one, two = start_api(**settings), start_api(**settings)
        one.wait_ready()
        two.wait_ready()
        return one, two

    return start


def keys_of_requests(engine: EngineSide) -> list[bytes]:
    kinds = [b":reply:", b":stream:", b":streams", b":generate:"]
    return [k for k in find_keys(engine.broker) if any(kind in k for kind in kinds) and b":generate:" not in k]


def told(url: str, path: str, body: dict[str, Any]) -> tuple[str, list[Event]]:
    with opening(url, path, body) as (stream, events):
        return stream, list(events)


BODIES = [
    (CHAT, HI),
    (CHAT, {**HI, **USAGE}),
    (CHAT, {**HI, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, {**HI, "logprobs": True, "top_logprobs": 2}),
    (COMPLETIONS, WORDS),
    (COMPLETIONS, {**WORDS, "echo": True, "logprobs": 1, **USAGE}),
    (COMPLETIONS, {**WORDS, "prompt": [7, 8, 9]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_event_leads_back_to_its_rest(
    api: RunningApi, engine: EngineSide, path: str, body: dict[str, Any]
) -> None:
    stream, events = told(api.url, path, body)
    assert events[-1].data == "[DONE]"
    assert text_of(events).endswith(TEXT)
    assert len({event.id for event in events}) == len(events), "every event has an id of its own"
    for number, event in enumerate(events, 1):
        assert rest(api.url, stream, event.id) == events[number:]
    assert rest(api.url, stream) == events
    query = httpx.get(f"{api.url}/v1/streams/{stream}", params={"last_event_id": events[0].id})
    assert query.text.count("data: ") == len(events) - 1


def test_the_rest_comes_from_another_replica_while_it_runs(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    engine.hold()
    with opening(one.url, CHAT, {**HI, **USAGE}) as (stream, events):
        first = [next(events)]
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        first.append(next(events))
        engine.step_once()
        first.append(next(events))
        with resuming(two.url, stream, first[1].id) as others:
            assert next(others) == first[2], "the event after the one that was named"
            engine.release()
            seen = [first[2], *others]
        assert [*first, *events] == [*first[:2], *seen], "both readers are told all of it, alike to the byte"
    assert text_of(seen) == " w2 w3 w4 w5 w6"
    assert seen[-1].data == "[DONE]"


def test_several_choices(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    body = {**HI, "n": 2, **USAGE}
    stream, events = told(one.url, CHAT, body)
    for number in range(len(events)):
        parts = by_choice([*events[: number + 1], *rest(two.url, stream, events[number].id)])
        assert parts == by_choice(events), f"resumed behind event {number}"


def test_a_reader_in_the_queue_before_any_token(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    engine.reading.clear()
    with opening(one.url, CHAT, HI) as (stream, events):
        role = next(events)
    assert role.choices[0]["delta"]["role"] == "assistant"
    with resuming(two.url, stream, role.id) as events, resuming(two.url, stream) as all_events:
        engine.reading.set()
        after, everything = list(events), list(all_events)
    assert everything == [role, *after]
    assert text_of(after) == TEXT


def test_a_client_that_left_is_waited_for(pair: StartPair, engine: EngineSide) -> None:
    """The stream goes on without anybody, also when its replica is gone, and is read to the end elsewhere."""
    one, two = pair()
    engine.hold()
    with opening(one.url, CHAT, HI) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        seen = [next(events), next(events)]
    eventually(lambda: not one.service.replies.exchanges, "the client is gone")
    one.stop()
    engine.release()
    eventually(lambda: not engine.running, "it was computed to its end")
    assert list(engine.ended.values()) == ["said"]
    after = rest(two.url, stream, seen[-1].id)
    assert text_of([*seen, *after]) == TEXT
    assert after[-1].data == "[DONE]"


def test_what_rings_for_nobody_is_not_ended(
    api: RunningApi, engine: EngineSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that opened a stream goes on to hear of it, and knows that others may wait for it."""
    monkeypatch.setattr("services.api.replies.RECENT_S", 0.0)
    engine.hold()
    with opening(api.url, CHAT, HI) as (stream, events):
        role = next(events)
        eventually(lambda: engine.running, "it runs")
    eventually(lambda: not api.service.replies.exchanges, "its client is gone")
    for _ in range(3):
        engine.step_once()
        eventually(lambda: api.service.janitor.is_idle, "what rang was looked at")
    engine.release()
    assert text_of(rest(api.url, stream, role.id)) == TEXT


def endless(request: GenerateRequest) -> Answer:
    return Answer([" word"] * 100_000)


def test_nobody_comes_back(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair(resume_for=1.0)
    engine.script = endless
    with opening(one.url, CHAT, {**HI, "max_tokens": 1000, "n": 2}) as (stream, events):
        next(events)
    eventually(lambda: len(engine.ended) == 2, "the engine was told to stop")
    eventually(lambda: not keys_of_requests(engine), "nothing of it is left")
    gone = two.get(f"/v1/streams/{stream}")
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "stream_not_found"
    assert sum(a.service.metrics.abandoned._value.get() for a in (one, two)) == 1


def test_a_stream_with_a_reader_is_not_abandoned(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair(resume_for=0.6)
    engine.hold()
    with opening(one.url, CHAT, HI) as (stream, events):
        role = next(events)
    with resuming(two.url, stream, role.id) as events:
        engine.wait_for_beats(25)
        engine.release()
        assert text_of(list(events)) == TEXT


def test_what_is_kept_goes_by_itself(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(resume_for=5.0)
    api.wait_ready()
    stream, events = told(api.url, CHAT, HI)
    assert rest(api.url, stream, events[1].id) == events[2:]
    keys = keys_of_requests(engine)
    assert keys
    left = [int(str(engine.broker.run(command("PTTL", key)))) for key in keys]
    assert all(ms == -2 or 0 < ms <= 126_000 for ms in left), left  # -2: gone by now
    eventually(lambda: api.get(f"/v1/streams/{stream}").status_code == 404, "it is over")


def test_readers_are_known_by_their_key(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(api_keys="a=alpha,b=beta")
    mine, other = {"Authorization": "Bearer alpha"}, {"Authorization": "Bearer beta"}
    eventually(lambda: api.get("/readyz").status_code == 200, "the api is ready")
    with opening(api.url, CHAT, HI, **mine) as (stream, events):
        assert list(events)[-1].data == "[DONE]"
    path = f"/v1/streams/{stream}"
    assert api.get(path, headers=mine).status_code == 200
    for headers, status in ((other, 404), ({}, 401)):
        assert api.get(path, headers=headers).status_code == status
    assert httpx.delete(api.url + path, headers=other).status_code == 404
    assert api.get(path, headers=mine).status_code == 200


@pytest.mark.parametrize("name", ["x", "chatcmpl-", "chatcmpl-0123", "cmpl-%00", "chatcmpl-" + "a" * 500])
def test_streams_that_are_not_there(api: RunningApi, name: str) -> None:
    answer = api.get(f"/v1/streams/{name}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "stream_not_found"
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "last",
    ["x", "-", "1", "begin", "1.2", "1.2.zz", "0.0.00000000-0.0.00000000", "1.3.deadbeef", "9999.1.00000000", "9" * 99],
)
def test_ids_that_name_nothing(api: RunningApi, engine: EngineSide, last: str) -> None:
    stream, _ = told(api.url, CHAT, HI)
    answer = api.get(f"/v1/streams/{stream}", headers={"Last-Event-ID": last})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "Last-Event-ID"
    assert rest(api.url, stream)[-1].data == "[DONE]", "the stream is as it was"


@pytest.mark.parametrize(
    ("path", "more", "headers"),
    [
        (CHAT, {"stream": False}, RESUME),
        (CHAT, {"stream": True}, {"X-Millrace-Resume": "yes"}),
        (CHAT, {"stream": True, "n": 129}, RESUME),
        ("/generate", {"stream": True}, RESUME),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    api: RunningApi, engine: EngineSide, path: str, more: dict[str, Any], headers: dict[str, str]
) -> None:
    body = {"prompt": "hi"} if path == "/generate" else HI
    answer = api.post(path, {**body, **more}, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("X-Millrace-Resume", "n")


def test_resuming_is_described(api: RunningApi) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    assert [p["name"] for p in paths[CHAT]["post"]["parameters"]] == ["X-Millrace-Resume"]
    stream = paths["/v1/streams/{response}"]
    assert set(stream) == {"get", "delete"}
    assert {"response", "Last-Event-ID", "last_event_id"} == {p["name"] for p in stream["get"]["parameters"]}


def test_an_error_before_the_first_token_leaves_nothing(api: RunningApi, engine: EngineSide) -> None:
    before = set(keys_of_requests(engine)) - {engine.broker.keys.streams.encode()}
    engine.reject = lambda request: TOO_LONG
    answer = api.post(CHAT, {**HI, "stream": True}, headers=RESUME)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    streams = engine.broker.keys.streams
    eventually(lambda: set(keys_of_requests(engine)) - {streams.encode()} <= before, "nothing of it is left")
    assert engine.broker.run(command("ZCARD", streams)) == 0


def test_an_error_in_the_middle_is_told_to_whoever_comes_back(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    broken = ErrorBody(500, "no", "server_error", "engine_crashed")
    engine.script = lambda request: Answer([" w1", " w2", " w3"], None, broken)
    stream, events = told(one.url, CHAT, HI)
    assert "engine_crashed" in events[-1].data
    for number, event in enumerate(events[:-1], 1):
        assert [e.data for e in rest(two.url, stream, event.id)] == [e.data for e in events[number:]]
    assert rest(two.url, stream) == events


def test_a_deadline_holds_also_when_nobody_reads(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    engine.script = endless
    with opening(one.url, CHAT, {**HI, "max_tokens": 5000, "timeout": 1.5}) as (stream, events):
        role = next(events)
    with resuming(two.url, stream, role.id) as events:
        *_, final = events
    assert "deadline_exceeded" in final.data
    eventually(lambda: not engine.running, "the engine was told to stop")
    with opening(one.url, CHAT, {**HI, "max_tokens": 5000, "timeout": 1.0}) as (stream, events):
        next(events)
    eventually(lambda: not engine.running, "nobody reads, and it ends all the same")
    assert "deadline_exceeded" in rest(two.url, stream)[-1].data


def test_a_stream_is_cancelled_by_name(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    engine.script = endless
    with opening(one.url, CHAT, {**HI, "max_tokens": 5000}) as (stream, events):
        next(events)
        assert httpx.delete(f"{two.url}/v1/streams/{stream}").status_code == 204
        *_, final = events
        assert "client_closed" in final.data
    eventually(lambda: not engine.running, "the engine was told to stop")
    assert two.get(f"/v1/streams/{stream}").status_code == 404


def test_a_reader_that_is_slow_is_told_everything(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(max_unsent_bytes=4096)
    api.wait_ready()
    engine.script = lambda request: Answer([f" {i:05000d}" for i in range(300)], "stop")
    with opening(api.url, COMPLETIONS, WORDS) as (stream, events):
        first = next(events)
    with resuming(api.url, stream, first.id) as events:
        eventually(lambda: not engine.running, "all of it was said")
        text = text_of([first, *events])
    assert text == "".join(f" {i:05000d}" for i in range(300))


@pytest.mark.parametrize("readers", [1, 2])
def test_lost_data_is_made_good_by_those_who_read(pair: StartPair, engine: EngineSide, readers: int) -> None:
    """Logs, record and all are wiped: whoever was told most opens the log again, and the others follow."""
    one, two = pair(repair_after=0.2, resume_for=4.0)
    engine.hold()
    with opening(one.url, CHAT, {**HI, "logprobs": True, **USAGE}) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        engine.step_once()
        seen = [next(events) for _ in range(3)]
        with resuming(two.url, stream, seen[1].id) as others:
            assert next(others) == seen[2]
            engine.forget()
            engine.broker.run(command("DEL", *keys_of_requests(engine)))
            record = engine.broker.keys.stream(stream.partition("-")[2])
            eventually(lambda: engine.broker.run(command("EXISTS", record)), "its record is kept again")
            engine.release()
            rest_of_other = list(others) if readers == 2 else []
        rest_of_first = list(events)
        if readers == 2:
            assert by_choice(rest_of_other) == by_choice(rest_of_first)
    assert text_of([*seen, *rest_of_first]) == TEXT
    later = rest(two.url, stream, seen[1].id)
    assert text_of([*seen[:2], *later]) == TEXT
    assert text_of(rest(two.url, stream)) == TEXT


def test_many_readers_of_one_stream(pair: StartPair, engine: EngineSide) -> None:
    one, two = pair()
    engine.hold()
    found: dict[int, list[Event]] = {}
    with opening(one.url, CHAT, HI) as (stream, events):
        role = next(events)
        readers = [
            threading.Thread(target=lambda i=i: found.update({i: rest((one, two)[i % 2].url, stream, role.id)}))
            for i in range(8)
        ]
        for reader in readers:
            reader.start()
        eventually(lambda: len(one.service.readers.followed) + len(two.service.readers.followed) == 8, "all read")
        engine.release()
        mine = list(events)
        for reader in readers:
            reader.join(30)
    assert [found[i] for i in range(8)] == [mine] * 8
