import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from services.launcher.redis_server import RedisServer
from shared.broker.connection import Broker
from shared.broker.control import look
from shared.messages import Heartbeat, decode
from shared.settings import RedisSettings
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


class Process:
    """The service script in a process of its own; what it prints is read line by line."""

    def __init__(self, mode: str, **environment: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
        env |= {"MILLRACE_HEALTH_HOST": "127.0.0.1", "MILLRACE_NAME": "script-0", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.shared.service_script", mode],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out: IO[str] = self.process.stdout
        self.err: IO[str] = self.process.stderr

    def line(self) -> str:
        return self.out.readline().strip()

    def wait_serving(self) -> int:
        """Wait until it serves; gives the port of its health server."""
        assert self.line() == "preparing"
        word, port = self.line().split()
        assert word == "serving"
        return int(port)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, list[str], str]:
        """Wait for the end: exit code, the rest of what it printed, its log."""
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out.splitlines(), err


@pytest.fixture
def start(redis_settings: RedisSettings) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(mode: str, **environment: str) -> Process:
        broker = {"MILLRACE_REDIS_URL": redis_settings.redis_url, "MILLRACE_REDIS_PREFIX": redis_settings.redis_prefix}
        started.append(Process(mode, **(broker | environment)))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()
        process.process.wait(20)
        process.out.close()
        process.err.close()


def probe(port: int, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.load(e)


def beats(broker: Broker) -> list[Heartbeat]:
    return [decode(Heartbeat, beat) for beat in broker.run(look(broker.keys, "tokenizer")).values()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_end_is_clean(broker: Broker, start: Callable[..., Process], number: int) -> None:
    process = start("serve")
    port = process.wait_serving()
    assert probe(port, "/readyz") == (200, {"ready": True, "missing": []})
    assert probe(port, "/livez")[0] == probe(port, "/startupz")[0] == 200
    [beat] = eventually(lambda: beats(broker), "it is registered")
    assert (beat.name, beat.model, beat.port, beat.draining) == ("script-0", "smollm2-135m-instruct", port, False)
    process.signal(number)
    assert process.end()[:2] == (0, ["draining", "done True"])
    assert beats(broker) == []


def test_while_it_drains_it_says_so(broker: Broker, start: Callable[..., Process]) -> None:
    process = start("never-ends")
    port = process.wait_serving()
    process.signal(signal.SIGTERM)
    assert process.line() == "draining"
    assert probe(port, "/readyz") == (503, {"ready": False, "missing": ["draining"]})
    assert probe(port, "/livez")[0] == 200
    eventually(lambda: [beat.draining for beat in beats(broker)] == [True], "others are told")


def test_a_second_signal_ends_at_once(start: Callable[..., Process]) -> None:
    process = start("never-ends")
    process.wait_serving()
    process.signal(signal.SIGTERM)
    assert process.line() == "draining"
    process.signal(signal.SIGTERM)
    assert process.end()[0] == 128 + signal.SIGTERM


def test_the_same_wish_by_two_signals_is_one(start: Callable[..., Process]) -> None:
    process = start("serve")
    process.wait_serving()
    process.signal(signal.SIGSTOP)
    process.signal(signal.SIGINT)
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGCONT)
    assert process.end()[0] == 0


def test_the_drain_deadline_ends_it_with_an_error(start: Callable[..., Process]) -> None:
    process = start("never-ends", MILLRACE_DRAIN_TIMEOUT="0.1")
    process.wait_serving()
    process.signal(signal.SIGTERM)
    code, _, log = process.end()
    assert code == 1
    assert "drain deadline" in log


def test_a_signal_before_it_serves_is_a_clean_end(start: Callable[..., Process]) -> None:
    process = start("slow-start")
    assert process.line() == "preparing"
    process.signal(signal.SIGTERM)
    assert process.end()[:2] == (0, [])


def test_a_signal_while_it_waits_for_the_broker_is_a_clean_end(start: Callable[..., Process]) -> None:
    process = start("serve", MILLRACE_REDIS_URL="redis://127.0.0.1:1/0")
    assert process.line() == "preparing"
    process.signal(signal.SIGTERM)
    assert process.end()[:2] == (0, [])


@pytest.mark.parametrize(
    ("mode", "code", "word"),
    [
        ("bad-model", 2, "there is no such model"),
        ("crash", 1, "RuntimeError: broken"),
        ("returns", 1, "the service's loop ended by itself"),
        ("helper-dies", 2, "a helper died"),
    ],
)
def test_what_is_not_a_clean_end_has_a_code_and_a_reason(
    broker: Broker, start: Callable[..., Process], mode: str, code: int, word: str
) -> None:
    got, _, log = start(mode).end()
    assert got == code
    assert word in log


def test_a_bad_setting_stops_the_start_with_its_name(start: Callable[..., Process]) -> None:
    code, out, log = start("serve", MILLRACE_LEASE="soon").end()
    assert (code, out) == (2, [])
    assert log.startswith("millrace tokenizer: MILLRACE_LEASE: ")
    assert len(log.splitlines()) == 1


def test_a_stuck_loop_ends_with_the_stacks_of_all_threads(start: Callable[..., Process]) -> None:
    process = start("stuck")
    process.wait_serving()
    code, _, log = process.end()
    assert code == 70
    assert "the loop is stuck" in log
    assert "in serve" in log


def test_stacks_can_be_asked_for(start: Callable[..., Process]) -> None:
    process = start("serve")
    process.wait_serving()
    process.signal(signal.SIGUSR1)
    process.signal(signal.SIGTERM)
    code, _, log = process.end()
    assert code == 0
    assert "in serve" in log


def test_it_lives_through_the_loss_of_the_broker(
    start_redis: Callable[..., RedisServer], start: Callable[..., Process]
) -> None:
    server = start_redis()
    process = start("serve", MILLRACE_REDIS_URL=server.url)
    port = process.wait_serving()
    server.kill()
    eventually(lambda: probe(port, "/readyz") == (503, {"ready": False, "missing": ["broker"]}), "it is not ready")
    assert probe(port, "/livez")[0] == 200
    server.start()
    assert process.line() == "reconnected"
    eventually(lambda: probe(port, "/readyz")[0] == 200, "it is ready again")
    process.signal(signal.SIGTERM)
    assert process.end()[0] == 0


def test_a_taken_port_is_stepped_over(start: Callable[..., Process]) -> None:
    first = start("serve")
    port = first.wait_serving()
    second = start("serve", MILLRACE_HEALTH_PORT=str(port))
    assert second.wait_serving() > port
    third = start("serve", MILLRACE_HEALTH_PORT=str(port), MILLRACE_HEALTH_PORT_STRICT="1")
    code, _, log = third.end()
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in log
