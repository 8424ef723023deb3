"""What the limits of API keys mean to this replica: what a request claims, how it is told, and what is given back.

Owns the claims of the requests under way: it holds their places in the broker while they run, and settles them when
they are over. The end of an answer is told once its place is free, so that its client may ask again at once; whatever
else is over, and what the broker does not take then, is settled at leisure, and what is missed frees itself. Of a
stream that goes on without its client it looks for the end, whoever brings that about: who reads it to the end settles
it, and whoever comes second finds nothing to settle. The counting is the broker's (`shared/broker/limits.py`), so that
all replicas share it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Scope

from services.api.exchange import Exchange, count_usage
from services.api.job import Job
from shared.broker.backoff import Backoff
from shared.broker.call import Call
from shared.broker.connection import AsyncBroker
from shared.broker.limits import Claim, Levels, Limits, hold, settle, until
from shared.broker.log_id import NO_LOG, LogId, is_end, split_log_id
from shared.broker.replies import last_id
from shared.broker.streams import Opened
from shared.errors import BrokerDown, BrokerError, RateLimited
from shared.keys import SLOT_TTL_MS

log = logging.getLogger(__name__)

ANSWER_GUESS: Final = 256
"""Tokens reserved for an answer without a limit of its own; what it really takes is charged when it is over."""
BYTES_PER_TOKEN: Final = 4
LIMIT_PARTS: Final = tuple(f"{what}-{of}" for of in ("Requests", "Tokens") for what in ("Limit", "Remaining", "Reset"))
"""What is told of a key's limits, each in a header `x-ratelimit-...`."""
_HOLD_S: Final = SLOT_TTL_MS / 3000
_LATE_S: Final = SLOT_TTL_MS / 1000 - _HOLD_S - 1
"""A place that frees itself sooner than this was not held when it was time: its replica is most likely dead."""
_LOOK_S: Final = 0.5
"""How often the logs of streams that go on without their clients are looked at."""
_FREE_S: Final = 1.0
"""How long the end of an answer waits for a broker that does not say that its place is free."""
_HOLD_CAP: Final = 2_000
_BATCH: Final = 256
_CAP: Final = 100_000
"""Settlements kept while the broker is away; what is beyond them frees itself."""


class KeyLimited(RateLimited):
    """A key is over one of its limits.

    Attributes:
        headers: what is left of each limit, as OpenAI tells it.
    """

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers


def make_claim(job: Job) -> Claim | None:
    """Say what a job takes of its key's limits; None where the key has none. Call it once its uids are made."""
    if not job.limits:
        return None
    answer = ANSWER_GUESS if job.params.max_tokens is None else job.params.max_tokens
    tokens = _guess_prompt(job) + answer * job.num_choices
    return Claim(job.tenant, job.uids[0], job.limits, tokens if job.purpose == "generate" else 0)


def _guess_prompt(job: Job) -> int:
    return math.ceil(job.cost_bytes / BYTES_PER_TOKEN)


def _used(exchange: Exchange) -> int:
    prompt, _, completion = count_usage(exchange)
    return prompt + completion if exchange.job.purpose == "generate" else 0


