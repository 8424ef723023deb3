"""The api as processes: its end under load, its workers, its settings."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shared.settings import RedisSettings
from tests.api.conftest import HOST
from tests.api.engine_side import MODEL, Answer, EngineSide
from tests.redis_keys import find_keys
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


class Process:
    """`python -m services.api` with settings of the test's own."""

    def __init__(self, redis: RedisSettings, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        told = {
            "host": HOST,
            "port": self.port,
            "redis_url": redis.redis_url,
            "redis_prefix": redis.redis_prefix,
            "served_model_name": MODEL,
            "drain_timeout": 2,
            **settings,
        }
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
        environment |= {f"MILLRACE_{k.upper()}": str(v) for k, v in told.items()}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "services.api"], env=environment, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=lambda: self.log.extend(self.popen.stderr or []))
        self._reader.start()

    def wait_ready(self) -> None:
        eventually(self._ready, "the api is ready")

    def _ready(self) -> bool:
        assert self.popen.poll() is None, self.log
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/readyz").status_code == 200
        return False

    def wait(self) -> int:
        code = self.popen.wait(30)
        self._reader.join()
        return code

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait()
        assert self.popen.stderr is not None
        self.popen.stderr.close()


@pytest.fixture
def start_process(redis_settings: RedisSettings) -> Iterator[Any]:
    started: list[Process] = []

    def start(**settings: Any) -> Process:
        process = Process(redis_settings, **settings)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def children(process: Process) -> list[int]:
    with open(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children") as listed:
        return [int(pid) for pid in listed.read().split()]


def test_an_end_under_load_finishes_streams(start_process: Any, engine: EngineSide) -> None:
    process: Process = start_process(drain_timeout=20)
    process.wait_ready()
    engine.script = lambda request: Answer([" a"] * 20, "stop")
    engine.tick_s = 0.05
    raw = b""
    with httpx.stream("POST", process.url + CHAT, json={**HI, "stream": True}, timeout=20) as answer:
        parts = answer.iter_raw()
        raw += next(parts)
        process.popen.send_signal(signal.SIGTERM)
        for part in parts:
            raw += part
    assert raw.endswith(b"data: [DONE]\n\n")
    assert process.wait() == 0
    assert not [k for k in find_keys(engine.broker) if b":reply:" in k]
    assert not engine.replicas()


def test_who_comes_during_an_end_is_told_to_go_elsewhere(start_process: Any, engine: EngineSide) -> None:
    """Also on a connection that was there before; nobody is cut off without a word."""
    process: Process = start_process(drain_timeout=20)
    process.wait_ready()
    engine.script = lambda request: Answer([" a"] * 40, "stop")
    engine.tick_s = 0.05
    body = json.dumps(HI).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        httpx.stream("POST", process.url + CHAT, json={**HI, "stream": True}, timeout=20) as answer,
        socket.create_connection((HOST, process.port), timeout=20) as before,
    ):
        parts = answer.iter_raw()
        next(parts)
        process.popen.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{process.url}/readyz").json()["missing"] == ["draining"], "it drains")
        assert httpx.post(process.url + CHAT, json=HI).json()["error"]["code"] == "shutting_down"
        before.sendall(head.encode() + body)
        assert b"503" in before.recv(65536)
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")
    assert process.wait() == 0


def test_the_drain_deadline_ends_streams_with_an_error(start_process: Any, engine: EngineSide) -> None:
    process: Process = start_process(drain_timeout=1)
    process.wait_ready()
    engine.script = lambda request: Answer([" a"] * 1_000_000)
    body = {**HI, "stream": True, "n": 2}
    with httpx.stream("POST", process.url + CHAT, json=body, timeout=30) as answer:
        parts = answer.iter_raw()
        next(parts)
        never_reads = socket.create_connection((HOST, process.port))
        process.popen.send_signal(signal.SIGINT)
        raw = b"".join(parts)
    assert b'"code":"shutting_down"' in raw
    assert b"[DONE]" not in raw
    assert process.wait() == 0
    never_reads.close()
    eventually(lambda: not engine.running, "the engine has let go")


def test_a_second_signal_ends_at_once(start_process: Any, engine: EngineSide) -> None:
    process: Process = start_process(drain_timeout=60)
    process.wait_ready()
    engine.hold()
    with socket.create_connection((HOST, process.port)) as sock:
        body = b'{"model":"%s","prompt":"x"}' % MODEL.encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        sock.sendall(head % len(body) + body)
        eventually(lambda: engine.running, "it runs")
        process.popen.send_signal(signal.SIGTERM)
        eventually(lambda: any("draining" in line for line in process.log), "it drains")
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait() == 1


def test_workers_share_a_port_and_their_numbers(start_process: Any, engine: EngineSide) -> None:
    process: Process = start_process(api_workers=2)
    process.wait_ready()
    eventually(lambda: len(children(process)) == 2, "two workers")
    eventually(lambda: len(engine.replicas()) == 2, "two replicas")
    for _ in range(40):
        assert httpx.post(process.url + CHAT, json=HI).status_code == 200
    line = 'millrace_http_requests_total{route="/v1/chat/completions",status="200"} 40.0'
    for _ in range(5):
        assert line in httpx.get(f"{process.url}/metrics").text
    victim = children(process)[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in children(process) and len(children(process)) == 2, "it was started again")

    def served() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return line in httpx.get(f"{process.url}/metrics").text
        return False

    eventually(served, "its numbers are kept")
    assert f'pid="{victim}"' not in httpx.get(f"{process.url}/metrics").text
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_a_bad_setting_is_named(start_process: Any) -> None:
    process: Process = start_process(max_body_bytes="lots")
    assert process.wait() == 2
    assert "MILLRACE_MAX_BODY_BYTES" in "".join(process.log)


def test_a_taken_port_is_named(start_process: Any, engine: EngineSide) -> None:
    process: Process = start_process()
    process.wait_ready()
    second: Process = start_process(port=process.port)
    assert second.wait() == 2
    assert "MILLRACE_PORT" in "".join(second.log)
