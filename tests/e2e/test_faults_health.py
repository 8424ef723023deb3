"""Readiness names who is missing, new requests are refused in time, and all comes back by itself."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.launcher.redis_server import RedisServer
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.stacks import launched
from tests.e2e.faults.stops import stopped
from tests.e2e.stack import ROOT, Stack, is_ready
from tests.waiting import eventually

FLAGS = ("--fake-step-ms", "5", "--lease", "1", "--missing-grace", "2")
OUTAGE_LINES = 60
"""What launcher and services may log together about an outage, however long."""


@pytest.fixture(scope="module")
def server(redis_program: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    one = RedisServer(redis_program, tmp_path_factory.mktemp("redis"))
    one.start()
    yield one
    one.kill()


@pytest.fixture(scope="module")
def stack(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with launched(tmp_path_factory.mktemp("stack"), *FLAGS, redis_url=server.url) as one:
        yield one


def ask(stack: Stack) -> httpx.Response:
    return stack.client.post("/v1/completions", json=stack.complete_body("x", max_tokens=2, ignore_eos=True))


@contextmanager
def down(server: RedisServer) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance", "part", "code"),
    [
        ("tokenizer-0", "tokenizer", "no_tokenizer"),
        ("scheduler-0", "engine", "no_engine"),
        ("detokenizer-0", "detokenizer", "no_detokenizer"),
        ("redis", "broker", "broker_unavailable"),
    ],
)
def test_who_is_missing_is_named_and_requests_are_refused(
    stack: Stack, server: RedisServer, instance: str, part: str, code: str
) -> None:
    stack.wait_ready()
    pids = stack.pids()
    away: AbstractContextManager[None] = down(server) if instance == "redis" else stopped(stack, instance)
    with away:
        eventually(lambda: stack.client.get("/readyz").json()["missing"] == [part], f"the {part} is missed", 15)
        assert stack.client.get("/readyz").status_code == 503
        assert stack.client.get("/livez").status_code == 200
        refused = eventually(lambda: (answer := ask(stack)).status_code == 503 and answer, "it is refused", 15)
        assert refused.json()["error"]["code"] == code
        assert int(refused.headers["retry-after"]) >= 1
    eventually(lambda: is_ready(stack.ports()["api-0"]), "it serves again", 30)
    stack.wait_ready()
    assert ask(stack).status_code == 200
    assert stack.pids() == pids
    wait_quiet(stack, texts=False)


@pytest.mark.slow
def test_a_lasting_outage_costs_little_and_fills_no_log(stack: Stack, server: RedisServer) -> None:
    stack.wait_ready()
    lines = len(stack.log.read_text(errors="replace").splitlines())
    processes = [psutil.Process(pid) for pid in stack.pids().values()]
    refused: list[float] = []

    def refuse() -> bool:
        answer = ask(stack)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "broker_unavailable")
        refused.append(answer.elapsed.total_seconds())
        return len(refused) == 40

    with down(server):
        eventually(lambda: not is_ready(stack.ports()["api-0"]), "readiness says so")
        before = sum(sum(p.cpu_times()[:2]) for p in processes)
        eventually(refuse, "forty are refused", every_s=0.1)
        spent = sum(sum(p.cpu_times()[:2]) for p in processes) - before
        assert total(stack, "api", "millrace_requests_in_flight") == 0, "nothing piles up"
    assert len(stack.log.read_text(errors="replace").splitlines()) - lines < OUTAGE_LINES
    print(f"forty refused, the slowest after {max(refused):.2f} s; meanwhile {spent:.2f} s of CPU")
    eventually(lambda: ask(stack).status_code == 200, "it serves again", 30)
    stack.wait_ready()


@pytest.mark.slow
def test_nothing_is_ready_before_the_engine_is(tmp_path: Path, server: RedisServer) -> None:
    """A model that cannot be served stops the start with a reason, and nobody was ready meanwhile."""
    command = [sys.executable, "-m", "services.launcher", "serve", "--port", "0", "--run-dir", str(tmp_path)]
    command += ["--model", str(tmp_path / "no-such-model"), "--redis-url", server.url, "--redis-prefix", "wrong"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=90, check=False)
    assert done.returncode != 0
    assert "no-such-model" in done.stderr
    assert "is ready" not in done.stdout