def refuse(claim: Claim, opened: Opened) -> KeyLimited:
    """Make the refusal of a key that is over a limit."""
    assert opened.levels is not None, "the broker says where the key stands"
    limits, levels = claim.limits, opened.levels
    when = ""
    if opened.limited == "concurrency":
        what, free_s = f"{_counted(limits.concurrency, 'request')} at a time", levels.free_ms / 1000
        wait = 1.0
        if free_s < _LATE_S:
            wait = max(wait, free_s)
        else:
            when = "when one of them is over"
    elif opened.limited == "requests":
        wait, what = until(limits.requests, levels.requests, 1), f"{_counted(limits.requests, 'request')} per minute"
    else:
        wait, what = until(limits.tokens, levels.tokens, claim.tokens), f"{_counted(limits.tokens, 'token')} per minute"
    return KeyLimited(
        f"this API key may use {what}; try again {when or 'in ' + _duration(wait)}",
        retry_after_s=wait,
        headers=limit_headers(limits, levels),
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def limit_headers(limits: Limits, levels: Levels) -> dict[str, str]:
    """Tell what is left of a key's limits, under the names of OpenAI's headers."""
    headers: dict[str, str] = {}
    for name, limit, level in (
        ("requests", limits.requests, levels.requests),
        ("tokens", limits.tokens, levels.tokens),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{name}"] = _duration(until(limit, level, limit))
    return headers


def tell_limits(scope: Scope, exchange: Exchange) -> None:
    """Put what is left of the key's limits into the head of the answer, which the gate completes."""
    if exchange.levels is not None:
        headers = limit_headers(exchange.job.limits, exchange.levels)
        scope["state"]["headers"] += [(name.encode(), value.encode()) for name, value in headers.items()]


def _duration(seconds: float) -> str:
    """Write a time as OpenAI's headers do: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


@dataclass(slots=True)
class _Left:
    """A stream that goes on without its client: what it uses, as far as it is known.

    Attributes:
        prompt: tokens of its prompts; where the client left before any was said, what they were taken for.
        said: uid -> tokens of its answer.
    """

    claim: Claim
    prompt: int
    said: dict[str, int]

    def is_over(self, lasts: list[LogId]) -> bool:
        """Take in the last ids of its logs. Those that nobody came back to are gone, and so is the request."""
        for uid, last in zip(self.said, lasts, strict=True):
            self.said[uid] = max(self.said[uid], split_log_id(last)[1])
        return all(last == NO_LOG or is_end(last) for last in lasts)


class LimitKeeper:
    """The claims of this replica's requests. `run` does the talking; everything else only notes it."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._held: dict[str, Claim] = {}
        self._left: dict[str, _Left] = {}
        self._settled: dict[str, tuple[Claim, int]] = {}
        self._wake = asyncio.Event()
        self._held_at = time.monotonic()
        self._looked_at = self._held_at
        self._held_last = asyncio.Event()
        self._held_last.set()

    def enter(self, claim: Claim) -> None:
        """Hold the place of a request that was opened, or may have been."""
        self._held[claim.id] = claim

    def leave(self, exchange: Exchange) -> None:
        """Have a request's place freed, and what it did not use given back; once it is over, if it goes on."""
        job = exchange.job
        claim = self._held.get(job.uids[0])
        if claim is None:
            return
        if exchange.goes_on:
            said = {choice.uid: choice.said for choice in exchange.choices}
            self._left[claim.id] = _Left(claim, count_usage(exchange)[0] or _guess_prompt(job), said)
            self._wake.set()
            return
        self._settle(claim, _used(exchange))
        self._wake.set()

    async def free(self, exchange: Exchange) -> None:
        """Free the place of a request that is over, and give back what it did not use, before its client is told.

        Nothing is asked of the broker where the key has no limits, or another reader of the stream was faster. While
        the broker does not answer `run` has to do it. A stream may have been opened at another replica, which finds
        nothing left to settle then.
        """
        job = exchange.job
        claim = job.claim if exchange.follows else self._held.get(job.uids[0])
        if claim is None:
            return
        self._left.pop(claim.id, None)
        self._settle(claim, _used(exchange))
        await self._settle_now(claim.id)

    async def free_left(self, stream: str) -> None:
        """Free the place of a stream that went on without its client, and was just ended here."""
        left = self._left.get(stream)
        if left is not None:
            try:
                await self._look([left])
            except BrokerError:
                return
            await self._settle_now(stream)

    async def _settle_now(self, claim_id: str) -> None:
        if claim_id not in self._settled:
            return
        claim, used = self._settled[claim_id]
        try:
            async with asyncio.timeout(_FREE_S):
                await self._held_last.wait()  # what is being held now must not come after it
                await self._broker.run(settle(self._broker.keys, claim, used))
        except (TimeoutError, BrokerError) as e:
            log.debug("the end of an answer did not wait for its place: %s", e)
        else:
            self._settled.pop(claim_id, None)
        finally:
            if claim_id in self._settled:
                self._wake.set()

    def look_soon(self) -> None:
        """Look for the end of streams that go on without their clients: one has just come to it here."""
        if self._left:
            self._looked_at = 0.0
            self._wake.set()

    def _settle(self, claim: Claim, used: int) -> None:
        self._held.pop(claim.id, None)
        if len(self._settled) < _CAP:
            self._settled[claim.id] = claim, used

    async def run(self) -> None:
        """Work for ever."""
        backoff = Backoff()
        while True:
            try:
                async with asyncio.timeout(_LOOK_S if self._left else _HOLD_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            try:
                await self.work()
                backoff.reset()
            except BrokerDown:
                await asyncio.sleep(backoff.next_s())
            except BrokerError:
                log.exception("the limits of API keys could not be written; what was taken frees itself")
                self._settled.clear()
                for claim_id in self._left:
                    self._held.pop(claim_id, None)
                self._left.clear()

    async def work(self) -> None:
        """Settle what is over, and hold the rest when it is time, in one round trip; before it, look for what is over.

        Raises:
            BrokerError: nothing is lost: the next turn does it.
        """
        now = time.monotonic()
        due = now - self._held_at >= _HOLD_S
        if self._left and (due or now - self._looked_at >= _LOOK_S):
            self._looked_at = now
            await self._look(list(self._left.values()))
        keys = self._broker.keys
        batch = list(self._settled.items())[:_BATCH]
        calls: list[Call[Any]] = [settle(keys, claim, used) for _, (claim, used) in batch]
        if due:
            calls += self._holds()
            self._held_last.clear()
        try:
            await self._broker.run_many(calls)
        finally:
            self._held_last.set()
        if due:
            self._held_at = now
        for claim_id, _ in batch:
            self._settled.pop(claim_id, None)
        if self._settled or (self._left and not self._looked_at):
            self._wake.set()
        else:
            self._wake.clear()

    async def _look(self, left: Sequence[_Left]) -> None:
        """Find those streams that have ended since their clients left."""
        uids = [uid for one in left for uid in one.said]
        lasts: list[LogId] = []
        for at in range(0, len(uids), _BATCH):
            batch = uids[at : at + _BATCH]
            lasts += await self._broker.run_many([last_id(self._broker.keys, uid) for uid in batch])
        at = 0
        for one in left:
            if one.is_over(lasts[at : at + len(one.said)]) and self._left.pop(one.claim.id, None) is not None:
                self._settle(one.claim, one.prompt + sum(one.said.values()))
            at += len(one.said)

    def _holds(self) -> list[Call[int]]:
        by_tenant: dict[str, list[str]] = {}
        for claim in self._held.values():
            by_tenant.setdefault(claim.tenant, []).append(claim.id)
        return [
            hold(self._broker.keys, tenant, ids[at : at + _HOLD_CAP])
            for tenant, ids in by_tenant.items()
            for at in range(0, len(ids), _HOLD_CAP)
        ]
