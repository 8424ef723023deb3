"""What the pages of a running stack say: right with several workers, true after aborts, bounded whatever is sent."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.stack import Stack
from tests.waiting import eventually

NUM_HOSTILE = 2000
MAX_GROWTH = 50
CHAT = "/v1/chat/completions"
FLAGS = ("--engine", "fake", "--fake-step-ms", "20", "--fake-eos-every", "0", "--max-running-requests", "3",
         "--api-workers", "2", "--max-seq-len", "4096")  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("metrics"), *FLAGS)
    try:
        yield stack
    finally:
        stack.close()


def page(stack: Stack, instance: str = "api-0") -> dict[str, float]:
    """Scrape: series -> value. A fresh connection may reach either worker."""
    text = httpx.get(f"http://127.0.0.1:{stack.ports()[instance]}/metrics", timeout=30).text
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in rows}


def count_series(stack: Stack) -> int:
    return sum(len(page(stack, instance)) for instance in stack.ports() if instance != "redis")


def total(found: dict[str, float], name: str) -> float:
    return sum(value for series, value in found.items() if series.partition("{")[0] == name)


def workers(stack: Stack) -> list[int]:
    return [child.pid for child in psutil.Process(stack.pids()["api-0"]).children()]


# --- the engine's gauges


class Streams:
    """Streams that are open until they are hung up."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._open = ExitStack()
        self._reading: list[Iterator[str]] = []
        self._client = self._open.enter_context(httpx.Client(base_url=stack.url, timeout=60))

    def begin(self, num: int, *, started: bool) -> None:
        """Open streams, and wait for the first token of each if they are to start."""
        for _ in range(num):
            body = self._stack.chat_body(max_tokens=3000, stream=True)
            if started:
                answer = self._open.enter_context(self._client.stream("POST", CHAT, json=body))
                lines = answer.iter_lines()
                self._reading.append(lines)  # who forgets it closes the stream
                next(line for line in lines if "content" in line)
            else:
                self._open.enter_context(_waiting(self._client, body))

    def hang_up(self) -> None:
        """Leave all."""
        self._open.close()


@contextlib.contextmanager
def _waiting(client: httpx.Client, body: dict[str, Any]) -> Iterator[None]:
    """Send a request on a connection of its own and read nothing."""
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as sock:
        sock.sendall(head.encode() + raw)
        yield


def gauges(stack: Stack) -> tuple[float, float, float]:
    """Read (running, waiting, live pages); none of them may ever be below zero."""
    found = page(stack, "scheduler-0")
    now = (
        found["millrace_requests_running"],
        found["millrace_requests_waiting"],
        found['millrace_kv_pages{state="live"}'],
    )
    assert min(now) >= 0
    assert sum(v for k, v in found.items() if k.startswith("millrace_kv_pages{")) <= found["millrace_kv_pages_capacity"]
    return now


def is_quiet(stack: Stack) -> bool:
    return gauges(stack) == (0, 0, 0) and total(page(stack), "millrace_requests_in_flight") == 0


def test_gauges_follow_what_runs_and_what_was_let_go(stack: Stack) -> None:
    eventually(lambda: is_quiet(stack), "idle at first")
    running = Streams(stack)
    running.begin(3, started=True)
    eventually(lambda: gauges(stack)[:2] == (3, 0), "three run")
    assert gauges(stack)[2] > 0
    assert page(stack, "scheduler-0")["millrace_kv_cache_usage_ratio"] > 0
    waiting = Streams(stack)
    waiting.begin(5, started=False)
    eventually(lambda: gauges(stack)[:2] == (3, 5), "five wait")
    waiting.hang_up()
    eventually(lambda: gauges(stack)[:2] == (3, 0), "those that waited were let go")
    running.hang_up()
    eventually(lambda: is_quiet(stack), "those that ran were let go")
    refused = stack.client.post("/v1/completions", json=stack.complete_body("x" * 9000, max_tokens=4))
    assert refused.status_code == 400
    eventually(lambda: is_quiet(stack), "a refused request leaves nothing")


def test_gauges_are_new_with_a_new_engine(stack: Stack) -> None:
    running = Streams(stack)
    running.begin(3, started=True)
    eventually(lambda: gauges(stack)[0] == 3, "three run")
    stack.kill("scheduler-0")
    stack.wait_ready()
    eventually(lambda: gauges(stack)[0] == 3, "three run again")
    running.hang_up()
    eventually(lambda: is_quiet(stack), "all were let go")
    before = page(stack, "scheduler-0")["millrace_engine_idle_seconds_total"]
    eventually(
        lambda: page(stack, "scheduler-0")["millrace_engine_idle_seconds_total"] > before, "an idle engine says so"
    )


