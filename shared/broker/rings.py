"""What rings in the inbox of an api replica: all that one flush has said to its requests, packed as one message.

Owns the packing. Who writes packs what will ring if all of it is accepted, as nearly always; `ring` of lua/common.lua
makes the same where only a part is, and for a terminal whose predecessor only the server knows.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from shared.broker.log_id import LogId

log = logging.getLogger(__name__)


class Ring(NamedTuple):
    """One entry of one log, as it rings in the inbox; `blob` is its encoded Delta.

    `prev` equal to the last id known: it follows at once. `log_id` not above that: known already.
    Anything else: read the log.
    """

    uid: str
    prev: LogId
    log_id: LogId
    blob: msgspec.Raw


class Rings(NamedTuple):
    """What a look into the inbox gives, and where the next one starts."""

    position: bytes
    rings: list[Ring]


_decoder: Final = msgspec.msgpack.Decoder(list[Ring])


def pack_rings(rings: Sequence[tuple[str, LogId, LogId, bytes, *tuple[Any, ...]]]) -> bytes:
    """Pack what rings together: (uid, prev, id, encoded delta) each; what stands behind these is left out."""
    packed = [b"\xdc%b" % len(rings).to_bytes(2, "big")]
    packed += [
        b"\x94\xd9%c%b\xc4%c%b\xc4%c%b%b" % (len(uid), uid.encode(), len(prev), prev, len(log_id), log_id, blob)
        for uid, prev, log_id, blob, *_ in rings
    ]
    return b"".join(packed)


def parse_rings(answer: Any, after: bytes) -> Rings:
    """Understand the answer of a read that began behind `after`.

    An entry that is none of ours is told to the log and passed over: what it may have rung for is in the logs.
    """
    rings: list[Ring] = []
    position = after
    for _, entries in answer or ():
        for position, fields in entries:  # the last one is where the next read begins
            try:
                rings += _decoder.decode(fields[1])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                log.warning("entry %s of an inbox is none of ours, it is passed over", position.decode())
    return Rings(position, rings)
