"""Two hundred streams while services are killed one after the other: none misses a token, none gets one twice.

The text of the fake engine has one letter per token and each letter hangs on all before it, so that equal texts
are equal tokens at equal places.
"""

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.faults.crowd import Client, Crowd, check_whole, wait_begun, wait_heard
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.stacks import MANY_SLOTS, ask_undisturbed, launched, stream_bodies
from tests.e2e.stack import Stack

NUM_STREAMS = 200
NUM_TOKENS = 60
STEP = ("--fake-step-ms", "25", "--lease", "3", *MANY_SLOTS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of each service."""
    with launched(tmp_path_factory.mktemp("alone"), *STEP) as stack:
        yield stack


@pytest.fixture(scope="module")
def doubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two schedulers, tokenizers and detokenizers."""
    pairs = ("--schedulers", "2", "--tokenizers", "2", "--detokenizers", "2")
    with launched(tmp_path_factory.mktemp("doubled"), *STEP, *pairs) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(alone: Stack) -> dict[str, str]:
    """What each prompt is answered when nothing happens; the same on both stacks."""
    return ask_undisturbed(alone, NUM_STREAMS, NUM_TOKENS)


def run_under(stack: Stack, undisturbed: dict[str, str], faults: list[tuple[str, int]]) -> list[Client]:
    """Open all streams, let the faults happen one after the other, and check every answer."""
    stack.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        for instance, signum in faults:
            stack.kill(instance, signum)
            wait_heard(clients, NUM_STREAMS)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    stack.wait_ready()
    wait_quiet(stack)
    return clients


@pytest.mark.slow
def test_every_service_is_killed_in_turn(alone: Stack, undisturbed: dict[str, str]) -> None:
    order = ["detokenizer-0", "scheduler-0", "tokenizer-0", "detokenizer-0", "scheduler-0"]
    run_under(alone, undisturbed, [(name, signal.SIGKILL) for name in order])
    assert total(alone, "api", "millrace_requests_reopened_total") == 0
    assert total(alone, "detokenizer", "millrace_detokenizer_dropped_total", reason="gap") == 0


@pytest.mark.slow
def test_survivors_take_over_from_the_killed(doubled: Stack, undisturbed: dict[str, str]) -> None:
    order = ["scheduler-0", "detokenizer-1", "tokenizer-0", "scheduler-1", "detokenizer-0"]
    clients = run_under(doubled, undisturbed, [(name, signal.SIGKILL) for name in order])
    print(f"longest gap of {NUM_STREAMS} streams, five kills, lease 3 s: {max(c.longest_gap_s for c in clients):.2f} s")
    assert total(doubled, "scheduler", "millrace_takeovers_total", why="crash") > 0
    assert total(doubled, "scheduler", "millrace_log_restarts_total") == 0
    assert total(doubled, "api", "millrace_requests_reopened_total") == 0


@pytest.mark.slow
def test_requests_that_are_not_yet_tokenized_survive_their_tokenizer(alone: Stack, undisturbed: dict[str, str]) -> None:
    alone.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(alone, stream_bodies(alone, NUM_STREAMS, NUM_TOKENS))
        alone.kill("tokenizer-0")
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    wait_quiet(alone)
