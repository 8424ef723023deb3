"""What the tests of faults launch, and what a fake engine answers when nothing happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.e2e.faults.crowd import Crowd
from tests.e2e.stack import Json, Stack

MANY_SLOTS = ("--max-running-requests", "256", "--max-queued-requests", "1000")


class Elsewhere(Stack):
    """A stack on a Redis that is the test's own."""

    def __init__(self, folder: Path, *flags: str, redis_url: str) -> None:
        super().__init__(folder, *flags, "--redis-url", redis_url)
        self._redis_url = redis_url

    def redis(self) -> "redis.Redis":
        """Connect to the broker."""
        return redis.Redis.from_url(self._redis_url, decode_responses=True)


@contextmanager
def launched(folder: Path, *flags: str, redis_url: str = "") -> Iterator[Stack]:
    """Launch a stack around the fake engine, on a Redis of its own or on a given one; end it with the block."""
    words = ("--engine", "fake", *flags)
    stack = Elsewhere(folder, *words, redis_url=redis_url) if redis_url else Stack(folder, *words)
    try:
        yield stack
    finally:
        stack.close()


def stream_bodies(stack: Stack, count: int, num_tokens: int, **more: Any) -> list[Json]:
    """Make streams whose prompts all differ; with a fake engine each answer has just so many letters."""
    fields: Json = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True, **more}
    if fields["stream"]:
        fields["stream_options"] = {"include_usage": True}
    return [stack.complete_body(f"stream number {number}", **fields) for number in range(count)]


def ask_undisturbed(stack: Stack, count: int, num_tokens: int) -> dict[str, str]:
    """Ask for all answers once, while nothing happens: prompt -> text. Each letter hangs on all before it."""
    with Crowd() as crowd:
        clients = crowd.ask(stack, stream_bodies(stack, count, num_tokens))
        crowd.wait(clients)
    texts = {c.body["prompt"]: c.text for c in clients}
    assert {len(text) for text in texts.values()} == {num_tokens}
    assert len(set(texts.values())) == count
    return texts
