"""The embedded model in float32 on two engines: whatever happens to whom, every token is what it would have been."""

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.faults.crowd import LONG, Client, Crowd, wait_begun, wait_heard
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.stops import stopped
from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

NUM_TOKENS = 64
LEASE_S = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--dtype", "float32", "--schedulers", "2", "--max-running-requests", "8", "--max-seq-len", "1024")
    stack = Stack(tmp_path_factory.mktemp("pair"), *flags, "--lease", str(LEASE_S))
    try:
        yield stack
    finally:
        stack.close()


def bodies(stack: Stack) -> list[Json]:
    """Give one request of each kind whose state has to be replayed by whoever takes over."""
    common: Json = {"max_tokens": NUM_TOKENS, "logit_bias": LONG, "stream": True}
    common["stream_options"] = {"include_usage": True}
    sampled: Json = {"temperature": 0.9, "seed": 17, "top_p": 0.9}
    return [
        stack.complete_body("Once upon a time", logprobs=0, **common),
        stack.complete_body("The history of the water mill", logprobs=2, **{**common, **sampled}),
        stack.complete_body("Dear diary,", presence_penalty=1.0, frequency_penalty=0.5, logprobs=0, **common),
        stack.complete_body("Count with me: one, two,", n=2, **{**common, **sampled, "logprobs": 0}),
        stack.complete_body("A letter:", regex="[a-z][a-z ,]{200,400}", logprobs=0, **{**common, **sampled}),
        stack.complete_body("One day", stop=[" the the the", "\n\n\n\n"], priority=-1, logprobs=0, **common),
    ]


def said(client: Client) -> tuple[str, list[str], dict[int, str]]:
    return client.text, client.tokens, client.others


@pytest.fixture(scope="module")
def undisturbed(pair: Stack) -> list[tuple[str, list[str], dict[int, str]]]:
    """What is said when nothing happens; asked two at a time, so that the company is another one too."""
    with Crowd() as crowd:
        found = []
        asked = bodies(pair)
        for at in range(0, len(asked), 2):
            clients = crowd.ask(pair, asked[at : at + 2])
            crowd.wait(clients, 110)
            found += map(said, clients)
    assert all(len(tokens) == NUM_TOKENS for _, tokens, _ in found)
    return found


def check(clients: list[Client], undisturbed: list[tuple[str, list[str], dict[int, str]]]) -> None:
    """Compare text and single tokens: none is missing, none came twice."""
    for client, expected in zip(clients, undisturbed, strict=True):
        assert said(client) == expected
        assert client.done
        assert set(client.finish) == {"length"}
        assert client.num_tokens == NUM_TOKENS * (1 + len(client.others))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_service_is_killed_in_mid_stream(
    pair: Stack, undisturbed: list[tuple[str, list[str], dict[int, str]]]
) -> None:
    pair.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(pair, bodies(pair))
        wait_begun(clients)
        for instance in ("scheduler-0", "detokenizer-0", "tokenizer-0", "scheduler-1"):
            pair.kill(instance, signal.SIGKILL)
            wait_heard(clients, 8, 120)
        crowd.wait(clients)
    check(clients, undisturbed)
    print(f"longest gap over four kills, lease {LEASE_S} s: {max(c.longest_gap_s for c in clients):.2f} s")
    pair.wait_ready()
    assert total(pair, "api", "millrace_requests_reopened_total") == 0
    wait_quiet(pair)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_sleeps_longer_than_its_lease(
    pair: Stack, undisturbed: list[tuple[str, list[str], dict[int, str]]]
) -> None:
    pair.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(pair, bodies(pair))
        wait_begun(clients)
        sleeper = max(("scheduler-0", "scheduler-1"), key=lambda s: pair.metric(s, "millrace_requests_running"))
        survivor = {"scheduler-0": "scheduler-1", "scheduler-1": "scheduler-0"}[sleeper]
        taken = total(pair, survivor, "millrace_takeovers_total", why="crash")
        with stopped(pair, sleeper):
            eventually(
                lambda: total(pair, survivor, "millrace_takeovers_total", why="crash") > taken, "it is taken from", 30
            )
            wait_heard(clients, 4, 60)
        crowd.wait(clients)
    check(clients, undisturbed)
    pair.wait_ready()
    wait_quiet(pair)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_are_drained_one_after_the_other(
    pair: Stack, undisturbed: list[tuple[str, list[str], dict[int, str]]]
) -> None:
    pair.wait_ready()
    with Crowd() as crowd:
        clients = crowd.ask(pair, bodies(pair))
        wait_begun(clients)
        for instance in ("scheduler-0", "scheduler-1"):
            pair.kill(instance, signal.SIGTERM)
            pair.wait_ready()
            wait_heard(clients, 4, 60)
        crowd.wait(clients)
    check(clients, undisturbed)
    wait_quiet(pair)


