"""One life for every thread-style service: start, wait for the broker, ready, serve, drain, stop.

Owns the order of these and the exit codes; composes heart, guard, health server, readiness and metrics. Knows
no service: each gives a `Service`, and its `__main__` is

    leave(main("tokenizer", TokenizerSettings, TokenizerService))

Exit codes: 0 a clean end; 1 a fault, or the drain deadline; 2 a bad setting; 70 a stuck loop; 128 and the
signal's number for a second signal. The api, which lives in an event loop of its own, uses `Heart`,
`Readiness` and `Metrics` without a `Life`.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn, Protocol, TypeVar

from shared import garbage
from shared.broker.connection import Broker
from shared.errors import ConfigError, MillraceError
from shared.guard import EXIT_FAULT, Guard, Interrupted
from shared.health import HealthServer, Pulse, Readiness
from shared.heart import Heart
from shared.ids import birth_mark, new_incarnation
from shared.keys import BEAT_S, Role
from shared.logs import setup_logs
from shared.messages import Heartbeat
from shared.metrics import DRAINING, LOOP_AGE, READY, Metrics
from shared.reason import tell_reason
from shared.settings import ServiceSettings, load
from shared.tracing import setup_tracing, stop_tracing
from shared.version import VERSION

log = logging.getLogger(__name__)

EXIT_CONFIG: Final = 2

S = TypeVar("S", bound=ServiceSettings)


class Service(Protocol):
    """What a service gives its life. All but the last three are called on the main thread."""

    def prepare(self, life: "Life") -> None:
        """Load what takes long (a model, a vocabulary). Probes already answer; the broker may be away.

        Raises:
            ConfigError: it cannot be served as set; the process ends with code 2.
        """
        ...

    def serve(self, life: "Life") -> None:
        """Work until `life.draining` is set and what is in hand is finished; call `life.beat()` every round.

        Starts once the broker answered. Connection errors are the service's to back off from; `life.pause`
        sleeps between tries. Return is the clean end, an exception is a fault.
        """
        ...

    def heartbeat(self, base: Heartbeat) -> Heartbeat:
        """Add the service's load to a heartbeat. Called on the heart's thread twice a second; must be quick."""
        ...

    def reconnected(self) -> None:
        """The broker is back, perhaps without its data. Called on the heart's thread: set a flag, no more."""
        ...

    def others_died(self) -> None:
        """Somebody of a watched role has lost its lease. Called on the heart's thread: wake who must act, no more."""
        ...


