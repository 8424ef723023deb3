"""The world of the protocol model: a real Redis, step machines for the services, and everything that may go wrong.

Services are machines that do one small action per turn. A fault is a crash between any two commands, a pause
(a zombie that wakes later), an answer that is lost after the command has run, a drain, or lost data: a wipe, a
rollback to a snapshot, one deleted key. Tokens are sampled, and each carries a hash of all before it, so that a
splice of two attempts is seen at once.
"""

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.broker.log_id import NO_LOG, LogId
from shared.keys import Keys, Role
from tests.redis_keys import command, find_keys

T = TypeVar("T")

MODEL: Final = "m"
NUM_SHARDS: Final = 2
SAMPLES: Final = 40
STOP_SAMPLE: Final = 7
"""A token drawn with this sample is the client's stop string."""
LEASES: Final[dict[Role, float]] = {"api": 12.0, "tokenizer": 6.0, "scheduler": 6.0, "detokenizer": 6.0}
LOOK_S: Final = 0.5


class Violation(AssertionError):
    """The promise was broken."""


class Crash(Exception):
    """The process died here."""


def draw_token(before: Sequence[int], rng: random.Random) -> int:
    """Sample a token that remembers everything before it."""
    return context(before) * SAMPLES + rng.randrange(SAMPLES)


def context(before: Sequence[int]) -> int:
    """Hash of all tokens before one."""
    return zlib.crc32(repr(list(before)).encode()) & 0xFFFFFF


def text_of(token_ids: Sequence[int]) -> str:
    """Decode: the same tokens always are the same text."""
    return "".join(f"{token:x} " for token in token_ids)


def is_stop(token: int) -> bool:
    """Whether the text of this token is the stop string."""
    return token % SAMPLES == STOP_SAMPLE


@dataclass
class Client:
    """What one client asked for and was told."""

    uid: str
    length: int
    reader: str = ""
    """Several may read one request: how this one is told from the others."""
    last: LogId = NO_LOG
    seen: int = 0
    entry: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None
    gone: bool = False
    left: bool = False
    away: bool = False
    """Its api died, or it hung up; it will come back."""
    lapsed: bool = False
    """So much time went by that its stream may be gone."""
    announced: bool = False
    """It knows the name of its stream."""
    stream: str = ""
    before: "Client | None" = None
    """What it was told before it came back, by others."""
    idle: int = 0
    reopens: int = 0

    @property
    def key(self) -> str:
        """Name it among all clients."""
        return self.uid + self.reader


class World:
    """One installation and its troubles. All chance comes from `rng`, so that a run can be repeated."""

    def __init__(self, broker: Broker, prefix: str, *, poison: bool = False, forgetful: bool = False) -> None:
        self.broker = broker
        self.keys = Keys(prefix)
        self.rng = random.Random(0)
        self.with_poison = poison
        self.forgetful = forgetful
        """Whether the broker may lose data. Without that, everything ends though no api asks who holds a request."""
        self.mischief = False
        self.calm = False
        self.data_lost = False
        self.clients: dict[str, Client] = {}
        self.poison: set[str] = set()
        self.launches: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.logs: dict[str, list[Any]] = {}
        self._snapshot: list[tuple[bytes, int, bytes]] | None = None
        self._names = 0
        self.restarts = 0
        """Times the server came back without some of its data; machines see a lost connection then."""

    # --- what machines use ---

    def name(self, kind: str) -> str:
        """Make a name that nobody had."""
        self._names += 1
        return f"{kind}{self._names}"

    def chance(self, share: float) -> bool:
        """Whether some mischief happens now."""
        return self.mischief and not self.calm and self.rng.random() < share

    def run(self, call: Call[T]) -> T:
        """Make a call; the caller may die before it, or lose the answer and ask again."""
        if self.chance(0.02):
            raise Crash
        answer = self.broker.run(call)
        if self.chance(0.03):
            self.events["answer lost"] += 1
            answer = self.broker.run(call)
        return answer

    def raw(self, *words: str | bytes | int) -> Any:
        """Send any command, with nothing going wrong."""
        return self.broker.run(command(*words))

    # --- what happens to data ---

    def find_keys(self) -> list[bytes]:
        """List everything this installation has in Redis."""
        own = f"{self.keys.prefix}:".encode()
        return [key for key in find_keys(self.broker) if key.startswith(own)]

    def wipe(self) -> None:
        """Lose everything."""
        self._lose("wiped")
        self.restarts += 1
        for key in self.find_keys():
            self.raw("DEL", key)

    def delete(self, place: int) -> None:
        """Lose one key."""
        found = self.find_keys()
        if found:
            self._lose("key deleted")
            self.raw("DEL", found[place % len(found)])

    def save(self) -> None:
        """Remember everything, as a disk does."""
        self._snapshot = [(key, self.raw("PTTL", key), self.raw("DUMP", key)) for key in self.find_keys()]

    @property
    def can_roll_back(self) -> bool:
        """Whether there is anything to come back to."""
        return self._snapshot is not None

    def roll_back(self) -> None:
        """Come back with what was remembered."""
        assert self._snapshot is not None
        self._lose("rolled back")
        self.restarts += 1
        for key in self.find_keys():
            self.raw("DEL", key)
        for key, ttl_ms, value in self._snapshot:
            self.raw("RESTORE", key, max(ttl_ms, 0), value)

    def _lose(self, how: str) -> None:
        self.events[how] += 1
        self.data_lost = True
        self.logs.clear()
