"""The audit: once a second every held request is compared with its log, which is thereby kept alive.

Owns the rules for what an audit finds (ended, gone, another's, behind), the doorbells of aborts, and the reading
of the whole own stream. Belongs to the I/O thread.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from services.scheduler.agenda import Agenda
from services.scheduler.desk import Desk
from services.scheduler.endings import Endings
from services.scheduler.inbox import Inbox, decode_entries
from services.scheduler.ledger import Held, Ledger, Phase, naming
from services.scheduler.metrics import Cause, SchedulerMetrics
from shared.broker.call import Call
from shared.broker.control import aborted, any_aborted
from shared.broker.log_id import LogId, is_end, split_log_id
from shared.broker.replies import LogEntry, OpenEntry, audit, last_id, read_log
from shared.broker.streams import FIRST, GenerateEntry, has_tokens_until, list_held, read_generate_entry
from shared.keys import Keys

log = logging.getLogger(__name__)

AUDIT_COUNT: Final = 128
"""Logs in one audit script: bounds how long it holds the server."""
FETCH_COUNT: Final = 64
HEADER_COUNT: Final = 256
MANY: Final = 512
"""With more requests than this the own stream is listed every fifth second only."""


class Upkeep:
    """Keeps the ledger true to the broker. I/O thread only."""

    def __init__(
        self,
        keys: Keys,
        model: str,
        me: str,
        ledger: Ledger,
        desk: Desk,
        endings: Endings,
        inbox: Inbox,
        metrics: SchedulerMetrics,
        on_listed: Callable[[bytes], None],
    ) -> None:
        self._keys = keys
        self._model = model
        self._me = me
        self._ledger = ledger
        self._desk = desk
        self._endings = endings
        self._inbox = inbox
        self._metrics = metrics
        self._on_highest = on_listed
        self._rung: dict[str, Held] = {}
        self._ignored: set[str] = set()
        self._behind: dict[str, tuple[Held, LogId]] = {}
        self._missing: list[bytes] = []
        self._bell_rings = False
        self._doorbell: Call[bool] | None = None
        self._doorbell_version = -1
        self._listed_s = 0.0

    def plan_doorbells(self, agenda: Agenda) -> None:
        """Add a look at whether any abort key of those who run is there; packed once per set of them."""
        ledger = self._ledger
        if self._doorbell_version != ledger.version:
            uids = [held.uid for held in ledger.live()]
            self._doorbell = any_aborted(self._keys, uids) if uids else None
            self._doorbell_version = ledger.version
        if self._doorbell is not None:
            agenda.add(self._doorbell, self._on_bell)

    def plan_audit(self, agenda: Agenda, *, listing: bool) -> None:
        """Add the audit of all requests; with `listing` the own stream is listed, however much there is."""
        ledger = self._ledger
        held = ledger.all()
        now = time.monotonic()
        if listing or len(held) <= MANY or now - self._listed_s >= 5.0:
            self._listed_s = now
            agenda.add(list_held(self._keys, self._me), self._on_listed)
        self._add_audits(agenda, held, "audit")
        for one in [h for h in held if not h.replica][:HEADER_COUNT]:
            agenda.add_wary(read_log(self._keys, one.uid, count=1), partial(self._on_header, one))
        self._ignored.clear()

    def plan_suspects(self, agenda: Agenda) -> None:
        """Add an audit of the suspects: nobody is admitted before they have a token in the log."""
        self._add_audits(agenda, self._ledger.suspects(), "audit")

    def plan(self, agenda: Agenda) -> None:
        """Add what was found and has to be looked into at once."""
        if self._bell_rings:
            self._bell_rings = False
            uids = [held.uid for held in self._ledger.live()]
            agenda.add(aborted(self._keys, uids), self._on_rung)
        rung, self._rung = list(self._rung.values()), {}
        self._add_audits(agenda, rung, "doorbell")
        behind, self._behind = self._behind, {}
        for held, last in behind.values():
            # In this order: what leaves the token stream is in the log by then, unless it was lost.
            found: list[bool] = []
            agenda.add(has_tokens_until(self._keys, self._model, held.shard, held.sent_id), found.append)
            agenda.add(
                last_id(self._keys, held.uid),
                partial(self._on_behind, held, held.attempt, last, found),
            )
        missing, self._missing = self._missing[:FETCH_COUNT], self._missing[FETCH_COUNT:]
        for entry_id in missing:
            agenda.add(read_generate_entry(self._keys, self._me, entry_id), self._on_missing)

    def _add_audits(self, agenda: Agenda, held: Sequence[Held], cause: Cause) -> None:
        for start in range(0, len(held), AUDIT_COUNT):
            part = list(held[start : start + AUDIT_COUNT])
            marks = [(one, one.attempt) for one in part]
            agenda.add(
                audit(self._keys, [one.uid for one in part]),
                partial(self._on_audit, marks, cause),
            )

    def _on_audit(self, marks: list[tuple[Held, int]], cause: Cause, answer: Sequence[LogId]) -> None:
        for (held, attempt), last in zip(marks, answer, strict=True):
            if self._ledger.get(held.uid) is held and held.attempt == attempt:
                self._judge(held, last, cause)

    def _judge(self, held: Held, last: LogId, cause: Cause) -> None:
        if not last or is_end(last):
            if held.phase is not Phase.FINISHED:
                self._metrics.aborted(cause)
            self._endings.drop(held)
            return
        if held.phase is Phase.WAITING:
            return
        attempt, said = split_log_id(last)
        match held.judge(attempt, said):
            case "moved":
                self._metrics.finished("moved")
                self._endings.drop(held)
            case "restart":
                self._restart(held)
            case "behind":
                self._ledger.confirm(held, said)
                self._behind[held.uid] = (held, last)
            case "keep":
                self._ledger.confirm(held, said)
                if cause == "doorbell":
                    self._ignored.add(held.uid)

    def _on_behind(self, held: Held, attempt: int, before: LogId, in_stream: list[bool], now: LogId) -> None:
        """All was sent, nothing of it waits, and the log still lacks some: it was lost."""
        speaking = self._ledger.get(held.uid) is held and held.attempt == attempt and held.phase is not Phase.WAITING
        if speaking and now == before and not in_stream[0] and not held.unsent:
            self._restart(held)

    def _restart(self, held: Held) -> None:
        log.warning(
            "the broker has lost a part of a reply log; its request starts again from what is left", extra=naming(held)
        )
        self._metrics.log_restart()
        if held.phase is Phase.LIVE:
            self._desk.end(held.uid, held.attempt)
        self._ledger.requeue(held)

    def _on_bell(self, rings: bool) -> None:
        self._bell_rings = rings

    def _on_rung(self, uids: list[str]) -> None:
        for uid in uids:
            held = self._ledger.get(uid)
            if held is not None and held.phase is Phase.LIVE and uid not in self._ignored:
                self._rung[uid] = held

    def _on_header(self, held: Held, entries: list[LogEntry] | None) -> None:
        if entries and isinstance(entries[0], OpenEntry):
            held.replica = entries[0].header.replica
            held.resumable = entries[0].header.resumable_ms > 0

    def _on_listed(self, found: list[tuple[bytes, str]]) -> None:
        """Find what this engine has not read, and forget what waits here but is in its stream no more."""
        ids = {entry_id for entry_id, _ in found}
        self._missing = [
            entry_id
            for entry_id, _ in found
            if self._ledger.by_entry(entry_id) is None and not self._endings.is_leaving(entry_id)
        ]
        self._on_highest(found[-1][0] if found else FIRST)
        for held in self._ledger.all():
            if held.phase is Phase.WAITING and held.entry not in ids:
                self._ledger.remove(held)

    def _on_missing(self, entry: GenerateEntry | None) -> None:
        if entry is not None:
            self._inbox.take_in(decode_entries([entry]))
