"""The stream of what was given up: notes for people, of requests and messages that no service could handle.

Owns the calls on it. Who gives up what, and when, is in docs/protocol.md.
"""

from collections.abc import Sequence

from shared.broker.call import Call, nothing, pairs
from shared.keys import DEAD_CAP, Keys
from shared.messages import DeadLetter, decode, encode


def bury(keys: Keys, letter: DeadLetter) -> Call[None]:
    """Keep a note of a request or message that was given up. The oldest notes go first."""
    return Call(("XADD", keys.dead, "MAXLEN", "~", DEAD_CAP, "*", "m", encode(letter)), nothing)


def list_dead(keys: Keys, *, count: int = DEAD_CAP) -> Call[list[tuple[bytes, DeadLetter]]]:
    """List the newest dead letters first."""
    return Call(
        ("XREVRANGE", keys.dead, "+", "-", "COUNT", count),
        lambda answer: [(entry_id, decode(DeadLetter, dict(pairs(flat)).get(b"m", b""))) for entry_id, flat in answer],
    )


def drop_dead(keys: Keys, entry_ids: Sequence[bytes]) -> Call[int]:
    """Delete dead letters."""
    return Call(("XDEL", keys.dead, *entry_ids), int)
