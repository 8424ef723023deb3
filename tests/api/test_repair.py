"""What the api does when the log and the inbox do not simply go on: gaps, takeovers, lost data, lost services."""

import concurrent.futures
from typing import Any

import httpx
import pytest

from services.api.log_reading import follow, read
from services.launcher.redis_server import RedisServer
from shared.broker.log_id import make_end_id, make_log_id
from shared.broker.replies import EndEntry, FenceEntry, LogEntry, OpenEntry, TokensEntry
from shared.messages import Delta, ErrorBody, FenceHeader, ReplyHeader, Said
from shared.settings import RedisSettings
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import MODEL, EngineSide
from tests.redis_keys import command, find_keys
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
TEXT = " w1 w2 w3 w4 w5 w6"


@pytest.fixture
def api(start_api: StartApi, engine: EngineSide) -> RunningApi:
    """A replica whose numbers are this test's alone."""
    running = start_api()
    running.wait_ready()
    return running


def opened(attempt: int = 1, said: Said | None = None) -> OpenEntry:
    count = len(said.token_ids) if said else 0
    return OpenEntry(make_log_id(attempt, count), ReplyHeader("api"), said, 0, b"5-0")


def fenced(attempt: int, said: int) -> FenceEntry:
    return FenceEntry(make_log_id(attempt, said), FenceHeader("engine", "1-0", 1), 1, "n")


def tokens(attempt: int, first: int, *ids: int) -> TokensEntry:
    delta = Delta(first, list(ids), "".join(f" {i}" for i in ids))
    return TokensEntry(make_log_id(attempt, first + len(ids) - 1), delta)


def ended(said: int, *ids: int, error: ErrorBody | None = None) -> EndEntry:
    delta = Delta(said - len(ids) + 1, list(ids), "", finish=None if error else "stop", error=error)
    return EndEntry(make_end_id(said), delta)


@pytest.mark.parametrize(
    ("log", "said", "verdict", "fresh", "last"),
    [
        ([], [], "reopen", [], b""),
        ([], [1], "reopen", [], b""),
        ([opened()], [], "continue", [], b"1-0"),
        ([opened(), fenced(2, 0)], [], "continue", [], b"2-0"),
        ([opened(), fenced(2, 0), tokens(2, 1, 10)], [], "continue", [b"2-1"], b"2-0"),
        ([opened(), fenced(2, 0), tokens(2, 1, 10)], [10], "continue", [], b"2-1"),
        ([opened(), tokens(2, 1, 10), fenced(3, 1), tokens(3, 2, 11)], [10], "continue", [b"3-2"], b"3-1"),
        ([opened(), tokens(2, 1, 10), ended(1)], [10], "continue", [make_end_id(1)], b"2-1"),
        ([opened(), tokens(2, 1, 10, 11)], [10], "reopen", [], b"2-2"),
        ([opened(), tokens(2, 1, 10)], [10, 11], "reopen", [], b"2-1"),
        ([opened(), tokens(2, 1, 99, 98)], [10, 11], "reopen", [], b"2-2"),
        ([opened(), tokens(2, 1, 99), ended(1)], [10], "lost", [], make_end_id(1)),
        ([opened(7, Said([10, 11], " 10 11")), tokens(8, 3, 12)], [10, 11], "continue", [b"8-3"], b"7-2"),
    ],
)
def test_reading_a_log(log: list[LogEntry], said: list[int], verdict: str, fresh: list[bytes], last: bytes) -> None:
    reading = read(log, said)
    assert reading.verdict == verdict
    assert [log_id for log_id, _ in reading.fresh] == fresh
    assert reading.last == last


@pytest.mark.parametrize(
    ("log", "fresh", "last"),
    [
        ([tokens(1, 1, 7)], [], make_log_id(1, 1)),
        ([tokens(1, 1, 7), tokens(1, 2, 8), ended(2)], [make_log_id(1, 2), make_end_id(2)], make_log_id(1, 1)),
        ([tokens(1, 1, 7), fenced(2, 1)], [], make_log_id(2, 1)),
        ([tokens(1, 1, 7), fenced(2, 1), tokens(2, 2, 8)], [make_log_id(2, 2)], make_log_id(2, 1)),
    ],
)
def test_following_a_log_from_what_was_said(log: list[LogEntry], fresh: list[bytes], last: bytes) -> None:
    reading = follow(log, make_log_id(1, 1))
    assert reading is not None and reading.verdict == "continue"
    assert [log_id for log_id, _ in reading.fresh] == fresh
    assert reading.last == last
    assert reading.attempt == max(2 if isinstance(e, FenceEntry) else 1 for e in log)


