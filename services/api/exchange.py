"""The state of one HTTP request between its reply reader and its writer: what was said, what waits to be sent.

The reader (`replies.py`) says deltas to a choice; the writer (`streaming.py`) takes what waits, merged as it
pleases. All of it lives on one event loop, so nothing here locks. Knows neither the broker nor HTTP.
"""

import asyncio
import time
from typing import Final

from services.api.job import Job
from shared import tracing
from shared.broker.limits import Levels
from shared.messages import Delta, ErrorBody, LogprobEntry

TOKEN_COST_BYTES: Final = 64
ALTERNATIVE_COST_BYTES: Final = 48
"""What a token, and an alternative of its logprobs, weigh while they wait for a slow client."""


class Choice:
    """One uid: what its client was told, and where its log stood then.

    Attributes:
        index: over all choices of the request.
        last_id: of the log, when the last delta was said; its terminal's once it ended.
        attempt: of the last `open` or reading; with that of `last_id`, what a log opened again must stand above.
        token_ids, texts: all that was said; a log that lost data is opened again with them.
        logprobs: likewise, kept only of a stream that can be resumed.
        ended: the terminal.
        prompt: the tokens of the prompt, from the first delta of a reply that asked for them.
        entry: of the tokenize stream, as the last `open` gave it.
        opened: the broker has answered the first `open`.
        reopens, unheld: times it was opened again, and how many of those because nobody held it.
        touched: monotonic seconds of the last sign of life.
        held_at: monotonic seconds when an engine was last known to hold the request.
        reading: the log is being read; deltas that ring meanwhile set `again`.
        behind: deltas were left in the log because the client is slow.
        closed: nobody waits for it any more.
    """

    __slots__ = (
        "again", "attempt", "behind", "cached_tokens", "closed", "ended", "entry", "exchange", "held_at", "index",
        "last_id", "logprobs", "opened", "prompt", "prompt_tokens", "reading", "reopens", "said", "texts", "token_ids",
        "touched", "uid", "unheld",
    )  # fmt: skip

    def __init__(self, exchange: "Exchange", uid: str, index: int) -> None:
        now = time.monotonic()
        self.exchange: Exchange | Left = exchange
        self.uid = uid
        self.index = index
        self.last_id: bytes = b""
        self.attempt = 0
        self.said = 0
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[LogprobEntry] = []
        self.ended: Delta | None = None
        self.prompt: list[LogprobEntry] = []
        self.entry = b""
        self.opened = False
        self.touched = now
        self.held_at = now
        self.reopens = 0
        self.unheld = 0
        self.reading = False
        self.again = False
        self.behind = False
        self.closed = False
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def is_closed(self) -> bool:
        """Whether its client is gone or served; it may change during any wait."""
        return self.closed

    @property
    def text(self) -> str:
        """All text that was said."""
        return "".join(self.texts)

    def say(self, delta: Delta, entry_id: bytes) -> None:
        """Hand a delta to the client's writer: it follows directly on what was said before.

        `entry_id` is the delta's id in the log; the caller has checked that it continues `last_id`.
        """
        self.last_id = entry_id
        self.touched = self.held_at = time.monotonic()
        self.take_in(delta)
        self.exchange.push(self, delta)

    def take_in(self, delta: Delta) -> None:
        """Remember what a delta tells."""
        if delta.prompt_tokens and not self.prompt_tokens:
            self.prompt_tokens = delta.prompt_tokens
            self.cached_tokens = delta.cached_tokens
        if delta.prompt:
            self.prompt = delta.prompt
        if delta.token_ids:
            self.token_ids.extend(delta.token_ids)
            self.said += len(delta.token_ids)
        if delta.text:
            self.texts.append(delta.text)
        if delta.finish is not None or delta.error is not None:
            self.ended = delta
        if delta.logprobs and self.exchange.job.resume_ms:
            self.logprobs.extend(delta.logprobs)


class Left:
    """What stands in a choice for its exchange once that is over, for who still reads its log: it takes nothing."""

    __slots__ = ("job",)
    full = False

    def __init__(self, job: Job) -> None:
        self.job = job

    def push(self, choice: Choice, delta: Delta) -> None:
        """Nobody writes it."""

    def leave_behind(self, choice: Choice) -> None:
        """Nobody fetches it."""

    def fail(self, error: ErrorBody) -> None:
        """Nobody is told."""


