"""SIGTERM under load: every service leaves with code 0, and what it had goes on elsewhere or with its successor."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.faults.crowd import Client, Crowd, check_whole, wait_begun, wait_heard
from tests.e2e.faults.quiet import api_urls, total, wait_quiet
from tests.e2e.faults.stacks import ask_undisturbed, launched, stream_bodies
from tests.e2e.stack import Stack
from tests.waiting import eventually

NUM_STREAMS = 32
NUM_TOKENS = 120
STEP = ("--fake-step-ms", "20")
WORKERS = ("tokenizer", "scheduler", "detokenizer")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of each; a drain takes no longer than two seconds."""
    with launched(tmp_path_factory.mktemp("alone"), *STEP, "--drain-timeout", "3") as stack:
        yield stack


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two of each."""
    pairs = ("--apis", "2", "--schedulers", "2", "--tokenizers", "2", "--detokenizers", "2")
    with launched(tmp_path_factory.mktemp("doubled"), *STEP, *pairs) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(alone: Stack) -> dict[str, str]:
    return ask_undisturbed(alone, NUM_STREAMS, NUM_TOKENS)


def exits(stack: Stack, instance: str) -> list[str]:
    """List how an instance has ended, so far."""
    return re.findall(rf"millrace: {instance} ended \(([^)]*)\)", stack.log.read_text(errors="replace"))


def restart(stack: Stack, instance: str, timeout_s: float = 60.0) -> None:
    """Send SIGTERM; wait until its successor runs, however long it drains."""
    old = stack.pids()[instance]
    os.kill(old, signal.SIGTERM)
    eventually(lambda: stack.pids().get(instance, old) != old, f"a new {instance}", timeout_s)


def check(stack: Stack, clients: list[Client], undisturbed: dict[str, str]) -> None:
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert total(stack, "api", "millrace_requests_reopened_total") == 0
    stack.wait_ready()
    wait_quiet(stack)


@pytest.mark.slow
@pytest.mark.parametrize("role", WORKERS)
def test_a_rolling_restart_of_two(doubled: Stack, undisturbed: dict[str, str], role: str) -> None:
    """One after the other leaves; its sibling takes what it had."""
    doubled.wait_ready()
    before = {i: len(exits(doubled, i)) for i in (f"{role}-0", f"{role}-1")}
    with Crowd() as crowd:
        clients = crowd.ask(doubled, stream_bodies(doubled, NUM_STREAMS, NUM_TOKENS), urls=api_urls(doubled))
        wait_begun(clients)
        for instance in before:
            restart(doubled, instance)
            doubled.wait_ready()
            wait_heard(clients, NUM_STREAMS)
        crowd.wait(clients)
    assert {i: exits(doubled, i)[count:] for i, count in before.items()} == {i: ["exit code 0"] for i in before}
    check(doubled, clients, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("role", WORKERS)
def test_a_restart_of_the_only_one(alone: Stack, undisturbed: dict[str, str], role: str) -> None:
    """What an engine has not finished by its deadline waits for its successor."""
    alone.wait_ready()
    instance = f"{role}-0"
    before = len(exits(alone, instance))
    with Crowd() as crowd:
        clients = crowd.ask(alone, stream_bodies(alone, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        restart(alone, instance)
        crowd.wait(clients)
    assert exits(alone, instance)[before:] == ["exit code 0"]
    check(alone, clients, undisturbed)


@pytest.mark.slow
def test_a_drained_engine_hands_over_at_once(doubled: Stack, undisturbed: dict[str, str]) -> None:
    doubled.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(doubled, stream_bodies(doubled, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        held = doubled.metric("scheduler-0", "millrace_requests_running")
        assert held > 0
        fences = total(doubled, "scheduler-1", "millrace_fences_total", answer="ok")
        restart(doubled, "scheduler-0")
        eventually(
            lambda: total(doubled, "scheduler-1", "millrace_fences_total", answer="ok") - fences >= held,
            "the survivor speaks for all of them",
        )
        crowd.wait(clients)
    assert "drained: nothing is left with this engine" in doubled.log.read_text(errors="replace")
    assert total(doubled, "scheduler", "millrace_takeovers_total", why="crash") == 0
    check(doubled, clients, undisturbed)


@pytest.mark.slow
def test_apis_are_restarted_one_after_the_other(doubled: Stack, undisturbed: dict[str, str]) -> None:
    """Each finishes its streams, takes no new ones meanwhile, and ends with code 0."""
    doubled.wait_ready()
    bodies = stream_bodies(doubled, NUM_STREAMS, NUM_TOKENS)
    for number, url in enumerate(api_urls(doubled)):
        with Crowd() as crowd:
            clients = crowd.ask(doubled, bodies, urls=[url])
            wait_begun(clients)
            restart(doubled, f"api-{number}")
            crowd.wait(clients)
        assert exits(doubled, f"api-{number}") == ["exit code 0"]
        doubled.wait_ready()
        check(doubled, clients, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("role", WORKERS)
def test_a_second_signal_ends_a_service_at_once_and_loses_nothing(
    alone: Stack, undisturbed: dict[str, str], role: str
) -> None:
    alone.wait_ready()
    instance = f"{role}-0"
    before = len(exits(alone, instance))
    with Crowd() as crowd:
        clients = crowd.ask(alone, stream_bodies(alone, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        old = alone.pids()[instance]
        os.kill(old, signal.SIGTERM)
        os.kill(old, signal.SIGINT)

        def insist() -> bool:
            if alone.pids().get(instance, old) != old:
                return True
            if psutil.pid_exists(old):
                os.kill(old, signal.SIGTERM)
            return False

        eventually(insist, f"a new {instance}", 60, every_s=0.2)
        crowd.wait(clients)
    assert exits(alone, instance)[before:] in (["exit code 0"], ["exit code 143"])
    check(alone, clients, undisturbed)


@pytest.mark.slow
def test_the_whole_ends_cleanly_under_load(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """One SIGTERM to the launcher: streams are finished, nobody is killed, nobody hears a second signal."""
    with launched(tmp_path, *STEP) as stack, Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        assert stack.stop(signal.SIGTERM) == 0
        crowd.wait(clients)
        check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
        log = stack.log.read_text(errors="replace")
    assert "second signal" not in log
    assert "killing" not in log
    assert log.count("ends with code 0") == 3


@pytest.mark.slow
def test_ctrl_c_ends_the_whole_within_five_seconds(tmp_path: Path) -> None:
    with launched(tmp_path, *STEP, "--schedulers", "2", "--apis", "2") as stack, Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, 4000), urls=api_urls(stack))
        wait_begun(clients)
        family = [psutil.Process(pid) for pid in stack.pids().values()]
        began = time.monotonic()
        stack.process.send_signal(signal.SIGINT)
        stack.process.wait(30)
        print(f"Ctrl-C under load: all ended after {time.monotonic() - began:.1f} s")
        assert not psutil.wait_procs(family, timeout=1)[1]
        crowd.wait(clients)
    assert not any(c.done for c in clients)
