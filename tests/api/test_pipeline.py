"""The picture of the pipeline: who is dead, what moved, how fast it went; and the route that shows it."""

from typing import Any

import msgspec
import pytest

from services.api.pipeline import GONE_SHOWN_S, HISTORY_S, MAX_EVENTS, MAX_GONE, Pipeline
from services.api.waits import Waits
from shared.broker.control import Standing
from shared.keys import LEASE_S, Role
from shared.messages import Heartbeat
from tests.api.conftest import RunningApi, StartApi
from tests.api.engine_side import MODEL, EngineSide
from tests.api.streams import opening, resuming
from tests.conftest import StartRedis
from tests.waiting import eventually

HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Watcher:
    """A picture, and the registry it is made of; time passes half a second per look."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.pipeline = Pipeline(LEASE_S, clock=lambda: self.now, wall=lambda: self.now)
        self.registry: dict[Role, dict[str, Standing]] = {"api": {}, "scheduler": {}}

    def put(self, role: Role, name: str, still_s: float = 0.0, over: bool = False, **fields: Any) -> None:
        place = self.registry[role]
        before = place[name].heartbeat if name in place else None
        beat = msgspec.structs.replace(before or Heartbeat(0, name.partition("/")[0]), **fields)
        if not still_s:
            beat = msgspec.structs.replace(beat, beat=beat.beat + 1)
        place[name] = Standing(beat, still_s, over)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 0.5
            self.pipeline.note(self.registry)

    def state(self, name: str) -> str:
        return {i["id"]: i["state"] for i in self.pipeline.instances()}.get(name, "")

    def told(self) -> list[tuple[str, str, int]]:
        return [(event["kind"], event["name"], event["count"]) for event in self.pipeline.events()]

    def last(self, column: str) -> Any:
        return self.pipeline.history()[column][-1]


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


def test_a_death_is_seen_told_and_shown_for_a_while(watcher: Watcher) -> None:
    watcher.put("scheduler", "s0/a", num_running=5, num_waiting=2)
    watcher.put("scheduler", "s1/a")
    watcher.look()
    assert watcher.told() == [], "those who were there before are not news"
    watcher.put("scheduler", "s0/a", still_s=1.5)
    watcher.look()
    assert watcher.state("s0/a") == "late"
    watcher.put("scheduler", "s0/a", still_s=5.0, over=True)
    watcher.put("scheduler", "s1/a", num_taken=7)
    watcher.look()
    assert watcher.state("s0/a") == "dead"
    assert watcher.told() == [("died", "s0", 7), ("took", "s1", 7)]
    del watcher.registry["scheduler"]["s0/a"]
    watcher.put("scheduler", "s0/b")
    watcher.look()
    assert (watcher.state("s0/a"), watcher.state("s0/b")) == ("dead", "serving")
    assert watcher.told()[2:] == [("joined", "s0", 0)]
    watcher.look(int(2 * GONE_SHOWN_S) + 2)
    assert watcher.state("s0/a") == ""


def test_the_dead_whom_nobody_removes_stay_dead(watcher: Watcher) -> None:
    """So it is when no engine is left that could take their requests over."""
    watcher.put("scheduler", "s0/a", still_s=9.0, over=True, num_running=3)
    watcher.look(int(3 * GONE_SHOWN_S))
    assert watcher.state("s0/a") == "dead"
    assert watcher.last("running") == 0
    assert watcher.told() == []


def test_who_signs_off_is_not_taken_for_dead(watcher: Watcher) -> None:
    for name in ("s0/a", "s1/a", "s2/a"):
        watcher.put("scheduler", name)
    watcher.look()
    watcher.put("scheduler", "s0/a", draining=True, num_running=3)
    watcher.put("scheduler", "s2/a", still_s=1.0)
    watcher.look()
    watcher.registry["scheduler"].clear()
    watcher.look()
    assert [watcher.state(name) for name in ("s0/a", "s1/a", "s2/a")] == ["left", "left", "dead"]
    assert ("draining", "s0", 3) in watcher.told()


def test_who_wakes_again_is_back(watcher: Watcher) -> None:
    watcher.put("scheduler", "s0/a")
    watcher.look()
    watcher.put("scheduler", "s0/a", still_s=5.0, over=True)
    watcher.look()
    watcher.put("scheduler", "s0/a")
    watcher.look()
    assert watcher.state("s0/a") == "serving"
    assert [kind for kind, _, _ in watcher.told()] == ["died", "woke"]
    assert watcher.pipeline.instances()[0]["gone_s"] is None


def test_figures_are_those_of_all_replicas_and_of_the_window_alone(watcher: Watcher) -> None:
    waits = {name: Waits() for name in ("a0/x", "a1/x")}
    for one in waits.values():
        one.num_said = 10_000
        one.first(30.0)  # long ago: not news to a replica that starts now

    def tell() -> None:
        for name, one in waits.items():
            watcher.put("api", name, num_said=one.num_said, ttft_counts=list(one.ttft), gap_counts=list(one.gap))

    tell()
    watcher.look(2)
    assert watcher.last("ttft_p50") is None
    for one, seconds in zip(waits.values(), (0.1, 0.2), strict=True):
        one.num_said += 50
        for _ in range(10):
            one.first(seconds)
    tell()
    watcher.look(2)
    assert watcher.last("tokens_per_s") == 100.0
    assert 0.06 < watcher.last("ttft_p50") < 0.16
    assert 0.13 < watcher.last("ttft_p99") < 0.3
    del watcher.registry["api"]["a1/x"]
    watcher.look(2)
    assert watcher.last("tokens_per_s") == 0.0, "who goes takes nothing away"
    watcher.look(61)
    assert watcher.last("ttft_p50") is None


def test_engines_are_added_up(watcher: Watcher) -> None:
    pages = {"num_pages": 100, "page_size": 16}
    watcher.put("scheduler", "s0/a", free_pages=40, num_running=3, num_waiting=1, **pages)
    watcher.put("scheduler", "s1/a", free_pages=100, num_running=2, **pages)
    watcher.look(2)
    assert watcher.last("hit_rate") is None
    watcher.put("scheduler", "s0/a", cache_query_tokens=200, cache_hit_tokens=50)
    watcher.look(2)
    shown = [watcher.last(column) for column in ("kv_used", "hit_rate", "running", "waiting")]
    assert shown == [0.3, 0.25, 5, 1]


def test_it_is_bounded(watcher: Watcher) -> None:
    for number in range(3 * MAX_GONE):
        watcher.put("scheduler", f"s{number}/a")
    watcher.look()
    watcher.registry["scheduler"].clear()
    watcher.look()
    assert len(watcher.pipeline.instances()) == MAX_GONE
    assert len(watcher.pipeline.events()) == MAX_EVENTS
    watcher.look(2 * HISTORY_S + 20)
    assert len(watcher.pipeline.history()["t"]) == HISTORY_S


def test_only_news_are_sent_and_the_columns_always(watcher: Watcher) -> None:
    watcher.put("api", "a0/x")
    watcher.look(20)
    times = watcher.pipeline.history()["t"]
    assert times == sorted(set(times))
    assert watcher.pipeline.history(times[-3])["t"] == times[-2:]
    assert watcher.pipeline.history(times[-1])["tokens_per_s"] == []


def test_an_instance_that_cannot_be_read_is_left_out(watcher: Watcher) -> None:
    watcher.registry["scheduler"]["s0/a"] = Standing(None, 0.0, False)
    watcher.look()
    assert watcher.pipeline.instances() == []


def test_the_route_shows_all_replicas_and_what_they_have_said(start_api: StartApi, engine: EngineSide) -> None:
    one, other = start_api(), start_api()
    one.wait_ready()
    eventually(lambda: len(shown(one, "api")) == 2 == len(shown(other, "api")), "they know each other")
    eventually(lambda: len(shown(one, "scheduler")) == 1, "they see the engine")
    assert shown(one, "scheduler")[0]["state"] == "serving"
    assert one.post("/v1/chat/completions", HI).status_code == 200
    for api in (one, other):
        eventually(lambda api=api: any(picture(api)["history"]["tokens_per_s"]), "its tokens are counted everywhere")
        eventually(lambda api=api: picture(api)["history"]["ttft_p50"][-1], "and how long the first one took")
    streams = {hop["stream"] for hop in picture(one)["hops"]}
    assert streams == {"tokenize", "generate", "tokens"}
    at = picture(one)["history"]["t"][-1]
    assert all(t > at for t in picture(one, at)["history"]["t"])
    assert one.get("/v1/pipeline?since=soon").status_code == 400


def test_queues_are_measured_though_nobody_reads_them(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api()
    api.wait_ready()
    engine.reading.clear()
    assert api.post("/v1/chat/completions", {**HI, "timeout": 0.2}).status_code == 504
    queue = eventually(lambda: next((h for h in queues(api) if h["length"]), None), "it waits in the queue")
    assert queue["of"] == MODEL and queue["oldest_s"] > 0
    engine.reading.set()
    eventually(lambda: not any(hop["length"] for hop in queues(api)), "the queue is empty")


def test_without_the_broker_it_shows_what_was_seen_last(
    start_redis: StartRedis, start_api: StartApi, prefix: str
) -> None:
    server = start_redis()
    api = start_api(redis_url=server.url)
    eventually(lambda: shown(api, "api"), "it sees itself")
    assert picture(api)["connected"]
    server.kill()
    eventually(lambda: not picture(api)["connected"], "it says that the broker is away")
    assert shown(api, "api")
    assert picture(api)["hops"]


def queues(api: RunningApi) -> list[dict[str, Any]]:
    return [hop for hop in picture(api)["hops"] if hop["stream"] == "tokenize"]


def picture(api: RunningApi, since: int = 0) -> dict[str, Any]:
    answer = api.get(f"/v1/pipeline?since={since}")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


def shown(api: RunningApi, role: Role) -> list[dict[str, Any]]:
    return [i for i in picture(api)["instances"] if i["role"] == role]


def test_what_is_given_to_who_came_back_is_shown(start_api: StartApi, engine: EngineSide) -> None:
    """It is open where it is given, its tokens are counted as they are given, and none of it when it is over."""
    api = start_api()
    api.wait_ready()
    engine.hold()
    with opening(api.url, "/v1/chat/completions", HI) as (stream, events):
        eventually(lambda: engine.running, "it runs")
        engine.step_once()
        assert next(events).data
    eventually(lambda: shown(api, "api")[0]["running"] == 0, "its client is gone")
    said = api.service.fleet.waits.num_said
    since = picture(api)["history"]["t"][-1]
    with resuming(api.url, stream) as events:
        eventually(lambda: shown(api, "api")[0]["running"] == 1, "it is given again")
        eventually(lambda: 1 in picture(api, since)["history"]["open"], "it was open")
        engine.release()
        assert list(events)[-1].data == "[DONE]"
    assert api.service.fleet.waits.num_said == said + 8
    eventually(lambda: shown(api, "api")[0]["running"] == 0, "it is over")
    eventually(lambda: any(picture(api, since)["history"]["tokens_per_s"]), "its tokens are shown")
    last = list(events_ids(api, stream))[5]
    said = api.service.fleet.waits.num_said
    with resuming(api.url, stream, last) as events:
        list(events)
    assert said < api.service.fleet.waits.num_said < said + 8, "what it has is not given again"


def events_ids(api: RunningApi, stream: str) -> list[str]:
    with resuming(api.url, stream) as events:
        return [event.id for event in events]
