"""Who lives, and who has to stop: heartbeats, leases judged by their observer, and the doorbells of aborts.

Owns the registry hashes and the rule that turns looks into life and death. No clock of another machine and no
key's time to live is ever compared: an instance is dead when its heartbeat has stood still for a lease of the
observer's own, connected time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from shared.broker.call import Call, call_script, load_script, pairs
from shared.errors import WireError
from shared.keys import BEAT_S, GENERATE_TTL_MS, LEASE_S, SUCCEEDED_S, Keys, Role
from shared.messages import Heartbeat, decode, encode

Look: TypeAlias = dict[Role, dict[str, bytes]]
"""Role -> incarnation -> its encoded Heartbeat, as they were at one instant."""

ALL_ROLES: Final[tuple[Role, ...]] = ("api", "tokenizer", "scheduler", "detokenizer")

_BEAT, _RETIRE, _ABORTED = load_script("beat"), load_script("retire"), load_script("aborted")
_PRONOUNCE: Final = load_script("pronounce")


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


def look_unregistered(keys: Keys, role: Role, incarnation: str, roles: Sequence[Role]) -> list[Call[Any]]:
    """Read everybody's heartbeats without having one: the answers but the first are those of `look`, by role.

    The first call writes nothing that was not so before, but is refused by a server that takes no writes: like a
    heartbeat it shows that what is seen is what is so.
    """
    unwritten: Call[Any] = Call(("HDEL", keys.alive(role), incarnation), lambda _: None)
    return [unwritten, *(look(keys, r) for r in roles)]


def retire(keys: Keys, role: Role, incarnation: str, beat: bytes) -> Call[bool]:
    """Remove an instance from the registry if its heartbeat is still `beat` and nothing is left in its stream.

    Observers call it for the dead, and each instance for itself at its clean end.
    """
    return call_script(_RETIRE, [keys.alive(role), keys.generate(incarnation)], [incarnation, beat], bool)


def pronounce(keys: Keys, role: Role, incarnation: str, beat: bytes) -> Call[bool]:
    """Mark an instance as ended if its heartbeat is still `beat`: its lease is over for every observer that looks.

    Only for whoever knows that its process has ended: one that merely stands still may come back.

    Raises:
        WireError: the heartbeat is of a later release.
    """
    ended = msgspec.structs.replace(decode(Heartbeat, beat), ended=True)
    return call_script(_PRONOUNCE, [keys.alive(role)], [incarnation, beat, encode(ended)], bool)


def aborted(keys: Keys, uids: Sequence[str]) -> Call[list[str]]:
    """Say which of these uids have had their terminal written; at most a few thousand. Nearly always none."""
    if not uids:
        return Call(("PING",), lambda _: [])
    return call_script(_ABORTED, [keys.abort(u) for u in uids], [], lambda places: [uids[i] for i in places])


def any_aborted(keys: Keys, uids: Sequence[str]) -> Call[bool]:
    """Say whether `aborted` would name any of these uids, of which there is at least one; much cheaper."""
    return Call(("EXISTS", *map(keys.abort, uids)), bool)


class _Lease(NamedTuple):
    """The heartbeat of one instance, its place, and for how much of the observer's connected time it stood still."""

    beat: bytes
    place: tuple[str, int] | None
    """Name and port: two that beat in one place are an instance and its successor. None: it cannot be read."""
    still_s: float
    ended: bool
    """Whoever started it has seen it end."""


class Standing(NamedTuple):
    """How an observer sees an instance of the registry."""

    heartbeat: Heartbeat | None
    """None: it is of a later release, and cannot be read."""
    still_s: float
    """For how long it has stood still."""
    is_over: bool
    """Whether its lease is over."""


