"""One life for every thread-style service: start, wait for the broker, ready, serve, drain, stop.

Owns signals, exit codes, the heart (the thread that writes heartbeats and watches those of others), the health
server and the watchdog of a stuck loop. Knows no service: each gives a `Service`, and its `__main__` is

    sys.exit(main("tokenizer", TokenizerSettings, TokenizerService))

Exit codes: 0 a clean end; 1 a fault, a second signal, or the drain deadline; 2 a bad setting; 70 a stuck loop.
The api, which lives in an event loop of its own, uses `Heart`, `Readiness` and `Metrics` without a `Life`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shared.health import Pulse, Readiness
from shared.keys import Role
from shared.messages import Heartbeat
from shared.metrics import Metrics
from shared.settings import ServiceSettings

S = TypeVar("S", bound=ServiceSettings)


class Service(Protocol):
    """What a service gives its life. All but `heartbeat` and `reconnected` are called on the main thread."""

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


class Life:
    """What a running service uses of its life.

    Attributes:
        settings: as given.
        role: as given.
        incarnation: id of this run of the instance, in its keys and heartbeats.
        readiness: `broker`, `start` and `draining` are kept by the life; services add their own parts.
        metrics: the registry of the process.
        pulse: beaten by the service's loop; the heartbeat carries its count.
        port: of the health server.
        draining: set by the first signal.
    """

    settings: ServiceSettings
    role: Role
    incarnation: str
    readiness: Readiness
    metrics: Metrics
    pulse: Pulse
    port: int

    def beat(self) -> None:
        """Say that the loop came round. A loop that stops saying so loses its lease, and later its life."""
        raise NotImplementedError

    @property
    def draining(self) -> bool:
        """Whether the service was told to end: take nothing new, finish what is in hand, return from `serve`."""
        raise NotImplementedError

    def drain_left_s(self) -> float:
        """Seconds until the drain deadline; infinite while not draining."""
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        """Sleep, but wake at once when draining begins; beats before and after."""
        raise NotImplementedError

    def drain(self) -> None:
        """Begin to end, as the first signal does. Safe on any thread."""
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """End with code 1 after `serve` returned; safe on any thread (a helper thread of the service died)."""
        raise NotImplementedError

    def living(self, role: Role) -> dict[str, Heartbeat]:
        """Give incarnation -> last heartbeat of the living of a watched role, as the heart saw them last."""
        raise NotImplementedError

    def dead(self, role: Role) -> dict[str, Heartbeat]:
        """Give incarnation -> last heartbeat of those whose lease is over, until somebody retires them."""
        raise NotImplementedError


def main(
    role: Role,
    settings_class: type[S],
    make: Callable[[S], Service],
    *,
    watch: Sequence[Role] = (),
    stuck_after_s: float = 60.0,
) -> int:
    """Run a service from its settings and give its exit code.

    Args:
        role: of the service.
        settings_class: read from the environment.
        make: builds the service; it must not do any work yet.
        watch: roles whose heartbeats the service looks at (its own is always watched).
        stuck_after_s: seconds without a beat after which the process dumps its stacks and ends with code 70.
    """
    raise NotImplementedError
