"""The way out: what a step has drawn becomes one entry per token stream, sent in order until it is acknowledged.

Owns the order and the content of what is sent: both are fixed when an entry is first sent, because a retry must
say the same. Belongs to the I/O thread; the step loop only posts its outputs.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.scheduler.agenda import Agenda
from services.scheduler.core.batch import RowLogprobs
from services.scheduler.core.link import PromptEcho, StepOutput
from services.scheduler.ledger import Held, Ledger, trace
from services.scheduler.metrics import SchedulerMetrics
from shared.broker.call import Call
from shared.broker.streams import length, publish_tokens
from shared.keys import TOKENS_PAUSE_LEN, Keys
from shared.messages import FinishReason, LogprobEntry, StepChunk

SEND_COUNT: Final = 64
"""Entries in one round trip at most; more wait only after the broker was away."""
RESUME_LEN: Final = TOKENS_PAUSE_LEN // 2
"""A pause ends when the longest stream is this short, so that it is not begun again at once."""


@dataclass(slots=True, eq=False)
class _Entry:
    """One step entry: the call that sends it, and which places of which step it carries."""

    call: Call[bytes]
    output: StepOutput
    found: list[tuple[int, Held]]


class Outbox:
    """Step outputs on their way to the token streams. I/O thread only."""

    def __init__(
        self, keys: Keys, model: str, me: str, ledger: Ledger, metrics: SchedulerMetrics, num_shards: int
    ) -> None:
        self._keys = keys
        self._model = model
        self._me = me
        self._ledger = ledger
        self._metrics = metrics
        self._num_shards = num_shards
        self._steps: deque[tuple[StepOutput, dict[int, list[tuple[int, Held]]], int]] = deque()
        self._entries: deque[_Entry] = deque()
        self._lengths: dict[int, int] = {}
        self._is_long = False

    def __len__(self) -> int:
        return len(self._steps) + len(self._entries)

    @property
    def full(self) -> bool:
        """Whether the step loop must wait: the detokenizers have much before them, or the broker takes nothing."""
        return self._is_long or len(self) > TOKENS_PAUSE_LEN

    def put(self, output: StepOutput) -> None:
        """Take the tokens of a step; what is said of requests that are no longer ours is left out."""
        ledger = self._ledger
        shards: dict[int, list[tuple[int, Held]]] = {}
        finishes, starts, stamp_ns = output.finishes, output.starts, output.stamp_ns
        for place, uid in enumerate(output.uids):
            held = ledger.speaking(uid, output.attempts[place])
            if held is None:
                continue
            index = output.firsts[place] - (output.tokens[place] < 0)
            ledger.draw(held, index)
            if place in starts:
                held.first_ns = stamp_ns
                self._metrics.stage("prefill", stamp_ns - held.fenced_ns)
                trace(held, "prefill", held.fenced_ns, stamp_ns, prompt_tokens=starts[place][0])
            if place in finishes:
                ledger.finish(held)
                self._metrics.finished(finishes[place])
                if held.first_ns:
                    self._metrics.stage("decode", stamp_ns - held.first_ns)
                    trace(held, "decode", held.first_ns, stamp_ns, tokens=index - held.base)
            found = shards.get(held.shard)
            if found is None:
                shards[held.shard] = [(place, held)]
            else:
                found.append((place, held))
        self._steps.append((output, shards, ledger.version))

    def plan(self, agenda: Agenda) -> None:
        """Add what is to be sent next."""
        while self._steps and len(self._entries) < SEND_COUNT:
            self._seal(*self._steps.popleft())
        for entry in list(self._entries)[:SEND_COUNT]:
            agenda.add(entry.call, partial(self._on_sent, entry))

    def plan_lengths(self, agenda: Agenda) -> None:
        """Add a look at how much the detokenizers have before them."""
        for shard in range(self._num_shards):
            agenda.add(length(self._keys.tokens(self._model, shard)), partial(self._on_length, shard))

    def _seal(self, output: StepOutput, shards: dict[int, list[tuple[int, Held]]], version: int) -> None:
        """Fix the content of a step's entries: one per token stream that has any of its tokens."""
        stale = version != self._ledger.version  # some have left since the step was taken in
        for shard, found in shards.items():
            places = [place for place, held in found if not stale or self._speaks(held, output.attempts[place])]
            if not places:
                continue
            chunk = make_chunk(self._me, output, places)
            kept = found if len(places) == len(found) else [one for one in found if one[0] in set(places)]
            call = publish_tokens(self._keys, self._model, shard, chunk)
            self._entries.append(_Entry(call, output, kept))

    def _speaks(self, held: Held, attempt: int) -> bool:
        return self._ledger.speaking(held.uid, attempt) is held

    def _on_sent(self, entry: _Entry, entry_id: bytes) -> None:
        head = self._entries.popleft()
        assert head is entry, "step entries are acknowledged in their order"
        attempts, firsts, tokens = entry.output.attempts, entry.output.firsts, entry.output.tokens
        for place, held in entry.found:
            if held.attempt == attempts[place]:
                held.unsent -= 1
                held.sent = firsts[place] - (tokens[place] < 0)
                held.sent_id = entry_id
        self._metrics.published((time.time_ns() - entry.output.stamp_ns) / 1e9)

    def _on_length(self, shard: int, entries: int) -> None:
        self._lengths[shard] = entries
        longest = max(self._lengths.values())
        self._is_long = longest > (RESUME_LEN if self._is_long else TOKENS_PAUSE_LEN)