class Observer:
    """Judges leases by its own looks. One per service, fed by the thread or task that beats.

    A look counts at most two intervals, however long the observer itself was away (paused, stopped), and a lost
    connection starts every lease anew: nobody is taken for dead because the broker, or the observer, was gone.
    An instance whose successor beats in its place has only the shortest lease left: it was started again. One that
    whoever started it has seen end has none.
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
        self._me = me
        self._leases = leases
        self._longest_step_s = 2 * interval_s
        self._clock = clock
        self._last_look_s: float | None = None
        self._roles: dict[Role, dict[str, _Lease]] = {}

    def note(self, seen: Look) -> None:
        """Take in a look that the broker has answered."""
        now_s = self._clock()
        step_s = 0.0 if self._last_look_s is None else min(now_s - self._last_look_s, self._longest_step_s)
        self._last_look_s = now_s
        for role, beats in seen.items():
            before = self._roles.get(role, {})
            leases = self._roles[role] = {}
            for incarnation, beat in beats.items():
                lease = before.get(incarnation)
                if lease is not None and lease.beat == beat:
                    leases[incarnation] = lease._replace(still_s=lease.still_s + step_s)
                else:
                    leases[incarnation] = _make_lease(beat)

    def lost(self) -> None:
        """Start all leases anew: the connection was lost, so nothing was seen for an unknown time."""
        self._last_look_s = None
        for leases in self._roles.values():
            for incarnation, lease in leases.items():
                leases[incarnation] = lease._replace(still_s=0.0)

    def living(self, role: Role) -> dict[str, Heartbeat]:
        """Give everyone of a role who is registered and not dead, the caller included.

        One whose heartbeat is of a later release, and cannot be read, is left out.
        """
        found: dict[str, Heartbeat] = {}
        for incarnation, lease in self._roles.get(role, {}).items():
            heartbeat = None if self._is_over(role, incarnation, lease) else _read(lease.beat)
            if heartbeat is not None:
                found[incarnation] = heartbeat
        return found

    def dead(self, role: Role) -> dict[str, bytes]:
        """Give the dead of a role with the heartbeat they died at."""
        leases = self._roles.get(role, {})
        return {name: lease.beat for name, lease in leases.items() if self._is_over(role, name, lease)}

    def forgettable(self, role: Role) -> dict[str, bytes]:
        """Give those of the dead whom every other observer has had time to see dead, for `retire`."""
        leases = self._roles.get(role, {})
        return {name: last for name, last in self.dead(role).items() if leases[name].still_s >= self._longest_step_s}

    def is_registered(self, role: Role, incarnation: str) -> bool:
        """Whether the last look saw it in the registry, dead or alive, its heartbeat readable or not."""
        return incarnation in self._roles.get(role, {})

    def standings(self, role: Role) -> dict[str, Standing]:
        """Give everyone of a role who is registered, the living and the dead, with what is left of their leases."""
        leases = self._roles.get(role, {})
        return {n: Standing(_read(i.beat), i.still_s, self._is_over(role, n, i)) for n, i in leases.items()}

    def _is_over(self, role: Role, incarnation: str, lease: _Lease) -> bool:
        if incarnation == self._me:
            return False
        if lease.ended or lease.still_s >= self._leases[role]:
            return True
        return lease.still_s >= SUCCEEDED_S and self._has_successor(role, incarnation, lease)

    def _has_successor(self, role: Role, incarnation: str, lease: _Lease) -> bool:
        return lease.place is not None and any(
            other.place == lease.place and (name == self._me or other.still_s < SUCCEEDED_S)
            for name, other in self._roles[role].items()
            if name != incarnation
        )


def _read(beat: bytes) -> Heartbeat | None:
    try:
        return decode(Heartbeat, beat)
    except WireError:
        return None


def _make_lease(beat: bytes) -> _Lease:
    heartbeat = _read(beat)
    if heartbeat is None:
        return _Lease(beat, None, 0.0, False)
    return _Lease(beat, (heartbeat.name, heartbeat.port) if heartbeat.port else None, 0.0, heartbeat.ended)


def _by_name(flat: Any) -> dict[str, bytes]:
    return {name.decode(errors="replace"): value for name, value in pairs(flat)}