class Exchange:
    """One HTTP request in flight. Made by the route, shared by reader and writer, dropped by the writer.

    Attributes:
        pending: deltas that wait to be written, in the order they were said.
        unsent_bytes: their weight.
        failure: an error that ends the request from our side (deadline, shutdown, no engine).
        gone: the client hung up.
        cut: the client does not read, so its connection is dropped.
        lagging: some choice is behind: its log holds what the slow client has not been told.
        silent_since: monotonic seconds since nothing was written; the sweep asks for a comment by it.
        sending_since: monotonic seconds when the write that is under way began; 0 between writes.
        levels: what is left of the API key's limits, where it has any.
        span: of the whole request, while traces are sent.
        follows: nobody rings for it: it reads a stream that was opened elsewhere, or by a client that left.
        announced: its client knows the stream's id, and so can come back to it.
    """

    __slots__ = (
        "_waiter",
        "announced",
        "choices",
        "comment_due",
        "cut",
        "failure",
        "first_token_at",
        "follows",
        "gone",
        "job",
        "lagging",
        "last_token_at",
        "levels",
        "max_unsent_bytes",
        "num_open",
        "opened_at",
        "pending",
        "sending_since",
        "silent_since",
        "span",
        "task",
        "unsent_bytes",
    )  # fmt: skip

    def __init__(self, job: Job, max_unsent_bytes: int) -> None:
        self.job = job
        self.max_unsent_bytes = max_unsent_bytes
        self.choices = [Choice(self, uid, i) for i, uid in enumerate(job.uids)]
        self.num_open = len(self.choices)
        self.pending: list[tuple[Choice, Delta]] = []
        self.unsent_bytes = 0
        self.failure: ErrorBody | None = None
        self.gone = False
        self.comment_due = False
        self.cut = False
        self.lagging = False
        self.follows = False
        self.announced = False
        self.opened_at = self.silent_since = time.monotonic()
        self.sending_since = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.task: asyncio.Task[object] | None = None
        self.levels: Levels | None = None
        self.span: tracing.Span | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether the client is so slow that further deltas had better stay in the log."""
        return self.unsent_bytes > self.max_unsent_bytes

    @property
    def goes_on(self) -> bool:
        """Whether it is unfinished, and goes on without its client, who may come back."""
        return self.job.resume_ms > 0 and self.announced and self.num_open > 0

    @property
    def started(self) -> bool:
        """Whether any token was said."""
        return any(choice.said for choice in self.choices)

    def push(self, choice: Choice, delta: Delta) -> None:
        """Queue a delta for the writer and wake it."""
        self.unsent_bytes += weight(delta)
        self.pending.append((choice, delta))
        if delta.finish is not None or delta.error is not None:
            self.num_open -= 1
        self.wake()

    def leave_behind(self, choice: Choice) -> None:
        """Note that a choice's log holds more than the slow client was told; the writer has it fetched."""
        choice.behind = self.lagging = True

    def wake(self) -> None:
        """Let the writer look again."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: ErrorBody) -> None:
        """End the request from our side; the first reason counts, and none after the answer is complete."""
        if self.failure is None and self.num_open:
            self.failure = error
            self.wake()

    def nudge(self) -> None:
        """Let the writer send something even if there is nothing to tell."""
        self.comment_due = True
        self.wake()

    def hang_up(self) -> None:
        """Note that the client is gone."""
        self.gone = True
        self.wake()

    def drop(self) -> None:
        """Break off a write that the client does not take."""
        if self.task is not None and self.sending_since and not self.cut:
            self.cut = True
            self.task.cancel()

    def let_go(self) -> None:
        """Break the circles that it is part of, once it is over: the collector would find them late."""
        self.task = None
        for choice in self.choices:
            choice.exchange = Left(self.job)

    async def take(self) -> list[tuple[Choice, Delta]]:
        """Wait for something to write and take all of it.

        An empty list means that the writer should look at `gone`, `failure` and `comment_due`.
        """
        if not (self.pending or self.gone or self.failure or self.comment_due):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch, self.pending = self.pending, []
        self.unsent_bytes = 0
        return batch

    def first_error(self) -> ErrorBody | None:
        """Give the error that ends the request, from our side or from the log of any choice."""
        if self.failure is not None:
            return self.failure
        for choice in self.choices:
            if choice.ended is not None and choice.ended.error is not None:
                return choice.ended.error
        return None


def weight(delta: Delta) -> int:
    """Estimate what a delta weighs in memory, in bytes."""
    cost = len(delta.text) + TOKEN_COST_BYTES * len(delta.token_ids)
    for entry in (*delta.logprobs, *delta.prompt):
        cost += TOKEN_COST_BYTES + ALTERNATIVE_COST_BYTES * len(entry.top)
    return cost


def count_usage(exchange: Exchange) -> tuple[int, int, int]:
    """Count (prompt tokens, cached prompt tokens, completion tokens): each prompt once, each choice's answer."""
    n = exchange.job.n
    prompt = cached = completion = 0
    for first in range(0, len(exchange.choices), n):
        known = next((c for c in exchange.choices[first : first + n] if c.prompt_tokens), None)
        if known is not None:
            prompt += known.prompt_tokens
            cached += known.cached_tokens
    for choice in exchange.choices:
        completion += choice.said
    return prompt, cached, completion
