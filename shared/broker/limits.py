"""The limits of an API key, shared by all replicas of an installation: what a request takes, and gives back.

Owns the calls and the arithmetic of the answers. A request takes one place among those under way, one of the
minute's requests, and the tokens it may need, in the same script that opens it; when it is over its place is freed
and the tokens are corrected by what was used. A place whose replica is dead frees itself, because only the living
hold theirs. Knows neither keys' texts nor HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shared.broker.call import Argument, Call, call_script, load_script
from shared.keys import SLOT_TTL_MS, Keys

_MINUTE_S: Final = 60.0
_SETTLE, _HOLD = load_script("settle", "limits"), load_script("hold", "limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one API key may do; 0 is no limit.

    Attributes:
        concurrency: requests under way at once.
        requests: requests started per minute.
        tokens: tokens of prompts and answers per minute.
    """

    concurrency: int = 0
    requests: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.concurrency or self.requests or self.tokens)


class Levels(NamedTuple):
    """Where a key stands: requests under way, and what is left of the minute's requests and tokens.

    Tokens may be below zero: more was used than reserved, and that much has to flow in first. Where all places are
    taken, `free_ms` says when one frees itself, unless somebody holds it until then; else it is 0.
    """

    running: int
    requests: float
    tokens: float
    free_ms: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one request takes of its key's limits.

    Attributes:
        tenant: the key's name.
        id: of the request, unique; a claim that is sent twice counts once.
        tokens: it may need; never more than a whole minute's.
    """

    tenant: str
    id: str
    limits: Limits
    tokens: int

    def keys(self, keys: Keys) -> list[str]:
        """Name the broker's keys that hold the limits' state."""
        return [keys.bucket(self.tenant), keys.slots(self.tenant)]

    def arguments(self) -> list[Argument]:
        """Give what `limits.lua` reads."""
        limits = self.limits
        return [self.id, SLOT_TTL_MS, limits.concurrency, limits.requests, limits.tokens, self.tokens]


def settle(keys: Keys, claim: Claim, used: int) -> Call[bool]:
    """Give back what a request took and did not use. False: it took nothing, or that was done before."""
    arguments: list[Argument] = [claim.id, claim.limits.tokens, claim.tokens, used]
    return call_script(_SETTLE, claim.keys(keys), arguments, bool)


def hold(keys: Keys, tenant: str, ids: Sequence[str]) -> Call[int]:
    """Say that requests are still under way; at most a few thousand. Called well within SLOT_TTL_MS."""
    return call_script(_HOLD, [keys.slots(tenant)], [SLOT_TTL_MS, *ids], int)


def read_levels(answer: bytes) -> Levels:
    """Understand what a script says of a key."""
    running, requests, tokens, free_ms = answer.split()
    return Levels(int(running), float(requests), float(tokens), int(free_ms))


def until(limit: int, level: float, wanted: float) -> float:
    """Say in how many seconds a limit's level will be `wanted`, if nothing is taken meanwhile."""
    return max(0.0, min(wanted, limit) - level) * _MINUTE_S / limit if limit else 0.0
