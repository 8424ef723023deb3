"""What the clients heard, beside what they should have: missing, doubled, different, and which failures are allowed."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from bench.chaos.clients import Client
from bench.chaos.schedule import Fault

_REPLICA: Final = {"cut", "replica_lost", "shutting_down"}
"""How the plain answers of an api replica may end with it."""
_BROKER: Final = {"broker_lost_data"}
"""How an answer may end whose last second the broker has lost."""


@dataclass(slots=True)
class Books:
    """Counts over rounds of one run, or of one kind of fault.

    Attributes:
        faults: that have struck.
        accepted: requests that were taken.
        completed: answered to their end.
        left: whose client hung up.
        failed: error code (or `cut`) -> how many ended with it.
        resumed: times a client came back to its stream and heard the rest.
        refused: code -> how often a client was sent away before it was accepted.
        missing, doubled: tokens of completed answers that were not heard, or heard more than once.
        different: answers of which something heard is not what was said without faults.
        worst_silence_s: longest wait of any client between two signs of life.
        forbidden: failures that no promise allows, and breaches of the wire format; in words.
        leaked: what was left behind; in words.
        alarms: repairs that happened though nothing was lost.
    """

    faults: int = 0
    accepted: int = 0
    completed: int = 0
    left: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    doubled: int = 0
    different: int = 0
    worst_silence_s: float = 0.0
    forbidden: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    alarms: Counter[str] = field(default_factory=Counter)

    @property
    def held(self) -> bool:
        """Whether every promise was kept."""
        return not (self.missing or self.doubled or self.different or self.forbidden or self.leaked or self.alarms)

    def add(self, other: "Books") -> None:
        """Add the counts of one round."""
        for name in ("faults", "accepted", "completed", "left", "resumed", "missing", "doubled", "different"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed += other.failed
        self.refused += other.refused
        self.alarms += other.alarms
        self.worst_silence_s = max(self.worst_silence_s, other.worst_silence_s)
        self.forbidden += other.forbidden
        self.leaked += other.leaked


def judge(fault: Fault, clients: list[Client]) -> Books:
    """Judge what the clients of one round heard."""
    books = Books(faults=1)
    for client in clients:
        books.refused.update(client.refusals)
        books.resumed += client.resumptions
        where = f"#{fault.number} {fault.name}, {client.ask.kind}"
        books.forbidden += [f"{where}: {what}" for what in client.wrong]
        if client.outcome == "open":
            books.forbidden.append(f"{where}: not over, after {client.refusals[-3:]}")
            continue
        books.accepted += 1
        _compare(client, books, where)
        if client.outcome == "left":
            books.left += 1
            continue
        books.worst_silence_s = max(books.worst_silence_s, client.longest_silence_s)
        if client.outcome == "done":
            books.completed += 1
            continue
        books.failed[client.code] += 1
        if client.code not in _allowed(fault, client):
            books.forbidden.append(f"{where}: failed with {client.code}")
    return books


def _allowed(fault: Fault, client: Client) -> set[str]:
    if fault.target == f"api-{client.api}" and fault.kind in ("kill", "stop"):
        return _REPLICA
    return _BROKER if fault.loses_data else set()


def _compare(client: Client, books: Books, where: str) -> None:
    """Compare all choices token by token; an answer that is not complete must be the beginning of it."""
    ask, differs = client.ask, False
    for index, expected in ask.answer.items():
        heard = client.heard.get(index, [])
        common = next((i for i, (a, b) in enumerate(zip(heard, expected, strict=False)) if a != b), None)
        differs = differs or common is not None or len(heard) > len(expected)
        books.doubled += max(0, len(heard) - len(expected))
        if client.outcome == "done":
            books.missing += max(0, len(expected) - len(heard))
            differs = differs or len(heard) < len(expected)
    if client.outcome == "done" and client.tokens != ask.tokens:
        books.forbidden.append(f"{where}: {client.tokens} tokens are counted instead of {ask.tokens}")
    if differs:
        books.different += 1
        books.forbidden.append(f"{where}: says something else ({describe(client)})")


def describe(client: Client) -> str:
    """Say how much was heard of how much, by choice."""
    return ", ".join(f"{len(client.heard.get(i, []))} of {len(e)}" for i, e in client.ask.answer.items())


def table(total: Books, kinds: dict[str, Books]) -> str:
    """Write the table that a run ends with."""
    rows: list[tuple[str, Any]] = [
        ("faults", total.faults), ("accepted", total.accepted), ("completed", total.completed),
        ("left by their clients", total.left), ("failed with a clear error", _words(total.failed)),
        ("streams come back to", total.resumed),
        ("sent away before acceptance", _words(total.refused)), ("indices missing", total.missing),
        ("indices doubled", total.doubled), ("answers that differ", total.different),
        ("failures not allowed", len(total.forbidden)), ("repairs without lost data", _words(total.alarms)),
        ("slots, pages, keys leaked", len(total.leaked)),
    ]  # fmt: skip
    lines = [f"{name:<30} {value}" for name, value in rows]
    lines.append(f"\n{'fault':<22} {'times':>5} {'requests':>8} {'failed':>6} {'worst silence':>13}")
    for name, books in sorted(kinds.items()):
        failed = sum(books.failed.values())
        lines.append(f"{name:<22} {books.faults:>5} {books.accepted:>8} {failed:>6} {books.worst_silence_s:>11.2f} s")
    lines += ["", *total.forbidden, *total.leaked]
    return "\n".join(lines)


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "-"
