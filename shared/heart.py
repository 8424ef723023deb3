"""The heart of an instance: a thread that writes its heartbeat, watches those of others, and minds the broker.

Owns the look of an instance at the broker: whether it answers, what server it is, who else lives. The count in
a heartbeat is the pulse of the service's own loop, so a loop that is stuck stops beating though this thread
goes on. Knows nothing of what the service does.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from shared.broker.backoff import Backoff, Outage
from shared.broker.connection import Broker
from shared.broker.control import Look, Observer, beat_and_look, look_unregistered, retire
from shared.broker.server import Agreement
from shared.errors import BrokerDown, BrokerError, ConfigError, MillraceError, WireError
from shared.keys import BEAT_S, LEASE_S, Role
from shared.messages import Heartbeat, encode
from shared.metrics import (
    BROKER_RECONNECTS,
    BROKER_ROUND_TRIP,
    BROKER_UP,
    HEARTBEAT_AGE,
    LEASES_LOST,
    LIVING,
    STRANGE_KEYS,
    Metrics,
)

log = logging.getLogger(__name__)

_NOBODY: Final[Mapping[str, Heartbeat]] = MappingProxyType({})


class Heart:
    """Beats for one instance. Every method and property may be used from any thread.

    Until `announce` the instance is not registered: the heart only looks. Its looks count all the same, so that a
    lease which ends while a model is loaded need not be waited for again.

    Args:
        broker: of this instance.
        role: of this instance.
        incarnation: of this instance.
        describe: makes the next heartbeat; called on the heart's thread.
        metrics: of the process.
        watch: roles to look at besides the own one.
        leases: role -> seconds without a change after which an instance is dead.
        interval_s: time between beats.
        on_up: called when the broker answers again after it did not; the first time is not a reconnect.
        on_death: called when somebody of a watched role has lost its lease.
        on_fatal: called when the server, or what the installation agreed on, will never do; the heart has stopped.
    """

    def __init__(
        self,
        broker: Broker,
        role: Role,
        incarnation: str,
        describe: Callable[[], Heartbeat],
        metrics: Metrics,
        *,
        watch: Iterable[Role] = (),
        leases: Mapping[Role, float] = LEASE_S,
        interval_s: float = BEAT_S,
        on_up: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
        on_fatal: Callable[[MillraceError], None] = lambda _: None,
    ) -> None:
        self.role: Role = role
        self.incarnation = incarnation
        self._broker = broker
        self._describe = describe
        self._roles: tuple[Role, ...] = tuple(dict.fromkeys((role, *watch)))
        self._observer = Observer(incarnation, leases=leases, interval_s=interval_s)
        self._interval_s = interval_s
        self._on_up = on_up
        self._on_death = on_death
        self._on_fatal = on_fatal
        self._backoff = Backoff()
        self._wake = threading.Event()
        self._first_up = threading.Event()
        self._stopping = False
        self._announced = False
        self._up = False
        self._outage = Outage()
        self._agreement: Agreement | None = None
        self._last_beat: Heartbeat | None = None
        self._last_beat_s = 0.0
        self._living: dict[Role, Mapping[str, Heartbeat]] = {}
        self._dead: dict[Role, dict[str, bytes]] = {}
        self._forgettable: dict[Role, dict[str, bytes]] = {}
        self._up_gauge = metrics.gauge(BROKER_UP)
        self._reconnects = metrics.counter(BROKER_RECONNECTS)
        self._round_trip = metrics.histogram(BROKER_ROUND_TRIP)
        self._strange = metrics.counter(STRANGE_KEYS)
        self._num_strange = 0
        self._leases_lost = metrics.counter(LEASES_LOST)
        metrics.gauge(HEARTBEAT_AGE).set_function(lambda: self.since_beat_s)
        for watched in self._roles:
            self._leases_lost.labels(watched)
            metrics.gauge(LIVING).labels(watched).set_function(partial(self._num_living, watched))
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    @property
    def up(self) -> bool:
        """Whether the broker answered last time."""
        return self._up

    def wait_up(self, timeout_s: float) -> bool:
        """Wait until the broker has answered for the first time."""
        return self._first_up.wait(timeout_s)

    @property
    def agreement(self) -> Agreement:
        """What the installation agreed on; only after the broker answered for the first time."""
        assert self._agreement is not None, "asked before the broker was there"
        return self._agreement

    def living(self, role: Role) -> Mapping[str, Heartbeat]:
        """Give incarnation -> heartbeat of the living of a watched role, as of the last look; not to be changed."""
        return self._living.get(role, _NOBODY)

    def dead(self, role: Role) -> Mapping[str, bytes]:
        """Give the dead of a watched role with the encoded heartbeat they died at."""
        return self._dead.get(role, {})

    def forgettable(self, role: Role) -> Mapping[str, bytes]:
        """Give those of the dead whom every other instance has had time to see dead, for `control.retire`."""
        return self._forgettable.get(role, {})

    def is_registered(self, role: Role, incarnation: str) -> bool:
        """Whether an instance was in the registry at the last look, dead or alive, its heartbeat readable or not."""
        return self._observer.is_registered(role, incarnation)

    @property
    def since_beat_s(self) -> float:
        """Seconds since the broker last took a heartbeat; infinite before the first."""
        return time.monotonic() - self._last_beat_s if self._last_beat_s else float("inf")

    def start(self) -> None:
        """Begin to mind the broker."""
        self._thread.start()

    def announce(self) -> None:
        """Register: from here on the instance beats."""
        self._announced = True
        self._wake.set()

    def hurry(self) -> None:
        """Beat and look now: something changed that others must know, or that others have done."""
        self._wake.set()

    def stop(self, *, leave: bool) -> None:
        """Beat no more; with `leave` also sign off, so that nobody waits for the lease to end.

        Signing off is left out when the broker is away, or still holds work of this instance.
        """
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if leave and self._up and self._last_beat is not None:
            try:
                self._broker.run(retire(self._broker.keys, self.role, self.incarnation, encode(self._last_beat)))
            except BrokerError as e:
                log.info("not signed off: %s", e)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._wake.wait(self._beat_once())
        except ConfigError as e:
            self._on_fatal(e)
        except Exception:
            log.exception("the heart failed")
            self._on_fatal(MillraceError("the heart failed"))

    def _beat_once(self) -> float:
        """Beat, or only look; give the pause until the next time."""
        began = time.monotonic()
        try:
            if not self._up:
                self._agreement = self._broker.prepare()
            seen = self._look()
            self._note(seen)
        except (BrokerError, WireError) as e:
            self._went_down(e)
            return self._backoff.next_s()
        self._round_trip.observe(time.monotonic() - began)
        before, self._num_strange = self._num_strange, self._broker.num_strange
        self._strange.inc(self._num_strange - before)
        self._came_up()
        return max(0.0, self._interval_s - (time.monotonic() - began))

    def _look(self) -> Look:
        keys = self._broker.keys
        if not self._announced:
            _, *looks = self._broker.run_many(look_unregistered(keys, self.role, self.incarnation, self._roles))
            return dict(zip(self._roles, looks, strict=True))
        heartbeat = self._next_heartbeat()
        seen = self._broker.run(beat_and_look(keys, self.role, self.incarnation, heartbeat, self._roles))
        self._last_beat = heartbeat
        self._last_beat_s = time.monotonic()
        return seen

    def _next_heartbeat(self) -> Heartbeat:
        """Describe the instance; the last heartbeat again while its loop stands still, whatever else changed."""
        last, heartbeat = self._last_beat, self._describe()
        if last is not None and last.beat == heartbeat.beat and last.draining == heartbeat.draining:
            return last
        return heartbeat

    def _note(self, seen: Look) -> None:
        self._observer.note(seen)
        self._living = {role: self._observer.living(role) for role in self._roles}
        before, self._dead = self._dead, {role: self._observer.dead(role) for role in self._roles}
        self._forgettable = {role: self._observer.forgettable(role) for role in self._roles}
        num_new = 0
        for role, dead in self._dead.items():
            if new := dead.keys() - before.get(role, {}).keys():
                self._leases_lost.labels(role).inc(len(new))
                num_new += len(new)
        if num_new:
            self._on_death()

    def _num_living(self, role: Role) -> int:
        """Count the living of a role; nobody is known to live while the broker is away."""
        return len(self.living(role)) if self._up else 0

    def _came_up(self) -> None:
        self._backoff.reset()
        if self._up:
            return
        self._up = True
        self._up_gauge.set(1)
        self._outage.end()
        if self._first_up.is_set():
            log.info("the broker is back at %s", self._broker.url)
            self._reconnects.inc()
            self._on_up()
        else:
            log.info("the broker answers at %s", self._broker.url)
            self._first_up.set()

    def _went_down(self, error: MillraceError) -> None:
        self._observer.lost()
        self._up = False
        self._up_gauge.set(0)
        if told := self._outage.tell(str(error)):
            level = logging.WARNING if isinstance(error, BrokerDown) else logging.ERROR
            log.log(level, "no use of the broker at %s: %s; trying again", self._broker.url, told)
