"""kill -9 of an engine whose lease would last for minutes: its launcher ends it, and a survivor goes on at once."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from shared.messages import Heartbeat, decode
from tests.e2e.faults.crowd import Crowd, check_whole, wait_begun
from tests.e2e.faults.quiet import wait_quiet
from tests.e2e.faults.stacks import ask_undisturbed, launched, stream_bodies
from tests.e2e.faults.stops import stopped
from tests.e2e.stack import Stack
from tests.waiting import eventually

NUM_STREAMS, NUM_TOKENS = 12, 150


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two engines whose lease no test waits for."""
    flags = ("--schedulers", "2", "--lease", "600", "--fake-step-ms", "25")
    with launched(tmp_path_factory.mktemp("deaths"), *flags) as stack:
        yield stack


def registered(stack: Stack, name: str) -> dict[str, bool]:
    """Look who is registered under a name: incarnation -> whether its launcher has seen it end."""
    with stack.redis() as broker:
        broker.connection_pool.connection_kwargs["decode_responses"] = False
        beats = broker.hgetall("millrace:alive:scheduler")
    found = {incarnation.decode(): decode(Heartbeat, beat) for incarnation, beat in beats.items()}
    return {incarnation: beat.ended for incarnation, beat in found.items() if beat.name == name}


def busiest(stack: Stack) -> str:
    return max(("scheduler-0", "scheduler-1"), key=lambda name: stack.metric(name, "millrace_requests_running"))


@pytest.mark.slow
def test_a_survivor_goes_on_long_before_the_lease_of_the_killed_is_over(pair: Stack) -> None:
    undisturbed = ask_undisturbed(pair, NUM_STREAMS, NUM_TOKENS)
    with Crowd() as crowd:
        clients = crowd.ask(pair, stream_bodies(pair, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        victim = busiest(pair)
        survivor = "scheduler-1" if victim == "scheduler-0" else "scheduler-0"
        (incarnation,) = registered(pair, victim)
        with socket.socket() as place:
            pid, port = pair.pids()[victim], pair.ports()[victim]
            os.kill(pair.process.pid, signal.SIGSTOP)  # no successor before its port is taken
            try:
                os.kill(pid, signal.SIGKILL)
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                eventually(lambda: binds(place, port), "the place of the killed is taken")
                place.listen()
            finally:
                os.kill(pair.process.pid, signal.SIGCONT)
            eventually(lambda: incarnation not in registered(pair, victim), "its lease is over, and it is forgotten")
            assert not registered(pair, victim), "it has no successor that could have shortened its lease"
            crowd.wait(clients)
        check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
        assert pair.metric(survivor, "millrace_takeovers_total", why="crash") >= 1
    gap = max(c.longest_gap_s for c in clients)
    print(f"killed beside a survivor, lease 600 s: longest gap of {NUM_STREAMS} streams {gap:.2f} s")
    pair.wait_ready()
    wait_quiet(pair)


@pytest.mark.slow
def test_who_only_stands_still_is_not_taken_for_dead(pair: Stack) -> None:
    with Crowd() as crowd:
        clients = crowd.ask(pair, stream_bodies(pair, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        with stopped(pair, busiest(pair)):
            pair.kill("tokenizer-0")  # by now its death has been told
            engines = registered(pair, "scheduler-0") | registered(pair, "scheduler-1")
            assert len(engines) == 2 and not any(engines.values())
        crowd.wait(clients)
    assert all(c.done and len(c.text) == NUM_TOKENS for c in clients)
    wait_quiet(pair)


def binds(place: socket.socket, port: int) -> bool:
    try:
        place.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
