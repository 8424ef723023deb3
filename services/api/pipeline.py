"""The picture of the installation: who lives, who died, what moved, and how fast the tokens came lately.

Made by every replica for itself from the heartbeats it reads anyway, so any replica or worker can show it, and all
show the same. Bounded: instances that are gone, events and history are kept for a while and by number. Knows neither
requests nor the broker; the queues between the services are measured in `hops.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from services.api.waits import Window, grown
from shared.broker.control import Standing
from shared.keys import BEAT_S, Role
from shared.messages import Heartbeat

State = Literal["serving", "draining", "late", "dead", "left"]
"""Late: its heartbeat is overdue and its lease runs out. Dead: the lease is over. Left: it signed off."""

HISTORY_S: Final = 300
WINDOW_S: Final = 30
"""Percentiles and hit rates are those of so many seconds."""
GONE_SHOWN_S: Final = 60.0
MAX_GONE: Final = 32
MAX_EVENTS: Final = 64
LATE_S: Final = 2 * BEAT_S
_SIGNED_OFF_S: Final = 1.5 * BEAT_S
"""Who goes from the registry with a heartbeat this fresh went by itself; the dead are removed by others, later."""
_Id = tuple[Role, str]
"""Role and incarnation."""
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class _Instance:
    """One incarnation: its last heartbeat, and what is thought of it."""

    role: Role
    beat: Heartbeat
    state: State
    still_s: float = 0.0
    gone_at: float | None = None


@dataclass(slots=True)
class _Totals:
    """Counters of a second: what all instances have added."""

    said: int = 0
    looked_up: int = 0
    hit: int = 0


@dataclass(slots=True)
class _Sums:
    """Counters of the last WINDOW_S seconds."""

    ttft: Window = field(default_factory=lambda: Window(WINDOW_S))
    gap: Window = field(default_factory=lambda: Window(WINDOW_S))
    cache: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_S))


class Pipeline:
    """The picture of one replica. Fed at every look at the registry.

    Args:
        leases: role -> seconds after which an instance is dead.
        clock: monotonic seconds.
        wall: seconds since the epoch; history and events are dated by it, once a second.
    """

    def __init__(
        self,
        leases: Mapping[Role, float],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._leases = leases
        self._clock = clock
        self._wall = wall
        self._instances: dict[_Id, _Instance] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_S)
        self._counted: dict[_Id, Heartbeat] = {}
        self._sums = _Sums()
        self._sampled_at: float | None = None
        self._begun = False

    # --- what is seen ------------------------------------------------------------------------------------

    def note(self, looked: Mapping[Role, Mapping[str, Standing]]) -> None:
        """Take in a look at the registry."""
        for role, standings in looked.items():
            for incarnation, standing in standings.items():
                self._see(role, incarnation, standing)
        for (role, incarnation), instance in self._instances.items():
            if incarnation not in looked.get(role, ()):
                self._miss(incarnation, instance)
        self._forget(looked)
        self._begun = True
        self._sample()

    def _see(self, role: Role, incarnation: str, standing: Standing) -> None:
        beat, known = standing.heartbeat, self._instances.get((role, incarnation))
        if beat is None:
            return
        state = _state(standing)
        if known is None:
            known = self._instances[role, incarnation] = _Instance(role, beat, state)
            known.gone_at = self._clock() if state == "dead" else None
            if self._begun and state == "serving":
                self._tell("joined", incarnation, known)
        if beat.num_taken > known.beat.num_taken:
            self._tell("took", incarnation, known, beat.num_taken - known.beat.num_taken)
        known.beat, known.still_s = beat, standing.still_s
        self._change(incarnation, known, state)

    def _miss(self, incarnation: str, instance: _Instance) -> None:
        """Judge one that is in the registry no more."""
        if instance.state in ("dead", "left"):
            return
        signed_off = instance.state == "draining" or instance.still_s < _SIGNED_OFF_S
        self._change(incarnation, instance, "left" if signed_off else "dead")

    def _change(self, incarnation: str, instance: _Instance, state: State) -> None:
        before, instance.state = instance.state, state
        if state == before:
            return
        if state in ("dead", "left"):
            instance.gone_at = self._clock()
            self._tell("died" if state == "dead" else "left", incarnation, instance, _held(instance.beat))
        else:
            instance.gone_at = None
            if state == "draining":
                self._tell("draining", incarnation, instance, _held(instance.beat))
            elif before == "dead":
                self._tell("woke", incarnation, instance)

    def _forget(self, looked: Mapping[Role, Mapping[str, Standing]]) -> None:
        """Keep those that are gone for a while, the dead until they are removed, and no more than MAX_GONE."""
        now = self._clock()
        gone = sorted((i.gone_at, key) for key, i in self._instances.items() if i.gone_at is not None)
        for number, (at, key) in enumerate(reversed(gone)):
            role, incarnation = key
            is_over = now - at > GONE_SHOWN_S and incarnation not in looked.get(role, ())
            if is_over or number >= MAX_GONE:
                del self._instances[key]

    def _tell(self, kind: str, incarnation: str, instance: _Instance, count: int = 0) -> None:
        """Note an event. Replicas give the same one the same id, so that a reader of several sees it once."""
        total = instance.beat.num_taken + count if kind == "took" else instance.beat.beat
        self._events.append(
            {
                "id": f"{kind}:{incarnation}:{total}",
                "at": round(self._wall(), 1),
                "kind": kind,
                "role": instance.role,
                "name": instance.beat.name,
                "count": count,
            }
        )

    # --- once a second -----------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Add a second to the history."""
        at, now = int(self._wall()), self._clock()
        if self._history and at == self._history[-1]["t"]:
            return
        elapsed_s = now - self._sampled_at if self._sampled_at is not None else 0.0
        self._sampled_at = now
        totals, sums = self._count(), self._sums
        sums.cache.append((totals.looked_up, totals.hit))
        engines = self.living("scheduler")
        pages = sum(e.num_pages for e in engines)
        looked_up = sum(asked for asked, _ in sums.cache)
        self._history.append(
            {
                "t": at,
                "tokens_per_s": round(totals.said / elapsed_s, 1) if elapsed_s else 0.0,
                "running": sum(e.num_running for e in engines),
                "waiting": sum(e.num_waiting for e in (*engines, *self.living("tokenizer"))),
                "open": sum(_running(a) for a in self.living("api")),
                "kv_used": round(1 - sum(e.free_pages for e in engines) / pages, 4) if pages else None,
                "hit_rate": round(sum(hit for _, hit in sums.cache) / looked_up, 4) if looked_up else None,
                **{f"ttft_{name}": _rounded(sums.ttft.percentile(share)) for name, share in SHARES.items()},
                **{f"gap_{name}": _rounded(sums.gap.percentile(share)) for name, share in SHARES.items()},
            }
        )

    def _count(self) -> _Totals:
        """See what counters have grown by since the last sample; one seen for the first time has grown by nothing."""
        totals, counted = _Totals(), self._counted
        ttft, gap = grown((), ()), grown((), ())
        for key, instance in self._instances.items():
            beat = instance.beat
            before = counted.get(key, beat)
            totals.said += max(0, beat.num_said - before.num_said)
            totals.looked_up += max(0, beat.cache_query_tokens - before.cache_query_tokens)
            totals.hit += max(0, beat.cache_hit_tokens - before.cache_hit_tokens)
            if instance.role == "api" and beat is not before:
                ttft = [a + b for a, b in zip(ttft, grown(beat.ttft_counts, before.ttft_counts), strict=True)]
                gap = [a + b for a, b in zip(gap, grown(beat.gap_counts, before.gap_counts), strict=True)]
        self._counted = {key: instance.beat for key, instance in self._instances.items()}
        self._sums.ttft.add(ttft)
        self._sums.gap.add(gap)
        return totals

    # --- what is shown -----------------------------------------------------------------------------------

    def living(self, role: Role) -> list[Heartbeat]:
        """Give the last heartbeats of those of a role that are not gone."""
        return [i.beat for i in self._instances.values() if i.role == role and i.gone_at is None]

    def names(self, role: Role) -> list[str]:
        """List the incarnations of a role, those that are gone included, the living first."""
        found = [(i.gone_at is not None, name) for (kind, name), i in self._instances.items() if kind == role]
        return [name for _, name in sorted(found)]

    def instances(self) -> list[dict[str, Any]]:
        """Describe every instance, those that have gone of late included, in the order of the stream."""
        now = self._clock()
        order: list[Role] = ["api", "tokenizer", "scheduler", "detokenizer"]
        found = sorted((order.index(role), i.beat.name, name, i) for (role, name), i in self._instances.items())
        return [self._describe(incarnation, instance, now) for _, _, incarnation, instance in found]

    def _describe(self, incarnation: str, instance: _Instance, now: float) -> dict[str, Any]:
        beat = instance.beat
        told: dict[str, Any] = {
            "id": incarnation,
            "role": instance.role,
            "name": beat.name,
            "state": instance.state,
            "lease_s": self._leases[instance.role],
            "still_s": round(instance.still_s, 1),
            "gone_s": None if instance.gone_at is None else round(now - instance.gone_at, 1),
            "model": beat.model,
            "version": beat.version,
            "port": beat.port,
            "running": _running(beat),
            "waiting": beat.num_waiting,
        }
        if instance.role == "scheduler":
            told |= {
                "slots": beat.max_running,
                "queued_tokens": beat.queued_tokens,
                "pages": beat.num_pages,
                "pages_live": beat.num_pages - beat.free_pages,
                "pages_cached": beat.cached_pages,
                "tokens_per_s": round(beat.tokens_per_s, 1),
                "taken": beat.num_taken,
            }
        return told

    def events(self) -> list[dict[str, Any]]:
        """Give the last events, the oldest first."""
        return list(self._events)

    def history(self, since: int = 0) -> dict[str, list[Any]]:
        """Give the samples after a second of the epoch, in columns; the columns are there even when nothing is."""
        rows = [row for row in self._history if row["t"] > since]
        names = self._history[-1] if self._history else ()
        return {name: [row[name] for row in rows] for name in names}


def _state(standing: Standing) -> State:
    if standing.is_over:
        return "dead"
    if standing.still_s >= LATE_S:
        return "late"
    assert standing.heartbeat is not None, "it has been read"
    return "draining" if standing.heartbeat.draining else "serving"


def _running(beat: Heartbeat) -> int:
    """Say what an instance has in hand; for an api that is what it gives, also to those who came back for it."""
    return beat.num_running + beat.num_resumed


def _held(beat: Heartbeat) -> int:
    return beat.num_running + beat.num_waiting


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
