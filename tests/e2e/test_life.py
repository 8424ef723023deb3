"""Start and end of the whole: the fake engine, two installations on one Redis, Ctrl-C, SIGTERM under load."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from shared.broker.connection import Broker
from shared.broker.dead_letters import bury
from shared.ids import new_uid
from shared.messages import DeadLetter, GenerateRequest, encode
from shared.sampling import SamplingParams
from shared.settings import RedisSettings
from tests.e2e.stack import ROOT, Stack, finish_of, is_ready, text_of
from tests.waiting import eventually


def test_the_fake_engine_serves_without_torch(fake: Stack) -> None:
    answer = fake.chat("hi", max_tokens=8)
    assert answer["usage"]["completion_tokens"] <= 8
    with open(f"/proc/{fake.pids()['scheduler-0']}/maps", encoding="utf-8") as maps:
        assert "libtorch" not in maps.read()
    body = fake.complete_body("abc", max_tokens=32)
    first, again = fake.stream("/v1/completions", body), fake.stream("/v1/completions", body)
    assert text_of(first) == text_of(again)


def test_every_service_answers_its_probes(fake: Stack) -> None:
    for instance, port in fake.ports().items():
        if instance == "redis":
            continue
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/livez").status_code == 200
        assert httpx.get(f"{base}/startupz").status_code == 200
        assert httpx.get(f"{base}/readyz").json() == {"ready": True, "missing": []}
        assert "millrace_service_info" in httpx.get(f"{base}/metrics").text


def test_readiness_names_the_missing_part(fake: Stack) -> None:
    fake.wait_ready()
    pid = fake.pids()["scheduler-0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        api = f"http://127.0.0.1:{fake.ports()['api-0']}"
        eventually(lambda: not is_ready(fake.ports()["api-0"]), "the api misses its engine")
        assert httpx.get(f"{api}/readyz").json()["missing"]
        assert httpx.get(f"{api}/livez").status_code == 200
    finally:
        os.kill(pid, signal.SIGCONT)
    fake.wait_ready()


@pytest.mark.slow
def test_ctrl_c_under_load_ends_everything_within_five_seconds(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "--engine", "fake", "--fake-step-ms", "50")
    with ThreadPoolExecutor(3) as pool:
        begun = [Event() for _ in range(3)]

        def hold(event: Event) -> list[str]:
            seen: list[str] = []
            try:
                with stack.streaming(
                    "/v1/completions", stack.complete_body("x", max_tokens=4000, ignore_eos=True)
                ) as e:
                    for data in e:
                        seen.append(data)
                        event.set()
            except httpx.HTTPError:
                return seen
            return seen

        held = [pool.submit(hold, event) for event in begun]
        assert all(event.wait(30) for event in begun)
        pressed = time.monotonic()
        stack.stop(signal.SIGINT)
        assert time.monotonic() - pressed < 5.5
        for future in held:
            assert "[DONE]" not in future.result(10)


@pytest.mark.slow
def test_sigterm_lets_streams_finish_and_ends_cleanly(tmp_path: Path) -> None:
    stack = Stack(tmp_path, "--engine", "fake", "--fake-step-ms", "20")
    body = stack.complete_body("x", max_tokens=100, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        with stack.streaming("/v1/completions", body) as events:
            chunks = [json.loads(next(events))]
            ended = pool.submit(stack.stop, signal.SIGTERM)
            chunks += [json.loads(event) for event in events if event != "[DONE]"]
        assert finish_of(chunks) == "length"
        assert ended.result(60) == 0


@pytest.mark.slow
def test_two_installations_share_a_redis_by_their_prefix(fake: Stack, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{fake.ports()['redis']}/0"
    other = Stack(tmp_path, "--engine", "fake", "--redis-url", url, "--redis-prefix", "other")
    try:
        assert "redis" not in other.pids()
        assert other.chat(max_tokens=4)["usage"]["completion_tokens"] <= 4
        assert fake.chat(max_tokens=4)["usage"]["completion_tokens"] <= 4
        with fake.redis() as broker:
            assert {key.split(":")[0] for key in broker.scan_iter(count=1000)} == {"millrace", "other"}
    finally:
        assert other.stop() == 0


def dead(stack: Stack, *action: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.launcher", "dead", "--run-dir", str(stack.folder / "run"), *action]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def test_a_dead_letter_is_sent_again(fake: Stack) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(uid=new_uid(), prompt_ids=[65, 66], params=params)
    letter = DeadLetter(request.uid, "poison", 3, "scheduler-0", 1_800_000_000_000, encode(request))
    with Broker(RedisSettings(redis_url=f"redis://127.0.0.1:{fake.ports()['redis']}/0")) as broker:
        broker.run(bury(broker.keys, letter))
    assert dead(fake, "list").stdout.endswith("1 letter\n")
    again = dead(fake, "replay", request.uid)
    assert "length after 5 tokens" in again.stdout, again.stderr
    assert again.returncode == 0
    assert dead(fake, "list").stdout == "0 letters\n"
