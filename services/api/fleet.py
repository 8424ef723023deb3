"""Who is there to do the work: this replica's heartbeat, its view of the others, and the broker's own state.

Owns the beat task and the questions that admission, readiness and replies ask: which models are served, which
services of a model are away and for how long, how loaded they are. Knows no request.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.api.metrics import BROKER_MEMORY, BROKER_MEMORY_LIMIT
from services.api.pipeline import Pipeline
from services.api.settings import ApiSettings
from services.api.waits import Waits
from shared.broker import server
from shared.broker.connection import AsyncBroker
from shared.broker.control import Observer, beat_and_look, retire
from shared.dialect import Dialect
from shared.errors import BrokerError
from shared.ids import birth_mark
from shared.keys import BEAT_S, Role
from shared.messages import Heartbeat, encode
from shared.metrics import BROKER_RECONNECTS, BROKER_ROUND_TRIP, BROKER_UP, LEASES_LOST, LIVING, STRANGE_KEYS, Metrics

log = logging.getLogger(__name__)

WORKERS: Final[tuple[Role, ...]] = ("tokenizer", "scheduler", "detokenizer")
ROLES: Final[tuple[Role, ...]] = ("api", *WORKERS)
NAMES: Final[dict[Role, str]] = {"tokenizer": "tokenizer", "scheduler": "engine", "detokenizer": "detokenizer"}
"""What people call a role: in readiness and in errors."""
MEMORY_LIMIT: Final = 0.7
"""Share of the broker's memory above which new requests are refused."""
_INFO_EVERY: Final = 4
NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a model's engines, as they said it last, summed."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    max_running: int = 0
    max_seq_len: int = 0
    tokens_per_s: float = 0.0


