"""Saying tokens: what one flush adds to the logs of many uids, and what rings of it, in one call.

Owns the call, and what makes it cheap: a log need not be asked where it ends while its writer has seen that end and
the broker has lost nothing since. What a broker loses is always its newest part. So each flush leaves its number
there and the next one asks for it, once for all logs: where that is, everything is that was there before. Knows
nothing of when a flush is due.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from shared.broker.call import Argument, Call, call_script, load_script, pairs
from shared.broker.log_id import LogId, is_next
from shared.broker.rings import pack_rings
from shared.ids import new_uid
from shared.keys import ABORT_TTL_MS, APPEND_CAP, FLUSH_TTL_MS, INBOX_CAP, INBOX_TTL_MS, Keys

_APPEND: Final = load_script("append")


class Terminal(NamedTuple):
    """What goes with an item that ends its log.

    Attributes:
        engine: from the log's fence header, as is `entry_id`: the entry that is deleted with the terminal.
        ttl_ms: life of the log from now on: `life_ms(header)`.
    """

    engine: str
    entry_id: bytes
    ttl_ms: int


class Item(NamedTuple):
    """One entry for the log of one uid.

    Attributes:
        prev: last id the log must have.
        log_id: `make_log_id(attempt, said)`, or `make_end_id(said)` with a terminal.
        blob: encoded Delta.
        replica: whose inbox is rung, from the log's header.
        terminal: set when the Delta ends the request.
        chain: `Flushes.chain` as it was when the item was sent whose answer was `prev`; 0 when `prev` was only read.
    """

    uid: str
    prev: LogId
    log_id: LogId
    blob: bytes
    replica: str
    terminal: Terminal | None = None
    chain: int = 0


class Flushes:
    """The flushes of one writer, one after the other.

    Attributes:
        chain: number of the present chain, from 1. Flushes are a chain while each finds the number of the one before
            it, so that the broker has lost nothing which their writer has seen.
    """

    def __init__(self, keys: Keys) -> None:
        self.chain = 1
        self._keys = keys
        self._key = keys.flush(new_uid())
        self._number = 0
        self._begins = True

    def append(self, items: Sequence[Item]) -> Call[list[LogId]]:
        """Make the next call, as `append` does. Calls must be sent in the order in which they were made."""
        before: Argument = "" if self._begins else self._number
        self._begins = False
        self._number += 1
        seen = [item.chain == self.chain and is_next(item.prev, item.log_id) for item in items]
        return _append(self._keys, items, seen, (self._key,), (before, self._number, FLUSH_TTL_MS), self.begin_anew)

    def begin_anew(self) -> None:
        """Begin another chain: the broker has lost something, or an answer did not come."""
        self.chain += 1
        self._begins = True


def append(keys: Keys, items: Sequence[Item]) -> Call[list[LogId]]:
    """Write what one flush says, at most APPEND_CAP items, no uid twice.

    Answers the last id of each log as it is now. An item is said when that is its own `log_id` (also when the
    first answer was lost, or another detokenizer has said the same). Any other id, or NO_LOG: nothing was
    written; forget the uid's state, rebuild it from the log and look again.
    """
    return _append(keys, items, [False] * len(items), (), ("", "", ""), lambda: None)


def _append(
    keys: Keys,
    items: Sequence[Item],
    seen: Sequence[bool],
    flush: Sequence[str],
    numbers: Sequence[Argument],
    on_loss: Callable[[], None],
) -> Call[list[LogId]]:
    """Make the call; `seen` says of which items the log need not be asked, as long as the chain holds."""
    assert len(items) <= APPEND_CAP, "a flush is cut into calls of APPEND_CAP items"
    boxes: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        boxes.setdefault(item.replica, []).append(place)
    order = [place for places in boxes.values() for place in places]
    names = [keys.inbox(replica) for replica in boxes]
    rings: list[Argument] = []
    for places in boxes.values():
        rings += (len(places), pack_rings([items[place] for place in places]))
    entries: list[Argument] = []
    terminals: list[Argument] = []
    for number, place in enumerate(order, start=1):
        uid, prev, log_id, blob, _, terminal, _ = items[place]
        names.append(keys.reply(uid))
        entries += (b"" if seen[place] else prev, log_id, blob)
        if terminal is not None:
            engine, entry_id, ttl_ms = terminal
            terminals += (number, ttl_ms, keys.generate(engine), entry_id, keys.abort(uid))
    bounds = (INBOX_CAP, INBOX_TTL_MS, ABORT_TTL_MS, len(keys.reply("")))
    arguments = [*numbers, *bounds, len(boxes), len(terminals), *rings, *terminals, *entries]

    def parse(answer: Sequence[Any]) -> list[LogId]:
        holds, *refused = answer
        if not holds:
            on_loss()
        last_ids = [item.log_id for item in items]
        for number, last_id in pairs(refused):
            last_ids[order[number - 1]] = last_id
        return last_ids

    return call_script(_APPEND, [*names, *flush], arguments, parse)
