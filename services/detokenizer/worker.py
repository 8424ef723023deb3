"""The detokenizer at work: reads the token streams that fall to it, says what is in them, deletes what is said.

Owns reading, deleting and the choice of streams. An entry stays in its stream until all of it is settled, so
whoever reads next, this instance or another, finds what a crash left behind. No stream has a group: that two
read the same one for a moment does no harm.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from services.detokenizer.metrics import DetokenizerMetrics
from services.detokenizer.pieces import check_shape, sort_by_reply
from services.detokenizer.settings import DetokenizerSettings
from services.detokenizer.shards import owned_shards
from services.detokenizer.speaker import Speaker
from services.detokenizer.state import Texts
from shared.broker.backoff import Backoff
from shared.broker.call import Call
from shared.broker.control import retire
from shared.broker.dead_letters import bury
from shared.broker.streams import FIRST, TokensEntry, backlog, drop_tokens, read_tokens
from shared.errors import BrokerDown, BrokerError, WireError
from shared.messages import DeadLetter, Heartbeat, StepChunk, decode
from shared.metrics import DEAD_LETTERS, HOP_SECONDS, StreamGauges
from shared.model_files import locate
from shared.runtime import Life
from shared.vocab import load_vocabulary

log = logging.getLogger(__name__)

BEAT_S: Final = 0.2
"""Detokenizers look at each other more often than others do: a stream without a reader stalls every reply in it."""
_BLOCK_MS: Final = 200
_SILENCE_S: Final = 1.0
"""After this long without an entry the streams are read from their beginnings, whatever the positions say."""
_LOOK_S: Final = 1.0


class Detokenizer:
    """The service. Built without work; see `shared.runtime.Service` for who calls what."""

    def __init__(self, settings: DetokenizerSettings) -> None:
        self._settings = settings
        self._model = settings.served_model_name
        self._positions: dict[int, bytes] = {}
        self._said: dict[int, list[bytes]] = {}
        self._last_entry_s = time.monotonic()
        self._last_look_s = 0.0
        self._start_over = threading.Event()
        self._trouble = ""
        self._backoff = Backoff()
        self._life: Life
        self._speaker: Speaker
        self._metrics: DetokenizerMetrics

    # --- the life ------------------------------------------------------------------------------------------

    def prepare(self, life: Life) -> None:
        """Load the vocabulary."""
        settings = self._settings
        files = locate(settings.model, settings.model_source, revision=settings.model_revision)
        self._life = life
        self._metrics = DetokenizerMetrics(life.metrics)
        self._speaker = Speaker(
            life.broker,
            Texts(load_vocabulary(files)),
            self._metrics,
            beat=life.beat,
            max_replies=settings.max_replies,
            idle_s=settings.idle_reply,
        )
        self._hop = life.metrics.histogram(HOP_SECONDS).labels("tokens")
        self._stream = StreamGauges(life.metrics, "tokens")
        self._dead = life.metrics.counter(DEAD_LETTERS).labels("undecodable")

    def serve(self, life: Life) -> None:
        """Read and say until draining; what is in hand then is finished."""
        while not life.draining:
            life.beat()
            try:
                self._round()
                self._went_well()
            except BrokerError as e:
                self._went_wrong(e)
                life.pause(self._backoff.next_s())
        self._drop_said_at_end()

    def heartbeat(self, base: Heartbeat) -> Heartbeat:
        """Say no more than all services do."""
        return base

    def reconnected(self) -> None:
        """Read all streams from their beginnings: what they hold may be other than it was."""
        self._start_over.set()

    def others_died(self) -> None:
        """Nothing: each round, which takes no longer than a short read, asks who lives."""

    # --- one round -----------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Wait for entries, say them, and remember to delete them."""
        if self._start_over.is_set():
            self._start_over.clear()
            self._positions = dict.fromkeys(self._positions, FIRST)
            self._said.clear()
            self._speaker.forget_all()
        self._choose_streams()
        self._look_around()
        if not self._positions:
            self._life.pause(_BLOCK_MS / 1000)
            return
        entries = self._read()
        now = time.monotonic()
        if entries:
            self._say(entries)
            self._last_entry_s = time.monotonic()
            self._metrics.flush_seconds.observe(self._last_entry_s - now)
        elif now - self._last_entry_s > _SILENCE_S:
            self._last_entry_s = now
            self._positions = dict.fromkeys(self._positions, FIRST)

    def _went_well(self) -> None:
        self._backoff.reset()
        if self._trouble:
            self._trouble = ""
            self._life.readiness.have("token streams")

    def _went_wrong(self, error: BrokerError) -> None:
        """Read everything again, later. The heart tells of outages; what it does not see is told here, once."""
        self._start_over.set()
        if not isinstance(error, BrokerDown) and str(error) != self._trouble:
            self._trouble = str(error)
            self._life.readiness.missing("token streams")
            log.error("the token streams cannot be read or said: %s; trying again", error)

    def _choose_streams(self) -> None:
        """Read the streams that fall to this instance now; new ones from their beginnings."""
        life = self._life
        mine = owned_shards(
            life.incarnation,
            self._settings.instance_name("detokenizer"),
            self._model,
            life.living("detokenizer"),
            life.heart.agreement.num_shards,
        )
        if mine != list(self._positions):
            log.info("reading token streams %s", mine)
            if not set(self._positions) <= set(mine):
                self._speaker.forget_all()  # others go on with some of these replies, and nobody would say so
            self._positions = {shard: self._positions.get(shard, FIRST) for shard in mine}
            self._metrics.shards.set(len(mine))

    def _read(self) -> list[TokensEntry]:
        """Delete what is said and wait for more, in one round trip."""
        keys = self._life.broker.keys
        calls: list[Call[Any]] = self._drops()
        calls.append(
            read_tokens(keys, self._model, self._positions, count=self._settings.read_steps, block_ms=_BLOCK_MS)
        )
        entries: list[TokensEntry] = self._life.broker.run_many(calls)[-1]
        self._said.clear()
        for shard, entry_id, _ in entries:
            self._positions[shard] = entry_id
        return entries

    def _say(self, entries: Sequence[TokensEntry]) -> None:
        chunks: list[StepChunk] = []
        now_ns = time.time_ns()
        for entry in entries:
            chunk = self._decode(entry)
            if chunk is not None:
                chunks.append(chunk)
                self._hop.observe(max(0.0, (now_ns - chunk.stamp_ns) / 1e9))
        self._speaker.say(sort_by_reply(chunks))
        for shard, entry_id, _ in entries:
            self._said.setdefault(shard, []).append(entry_id)

    def _decode(self, entry: TokensEntry) -> StepChunk | None:
        """Decode a step; what is none goes to the dead letters, and its uids are said again by their engine."""
        try:
            chunk = decode(StepChunk, entry.payload)
            check_shape(chunk)
            return chunk
        except WireError as e:
            source = f"tokens {self._model} {entry.shard} {entry.entry_id.decode()}"
            log.error("entry %s is no engine step, %d bytes: %s", source, len(entry.payload), e)
            self._dead.inc()
            letter = DeadLetter("", f"undecodable: {e}", 1, source, time.time_ns() // 1_000_000)
            self._life.broker.run(bury(self._life.broker.keys, letter))
            return None

    def _drops(self) -> list[Call[Any]]:
        keys = self._life.broker.keys
        return [drop_tokens(keys, self._model, shard, entry_ids) for shard, entry_ids in self._said.items()]

    def _drop_said_at_end(self) -> None:
        """Delete what was said last. If that fails, whoever reads it next finds it in the logs already."""
        if self._said:
            try:
                self._life.broker.run_many(self._drops())
            except BrokerError as e:
                log.info("what was said last is left in the streams: %s", e)

    def _look_around(self) -> None:
        """Once a second: measure the streams, forget silent replies, sign dead siblings off."""
        now = time.monotonic()
        if now - self._last_look_s < _LOOK_S:
            return
        self._last_look_s = now
        self._speaker.forget_idle()
        broker = self._life.broker
        dead = self._life.forgettable("detokenizer")
        signing_off = [retire(broker.keys, "detokenizer", incarnation, beat) for incarnation, beat in dead.items()]
        measuring = [backlog(broker.keys.tokens(self._model, shard)) for shard in self._positions]
        answers = broker.run_many([*signing_off, *measuring]) if signing_off or measuring else []
        backlogs = answers[len(signing_off) :]
        length, said = sum(b.length for b in backlogs), sum(map(len, self._said.values()))
        self._stream.set(length, length - said, said, max((b.age_s for b in backlogs), default=0.0))