class Life:
    """The life of one service, and what the service uses of it.

    Args:
        role: of the service.
        settings: of the service.
        service: what lives.
        watch: roles whose heartbeats the service looks at besides its own.
        stuck_after_s: seconds without a beat after which the process ends with code 70; 0 never.
        beat_s: time between heartbeats.
        kill: ends the process at once, without another line of Python.

    Attributes:
        settings: as given.
        role: as given.
        incarnation: id of this run of the instance, in its keys and heartbeats.
        broker: for the service's own calls; not yet connected.
        heart: who lives, and whether the broker does.
        readiness: `start`, `broker` and `draining` are kept by the life; services add their own parts.
        metrics: the registry of the process.
        pulse: beaten by the service's loop; the heartbeat carries its count.
        port: of the health server; 0 before it runs.
    """

    def __init__(
        self,
        role: Role,
        settings: ServiceSettings,
        service: Service,
        *,
        watch: Sequence[Role] = (),
        stuck_after_s: float = 60.0,
        beat_s: float = BEAT_S,
        kill: Callable[[int], object] = os._exit,
    ) -> None:
        name = settings.instance_name(role)
        self.role: Role = role
        self.settings = settings
        self.incarnation = new_incarnation(name)
        self.readiness = Readiness("start")
        self.metrics = Metrics(role, name, settings.served_model_name, VERSION)
        self.pulse = Pulse()
        self.port = 0
        self.broker = Broker(settings, name=name)
        self.heart = Heart(
            self.broker,
            role,
            self.incarnation,
            self._heartbeat,
            self.metrics,
            watch=watch,
            leases={r: settings.lease_s(r) for r in (role, *watch)},
            interval_s=beat_s,
            on_up=service.reconnected,
            on_death=service.others_died,
            on_fatal=self._fatal,
        )
        self._name = name
        self._service = service
        self._draining = threading.Event()
        self._drain_began_s = 0.0
        self._guard = Guard(
            self.pulse,
            stuck_after_s=stuck_after_s,
            drain=self.drain,
            drain_left_s=self.drain_left_s,
            look=self.heart.hurry,
            kill=kill,
        )
        self._error: MillraceError | None = None
        self._observe()

    # --- what a service uses -------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say that the loop came round. A loop that stops saying so loses its lease, and later its life."""
        self.pulse.beat()

    @property
    def draining(self) -> bool:
        """Whether the service was told to end: take nothing new, finish what is in hand, return from `serve`."""
        return self._draining.is_set()

    def drain_left_s(self) -> float:
        """Seconds until the drain deadline; infinite while not draining."""
        if not self.draining:
            return float("inf")
        return max(0.0, self._drain_began_s + self.settings.drain_timeout - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Sleep, but wake at once when draining begins; beats before and after."""
        self.beat()
        self._draining.wait(seconds)
        self.beat()

    def drain(self) -> None:
        """Begin to end, as the first signal does. Safe on any thread."""
        if not self._draining.is_set():
            self._drain_began_s = time.monotonic()
            self.readiness.missing("draining")
            self._draining.set()
            self.heart.hurry()

    def fail(self, error: MillraceError) -> None:
        """Begin to end because a part of the service is broken: the exit code will be 1. Safe on any thread."""
        self._error = self._error or error
        self.drain()

    def living(self, role: Role) -> Mapping[str, Heartbeat]:
        """Give incarnation -> last heartbeat of the living of a watched role, this instance included."""
        return self.heart.living(role)

    def dead(self, role: Role) -> Mapping[str, bytes]:
        """Give incarnation -> encoded last heartbeat of those whose lease is over, until they are retired."""
        return self.heart.dead(role)

    def forgettable(self, role: Role) -> Mapping[str, bytes]:
        """Give those of the dead whom every other instance has had time to see dead, for `retire`."""
        return self.heart.forgettable(role)

    # --- the life itself -----------------------------------------------------------------------------------

    def run(self) -> int:
        """Live, and give the exit code. Signals are the caller's to connect (`connect_signals`)."""
        health: HealthServer | None = None
        try:
            health = self._start_health()
            self._guard.start()
            self.heart.start()
            self._live()
            code = self._exit_code()
        except Interrupted:
            code = self._exit_code()
        except ConfigError as e:
            log.error("%s", e)
            tell_reason(str(e))
            code = EXIT_CONFIG
        except Exception as e:
            log.exception("%s failed", self.role)
            tell_reason(f"{type(e).__name__}: {e}")
            code = EXIT_FAULT
        self._guard.may_interrupt = False
        self.pulse.rest()
        self.heart.stop(leave=code == 0)
        if health is not None:
            health.stop()
        self._guard.stop()
        self.broker.close()
        log.info("%s ends with code %d", self._name, code)
        return code

    def connect_signals(self) -> None:
        """Let signals end this life, print all stacks, or have the heart look; see `Guard`. Main thread only."""
        self._guard.connect_signals()

    def _live(self) -> None:
        log.info("%s starts as %s, version %s", self.role, self.incarnation, VERSION)
        self._service.prepare(self)
        garbage.settle()
        while not self.heart.wait_up(0.2):
            if self.draining:
                raise Interrupted
        self._guard.may_interrupt = False
        if self.draining:
            raise Interrupted
        self.heart.announce()
        self.readiness.have("start")
        self.readiness.started()
        self._service.serve(self)
        if not self.draining:
            raise MillraceError("the service's loop ended by itself")

    def _exit_code(self) -> int:
        if self._error is None:
            return 0
        log.error("%s", self._error)
        tell_reason(str(self._error))
        return EXIT_CONFIG if isinstance(self._error, ConfigError) else EXIT_FAULT

    def _start_health(self) -> HealthServer:
        health = HealthServer(
            self.settings.health_host,
            self.settings.health_port,
            strict=self.settings.health_port_strict,
            metrics=self.metrics,
            readiness=self.readiness,
            version=VERSION,
            alive=lambda: not self._guard.is_stuck(0.5),
        )
        self.port = health.port
        health.start()
        return health

    def _observe(self) -> None:
        """Connect what is asked for at every look, and what is measured at every scrape."""
        self.readiness.require("broker", lambda: self.heart.up)
        self.metrics.gauge(READY).set_function(lambda: float(self.readiness.ready))
        self.metrics.gauge(DRAINING).set_function(lambda: float(self.draining))
        self.metrics.gauge(LOOP_AGE).set_function(lambda: self.pulse.age_s)

    def _heartbeat(self) -> Heartbeat:
        base = Heartbeat(
            beat=self.pulse.count,
            name=self._name,
            version=VERSION,
            model=self.settings.served_model_name,
            draining=self.draining,
            port=self.port,
            birth=birth_mark(),
        )
        return self._service.heartbeat(base)

    def _fatal(self, error: MillraceError) -> None:
        """The heart cannot go on: without it there is no lease, so the service must end."""
        self.fail(error)


def main(
    role: Role,
    settings_class: type[S],
    make: Callable[[S], Service],
    *,
    watch: Sequence[Role] = (),
    stuck_after_s: Callable[[S], float] = lambda _: 60.0,
    beat_s: float = BEAT_S,
) -> int:
    """Run a service from its settings and give its exit code.

    Args:
        role: of the service.
        settings_class: read from the environment.
        make: builds the service; it must not do any work yet.
        watch: roles whose heartbeats the service looks at (its own is always watched).
        stuck_after_s: seconds without a beat after which the process dumps its stacks and ends with code 70.
        beat_s: time between heartbeats.
    """
    faulthandler.enable()
    try:
        settings = load(settings_class)
        setup_logs(role, settings)
        setup_tracing(role, settings)
        stuck_s = stuck_after_s(settings)
        life = Life(role, settings, make(settings), watch=watch, stuck_after_s=stuck_s, beat_s=beat_s)
    except ConfigError as e:
        sys.stderr.write(f"millrace {role}: {e}\n")
        tell_reason(str(e))
        return EXIT_CONFIG
    try:
        life.connect_signals()
        return life.run()
    except Interrupted:
        return 0
    finally:
        stop_tracing()


def leave(code: int) -> NoReturn:
    """End the process with a code, at once: everything that has to be closed is closed.

    The interpreter's own way out takes signals' handlers away, so that a second SIGTERM would turn a clean end
    into a death by signal, joins threads that nobody needs, and takes a model's memory apart piece by piece.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
