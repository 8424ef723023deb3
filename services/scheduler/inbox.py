"""The way in: entries of the own stream become waiting requests, are fenced, replayed and handed to the loop.

Owns the reader thread (its own connection blocks on the stream) and, on the I/O thread, everything between an
entry and its Arrival. Knows nothing of steps, and leaves audits and takeovers to their own modules.
"""

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from services.scheduler.agenda import Agenda
from services.scheduler.core.link import Arrival
from services.scheduler.desk import Desk, Read
from services.scheduler.endings import Endings
from services.scheduler.ledger import Held, Ledger, Phase, naming, trace
from services.scheduler.metrics import SchedulerMetrics
from shared.broker.backoff import Backoff
from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.broker.log_id import LogId, split_log_id
from shared.broker.replies import (
    EndEntry,
    Fenced,
    LogEntry,
    OpenEntry,
    TokensEntry,
    fence,
    last_id,
    read_log,
)
from shared.broker.streams import FIRST, MAX_BLOCK_MS, GenerateEntry, read_generate
from shared.errors import BrokerError, WireError
from shared.ids import shard_of
from shared.keys import Keys
from shared.messages import FenceHeader, GenerateRequest, decode

log = logging.getLogger(__name__)

PROMPT_TAIL: Final = 16
"""Prompt tokens a detokenizer is told, so that the first token is decoded with what stands before it."""
READ_COUNT: Final = 64


def decode_entries(entries: Sequence[GenerateEntry]) -> Read:
    """Decode the payloads of entries; None stands for one that is no request, or not the one it says."""
    found: list[tuple[GenerateEntry, GenerateRequest | None]] = []
    for entry in entries:
        try:
            request = decode(GenerateRequest, entry.payload)
        except WireError:
            found.append((entry, None))
            continue
        found.append((entry, request if request.uid == entry.uid else None))
    return Read(found)


