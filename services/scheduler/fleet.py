"""What this engine does for, and leaves to, others: takes over from dead engines, hands over when it drains.

Owns the choice of whom to take from and whom to give to, and the end of requests whose api replica is dead.
Belongs to the I/O thread; who lives is the heart's knowledge.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, Protocol

from services.scheduler.agenda import Agenda
from services.scheduler.endings import Endings
from services.scheduler.ledger import Held, Ledger, Phase
from services.scheduler.link_config import LinkConfig
from services.scheduler.metrics import SchedulerMetrics
from shared.broker.control import retire
from shared.broker.streams import FIRST, GenerateEntry, Taken, list_held, read_generate, take
from shared.errors import WireError
from shared.keys import Keys, Role
from shared.messages import Heartbeat, decode

log = logging.getLogger(__name__)

FORGET_API_S: Final = 5.0
"""A dead api replica stays registered for so long, so that every engine sees it dead and ends its requests."""
TAKE_COUNT: Final = 8
"""Entries taken from a dead engine per look, so that its survivors share them."""


class Registry(Protocol):
    """Who lives, as the heart of this instance sees it."""

    @property
    def since_beat_s(self) -> float:
        """Seconds since the broker last took a heartbeat of this instance."""
        ...

    def living(self, role: Role) -> Mapping[str, Heartbeat]:
        """Give the living of a role with their heartbeats."""
        ...

    def dead(self, role: Role) -> Mapping[str, bytes]:
        """Give those whose lease is over with their last encoded heartbeats."""
        ...

    def forgettable(self, role: Role) -> Mapping[str, bytes]:
        """Give those of the dead whom every other instance has had time to see dead."""
        ...

    def is_registered(self, role: Role, incarnation: str) -> bool:
        """Whether an instance is known, whatever its heartbeat says."""
        ...


class Fleet:
    """Dealings with other engines and with api replicas. I/O thread only."""

    def __init__(
        self,
        keys: Keys,
        config: LinkConfig,
        registry: Registry,
        ledger: Ledger,
        endings: Endings,
        metrics: SchedulerMetrics,
    ) -> None:
        self._keys = keys
        self._config = config
        self._me = config.me
        self._registry = registry
        self._ledger = ledger
        self._endings = endings
        self._metrics = metrics
        self._found: dict[str, list[GenerateEntry]] = {}
        self._absent_since: dict[str, float] = {}
        self._orphans: dict[str, Held] = {}
        self._dead_apis: dict[str, float] = {}
        self._giving: list[tuple[bytes, str]] = []
        self._round = itertools.count()
        self.num_left: int | None = None
        """Entries in the own stream at the last look of the handover; None before it."""
        self.num_taken = 0
        """Requests taken over from dead engines so far."""

    def forget_looks(self) -> None:
        """Start all waiting anew: the broker was out of sight for an unknown time."""
        self._absent_since.clear()
        self._dead_apis.clear()
        self._found.clear()
        self._giving.clear()
        self.num_left = None

    # --- takeover

    @property
    def reaping(self) -> bool:
        """Whether a dead engine may still hold requests for this one."""
        return any(self._is_kin(beat) for beat in self._registry.dead("scheduler").values())

    def plan_reap(self, agenda: Agenda) -> None:
        """Look into the streams of dead engines: what is left there is taken, what is empty is forgotten."""
        for engine, beat in self._registry.dead("scheduler").items():
            if self._is_kin(beat):
                agenda.add(
                    read_generate(self._keys, engine, after=FIRST, count=TAKE_COUNT),
                    partial(self._on_found, engine),
                )
        for engine, beat in self._registry.forgettable("scheduler").items():
            agenda.add(retire(self._keys, "scheduler", engine, beat), lambda _: None)

    def plan_takes(self, agenda: Agenda) -> None:
        """Take what the last look into the streams of dead engines has found."""
        found, self._found = self._found, {}
        for engine, entries in found.items():
            if engine not in self._registry.dead("scheduler"):
                continue  # it is back
            for entry in entries:
                agenda.add(take(self._keys, engine, entry.entry_id, entry.uid, self._me, "crash"), self._on_taken)

    def _on_found(self, engine: str, entries: list[GenerateEntry]) -> None:
        self._found[engine] = entries

    def _on_taken(self, answer: Taken) -> None:
        if answer == "OK":
            self.num_taken += 1
            self._metrics.takeover("crash")

    def _is_kin(self, beat: bytes) -> bool:
        """Whether an engine computes the same as this one, so that either can go on where the other stopped."""
        try:
            return self._same(decode(Heartbeat, beat))
        except WireError:
            return False

    def _same(self, other: Heartbeat) -> bool:
        return other.model == self._config.model and other.fingerprint == self._config.fingerprint

    # --- orphans

    def find_orphans(self) -> None:
        """End the plain requests of api replicas that are dead; resumable ones go on, somebody may come back."""
        dead = self._registry.dead("api")
        now = time.monotonic()
        absent: dict[str, float] = {}
        for held in self._ledger.all():
            if not held.replica or held.phase is Phase.FINISHED:
                continue
            if held.replica not in dead:
                if self._registry.is_registered("api", held.replica):
                    continue  # alive, even if its heartbeat is of another release and cannot be read
                # Forgotten by others, or never seen: it has a lease's time to show up.
                absent[held.replica] = since = self._absent_since.get(held.replica, now)
                if now - since < self._config.api_lease_s:
                    continue
            if not held.resumable and self._orphans.get(held.uid) is not held:
                self._orphans[held.uid] = held
                self._endings.orphan(held)
        self._absent_since = absent
        self._orphans = {uid: held for uid, held in self._orphans.items() if self._ledger.get(uid) is held}

    def plan_forgetting(self, agenda: Agenda) -> None:
        """Forget api replicas that have been dead for a while: nobody else would."""
        dead, now = self._registry.dead("api"), time.monotonic()
        self._dead_apis = {replica: self._dead_apis.get(replica, now) for replica in dead}
        for replica, since in self._dead_apis.items():
            if now - since >= FORGET_API_S:
                agenda.add(retire(self._keys, "api", replica, dead[replica]), lambda _: None)

    # --- handover

    def survivors(self) -> list[str]:
        """List the engines that could take this one's requests over, the least loaded first."""
        found = [
            (beat.num_running + beat.num_waiting, engine)
            for engine, beat in self._registry.living("scheduler").items()
            if engine != self._me and not beat.draining and self._same(beat)
        ]
        return [engine for _, engine in sorted(found)]

    def plan_handover(self, agenda: Agenda, *, wait_finished: bool) -> None:
        """Give away what is in the own stream.

        Args:
            agenda: to add to.
            wait_finished: leave requests alone that are computed to their end: their terminal is on its way.
        """
        targets = self.survivors()
        giving, self._giving = self._giving, []
        for entry_id, uid in giving if targets else ():
            held = self._ledger.by_entry(entry_id)
            if wait_finished and held is not None and held.phase is Phase.FINISHED:
                continue
            target = targets[next(self._round) % len(targets)]
            agenda.add(take(self._keys, self._me, entry_id, uid, target, "drain"), self._on_given)
        agenda.add(list_held(self._keys, self._me), self._on_left)

    def _on_given(self, answer: Taken) -> None:
        if answer == "OK":
            self._metrics.takeover("drain")
            self._metrics.finished("moved")

    def _on_left(self, left: Iterable[tuple[bytes, str]]) -> None:
        self._giving = list(left)
        self.num_left = len(self._giving)