class Fleet:
    """The services of the installation as this replica sees them.

    Attributes:
        connected: the last heartbeat was accepted.
        draining: said in the heartbeat.
        num_open: choices in flight, said in the heartbeat.
        num_resumed: choices that are given to clients who came back, said there too.
        waits: what this replica's clients got and waited for, said in the heartbeat.
        pipeline: the picture of the installation that is made of all heartbeats.
    """

    def __init__(
        self,
        broker: AsyncBroker,
        incarnation: str,
        settings: ApiSettings,
        metrics: Metrics,
        *,
        version: str,
        port: int = 0,
        on_reconnect: Callable[[], None] = lambda: None,
    ) -> None:
        self._broker = broker
        self._me = incarnation
        self._settings = settings
        self._version = version
        self._port = port
        self._on_reconnect = on_reconnect
        leases = {role: settings.lease_s(role) for role in ROLES}
        self._observer = Observer(incarnation, leases=leases)
        self._living: dict[Role, dict[str, Heartbeat]] = {role: {} for role in ROLES}
        self._beats: dict[tuple[Role, str], int] = {}
        self._changed: dict[tuple[Role, str], float] = {}
        self._models: dict[str, int] = {settings.served_model_name: int(time.time())}
        self._dialects: dict[str, Dialect] = {}
        self._beat = 0
        self._written = b""
        self._up = metrics.gauge(BROKER_UP)
        self._reconnects = metrics.counter(BROKER_RECONNECTS)
        self._round_trip = metrics.histogram(BROKER_ROUND_TRIP)
        self._strange = metrics.counter(STRANGE_KEYS)
        self._told_strange = 0
        self._memory = metrics.gauge(BROKER_MEMORY)
        self._memory_limit = metrics.gauge(BROKER_MEMORY_LIMIT)
        self._num_living = {role: metrics.gauge(LIVING).labels(role) for role in ROLES}
        self._leases_lost = {role: metrics.counter(LEASES_LOST).labels(role) for role in ROLES}
        self._dead: dict[Role, set[str]] = {}
        self._well_at = time.monotonic()
        self.connected = False
        self.memory_ratio = 0.0
        self.draining = False
        self.num_open = 0
        self.num_resumed = 0
        self.waits = Waits()
        self.pipeline = Pipeline(leases)

    @property
    def models(self) -> dict[str, int]:
        """Served model -> when this replica first knew of it, in seconds since the epoch.

        A model whose services are all away stays for as long as requests wait for them; this replica's own for ever.
        """
        return self._models

    async def run(self) -> None:
        """Beat for ever. Every lost connection starts all leases anew and is told to `on_reconnect` when it is over."""
        was_up = has_been_up = False
        while True:
            began = time.monotonic()
            try:
                await self._look()
                if self._beat % _INFO_EVERY == 1:
                    await self._look_at_memory()
            except BrokerError as e:
                if was_up:
                    log.warning("the broker is away: %s", e)
                self._lost()
                was_up = False
            else:
                self._round_trip.observe(time.monotonic() - began)
                if not was_up:
                    log.info("connected to the broker at %s", self._broker.url)
                    self._reconnects.inc(has_been_up)
                    self._on_reconnect()
                was_up = has_been_up = True
            self.connected = was_up
            if was_up and self.memory_ratio <= MEMORY_LIMIT:
                self._well_at = time.monotonic()
            self._show(was_up)
            await asyncio.sleep(max(0.0, BEAT_S - (time.monotonic() - began)))

    async def _look_at_memory(self) -> None:
        info = await self._broker.run(server.info())
        self.memory_ratio = info.used_ratio
        self._memory.set(info.used_bytes)
        self._memory_limit.set(info.max_bytes)

    def _show(self, up: bool) -> None:
        """Set the gauges; what only the broker knows is unknown while it is away."""
        self._up.set(up)
        before, self._told_strange = self._told_strange, self._broker.num_strange
        self._strange.inc(self._told_strange - before)
        for role, gauge in self._num_living.items():
            gauge.set(len(self._living[role]) if up else 0)
        if not up:
            self._memory.set(float("nan"))

    async def leave(self) -> None:
        """Take this replica out of the registry, at its clean end."""
        await self._broker.run(retire(self._broker.keys, "api", self._me, self._written))

    async def _look(self) -> None:
        self._beat += 1
        mine = self._heartbeat()
        self._written = encode(mine)
        seen = await self._broker.run(beat_and_look(self._broker.keys, "api", self._me, mine, ROLES))
        self._observer.note(seen)
        self._judge()
        self.pipeline.note({role: self._observer.standings(role) for role in ROLES})
        now = time.monotonic()
        for role in WORKERS:
            for name, beat in self._living[role].items():
                if beat.model:
                    self._models.setdefault(beat.model, int(time.time()))
                if self._beats.get((role, name)) != beat.beat:
                    self._beats[role, name] = beat.beat
                    self._changed[role, beat.model] = now
        self._forget_models(now)

    def _forget_models(self, now: float) -> None:
        """Forget models that nobody has served for so long that all who waited for them have been sent away.

        What a service has left in the registry that was killed, or ended in the middle of an answer, is not to keep
        its model for ever.
        """
        served = {beat.model for role in WORKERS for beat in self._living[role].values()}
        for model in self._models.keys() - served - {self._settings.served_model_name}:
            served_at = max(self._changed.get((role, model), NEVER) for role in WORKERS)
            if now - served_at > self._settings.no_engine_timeout:
                log.info("nobody serves the model %s any more", model)
                del self._models[model]
                self._dialects.pop(model, None)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            beat=self._beat,
            name=self._settings.instance_name("api"),
            version=self._version,
            draining=self.draining,
            port=self._port,
            birth=birth_mark(),
            num_running=self.num_open,
            num_resumed=self.num_resumed,
            num_said=self.waits.num_said,
            ttft_counts=list(self.waits.ttft),
            gap_counts=list(self.waits.gap),
        )

    def _lost(self) -> None:
        self._observer.lost()
        self._judge()
        now = time.monotonic()
        self._changed = dict.fromkeys(self._changed, now)

    def _judge(self) -> None:
        """Read the heartbeats of the living once per look: they are asked for with every request and sweep."""
        self._living = {role: self._observer.living(role) for role in ROLES}
        for role in ROLES:
            dead = set(self._observer.dead(role))
            self._leases_lost[role].inc(len(dead - self._dead.get(role, set())))
            self._dead[role] = dead

    @property
    def unwell_s(self) -> float:
        """Say for how long the broker has been away or short of memory, give or take a heartbeat."""
        return time.monotonic() - self._well_at

    def living(self, role: Role, model: str) -> list[Heartbeat]:
        """Give the living of a role that serve a model."""
        return [beat for beat in self._living[role].values() if beat.model in (model, "")]

    def dialect(self, model: str) -> Dialect | None:
        """Say how a model writes calls and thoughts, as its tokenizers told it last; None while none has.

        A model that nobody serves has the plainest of dialects: its requests are refused for other reasons.
        """
        if model not in self._models:
            return Dialect()
        for beat in self.living("tokenizer", model):
            if beat.dialect is not None:
                self._dialects[model] = beat.dialect
                break
        return self._dialects.get(model)

    def last_beat(self, role: Role, model: str) -> float:
        """Say when anybody of a role was last seen to beat (monotonic seconds), or NEVER."""
        return max(self._changed.get((role, model), NEVER), self._changed.get((role, ""), NEVER))

    def away_s(self, role: Role, model: str) -> float:
        """Say for how long a role has been missing: 0 while somebody lives, infinite if nobody ever did."""
        if self.living(role, model):
            return 0.0
        return time.monotonic() - self.last_beat(role, model)

    def load(self, model: str) -> Load:
        """Sum what the engines of a model say of themselves."""
        engines = self.living("scheduler", model)
        return Load(
            running=sum(e.num_running for e in engines),
            waiting=sum(e.num_waiting for e in engines),
            queued_tokens=sum(e.queued_tokens for e in engines),
            max_running=sum(e.max_running for e in engines),
            max_seq_len=min((e.max_seq_len for e in engines if e.max_seq_len), default=0),
            tokens_per_s=sum(e.tokens_per_s for e in engines),
        )

    @property
    def num_open_elsewhere(self) -> int:
        """Choices in flight at the other replicas, as they said it last."""
        return sum(beat.num_running for name, beat in self._living["api"].items() if name != self._me)

    def missing(self, model: str) -> list[str]:
        """Name what a request for a model would lack now."""
        if not self.connected:
            return ["broker"]
        missing = [NAMES[role] for role in WORKERS if not self.living(role, model)]
        if "engine" not in missing and all(e.draining for e in self.living("scheduler", model)):
            missing.append("engine")
        if self.memory_ratio > MEMORY_LIMIT:
            missing.append("broker memory")
        return missing
