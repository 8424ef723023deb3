"""What this engine holds: every unfinished request of its stream, and how far the log has got with each.

Owns the record of each request (waiting, live or finished), the order in which they are fenced, and the rule of
suspects; belongs to the I/O thread alone. Pure: knows neither the broker nor the step loop.
"""

import logging
import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from services.scheduler.core.queue import WaitingQueue
from shared import tracing
from shared.broker.streams import Why
from shared.messages import GenerateRequest

log = logging.getLogger(__name__)

Verdict = Literal["keep", "moved", "restart", "behind"]


class Phase(IntEnum):
    """Where a request stands in this engine."""

    WAITING = 0
    LIVE = 1
    FINISHED = 2


@dataclass(slots=True)
class Held:
    """One request whose entry is in this engine's stream.

    Attributes:
        entry: id of its entry; who holds it may fence.
        why: how it came here; decides whether its next launch counts as a failed one's successor.
        shard: token stream of its uid.
        nonce: of the fence that is being asked for; kept until it is answered, so that a retry is recognised.
        attempt: number of its fence.
        launches: launches since the last token in its log, this one included; above 1 it is a suspect.
        base: tokens said before the fence.
        logged: tokens in the log, as the last audit saw.
        drawn: index of the last token that the loop has published.
        sent: index of the last token that the broker has acknowledged.
        sent_id: id of the step entry that carried it; empty while nothing was sent.
        unsent: places in step entries that wait for the broker.
        replica: api replica that has the client; empty until its log's header was read.
        resumable: whether the request goes on when that replica dies.
        read_ns, fenced_ns, first_ns: wall clock when its entry was read, its fence answered, its first token drawn.
    """

    uid: str
    entry: bytes
    request: GenerateRequest
    why: Why
    shard: int
    phase: Phase = Phase.WAITING
    nonce: str = ""
    attempt: int = 0
    launches: int = 0
    base: int = 0
    logged: int = 0
    drawn: int = 0
    sent: int = 0
    sent_id: bytes = b""
    unsent: int = 0
    replica: str = ""
    resumable: bool = False
    read_ns: int = field(default_factory=time.time_ns)
    fenced_ns: int = 0
    first_ns: int = 0

    def judge(self, attempt: int, said: int) -> Verdict:
        """Compare an open log with what this engine knows of it.

        Args:
            attempt: of the log's last id.
            said: tokens in the log.

        Returns:
            `keep`; `moved` when another speaks for it; `restart` when the log lost the fence; `behind` when all
            that was sent should be in the log, or still in the token stream: who reads both knows which.
        """
        if attempt > self.attempt:
            return "moved"
        if attempt < self.attempt:
            return "restart"
        complete = said >= self.sent and self.phase is not Phase.FINISHED
        return "keep" if complete or self.unsent or not self.sent_id else "behind"


def naming(held: Held) -> dict[str, str]:
    """Name a request in a log line, as `extra`."""
    return {"uid": held.uid, "request_id": held.request.request_id}


def trace(held: Held, stage: str, start_ns: int, end_ns: int, **numbers: int) -> None:
    """Record a stage of a request in its trace, and in the log for those who look closely."""
    request = held.request
    tracing.record(stage, request.traceparent, start_ns, end_ns, request_id=request.request_id, **numbers)
    log.debug("%s: %.1f ms", stage, (end_ns - start_ns) / 1e6, extra=naming(held))