@pytest.mark.parametrize("log", [[], [tokens(1, 2, 8)], [fenced(2, 1)], [ended(1)]])
def test_a_log_that_has_lost_what_was_said_is_not_followed(log: list[LogEntry]) -> None:
    assert follow(log, make_log_id(1, 1)) is None


def test_an_error_is_told_even_by_a_log_that_disagrees() -> None:
    failure = ErrorBody(500, "x", "server_error")
    reading = read([opened(), tokens(2, 1, 99), ended(1, error=failure)], [10])
    assert reading.verdict == "continue"
    assert reading.fresh[0][1].error == failure


class Client:
    """A request under way in a thread of its own."""

    def __init__(self, api: RunningApi, body: dict[str, Any]) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._future = self._pool.submit(lambda: api.post(CHAT, body))

    def answer(self) -> httpx.Response:
        answer = self._future.result(30)
        self._pool.shutdown()
        return answer


def started(api: RunningApi, engine: EngineSide, **more: Any) -> Client:
    """Start a request and say two tokens of it."""
    engine.hold()
    client = Client(api, {**HI, **more})
    eventually(lambda: engine.running, "it runs")
    for said in (1, 2):
        engine.step_once()
        eventually(lambda said=said: [c for c in api.service.replies.choices.values() if c.said == said], "it is told")
    return client


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def reopens(api: RunningApi, why: str) -> float:
    return float(api.service.metrics.reopens.labels(why)._value.get())


def test_a_fence_in_mid_stream_is_a_takeover(api: RunningApi, engine: EngineSide) -> None:
    client = started(api, engine)
    engine.fence_again()
    engine.release()
    assert text_of(client.answer()) == TEXT
    assert reopens(api, "data") == 0


