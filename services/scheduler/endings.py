"""The ways a request leaves this engine other than by being computed: dropped, failed, given up, buried.

Owns what has to be written for that (terminals, dead letters, deletions of entries), kept until the broker has
answered. Belongs to the I/O thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.scheduler.agenda import Agenda
from services.scheduler.desk import Desk, Failed
from services.scheduler.ledger import Held, Ledger, Phase, naming
from services.scheduler.metrics import SchedulerMetrics
from shared.broker.dead_letters import bury
from shared.broker.replies import MAX_LAUNCHES, Ended, end
from shared.broker.streams import GenerateEntry, drop_generate
from shared.keys import Keys
from shared.messages import DeadLetter, Delta, ErrorBody, encode

log = logging.getLogger(__name__)

POISON: Final = ErrorBody(
    500, f"The engine died {MAX_LAUNCHES} times on this request; it was given up", "server_error", "engine_crashed"
)
UNREADABLE: Final = ErrorBody(500, "The request could not be read by the engine", "server_error", "internal_error")
REPLICA_LOST: Final = ErrorBody(
    503, "The server that answered this request is gone", "service_unavailable_error", "replica_lost"
)


@dataclass(slots=True, eq=False)
class _Terminal:
    """A terminal to write; `attempt` None ends the uid whoever speaks for it, `held` is forgotten with it."""

    uid: str
    error: ErrorBody
    attempt: int | None = None
    entry: bytes = b""
    held: Held | None = None
    letter: DeadLetter | None = None


class Endings:
    """What is to be written about requests that leave. I/O thread only."""

    def __init__(
        self, keys: Keys, me: str, ledger: Ledger, desk: Desk, metrics: SchedulerMetrics, keep_bodies: bool
    ) -> None:
        self._keep_bodies = keep_bodies
        self._keys = keys
        self._me = me
        self._ledger = ledger
        self._desk = desk
        self._metrics = metrics
        self._terminals: list[_Terminal] = []
        self._deletions: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._terminals) + len(self._deletions)

    def is_leaving(self, entry: bytes) -> bool:
        """Whether an entry is about to be deleted."""
        return entry in self._deletions or any(t.entry == entry for t in self._terminals)

    def drop(self, held: Held) -> None:
        """Forget a request whose log is ended, gone or another's; the loop forgets it too."""
        if held.phase is Phase.LIVE:
            self._desk.end(held.uid, held.attempt)
        self._ledger.remove(held)
        self._deletions[held.entry] = None

    def delete(self, entry: bytes) -> None:
        """Delete an entry that nobody needs."""
        self._deletions[entry] = None

    def fail(self, failed: Failed) -> None:
        """End a request that the loop has ended with an error."""
        held = self._ledger.speaking(failed.uid, failed.attempt)
        if held is None:
            return
        self._ledger.remove(held)
        self._terminals.append(_Terminal(failed.uid, failed.error, failed.attempt, held.entry))
        self._metrics.finished("error")

    def give_up(self, held: Held) -> None:
        """End a request that has ended its engine too often, and leave a note of it."""
        log.error("a request is given up: its engine died %d times on it", MAX_LAUNCHES, extra=naming(held))
        letter = self._letter(held.uid, "poison", MAX_LAUNCHES, lambda: encode(held.request))
        self._ledger.remove(held)
        self._terminals.append(_Terminal(held.uid, POISON, None, held.entry, None, letter))
        self._metrics.finished("error")
        self._metrics.dead_letter("poison")

    def bury(self, entry: GenerateEntry) -> None:
        """Put aside an entry that is no request; if it names a uid, that one is told."""
        log.error("entry %s of this engine's stream is no request", entry.entry_id.decode(errors="replace"))
        letter = self._letter(entry.uid, "unreadable", 1, lambda: entry.payload)
        self._terminals.append(_Terminal(entry.uid, UNREADABLE, None, entry.entry_id, None, letter))
        self._metrics.dead_letter("unreadable")

    def orphan(self, held: Held) -> None:
        """End a request whose api replica is dead; it is held until the broker has said that it was still ours."""
        attempt = held.attempt if held.phase is Phase.LIVE else None
        self._terminals.append(_Terminal(held.uid, REPLICA_LOST, attempt, b"", held))

    def plan(self, agenda: Agenda) -> None:
        """Add all that is still to be written."""
        for terminal in self._terminals:
            if terminal.letter is not None:
                agenda.add(bury(self._keys, terminal.letter), lambda _: None)
            delta = Delta(0, [], "", error=terminal.error, stamp_ns=time.time_ns())
            agenda.add(
                end(self._keys, terminal.uid, delta, attempt=terminal.attempt),
                partial(self._on_end, terminal),
            )
        if self._deletions:
            entries = list(self._deletions)
            agenda.add(drop_generate(self._keys, self._me, entries), lambda _: self._on_deleted(entries))

    def _on_end(self, terminal: _Terminal, answer: Ended) -> None:
        self._terminals.remove(terminal)
        if terminal.entry:
            self._deletions[terminal.entry] = None
        held = terminal.held
        if held is not None and self._ledger.get(held.uid) is held and answer != "FENCED":
            self._metrics.aborted("orphan")
            self.drop(held)

    def _on_deleted(self, entries: list[bytes]) -> None:
        for entry in entries:
            self._deletions.pop(entry, None)

    def _letter(self, uid: str, reason: str, tries: int, body: Callable[[], bytes]) -> DeadLetter:
        kept = body() if self._keep_bodies else b""
        return DeadLetter(uid, reason, tries, self._me, time.time_ns() // 1_000_000, kept)
