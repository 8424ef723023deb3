"""Streams that are come back to from another api, while services and connections die: nothing missing, nothing twice.

Each letter of the fake engine hangs on all before it, so equal texts are equal tokens at equal places.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import Any

import httpx
import pytest

from services.launcher.redis_server import RedisServer
from tests.api.streams import Event, by_choice, opening, rest, text_of
from tests.e2e.faults.quiet import api_urls, slots_in_use, total, wait_quiet
from tests.e2e.faults.stacks import ask_undisturbed, launched, stream_bodies
from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

NUM_STREAMS = 6
NUM_TOKENS = 100
PATH = "/v1/completions"
RESUME_FOR = "12"
"""Long enough for a slow machine to start a service again while nobody reads."""


@pytest.fixture(scope="module")
def server(redis_program: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"), persistent=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def stack(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    pairs = ("--apis", "2", "--detokenizers", "2", "--schedulers", "2")
    flags = ("--fake-step-ms", "25", "--lease", "3", "--resume-for", RESUME_FOR, *pairs)
    with launched(tmp_path_factory.mktemp("resume"), *flags, redis_url=server.url) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[str, str]:
    return ask_undisturbed(stack, NUM_STREAMS, NUM_TOKENS)


@dataclass
class Reader:
    """One client: opens a stream, loses it, and comes back for the rest."""

    body: Json
    begun: Flag = field(default_factory=Flag)
    let_go: Flag = field(default_factory=Flag)
    stream: str = ""
    events: list[Event] = field(default_factory=list)

    def open(self, url: str) -> None:
        """Read until told to let go, or until the connection breaks."""
        try:
            with opening(url, PATH, self.body) as (self.stream, events):
                for event in events:
                    self.events.append(event)
                    if len(self.events) > 8:
                        self.begun.set()
                    if self.let_go.is_set():
                        return
        except httpx.HTTPError:
            assert not self.let_go.is_set(), "the connection broke by itself"

    def finish(self, url: str) -> None:
        """Come back for the rest."""
        self.events += rest(url, self.stream, self.events[-1].id)


def run_under(
    stack: Stack,
    undisturbed: dict[str, str],
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Read streams at the first api, and go on at the second; faults happen before and after they are let go."""
    stack.wait_ready()
    one, two = api_urls(stack)
    bodies = stream_bodies(stack, NUM_STREAMS, NUM_TOKENS)
    bodies[-1]["n"] = 2
    readers = [Reader(body) for body in bodies]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        reading = [pool.submit(reader.open, one) for reader in readers]
        for reader in readers:
            assert reader.begun.wait(60)
        if before is not None:
            before()
        for reader in readers:
            reader.let_go.set()
        for future in reading:
            future.result(60)
        if after is not None:
            after()
        for future in [pool.submit(reader.finish, two) for reader in readers]:
            future.result(120)
    for reader in readers:
        assert reader.events[-1].data == "[DONE]"
        assert text_of(reader.events) == undisturbed[reader.body["prompt"]]
        whole = rest(two, reader.stream)
        if "n" in reader.body:
            assert by_choice(reader.events) == by_choice(whole), "every choice alike, in whatever order they came"
            assert len(text_of(reader.events, 1)) == NUM_TOKENS
        else:
            assert reader.events == whole, "to the byte, whoever tells them"
    stack.wait_ready()


@pytest.mark.slow
def test_services_die_between(stack: Stack, undisturbed: dict[str, str]) -> None:
    def kill(instance: str) -> Callable[[], None]:
        return lambda: stack.kill(instance, signal.SIGKILL)

    run_under(stack, undisturbed, before=kill("detokenizer-0"), after=kill("detokenizer-1"))
    run_under(stack, undisturbed, after=kill("scheduler-0"))
    wait_quiet(stack, ended_logs=True)


@pytest.mark.slow
def test_the_api_that_opened_the_streams_dies(stack: Stack, undisturbed: dict[str, str]) -> None:
    run_under(stack, undisturbed, before=lambda: stack.kill("api-0", signal.SIGKILL))
    wait_quiet(stack, ended_logs=True)


@pytest.mark.slow
def test_all_connections_to_the_broker_are_cut(stack: Stack, undisturbed: dict[str, str]) -> None:
    def cut() -> None:
        with stack.redis() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")

    run_under(stack, undisturbed, before=cut, after=cut)
    wait_quiet(stack, ended_logs=True)


@pytest.mark.slow
def test_the_broker_restarts_with_its_data(stack: Stack, undisturbed: dict[str, str], server: RedisServer) -> None:
    def restart() -> None:
        server.stop()
        server.start()

    run_under(stack, undisturbed, after=restart)
    wait_quiet(stack, ended_logs=True)


@pytest.mark.slow
def test_nobody_comes_back(stack: Stack) -> None:
    stack.wait_ready()
    one, two = api_urls(stack)
    abandoned = total(stack, "api", "millrace_streams_abandoned_total")
    body = stream_bodies(stack, 1, 4000, n=2)[0]
    with opening(one, PATH, body) as (stream, events):
        first = next(events)
    assert httpx.get(f"{two}/v1/streams/{stream}", params={"last_event_id": "x"}).status_code == 400
    assert slots_in_use(stack), "it is waited for"
    eventually(lambda: not slots_in_use(stack), "its slots are free")
    assert total(stack, "api", "millrace_streams_abandoned_total") == abandoned + 1
    gone = httpx.get(f"{two}/v1/streams/{stream}", headers={"Last-Event-ID": first.id})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "stream_not_found")
    wait_quiet(stack, ended_logs=True)