class Reader:
    """The thread that blocks on the own stream and posts what arrives."""

    def __init__(self, broker: Broker, me: str, desk: Desk) -> None:
        self._broker = broker
        self._me = me
        self._desk = desk
        self._position = FIRST
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more; returns at once, the thread ends within a second."""
        self._stop.set()

    def rewind(self, position: bytes) -> None:
        """Go on behind this id: entries have been made below the position, by a server whose clock is behind."""
        self._position = position

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            before = self._position
            call = read_generate(self._broker.keys, self._me, after=before, count=READ_COUNT, block_ms=MAX_BLOCK_MS)
            try:
                entries = self._broker.run(call)
            except BrokerError as e:
                log.debug("reading the engine's stream failed: %s", e)
                self._position = FIRST
                self._stop.wait(backoff.next_s())
                continue
            backoff.reset()
            if not entries:
                continue
            if self._position == before:
                self._position = entries[-1].entry_id
            self._desk.post(decode_entries(entries))


class Inbox:
    """Takes entries in, fences them in the waiting order, and hands over what may start. I/O thread only."""

    def __init__(
        self,
        keys: Keys,
        me: str,
        ledger: Ledger,
        desk: Desk,
        endings: Endings,
        metrics: SchedulerMetrics,
        num_shards: int,
    ) -> None:
        self._keys = keys
        self._me = me
        self._ledger = ledger
        self._desk = desk
        self._endings = endings
        self._metrics = metrics
        self._num_shards = num_shards
        self._num_fences = 0
        self._replays: dict[str, Held] = {}
        self._twins: dict[str, Held] = {}
        self.open = True
        """Whether new requests are fenced."""

    def take_in(self, read: Read) -> None:
        """Note what was read; entries that are known are left alone."""
        for entry, request in read.entries:
            if self._ledger.by_entry(entry.entry_id) is not None or self._endings.is_leaving(entry.entry_id):
                continue
            if request is None:
                self._endings.bury(entry)
                continue
            waited_s = time.time() - int(entry.entry_id.partition(b"-")[0]) / 1000
            self._metrics.read(waited_s, again=entry.why != "new")
            shard = shard_of(entry.uid, self._num_shards)
            held = Held(entry.uid, entry.entry_id, request, entry.why, shard)
            known = self._ledger.get(entry.uid)
            if known is None:
                self._ledger.add(held)
            elif known.phase is Phase.WAITING:
                if _order(held.entry) < _order(known.entry):  # read before the newer one was, told after it
                    self._endings.delete(held.entry)
                else:
                    self._endings.drop(known)
                    self._ledger.add(held)
            else:
                self._twins[entry.uid] = held

    def plan(self, agenda: Agenda) -> None:
        """Add what the way in needs now: fences, replays, and the choice between two entries of one uid."""
        for held in list(self._twins.values()):
            agenda.add(last_id(self._keys, held.uid), partial(self._on_twin, held))
        for held in list(self._replays.values()):
            agenda.add_wary(
                read_log(self._keys, held.uid),
                partial(self._on_replay, held, held.attempt),
            )
        if self.open:
            self._ledger.choose(self._desk.room() - len(self._replays))
        for held in list(self._ledger.asked.values()):
            agenda.add(self._fence(held), partial(self._on_fenced, held))

    def _fence(self, held: Held) -> Call[Fenced]:
        if not held.nonce:
            self._num_fences += 1
            held.nonce = f"{self._me}/{self._num_fences}"
        ids = held.request.prompt_ids
        header = FenceHeader(self._me, held.entry.decode(), len(ids), list(ids[-PROMPT_TAIL:]))
        return fence(self._keys, held.uid, self._me, held.entry, held.nonce, held.why, header, solo=self._ledger.solo)

    def _on_fenced(self, held: Held, answer: Fenced) -> None:
        if self._ledger.asked.get(held.uid) is not held:
            return  # dropped by an audit in the same round trip
        self._metrics.fence(answer.outcome)
        match answer.outcome:
            case "OK":
                self._ledger.speak(held, answer.attempt, answer.said, answer.launches)
                self._metrics.queued(time.time() - held.request.arrival_ms / 1000)
                self._metrics.stage("admit", held.fenced_ns - held.read_ns)
                trace(held, "queue", held.read_ns, held.fenced_ns, launches=answer.launches)
                if answer.said:
                    self._replays[held.uid] = held
                else:
                    self._desk.arrive(Arrival(held.request, answer.attempt))
            case "LOST":
                self._ledger.remove(held)
            case "GONE" | "ENDED":
                self._metrics.aborted("fence")
                self._ledger.remove(held)
            case "POISON":
                self._endings.give_up(held)
            case "SUSPECT":
                self._ledger.refuse(held)

    def _on_replay(self, held: Held, attempt: int, entries: list[LogEntry] | None) -> None:
        """Hand over a request with what was said before its fence; a log that lacks some of it is its owner's."""
        if self._replays.get(held.uid) is held:
            del self._replays[held.uid]
        if self._ledger.speaking(held.uid, attempt) is not held:
            return
        said: list[int] = []
        for entry in entries or ():
            if isinstance(entry, OpenEntry):
                said = list(entry.said.token_ids) if entry.said is not None else []
                held.replica, held.resumable = entry.header.replica, entry.header.resumable_ms > 0
            elif isinstance(entry, TokensEntry | EndEntry):
                said += entry.delta.token_ids
        if len(said) < held.base:
            log.warning("a reply log has lost tokens; its request is left to the api", extra=naming(held))
            self._endings.drop(held)
            return
        self._desk.arrive(Arrival(held.request, attempt, said[: held.base]))

    def _on_twin(self, held: Held, last: LogId) -> None:
        """Two entries of one uid: the old one stands unless the log has moved on from it."""
        if self._twins.get(held.uid) is held:
            del self._twins[held.uid]
        known = self._ledger.get(held.uid)
        if known is None:
            self._ledger.add(held)
        elif known.entry == held.entry:
            return  # an audit has dropped the one known then, and a listing has found this one meanwhile
        elif split_log_id(last)[0] == known.attempt:
            self._endings.delete(held.entry)
        else:
            self._endings.drop(known)
            self._ledger.add(held)


def _order(entry: bytes) -> tuple[int, int]:
    """Say where an entry stands in its stream."""
    ms, _, sequence = entry.partition(b"-")
    return int(ms), int(sequence)
