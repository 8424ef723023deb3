"""Who lives, and who has to stop: heartbeats, leases judged by their observer, and the doorbells of aborts.

Owns the registry hashes and the rule that turns looks into life and death. No clock of another machine and no
key's time to live is ever compared: an instance is dead when its heartbeat has stood still for a lease of the
observer's own, connected time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from shared.broker.call import Call, call_script, load_script, pairs
from shared.errors import WireError
from shared.keys import BEAT_S, GENERATE_TTL_MS, LEASE_S, Keys, Role
from shared.messages import Heartbeat, decode, encode

Look: TypeAlias = dict[Role, dict[str, bytes]]
"""Role -> incarnation -> its encoded Heartbeat, as they were at one instant."""

ALL_ROLES: Final[tuple[Role, ...]] = ("api", "tokenizer", "scheduler", "detokenizer")

_BEAT, _RETIRE, _ABORTED = load_script("beat"), load_script("retire"), load_script("aborted")


def beat_and_look(
    keys: Keys, role: Role, incarnation: str, heartbeat: Heartbeat, roles: Sequence[Role] = ALL_ROLES
) -> Call[Look]:
    """Write the own heartbeat and read everybody's, in one script; an engine's stream is kept alive with it."""
    names = [keys.generate(incarnation), keys.alive(role), *(keys.alive(r) for r in roles)]
    return call_script(
        _BEAT,
        names,
        [incarnation, encode(heartbeat), GENERATE_TTL_MS],
        lambda answer: {r: _by_name(flat) for r, flat in zip(roles, answer, strict=True)},
    )


def look(keys: Keys, role: Role) -> Call[dict[str, bytes]]:
    """Read the registry of a role without beating (for tools; an observer beats)."""
    return Call(("HGETALL", keys.alive(role)), _by_name)


def retire(keys: Keys, role: Role, incarnation: str, beat: bytes) -> Call[bool]:
    """Remove an instance from the registry if its heartbeat is still `beat` and nothing is left in its stream.

    Observers call it for the dead, and each instance for itself at its clean end.
    """
    return call_script(_RETIRE, [keys.alive(role), keys.generate(incarnation)], [incarnation, beat], bool)


def aborted(keys: Keys, uids: Sequence[str]) -> Call[list[str]]:
    """Say which of these uids have had their terminal written; at most a few thousand. Nearly always none."""
    if not uids:
        return Call(("PING",), lambda _: [])
    return call_script(_ABORTED, [keys.abort(u) for u in uids], [], lambda places: [uids[i] for i in places])


class Observer:
    """Judges leases by its own looks. One per service, fed by the thread or task that beats.

    A look counts at most two intervals, however long the observer itself was away (paused, stopped), and a lost
    connection starts every lease anew: nobody is taken for dead because the broker, or the observer, was gone.
    """

    def __init__(
        self,
        me: str,
        *,
        leases: Mapping[Role, float] = LEASE_S,
        interval_s: float = BEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nobody known.

        Args:
            me: the own incarnation, never among the dead.
            leases: role -> seconds.
            interval_s: time between looks; the caller's promise.
            clock: monotonic seconds.
        """

    def note(self, seen: Look) -> None:
        """Take in a look that the broker has answered."""

    def lost(self) -> None:
        """Start all leases anew: the connection was lost, so nothing was seen for an unknown time."""

    def living(self, role: Role) -> dict[str, Heartbeat]:
        """Give everyone of a role who is registered and not dead, the caller included."""

    def dead(self, role: Role) -> dict[str, bytes]:
        """Give the dead of a role with the heartbeat they died at, as `retire` wants it."""

    def is_dead(self, role: Role, incarnation: str) -> bool:
        """Whether its heartbeat has stood still for a lease. One that is not registered is not dead, but unknown."""


def _by_name(flat: Any) -> dict[str, bytes]:
    return {name.decode(): value for name, value in pairs(flat)}
