"""Services that stand still for a while: what they missed is made good, and who was replaced says nothing more."""

from collections.abc import Iterator

import pytest

from tests.e2e.faults.crowd import Crowd, check_whole, wait_begun, wait_heard
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.stacks import ask_undisturbed, launched, stream_bodies
from tests.e2e.faults.stops import stopped
from tests.e2e.stack import Stack, is_ready
from tests.waiting import eventually

NUM_STREAMS = 16
NUM_TOKENS = 150
LEASE = ("--lease", "2", "--fake-step-ms", "20")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with launched(tmp_path_factory.mktemp("alone"), *LEASE) as stack:
        yield stack


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with launched(tmp_path_factory.mktemp("two"), *LEASE, "--schedulers", "2") as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(alone: Stack) -> dict[str, str]:
    return ask_undisturbed(alone, NUM_STREAMS, NUM_TOKENS)


def drawn(stack: Stack) -> float:
    return total(stack, "scheduler", "millrace_generated_tokens_total")


@pytest.mark.slow
@pytest.mark.parametrize("instance", ["detokenizer-0", "api-0"])
def test_a_service_stands_still_until_all_is_computed(alone: Stack, undisturbed: dict[str, str], instance: str) -> None:
    """All tokens of all streams wait for it, and come in one piece."""
    alone.wait_ready()
    before = drawn(alone)
    with Crowd() as crowd:
        clients = crowd.ask(alone, stream_bodies(alone, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        with stopped(alone, instance):
            eventually(lambda: drawn(alone) - before == NUM_STREAMS * NUM_TOKENS, "all is computed", 60)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    wait_quiet(alone)


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "part"), [("tokenizer-0", "tokenizer"), ("scheduler-0", "engine")])
def test_a_service_without_a_sibling_stands_still_for_more_than_its_lease(
    alone: Stack, undisturbed: dict[str, str], instance: str, part: str
) -> None:
    alone.wait_ready()
    fences = total(alone, "scheduler", "millrace_fences_total", answer="ok")
    bodies = stream_bodies(alone, NUM_STREAMS, NUM_TOKENS)
    with Crowd() as crowd:
        clients = crowd.ask(alone, bodies[:-1])
        wait_begun(clients)
        with stopped(alone, instance):
            eventually(lambda: part in alone.client.get("/readyz").json()["missing"], f"the api misses the {part}")
            clients += crowd.ask(alone, bodies[-1:])
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    wait_quiet(alone)
    assert total(alone, "scheduler", "millrace_fences_total", answer="ok") - fences == NUM_STREAMS, "nobody took over"


@pytest.mark.slow
def test_short_stops_of_everybody_change_nothing(alone: Stack, undisturbed: dict[str, str]) -> None:
    alone.wait_ready()
    fences = total(alone, "scheduler", "millrace_fences_total", answer="ok")
    with Crowd() as crowd:
        clients = crowd.ask(alone, stream_bodies(alone, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        for instance in ("detokenizer-0", "scheduler-0", "api-0", "tokenizer-0", "redis"):
            with stopped(alone, instance):
                pass
            wait_heard(clients, NUM_STREAMS)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert total(alone, "scheduler", "millrace_fences_total", answer="ok") - fences == NUM_STREAMS
    assert total(alone, "api", "millrace_requests_reopened_total") == 0
    wait_quiet(alone)


@pytest.mark.slow
def test_a_stopped_engine_is_fenced_and_recovers(two_engines: Stack, undisturbed: dict[str, str]) -> None:
    """Its requests go on with the survivor; when it wakes it forgets them, and serves again."""
    stack = two_engines
    stack.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        wait_begun(clients)
        # Whoever was seen first has most of them, on a slow machine all.
        load = {name: stack.metric(name, "millrace_requests_running") for name in ("scheduler-0", "scheduler-1")}
        survivor, sleeper = sorted(load, key=lambda name: load[name])
        held = load[sleeper]
        assert held > 0
        with stopped(stack, sleeper):
            eventually(
                lambda: total(stack, survivor, "millrace_takeovers_total", why="crash") == held, "all are taken over"
            )
            wait_heard(clients, 2 * NUM_STREAMS)
        crowd.wait(clients)
    check_whole(clients, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    eventually(
        lambda: total(stack, sleeper, "millrace_engine_requests_finished_total", reason="moved") == held,
        "the sleeper has let go of them",
    )
    assert total(stack, "api", "millrace_requests_reopened_total") == 0
    assert total(stack, "detokenizer", "millrace_detokenizer_dropped_total", reason="gap") == 0
    wait_quiet(stack)
    eventually(lambda: is_ready(stack.ports()[sleeper]), "the sleeper serves again")
    before = stack.metric(sleeper, "millrace_generated_tokens_total")
    with Crowd() as crowd:
        again = crowd.ask(stack, stream_bodies(stack, NUM_STREAMS, NUM_TOKENS))
        crowd.wait(again)
    check_whole(again, lambda c: undisturbed[c.body["prompt"]], NUM_TOKENS)
    assert stack.metric(sleeper, "millrace_generated_tokens_total") > before
    wait_quiet(stack)
