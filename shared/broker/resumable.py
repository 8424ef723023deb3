"""Streams that a client may come back to, from any api replica: what is kept of them beside their logs.

A stream is a record (opaque here: what an api needs to write its events, and to open it again) and the time at which
it lapses. Whoever reads it puts that off; nobody owns it, so it outlives the replica that opened it. Any replica
asks for what is due, and the script that answers also ends it. Named by the uid of its first choice.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from shared.broker.call import Argument, Call, call_script, load_script, word
from shared.keys import ABORT_TTL_MS, INBOX_CAP, INBOX_TTL_MS, Keys
from shared.messages import Delta, encode

LAPSE_CAP: Final = 64
"""Streams that one look ends at most: bounds how long it holds the server."""

Kept = Literal["OK", "UNKNOWN", "FULL"]

_COMPLETE = load_script("complete")
_KEEP, _ATTACH, _LAPSE = (
    load_script("keep", "stream"),
    load_script("attach", "stream"),
    load_script("lapse", "stream", "terminal"),
)


class Record(NamedTuple):
    """What is kept of a stream.

    Attributes:
        uids: its choices.
        key_hash: whose it is.
        life_ms: how long it is kept without a reader, and after its end.
        data: for the api alone.
        timeout_ms: what is left of its deadline, by the server's clock from now on; None without one.
    """

    uids: Sequence[str]
    key_hash: str
    life_ms: int
    data: bytes
    timeout_ms: int | None = None


class Attached(NamedTuple):
    """A stream that somebody came back to; `timeout_ms` is what is left of its deadline, None without one."""

    data: bytes
    timeout_ms: int | None


class Lapsed(NamedTuple):
    """How many streams a look has ended: nobody came back to them, or their deadline had passed."""

    abandoned: int
    late: int


def keep(keys: Keys, record: Record, *, cap: int | None = None) -> Call[Kept]:
    """Remember a stream, before its logs are opened, or again after the broker has lost it.

    Args:
        keys: names of the installation.
        record: of the stream.
        cap: unfinished streams there may be; beyond it the answer is FULL and nothing is kept. None for a repair.
    """
    timeout: Argument = "" if record.timeout_ms is None else record.timeout_ms
    most: Argument = "" if cap is None else cap
    more: list[Argument] = [most, " ".join(record.uids), record.key_hash, timeout, record.data]
    return _keep(keys, record.uids[0], record.life_ms, more)


def put_off(keys: Keys, stream: str, life_ms: int) -> Call[Kept]:
    """Say that somebody reads a stream; UNKNOWN when nothing is known of it, so that its record is to be kept again."""
    return _keep(keys, stream, life_ms, ["", "", "", "", ""])


def attach(keys: Keys, stream: str, key_hash: str) -> Call[Attached | None]:
    """Come back to a stream; None: there is none, or no more, or another key opened it."""
    arguments: list[Argument] = [stream, key_hash, keys.reply("")]
    return call_script(_ATTACH, [keys.stream(stream), keys.streams], arguments, _parse_attached)


def lapse(keys: Keys, late: Delta) -> Call[Lapsed]:
    """End what nobody has come back to, and with `late` what is past its deadline; at most LAPSE_CAP of them.

    Only to be called by a replica that has long been in touch: after an outage readers must have had time to say
    that they are there.
    """
    prefixes: list[Argument] = [keys.stream(""), keys.reply(""), keys.abort("")]
    ends: list[Argument] = [encode(late), ABORT_TTL_MS, keys.inbox(""), INBOX_CAP, INBOX_TTL_MS]
    return call_script(_LAPSE, [keys.streams], [LAPSE_CAP, *prefixes, *ends], lambda answer: Lapsed(*answer))


def complete(keys: Keys, stream: str, life_ms: int) -> Call[int]:
    """Note that a stream has ended and was told to its end: it can be read for its life, and counts no more."""
    return call_script(_COMPLETE, [keys.stream(stream), keys.streams], [stream, life_ms], int)


def discard(keys: Keys, stream: str) -> list[Call[Any]]:
    """Forget a stream that nobody can come back to; its logs are the caller's."""
    return [Call(("ZREM", keys.streams, stream), bool), Call(("DEL", keys.stream(stream)), int)]


def _keep(keys: Keys, stream: str, life_ms: int, more: list[Argument]) -> Call[Kept]:
    return call_script(_KEEP, [keys.stream(stream), keys.streams], [stream, life_ms, *more], word)


def _parse_attached(answer: Any) -> Attached | None:
    if answer is None:
        return None
    data, timeout_ms = answer
    return Attached(data, None if timeout_ms < 0 else timeout_ms)