def make_chunk(engine: str, output: StepOutput, places: list[int]) -> StepChunk:
    """Make the message about some places of a step; `counts` is left out when each has its one token."""
    tokens = [output.tokens[place] for place in places]
    counts: list[int] = []
    if min(tokens) < 0:
        counts = [int(token >= 0) for token in tokens]
        tokens = [token for token in tokens if token >= 0]
    return StepChunk(
        engine,
        output.stamp_ns,
        [output.uids[place] for place in places],
        [output.attempts[place] for place in places],
        [output.firsts[place] for place in places],
        tokens,
        counts,
        _renumber(output.finishes, places),
        _renumber_starts(output.starts, places),
        {
            at: [_entry_of(output.tokens[place], output.logprobs[place])]
            for at, place in enumerate(places)
            if place in output.logprobs
        }
        if output.logprobs
        else {},
        {at: _prompt_of(output.prompts[place]) for at, place in enumerate(places) if place in output.prompts}
        if output.prompts
        else {},
        [at for at, place in enumerate(places) if place in output.complete] if output.complete else [],
    )


def _prompt_of(echo: PromptEcho) -> list[LogprobEntry]:
    """Give one entry per token of a prompt; the first is not scored, and none is unless that was asked for."""
    ids = echo.token_ids.tolist()
    entries = [LogprobEntry(ids[0], 0.0)]
    for piece in echo.scores:
        scored = zip(piece.logprobs.tolist(), piece.top_ids.tolist(), piece.top_logprobs.tolist(), strict=True)
        for logprob, top_ids, top in scored:
            alternatives = [(i, p, b"") for i, p in zip(top_ids, top, strict=True)]
            entries.append(LogprobEntry(ids[len(entries)], logprob, b"", alternatives))
    return entries + [LogprobEntry(token_id, 0.0) for token_id in ids[len(entries) :]]


def _renumber(found: Mapping[int, FinishReason], places: list[int]) -> dict[int, FinishReason]:
    return {at: found[place] for at, place in enumerate(places) if place in found} if found else {}


def _renumber_starts(found: Mapping[int, tuple[int, int]], places: list[int]) -> dict[int, tuple[int, int]]:
    return {at: found[place] for at, place in enumerate(places) if place in found} if found else {}


def _entry_of(token_id: int, row: RowLogprobs) -> LogprobEntry:
    top = [(int(i), float(p), b"") for i, p in zip(row.top_ids, row.top_logprobs, strict=True)]
    return LogprobEntry(token_id, row.logprob, b"", top)