def spoken_arguments(pair: Stack, *, disturbed: bool) -> str:
    """Stream a forced call; where it is disturbed, its engine is killed in the middle of the arguments."""
    parameters = {"type": "object", "required": ["city"], "additionalProperties": False}
    parameters["properties"] = {"city": {"type": "string", "minLength": 120, "maxLength": 140}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    body = pair.chat_body("Weather where?", tools=[tool], temperature=0, max_tokens=200, stream=True)
    body["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    said, names, finish, victim = "", [], "", ""
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(**body):
            (choice,) = chunk.choices
            for call in choice.delta.tool_calls or []:
                assert call.index == 0 and call.function is not None
                names += [call.function.name] if call.function.name else []
                said += call.function.arguments or ""
            finish = choice.finish_reason or finish
            if disturbed and not victim and len(said) > 20:
                running = {s: pair.metric(s, "millrace_requests_running") for s in ("scheduler-0", "scheduler-1")}
                victim = max(running, key=lambda s: running[s])
                assert running[victim] == 1, "the call is under way"
                pair.kill(victim, signal.SIGKILL)
    assert names == ["weather"] and finish == "tool_calls"
    assert not disturbed or victim
    return said


@pytest.mark.slow
def test_an_engine_is_killed_in_the_middle_of_a_call(pair: Stack) -> None:
    pair.wait_ready()
    wanted = spoken_arguments(pair, disturbed=False)
    assert 120 <= len(json.loads(wanted)["city"]) <= 140
    assert spoken_arguments(pair, disturbed=True) == wanted
    pair.wait_ready()
    wait_quiet(pair)


@pytest.mark.slow
def test_pathological_prompts_hold_nobody_up(real: Stack) -> None:
    """They are refused; meanwhile probes answer, streams go on and short requests are served."""
    real.wait_ready()
    stop = threading.Event()
    slowest: list[float] = []

    def poll() -> None:
        with httpx.Client(base_url=real.url, timeout=30) as client:
            while not stop.wait(0.1):
                slowest.append(client.get("/livez").elapsed.total_seconds())

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        with Crowd() as crowd:
            running = crowd.ask(real, [real.complete_body("a", max_tokens=150, logit_bias=LONG, stream=True)] * 2)
            wait_begun(running)
            prompts = ["a" * 2_000_000] * 3 + ["https://x.y/" * 100_000] * 3
            huge = crowd.ask(real, [real.complete_body(prompt, max_tokens=5) for prompt in prompts])
            short = crowd.ask(real, [real.complete_body("hi", max_tokens=2, logit_bias=LONG)])
            crowd.wait(short)
            assert not all(c.over.is_set() for c in running)
            crowd.wait([*huge, *running])
    finally:
        stop.set()
        poller.join()
    assert {(c.status, c.error["code"] if c.error else None) for c in huge} == {(400, "context_length_exceeded")}
    assert short[0].done
    assert all(c.done for c in running)
    gap = max(c.longest_gap_s for c in running)
    print(f"six huge prompts: slowest probe {max(slowest):.2f} s, longest gap of a stream {gap:.2f} s")
    wait_quiet(real)