class Ledger:
    """All requests this engine holds, by uid; each uid at most once."""

    def __init__(self) -> None:
        self.version = 0
        """Changes with the set of live uids, so that a packed command for them can be kept."""
        self._held: dict[str, Held] = {}
        self._uid_of_entry: dict[bytes, str] = {}
        self._queue: WaitingQueue[Held] = WaitingQueue()
        self._live: dict[str, Held] = {}
        self._fresh: set[str] = set()
        self._suspects: set[str] = set()
        self._solo: dict[str, Held] = {}
        self.asked: dict[str, Held] = {}
        """Requests whose fence is being asked for, until it is answered."""
        self.solo = False
        """Whether the only one asked for may be launched although it is a suspect."""
        self.waiting_tokens = 0
        """Prompt tokens of the requests without a fence."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, uid: object) -> bool:
        return uid in self._held

    @property
    def num_waiting(self) -> int:
        """Requests without a fence."""
        return len(self._queue) + len(self._solo) + len(self.asked)

    @property
    def num_live(self) -> int:
        """Requests that are fenced and not finished."""
        return len(self._live)

    @property
    def num_finished(self) -> int:
        """Requests computed to their end whose terminal has not been seen in the log."""
        return len(self._held) - self.num_waiting - len(self._live)

    def get(self, uid: str) -> Held | None:
        """Find a request by its uid."""
        return self._held.get(uid)

    def by_entry(self, entry: bytes) -> Held | None:
        """Find a request by the id of its entry."""
        uid = self._uid_of_entry.get(entry)
        return self._held[uid] if uid is not None else None

    def speaking(self, uid: str, attempt: int) -> Held | None:
        """Find a request that this engine speaks for with just this attempt."""
        held = self._held.get(uid)
        return held if held is not None and held.attempt == attempt and held.phase is not Phase.WAITING else None

    def all(self) -> list[Held]:
        """List all requests."""
        return list(self._held.values())

    def live(self) -> list[Held]:
        """List the requests that are fenced and not finished."""
        return list(self._live.values())

    def suspects(self) -> list[Held]:
        """List the live suspects that have no token in the log since their fence."""
        return [self._held[uid] for uid in self._suspects]

    def add(self, held: Held) -> None:
        """Put a request into the waiting order. Its uid must not be held."""
        self._held[held.uid] = held
        self._uid_of_entry[held.entry] = held.uid
        self._enqueue(held)

    def remove(self, held: Held) -> None:
        """Forget a request."""
        self._unplace(held)
        del self._held[held.uid]
        del self._uid_of_entry[held.entry]

    def requeue(self, held: Held) -> None:
        """Have a request fenced anew and continued from its log."""
        self._unplace(held)
        held.why, held.nonce = "self", ""
        held.sent_id, held.unsent = b"", 0
        self._enqueue(held)

    def speak(self, held: Held, attempt: int, said: int, launches: int) -> None:
        """Note a fence: the request is live, with `said` tokens before it."""
        self._unplace(held)
        held.phase, held.attempt, held.launches = Phase.LIVE, attempt, launches
        held.base = held.logged = held.drawn = held.sent = said
        held.sent_id, held.unsent = b"", 0
        held.fenced_ns, held.first_ns = time.time_ns(), 0
        self._live[held.uid] = held
        self._fresh.add(held.uid)
        if launches > 1:
            self._suspects.add(held.uid)
        self.version += 1

    def draw(self, held: Held, index: int) -> None:
        """Note that the loop has published tokens up to `index`."""
        held.drawn = index
        held.unsent += 1
        if self._fresh:
            self._fresh.discard(held.uid)

    def finish(self, held: Held) -> None:
        """Note that a request is computed to its end; it is held until its terminal is in the log."""
        if held.phase is Phase.LIVE:
            held.phase = Phase.FINISHED
            del self._live[held.uid]
            self.version += 1

    def confirm(self, held: Held, said: int) -> None:
        """Note what an audit found in the log of an attempt of ours."""
        held.logged = max(held.logged, said)
        if held.logged > held.base:
            self._suspects.discard(held.uid)

    def choose(self, room: int) -> None:
        """Take the next requests out of the waiting order, up to `room`, to be fenced: see `asked`.

        A suspect is launched with nobody else in a first launch, so that only it can be to blame if the process
        dies; and until it has a token in the log nobody is admitted.
        """
        if self.asked or self._suspects:
            return
        alone = not self._fresh
        if self._solo:
            if alone and room > 0:
                held = self._solo.pop(next(iter(self._solo)))
                self.asked[held.uid] = held
                self.solo = True
            return
        while self._queue and len(self.asked) < room:
            held = self._queue.pop()
            self.asked[held.uid] = held
        self.solo = alone and len(self.asked) == 1

    def refuse(self, held: Held) -> None:
        """Note that the fence of an asked request waits until nobody else is in a first launch."""
        del self.asked[held.uid]
        self._solo[held.uid] = held

    def _enqueue(self, held: Held) -> None:
        held.phase = Phase.WAITING
        request = held.request
        cost = len(request.prompt_ids)
        self.waiting_tokens += cost
        self._queue.push(
            held.uid,
            held,
            priority=request.priority,
            tenant=request.tenant,
            arrival_ms=request.arrival_ms,
            cost=cost,
        )

    def _unplace(self, held: Held) -> None:
        """Take a request out of every list it may be in."""
        uid = held.uid
        if held.phase is Phase.WAITING:
            self.waiting_tokens -= len(held.request.prompt_ids)
            if self.asked.pop(uid, None) is None and self._solo.pop(uid, None) is None:
                self._queue.remove(uid)
        elif held.phase is Phase.LIVE:
            del self._live[uid]
            self.version += 1
        self._fresh.discard(uid)
        self._suspects.discard(uid)
