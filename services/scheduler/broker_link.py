"""The link to the broker: the I/O thread beside the step loop, and what it does in which order.

Composes inbox, outbox, upkeep, endings and fleet into turns of one pipelined round trip each. The step loop's
side is the `Link` protocol and never waits. Owns the rules of lost contact: no heartbeat taken for a lease, or
a lost connection, stops the steps; the audit comes before anything is sent again.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from services.scheduler.agenda import Agenda
from services.scheduler.core.link import Arrival, Load, StepOutput
from services.scheduler.desk import Desk, Failed, Read
from services.scheduler.endings import Endings
from services.scheduler.fleet import Fleet, Registry
from services.scheduler.inbox import Inbox, Reader
from services.scheduler.ledger import Ledger
from services.scheduler.link_config import LinkConfig
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.outbox import Outbox
from services.scheduler.timetable import Timetable
from services.scheduler.upkeep import Upkeep
from shared.broker.backoff import Backoff
from shared.broker.connection import Broker
from shared.broker.streams import Backlog, backlog
from shared.errors import BrokerDown, BrokerError, BrokerFull, WireError
from shared.messages import ErrorBody

log = logging.getLogger(__name__)

AUDIT_S: Final = 1.0
LOOK_S: Final = 0.5
"""Between looks at api replicas, and at the lengths of the token streams."""
REAP_S: Final = 0.1
"""Between looks into the streams of dead engines while there are any."""
DOORBELL_S: Final = 0.05
"""Between looks at abort keys while nothing is published: a step may take long."""
SUSPECT_S: Final = 0.02
NO_CONTACT_S: Final = 0.02
"""Between looks at whether the lease is kept again."""
FINISHED_GRACE_S: Final = 1.0
"""A handover leaves computed requests to the detokenizer for so long."""


class BrokerLink:
    """The Link of a scheduler. `start` before the loop runs; `finish` after it has returned."""

    def __init__(
        self,
        broker: Broker,
        registry: Registry,
        config: LinkConfig,
        metrics: SchedulerMetrics,
        *,
        on_report: Callable[[], None] = lambda: None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        keys, me, model = broker.keys, config.me, config.model
        self._broker = broker
        self._registry = registry
        self._config = config
        self._metrics = metrics
        self._on_report = on_report
        self._on_failure = on_failure
        self._ledger = ledger = Ledger()
        self._desk = desk = Desk()
        self._endings = Endings(keys, me, ledger, desk, metrics, config.dead_letter_bodies)
        self._reader = Reader(broker, me, desk)
        self._inbox = Inbox(keys, me, ledger, desk, self._endings, metrics, config.num_shards)
        self._outbox = Outbox(keys, model, me, ledger, metrics, config.num_shards)
        self._upkeep = Upkeep(keys, model, me, ledger, desk, self._endings, self._inbox, metrics, self._reader.rewind)
        self._fleet = Fleet(keys, config, registry, ledger, self._endings, metrics)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._backoff = Backoff()
        self._times = Timetable()
        self._in_contact = False
        self._full = False
        self._trouble = ""
        self._untold = False
        self._resume_s = 0.0
        self._suspect_of_loss = threading.Event()
        self._finish_by_s: float | None = None
        self._finish_began_s = 0.0
        self._over = threading.Event()

    # --- the step loop's side: Link

    @property
    def paused(self) -> bool:
        """Whether stepping must wait."""
        return self._desk.paused

    def arrivals(self) -> list[Arrival]:
        """Take the requests that may start."""
        return self._desk.take_arrivals()

    def endings(self) -> list[tuple[str, int]]:
        """Take the requests to forget."""
        return self._desk.take_endings()

    def await_look(self) -> float:
        """Wait until one more step may be planned."""
        return self._desk.await_look()

    def planned(self) -> None:
        """Note that a step was planned."""
        self._desk.planned()
        self._untold = True

    def publish(self, output: StepOutput) -> None:
        """Hand over a step's tokens."""
        self._desk.post(output)
        self._untold = False

    def fail(self, uid: str, attempt: int, error: ErrorBody) -> None:
        """End a request with an error."""
        self._desk.post(Failed(uid, attempt, error))

    def report(self, load: Load) -> None:
        """Beat, and say how much runs; who waits is fenced when there is room, and after each step is a look."""
        self._desk.report(load)
        self._on_report()
        if self._untold or (self._ledger.num_waiting and self._desk.room() > 0):
            self._untold = False
            self._desk.post(None)

    def idle(self, timeout_s: float) -> None:
        """Sleep until there is an arrival or an ending."""
        self._desk.sleep(timeout_s)

    # --- the service's side, any thread

    def start(self) -> None:
        """Begin to read and to write."""
        self._thread.start()
        self._reader.start()

    def lost_contact(self) -> None:
        """Say that the broker was away, perhaps without its data: the audit comes first."""
        self._suspect_of_loss.set()

    def others_died(self) -> None:
        """Look now at what the dead have left."""
        self._times.hasten("look", "reap")
        self._desk.post(None)

    @property
    def num_waiting(self) -> int:
        """Requests of this engine that have no slot."""
        return self._ledger.num_waiting + self._desk.num_handed + self._desk.load.num_ready

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for a fence."""
        return self._ledger.waiting_tokens

    @property
    def num_unconfirmed(self) -> int:
        """Requests computed to their end whose terminal was not seen yet."""
        return self._ledger.num_finished

    @property
    def num_held(self) -> int:
        """Requests of this engine in any state."""
        return len(self._ledger)

    @property
    def load(self) -> Load:
        """What the loop reported last."""
        return self._desk.load

    @property
    def has_survivors(self) -> bool:
        """Whether an engine lives that could take over."""
        return bool(self._fleet.survivors())

    @property
    def num_taken(self) -> int:
        """Requests taken over from dead engines so far."""
        return self._fleet.num_taken

    def wake(self) -> None:
        """Let the step loop come round once, if it sleeps."""
        self._desk.ring()

    def finish(self, timeout_s: float) -> bool:
        """Send what is left, hand every request over to a survivor, and end the threads.

        Returns:
            Whether nothing was left behind in this engine's stream.
        """
        self._inbox.open = False
        self._finish_began_s = time.monotonic()
        self._finish_by_s = self._finish_began_s + timeout_s
        self._desk.post(None)
        self._over.wait(timeout_s + 1.0)
        return self._fleet.num_left == 0

    def close(self) -> None:
        """End the threads without a word: who finds the entries takes over. Safe after `finish`."""
        self._over.set()
        self._reader.stop()
        self._desk.post(None)

    # --- the I/O thread

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._take_mail()
                if self._finish_by_s is not None and time.monotonic() >= self._finish_by_s:
                    break
                try:
                    self._turn()
                except (BrokerError, WireError) as e:
                    self._broken(e)
        except Exception as e:
            log.exception("the I/O thread failed")
            self._on_failure(f"the I/O thread failed: {type(e).__name__}")
        finally:
            self._desk.paused = True
            self._over.set()

    def _take_mail(self) -> None:
        for mail in self._desk.next_mail(self._until_due()):
            match mail:
                case StepOutput():
                    self._outbox.put(mail)
                case Failed():
                    self._endings.fail(mail)
                case Read():
                    self._inbox.take_in(mail)
                case None:
                    pass

    def _turn(self) -> None:
        """Do all that is to be done now: one round trip as a rule, more while answers ask for more."""
        began = time.monotonic()
        if self._suspect_of_loss.is_set() or not self._keeps_lease:
            self._in_contact = False
        if not self._in_contact and (began < self._resume_s or not self._regain()):
            self._desk.paused = self._desk.paused or self._outbox.full or not self._keeps_lease
            return
        num_planned = self._desk.num_planned
        agenda = Agenda()
        self._upkeep.plan_doorbells(agenda)
        self._plan_due(agenda, began)
        while True:
            self._plan_urgent(agenda)
            if not agenda:
                break
            agenda.run(self._broker)
            agenda = Agenda()
        self._desk.looked(num_planned)
        self._backoff.reset()
        self._desk.paused = self._outbox.full
        if self._finish_by_s is not None and not self._outbox and not self._endings:
            self._hand_over()
        self._metrics.io_turn(time.monotonic() - began)

    def _plan_urgent(self, agenda: Agenda) -> None:
        """Add what cannot wait. With a full server what frees memory goes first and alone: the rest is refused."""
        self._endings.plan(agenda)
        self._upkeep.plan(agenda)
        if self._full and agenda:
            return
        self._full = False
        self._outbox.plan(agenda)
        self._inbox.plan(agenda)
        self._fleet.plan_takes(agenda)

    def _plan_due(self, agenda: Agenda, now: float) -> None:
        if self._times.is_due("audit", AUDIT_S, now):
            agenda.add(backlog(self._broker.keys.generate(self._config.me)), self._on_backlog)
            self._upkeep.plan_audit(agenda, listing=False)
        if self._times.is_due("look", LOOK_S if not self._outbox.full else DOORBELL_S, now):
            self._outbox.plan_lengths(agenda)
            self._fleet.find_orphans()
            self._fleet.plan_forgetting(agenda)
        if self._inbox.open and self._times.is_due("reap", REAP_S if self._fleet.reaping else LOOK_S, now):
            self._fleet.plan_reap(agenda)
        if self._ledger.suspects() and self._times.is_due("suspects", SUSPECT_S, now):
            self._upkeep.plan_suspects(agenda)

    def _on_backlog(self, found: Backlog) -> None:
        self._metrics.backlog(found.length, self._ledger.num_waiting, found.age_s)

    def _until_due(self) -> float:
        """Say how long the thread may sleep."""
        if not self._in_contact:
            return NO_CONTACT_S
        if self._finish_by_s is not None or self._ledger.suspects():
            return SUSPECT_S
        longest = REAP_S if self._fleet.reaping else LOOK_S
        if self._ledger.num_live or self._outbox.full:
            longest = DOORBELL_S
        return max(0.0, min(self._times.left_s(time.monotonic(), "audit", "look"), longest))

    # --- contact

    @property
    def _keeps_lease(self) -> bool:
        return self._registry.since_beat_s < self._config.lease_s

    def _regain(self) -> bool:
        """Compare everything with the broker before anything is sent; False while the lease is not kept."""
        if not self._keeps_lease:
            return False
        self._suspect_of_loss.clear()
        self._fleet.forget_looks()
        agenda = Agenda()
        self._upkeep.plan_audit(agenda, listing=True)
        while agenda:
            agenda.run(self._broker)
            agenda = Agenda()
            self._upkeep.plan(agenda)
        self._in_contact = True
        return True

    def _broken(self, error: Exception) -> None:
        self._in_contact = False
        self._full = isinstance(error, BrokerFull)
        if not isinstance(error, BrokerDown) and str(error) != self._trouble:  # the heart tells of the others
            self._trouble = str(error)
            log.error("the broker refuses what the engine has to say: %s", error)
        self._resume_s = time.monotonic() + self._backoff.next_s()

    # --- the end

    def _hand_over(self) -> None:
        """Give everything away, then end; without anyone to give to, what is left waits in the stream."""
        while True:
            waited = time.monotonic() - self._finish_began_s
            agenda = Agenda()
            self._fleet.plan_handover(agenda, wait_finished=waited < FINISHED_GRACE_S)
            agenda.run(self._broker)
            if self._fleet.num_left == 0 or not self._fleet.survivors():
                self._over.set()
                return
            if self._finish_by_s is not None and time.monotonic() >= self._finish_by_s:
                return
            self._over.wait(SUSPECT_S)