def test_a_lost_inbox_is_made_good_by_the_log(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(repair_after=0.2)
    api.wait_ready()
    client = started(api, engine)
    engine.say_past_the_inbox()
    assert text_of(client.answer()) == TEXT
    assert reopens(api, "data") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_log_is_opened_again_with_what_was_told(api: RunningApi, engine: EngineSide, stream: bool) -> None:
    client = started(api, engine, stream=stream)
    engine.broker.run(command("DEL", *[k for k in find_keys(engine.broker) if b":reply:" in k]))
    engine.release()
    answer = client.answer()
    if stream:
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert [answer.text.count(f'"content":" w{i}') for i in range(1, 7)] == [1] * 6
    else:
        assert text_of(answer) == TEXT
        assert answer.json()["usage"]["completion_tokens"] == 6
    assert reopens(api, "data") == 1


def test_a_request_that_nobody_holds_is_opened_again(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(repair_after=0.1, reopen_after=0.5)
    api.wait_ready()
    client = started(api, engine)
    engine.forget()
    engine.release()
    assert text_of(client.answer()) == TEXT
    assert reopens(api, "unheld") == 1


def test_strangers_in_the_inbox_are_ended(api: RunningApi, engine: EngineSide) -> None:
    client = started(api, engine)
    uid = next(iter(api.service.replies.choices))
    api.service.replies.choices.pop(uid)
    engine.step_once()
    eventually(lambda: not [k for k in find_keys(engine.broker) if b":reply:" in k], "the log is gone")
    engine.release()
    eventually(lambda: engine.ended.get(uid), "the engine has let go of it")
    api.service.fleet.draining = True
    for exchange in list(api.service.replies.exchanges):
        exchange.fail(ErrorBody(503, "over", "x"))
    client.answer()


def test_what_is_no_ring_is_read_once(api: RunningApi, engine: EngineSide) -> None:
    inbox = engine.broker.keys.inbox(api.service.incarnation)
    engine.broker.run(command("XADD", inbox, "*", "m", "x"))
    eventually(lambda: engine.broker.run(command("XLEN", inbox)) == 0, "it is trimmed away")
    assert text_of(api.post(CHAT, HI)) == TEXT


def test_a_service_that_stays_away(start_api: StartApi, engine: EngineSide) -> None:
    """Requests from before wait for a takeover; those of its last moments, and new ones, get a 503."""
    api = start_api(missing_grace=1.0, lease=1.0)
    api.wait_ready()
    before = started(api, engine)
    engine.roles.discard("scheduler")
    engine.wait_for_beats(12)  # more than a beat of an api that looked just before the last one
    during = Client(api, HI)
    answer = during.answer()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_engine"
    eventually(lambda: api.get("/readyz").status_code == 503, "readiness tells")
    assert api.get("/readyz").json()["missing"] == ["engine"]
    assert api.get("/livez").status_code == 200
    refused = api.post(CHAT, {**HI, "stream": True})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    engine.roles.add("scheduler")
    engine.release()
    assert text_of(before.answer()) == TEXT
    api.wait_ready()
    assert api.post(CHAT, HI).status_code == 200


def test_a_model_that_nobody_serves_any_more_is_forgotten(start_api: StartApi, engine: EngineSide) -> None:
    """Its services ended in the middle of an answer, and left heartbeats behind; the replica's own model stays."""
    other = EngineSide(engine.broker_settings, model="other/model-2").start()
    api = start_api(missing_grace=1.0, lease=1.0, no_engine_timeout=2.0)
    api.wait_ready()
    body = {**HI, "model": other.model}
    eventually(lambda: other.model in api.service.fleet.models, "it is seen")
    assert api.post(CHAT, body).status_code == 200
    other.stop()
    engine.roles.clear()
    away = eventually(lambda: (a := api.post(CHAT, body)).status_code != 200 and a, "nobody serves it")
    assert (away.status_code, away.json()["error"]["type"]) == (503, "service_unavailable_error")
    gone = eventually(lambda: (a := api.post(CHAT, body)).status_code != 503 and a, "it is forgotten")
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == f"the model `{other.model}` does not exist; there is: {MODEL}"
    assert [m["id"] for m in api.get("/v1/models").json()["data"]] == [MODEL]
    assert api.post(CHAT, HI).status_code == 503, "its own is away for as long"
    again = EngineSide(engine.broker_settings, model=other.model).start()
    try:
        eventually(lambda: api.post(CHAT, body).status_code == 200, "somebody serves it again")
    finally:
        again.stop()


def test_no_engine_for_too_long_ends_what_waits(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(missing_grace=1.0, lease=1.0, no_engine_timeout=2.0)
    api.wait_ready()
    before = started(api, engine)
    engine.roles.discard("scheduler")
    assert before.answer().status_code == 503


def test_a_broker_that_goes_and_comes_back(start_api: StartApi, start_redis: Any, api_settings: dict[str, Any]) -> None:
    server: RedisServer = start_redis(persistent=True)
    side = EngineSide(RedisSettings(redis_url=server.url, redis_prefix="away")).start()
    try:
        api = start_api(redis_url=server.url, redis_prefix="away")
        api.wait_ready()
        assert api.post(CHAT, HI).status_code == 200
        server.kill()
        eventually(lambda: api.get("/readyz").json()["missing"] == ["broker"], "readiness tells")
        refused = api.post(CHAT, HI)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "broker_unavailable"
        assert api.get("/livez").status_code == 200
        server.start()
        api.wait_ready()
        assert text_of(api.post(CHAT, HI)) == TEXT
    finally:
        side.stop()


def test_a_broker_that_stays_away_ends_what_waits(
    start_api: StartApi, start_redis: Any, api_settings: dict[str, Any]
) -> None:
    server: RedisServer = start_redis()
    side = EngineSide(RedisSettings(redis_url=server.url, redis_prefix="gone")).start()
    try:
        api = start_api(redis_url=server.url, redis_prefix="gone", no_engine_timeout=2.0)
        api.wait_ready()
        before = started(api, side)
        server.kill()
        answer = before.answer()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "broker_unavailable")
    finally:
        side.stop()


def test_the_queue_is_bounded(start_api: StartApi, engine: EngineSide) -> None:
    engine.max_running = 1
    api = start_api(max_queued_requests=2)
    api.wait_ready()
    eventually(lambda: api.service.fleet.load(MODEL).max_running == 1, "the engine's size is known")
    engine.hold()
    waiting = [Client(api, HI) for _ in range(3)]
    eventually(lambda: api.service.admission.num_choices == 3, "they are in")
    refused = api.post(CHAT, {**HI, "stream": True})
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["type"] == "rate_limit_error"
    engine.release()
    assert [text_of(c.answer()) for c in waiting] == [TEXT] * 3
    assert api.post(CHAT, HI).status_code == 200