def test_everybody_who_got_in_is_counted_out_once(stack: Stack) -> None:
    eventually(lambda: is_quiet(stack), "idle at first")
    before = page(stack)
    for _ in range(4):
        stack.chat(max_tokens=2)
    leaving = Streams(stack)
    leaving.begin(2, started=True)
    leaving.hang_up()
    assert stack.client.post(CHAT, json=stack.chat_body(model="no such model")).status_code == 404
    eventually(lambda: is_quiet(stack), "all were let go")
    now = page(stack)

    def grown(series: str) -> float:
        return now.get(series, 0.0) - before.get(series, 0.0)

    assert grown('millrace_requests_finished_total{reason="length"}') == 4
    assert grown('millrace_requests_finished_total{reason="aborted"}') == 2
    assert total(now, "millrace_requests_finished_total") - total(before, "millrace_requests_finished_total") == 6
    assert grown('millrace_request_errors_total{status="404",type="invalid_request_error"}') == 1
    assert total(now, "millrace_e2e_request_latency_seconds_count") > total(
        before, "millrace_e2e_request_latency_seconds_count"
    )


# --- several workers


def test_every_scrape_shows_all_workers(stack: Stack) -> None:
    series = 'millrace_http_requests_total{route="/v1/chat/completions",status="200"}'
    before = page(stack).get(series, 0.0)
    for _ in range(50):
        assert httpx.post(stack.url + CHAT, json=stack.chat_body(max_tokens=1)).status_code == 200
    for _ in range(20):
        found = page(stack)
        assert found[series] == before + 50
        assert not [name for name in found if "pid=" in name]
        assert found["millrace_broker_up"] == 1
    assert found["process_resident_memory_bytes"] > 50e6
    assert total(found, "millrace_service_info") == 2


def test_a_dead_worker_takes_its_gauges_along_and_leaves_its_counters(stack: Stack) -> None:
    eventually(lambda: is_quiet(stack), "idle at first")
    running = Streams(stack)
    running.begin(3, started=True)
    assert page(stack)["millrace_requests_in_flight"] == 3
    counted = total(page(stack), "millrace_http_requests_total")
    for victim in workers(stack):
        os.kill(victim, signal.SIGKILL)
    eventually(lambda: _served(stack), "new workers serve")
    with contextlib.suppress(httpx.TransportError):
        running.hang_up()
    found = page(stack)
    assert found["millrace_requests_in_flight"] == 0
    assert total(found, "millrace_http_requests_total") >= counted
    eventually(lambda: gauges(stack)[:2] == (0, 0), "the engine has ended what nobody waits for")
    eventually(lambda: total(page(stack), "millrace_service_info") == 2, "two workers")


def test_a_new_parent_begins_at_zero(stack: Stack) -> None:
    stack.kill("api-0")
    eventually(lambda: _served(stack), "a new api serves")
    found = page(stack)
    assert total(found, "millrace_requests_finished_total") == 0
    assert total(found, "millrace_requests_in_flight") == 0


def _served(stack: Stack) -> bool:
    try:
        return httpx.get(f"{stack.url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


# --- hostile requests


async def _send_hostile(stack: Stack, client: httpx.AsyncClient, i: int) -> None:
    odd = f'x{i}"\\\n{{}}é'
    body = stack.chat_body(max_tokens=1, user=odd)
    headers = {
        "X-Request-Id": f"r{i}",
        "X-Odd": f"o{i}",
        "User-Agent": f"a{i}",
        "traceparent": f"00-{i:032x}-{i:016x}-01",
    }
    match i % 10:
        case 0:
            await client.post(CHAT, json={**body, "model": odd}, headers=headers)
        case 1:
            await client.get(f"/v1/x{i}", headers=headers)
        case 2:
            await client.get(f"/v1/models/x{i}", headers=headers)
        case 3:
            await client.request(f"FOO{i}", CHAT, headers=headers)
        case 4:
            await client.request(f"BAR{i}", f"/{i}/%22%0A", headers=headers)
        case 5:
            await client.post(CHAT, json={**body, f"field{i}": odd, "temperature": i}, headers=headers)
        case 6:
            await client.post(CHAT, content=b"{" + str(i).encode(), headers=headers)
        case 7:
            await client.post("/v1/completions", json={**body, "prompt": odd, "stop": [odd]}, headers=headers)
        case 8:
            await client.get(f"/metrics?x={i}", headers={**headers, "X-Request-Id": f"not valid {i}"})
        case _:
            await client.post(CHAT, json=body, headers=headers)


def test_no_request_makes_series(stack: Stack) -> None:
    async def send() -> None:
        numbers = iter(range(NUM_HOSTILE))
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:

            async def work() -> None:
                for i in numbers:
                    await _send_hostile(stack, client, i)

            await asyncio.gather(*(work() for _ in range(8)))

    eventually(lambda: is_quiet(stack), "idle at first")
    stack.chat(max_tokens=1)
    before = count_series(stack)
    asyncio.run(send())
    eventually(lambda: is_quiet(stack), "all were let go")
    found = page(stack)
    assert total(found, "millrace_http_requests_total") >= NUM_HOSTILE * 0.8  # a method nobody knows is no request
    assert count_series(stack) - before < MAX_GROWTH
    assert 'millrace_http_requests_total{route="unmatched",status="404"}' in found
    models = {series for series in found if "model=" in series and f'model="{stack.model}"' not in series}
    assert models == set()
