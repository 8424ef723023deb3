"""Any one service is killed in mid-stream: the stream goes on, and says what it would have said."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import httpx
import pytest

from tests.e2e.stack import Json, Stack, finish_of, text_of
from tests.waiting import eventually

LONG = {"2": -100, "0": -100}
NUM_TOKENS = 120
PROMPTS = ["Once upon a time", "The history of the water mill", "Count with me: one, two,", "Dear diary,"]
COMPLETIONS = "/v1/completions"


def read(stack: Stack, body: Json, begun: Event, after: int = 5) -> list[Json]:
    """Read a stream to its `[DONE]`; sets `begun` after some events."""
    chunks = []
    with stack.streaming(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}) as events:
        for number, event in enumerate(events):
            if number == after:
                begun.set()
            if event == "[DONE]":
                return chunks
            chunks.append(json.loads(event))
    raise AssertionError(f"the stream ended without [DONE]: {chunks[-2:]}")


Streams = list["Future[list[Json]]"]


@pytest.fixture
def streams() -> Iterator[Callable[[Stack], Streams]]:
    """Gives a function that starts one stream per prompt and returns when all have begun."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:

        def start(stack: Stack) -> Streams:
            begun = [Event() for _ in PROMPTS]
            bodies = [stack.complete_body(p, max_tokens=NUM_TOKENS, logit_bias=LONG) for p in PROMPTS]
            futures = [pool.submit(read, stack, body, event) for body, event in zip(bodies, begun, strict=True)]
            for event in begun:
                assert event.wait(60)
            return futures

        yield start


@pytest.fixture(scope="module")
def undisturbed(real: Stack) -> list[str]:
    """What the prompts are answered when nothing happens."""
    answers = [real.complete(p, max_tokens=NUM_TOKENS, logit_bias=LONG) for p in PROMPTS]
    return [answer["choices"][0]["text"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("instance", ["tokenizer-0", "detokenizer-0", "scheduler-0", "redis"])
def test_streams_survive_the_death_of_a_service(
    real: Stack, undisturbed: list[str], streams: Callable[[Stack], Streams], instance: str
) -> None:
    real.wait_ready()
    running = streams(real)
    real.kill(instance)
    for future, text in zip(running, undisturbed, strict=True):
        chunks = future.result(90)
        assert text_of(chunks) == text
        assert finish_of(chunks) == "length"
        assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    real.wait_ready()
    assert real.complete("The capital of France is", max_tokens=1)["choices"][0]["text"] == " Paris"


@pytest.mark.slow
def test_a_request_that_waits_for_its_whole_answer_survives_too(real: Stack, undisturbed: list[str]) -> None:
    real.wait_ready()
    drawn = real.metric("scheduler-0", "millrace_generated_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(real.complete, PROMPTS[0], max_tokens=NUM_TOKENS, logit_bias=LONG)
        eventually(lambda: real.metric("scheduler-0", "millrace_generated_tokens_total") > drawn + 9, "it runs")
        real.kill("scheduler-0")
        assert answer.result(90)["choices"][0]["text"] == undisturbed[0]
    real.wait_ready()


@pytest.mark.slow
def test_a_dead_api_cuts_its_streams_and_leaks_no_slot(real: Stack) -> None:
    real.wait_ready()
    body = real.complete_body(PROMPTS[0], max_tokens=4000, logit_bias=LONG)
    with pytest.raises(httpx.HTTPError), real.streaming(COMPLETIONS, body) as events:
        next(events)
        real.kill("api-0")
        assert "[DONE]" not in list(events)
    real.wait_ready()
    eventually(lambda: real.running() == 0, "its slot is free after the lease")
    assert real.complete("The capital of France is", max_tokens=1)["choices"][0]["text"] == " Paris"
