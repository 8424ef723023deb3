"""Which fault happens when: a pure function of the seed, so that a run that fails can be had again."""

import random
from typing import Final, NamedTuple

WORKERS: Final = ("tokenizer", "scheduler", "detokenizer")
ROLES: Final = ("api", *WORKERS)
KEY_KINDS: Final = ("reply", "generate", "tokens", "inbox", "alive", "tokenize")
"""Kinds of keys of ours that a stranger may overwrite."""
LEASES_S: Final = {"api": 15.0, "tokenizer": 1.5, "scheduler": 2.0, "detokenizer": 1.5}
"""After how long an instance that stands still is taken to be dead; the engines' is set by a flag."""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        number: from 1.
        kind: `kill` (-9), `drain` (SIGTERM), `stop` (past the lease), `pause` (shorter), `redis kill`, `redis wipe`,
            `latency`, `cut` (all connections to the broker), `vandal` (a key of ours becomes a string), `leave`,
            `slow readers`, `poison`, `nan`, `hostile`.
        target: instance, kind of key, or empty.
        hold_s: how long it lasts, where that is not at once.
        after: clients that have begun to hear when it strikes.
    """

    number: int
    kind: str
    target: str = ""
    hold_s: float = 0.0
    after: int = 0

    @property
    def name(self) -> str:
        """Name its kind for the table: all instances of a role alike."""
        target = self.target.partition("-")[0]
        return f"{self.kind} {target}".strip()

    @property
    def loses_data(self) -> bool:
        """Whether the broker may forget what it has accepted."""
        return self.kind in ("redis kill", "redis wipe", "vandal")


def plan(seed: int, count: int, *, brief: bool = False, only: str = "") -> list[Fault]:
    """Draw a schedule.

    Args:
        seed: of the run.
        count: faults.
        brief: leave out what takes long, for a run in CI.
        only: words that a fault's name must hold, to look at one kind by itself.

    Raises:
        ValueError: no fault has such a name.
    """
    rng = random.Random(f"faults {seed}")
    deck: list[Fault] = []
    found: list[Fault] = []
    while len(found) < count:
        if not deck:
            deck = [fault for fault in _deck(rng, brief=brief) if only in fault.name]
            if not deck:
                raise ValueError(f"no fault is called {only!r}")
            rng.shuffle(deck)
        found.append(deck.pop()._replace(number=len(found) + 1, after=rng.randrange(3, 8)))
    return found


def _deck(rng: random.Random, *, brief: bool) -> list[Fault]:
    """Give every kind of fault, so that each has its turn before any comes again."""
    instances = [f"{role}-{i}" for role in ROLES for i in range(2)]
    if brief:
        instances = [f"{role}-{rng.randrange(2)}" for role in ROLES]
    deck = [Fault(0, kind, instance) for kind in ("kill", "drain") for instance in instances]
    for instance in instances:
        lease_s = LEASES_S[instance.partition("-")[0]]
        if not brief or lease_s < 10:
            deck.append(Fault(0, "stop", instance, lease_s * rng.uniform(1.4, 2.0)))
        deck.append(Fault(0, "pause", instance, rng.uniform(0.05, 0.6) * min(lease_s, 3.0)))
    deck += [Fault(0, "vandal", kind) for kind in KEY_KINDS]
    for _ in range(1 if brief else 2):
        deck += [Fault(0, "redis kill", hold_s=rng.uniform(0.0, 2.0)), Fault(0, "redis wipe", hold_s=rng.random())]
        deck += [Fault(0, "latency", "redis", rng.uniform(1.0, 4.0)), Fault(0, "cut", "redis")]
        deck += [Fault(0, "pause", "redis", rng.uniform(0.2, 7.0)), Fault(0, "leave"), Fault(0, "slow readers")]
        deck += [Fault(0, "poison"), Fault(0, "nan"), Fault(0, "hostile")]
    return deck
