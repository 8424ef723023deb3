"""The work of a tokenizer: requests from the queue, as ids to an engine, or with a reason back to their client.

Owns what is in hand. An entry leaves the queue only in the script that hands it to an engine, or after its uids
were ended, so a death at any point loses nothing; every call may be made twice. All calls to the broker are made
on one thread; only the encoding of very long prompts runs aside.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from services.tokenizer import traces
from services.tokenizer.encode import HEAVY_CHARS, Encoded, PromptEncoder, weigh
from services.tokenizer.engines import Engines
from services.tokenizer.metrics import Outcome, TokenizerMetrics
from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.broker.control import aborted
from shared.broker.dead_letters import bury
from shared.broker.replies import end
from shared.broker.streams import FIRST, Moved, QueueEntry, discard, move, read_own, read_queue
from shared.errors import RequestError, ServerFault, WireError
from shared.messages import DeadLetter, Delta, ErrorBody, TokenizeRequest, decode

log = logging.getLogger(__name__)

MAX_DELIVERIES: Final = 3
"""Tokenizers that may die over a request before it is given up."""
MAX_HELD: Final = 1_000
"""Requests in hand beyond which nothing more is read: others may have an engine."""
_SETTLE_CAP: Final = 64
_ASK_CAP: Final = 2_000
_LOOK_S: Final = 1.0


@dataclass(slots=True)
class _Work:
    """A request in hand that is ready to leave the queue: with ids to an engine, with its answer, or with an error."""

    entry: QueueEntry
    answer: Encoded | Delta | ErrorBody
    letter: DeadLetter | None = None
    since_s: float = field(default_factory=time.monotonic)


class Worker:
    """One tokenizer's loop body. Used by one thread, but for the counters.

    Args:
        broker: of this instance.
        model: served name, whose queue is read.
        consumer: the incarnation of this instance.
        encoder: for the model.
        engines: who may get requests.
        metrics: recorder.
        batch: entries read at once.
        pool: runs the encoding of very long prompts.
        keep_bodies: dead letters hold the request.
        clock: wall clock in seconds, for the time on the way only.
    """

    def __init__(
        self,
        broker: Broker,
        model: str,
        consumer: str,
        encoder: PromptEncoder,
        engines: Engines,
        metrics: TokenizerMetrics,
        *,
        batch: int,
        pool: ThreadPoolExecutor,
        keep_bodies: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._broker = broker
        self._keys = broker.keys
        self._model = model
        self._consumer = consumer
        self._encoder = encoder
        self._engines = engines
        self._metrics = metrics
        self._batch = batch
        self._pool = pool
        self._keep_bodies = keep_bodies
        self._clock = clock
        self._held: dict[bytes, _Work] = {}
        self._aside: dict[bytes, tuple[QueueEntry, Future[Encoded | Delta | RequestError]]] = {}
        self._next_look_s = 0.0
        metrics.watch(lambda: len(self._held), lambda: len(self._aside))

    @property
    def num_held(self) -> int:
        """Requests ready for an engine that none has taken yet."""
        return len(self._held)

    @property
    def num_aside(self) -> int:
        """Very long requests that are being encoded."""
        return len(self._aside)

    def turn(self, block_ms: int) -> None:
        """Read what is new, wait up to `block_ms` for it, and bring on all that is in hand.

        Raises:
            BrokerError: what was sent may or may not have happened; everything in hand stays in hand. When the
                broker is back, call `recover` first.
        """
        if self._aside or self._held:
            block_ms = min(block_ms, 10)
        if len(self._held) < MAX_HELD:
            entries = self._broker.run(self._read(block_ms))
            self._metrics.taken(len(entries))
            self.take_in(entries)
        self.bring_on()

    def bring_on(self) -> None:
        """Bring on what is in hand without reading anything new. Raises as `turn`."""
        self._collect()
        self._settle()
        if self._held and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + _LOOK_S
            self._drop_ended()

    def recover(self) -> None:
        """Take in what the queue gave this consumer in an answer that was lost. Raises as `turn`."""
        after = FIRST
        while entries := self._broker.run(
            read_own(self._keys, self._model, self._consumer, count=self._batch, after=after)
        ):
            after = entries[-1].entry_id
            self._metrics.taken(len(entries), again=True)
            self.take_in([e for e in entries if e.entry_id not in self._held and e.entry_id not in self._aside])

    def take_in(self, entries: Sequence[QueueEntry]) -> None:
        """Encode entries that were just read; very long ones begin to be encoded aside. Raises as `turn`."""
        light: list[tuple[QueueEntry, TokenizeRequest]] = []
        weight = 0
        for entry, request in self._alive(entries):
            self._metrics.waited(self._clock() - request.arrival_ms / 1000)
            traces.queued(request)
            weight_of_one = weigh(request)
            if weight_of_one > HEAVY_CHARS:
                limit = self._engines.max_seq_len
                self._aside[entry.entry_id] = (entry, self._pool.submit(self._encode_one, request, limit))
                continue
            if light and weight + weight_of_one > HEAVY_CHARS:
                self._encode(light)
                light, weight = [], 0
            light.append((entry, request))
            weight += weight_of_one
        self._encode(light)

    def take_over(self, entry: QueueEntry) -> None:
        """Do one entry of a dead tokenizer, alone and to its end, so that it is known what kills. Raises as `turn`."""
        self._metrics.claimed()
        if entry.entry_id in self._held or entry.entry_id in self._aside:
            return
        if entry.deliveries > MAX_DELIVERIES:
            self._bury(entry, "crash", ServerFault("the request could not be tokenized, repeatedly"))
        else:
            for _, request in self._alive([entry]):
                traces.queued(request)
                self._hold(entry, self._encode_one(request, self._engines.max_seq_len))
        self._settle()

    def _read(self, block_ms: int) -> Call[list[QueueEntry]]:
        return read_queue(self._keys, self._model, self._consumer, count=self._batch, block_ms=block_ms)

    def _alive(self, entries: Sequence[QueueEntry]) -> list[tuple[QueueEntry, TokenizeRequest]]:
        """Decode entries and leave out those that nobody waits for any more."""
        readable: list[tuple[QueueEntry, TokenizeRequest]] = []
        for entry in entries:
            try:
                readable.append((entry, decode(TokenizeRequest, entry.payload)))
            except WireError as e:
                log.error("an entry of the queue cannot be read: %s", e)
                self._bury(entry, "unreadable", ServerFault("the request could not be read"))
        ended = self._ended(uid for entry, _ in readable for uid in entry.uids)
        over = [entry for entry, _ in readable if entry.uids and ended.issuperset(entry.uids)]
        self._discard(over)
        return [(entry, request) for entry, request in readable if entry not in over] if over else readable

    def _ended(self, uids: Iterable[str]) -> set[str]:
        asked = list(uids)
        calls = [aborted(self._keys, asked[i : i + _ASK_CAP]) for i in range(0, len(asked), _ASK_CAP)]
        return {uid for answer in self._broker.run_many(calls) for uid in answer}

    def _discard(self, entries: Sequence[QueueEntry]) -> None:
        self._broker.run_many([discard(self._keys, self._model, entry.entry_id) for entry in entries])
        for _ in entries:
            self._metrics.done("ended")

    def _bury(self, entry: QueueEntry, reason: Literal["crash", "unreadable"], fault: RequestError) -> None:
        letter = DeadLetter(
            uid=entry.uids[0] if entry.uids else "",
            reason=f"tokenizer_{reason}",
            tries=entry.deliveries,
            source=self._keys.tokenize(self._model),
            at_ms=int(self._clock() * 1000),
            body=entry.payload if self._keep_bodies else b"",
        )
        self._metrics.buried(reason)
        self._held[entry.entry_id] = _Work(entry, _body(fault), letter)

    def _encode(self, batch: Sequence[tuple[QueueEntry, TokenizeRequest]]) -> None:
        """Encode in one batch; should that fail as a whole, one by one, so that one request fails alone."""
        if not batch:
            return
        began, began_ns = time.perf_counter(), time.time_ns()
        limit = self._engines.max_seq_len
        try:
            answers = self._encoder.encode([request for _, request in batch], limit)
        except Exception as e:
            log.error("a batch could not be encoded (%s); its requests are encoded one by one", type(e).__name__)
            answers = [self._encode_one(request, limit) for _, request in batch]
        else:
            traces.encoded([request for _, request in batch], began_ns)
        self._metrics.encoded(len(batch), time.perf_counter() - began)
        for (entry, _), answer in zip(batch, answers, strict=True):
            self._hold(entry, answer)

    def _encode_one(self, request: TokenizeRequest, limit: int) -> Encoded | Delta | RequestError:
        """Encode one request, on any thread. Whatever is wrong with it is its answer."""
        began_ns = time.time_ns()
        try:
            answer = self._encoder.encode([request], limit)[0]
        except Exception as e:  # its text may be in the message, so only the kind is told
            where = {"request_id": request.request_id}
            log.error("a request could not be encoded: %s", type(e).__name__, extra=where)
            return ServerFault("the request could not be tokenized")
        traces.encoded([request], began_ns)
        return answer

    def _hold(self, entry: QueueEntry, answer: Encoded | Delta | RequestError) -> None:
        if isinstance(answer, Encoded):
            for prompt in answer.requests[:: max(1, len(answer.requests) // answer.num_prompts)]:
                self._metrics.prompt(len(prompt.prompt_ids))
        self._held[entry.entry_id] = _Work(entry, _body(answer) if isinstance(answer, RequestError) else answer)

    def _collect(self) -> None:
        """Take in what has been encoded aside."""
        done = [entry_id for entry_id, (_, future) in self._aside.items() if future.done()]
        for entry_id in done:
            entry, future = self._aside.pop(entry_id)
            self._hold(entry, future.result())

    def _settle(self) -> None:
        """Let everything in hand leave the queue that can; what has no engine stays in hand."""
        again = True
        while again:
            again = False
            works = list(self._held.values())
            for i in range(0, len(works), _SETTLE_CAP):
                again |= self._settle_some(works[i : i + _SETTLE_CAP])

    def _settle_some(self, works: Sequence[_Work]) -> bool:
        """Bring some requests on their way in one round trip; say whether an engine was found to be gone."""
        calls: list[Call[Any]] = []
        sent: list[tuple[_Work, str, int]] = []
        for work in works:
            engine = ""
            if not isinstance(work.answer, Encoded):
                calls += self._ending(work, work.answer)
            else:
                chosen = self._engines.choose(work.entry.uids[0], work.answer.num_prompt_tokens)
                if chosen is None:
                    continue
                engine = chosen
                calls.append(move(self._keys, self._model, work.entry.entry_id, engine, work.answer.requests))
            sent.append((work, engine, len(calls) - 1))
        answers = self._broker.run_many(calls)
        again = False
        for work, engine, place in sent:
            outcome: Moved | None = answers[place] if engine else None
            if outcome == "NOENGINE":
                self._engines.gone(engine)
                self._metrics.no_engine()
                again = True
                continue
            del self._held[work.entry.entry_id]
            if engine:
                self._metrics.placed(time.monotonic() - work.since_s)
            if work.letter is None:
                self._metrics.done(_outcome(work, outcome))
        return again

    def _ending(self, work: _Work, answer: Delta | ErrorBody) -> list[Call[Any]]:
        """End every choice, and only then let the entry go."""
        last = Delta(0, [], "", error=answer) if isinstance(answer, ErrorBody) else answer
        calls: list[Call[Any]] = [end(self._keys, uid, last) for uid in work.entry.uids]
        if work.letter is not None:
            calls.append(bury(self._keys, work.letter))
        return [*calls, discard(self._keys, self._model, work.entry.entry_id)]

    def _drop_ended(self) -> None:
        """Let go of requests that ended while they waited for an engine."""
        ended = self._ended(uid for work in self._held.values() for uid in work.entry.uids)
        over = [work.entry for work in self._held.values() if ended.issuperset(work.entry.uids)]
        self._discard(over)
        for entry in over:
            del self._held[entry.entry_id]


def _outcome(work: _Work, moved: Moved | None) -> Outcome:
    if moved is None:
        return "told" if isinstance(work.answer, Delta) else "rejected"
    return "moved" if moved == "OK" else "duplicate"


def _body(error: RequestError) -> ErrorBody:
    return ErrorBody(error.status, error.message, error.type, error.code, error.param)
