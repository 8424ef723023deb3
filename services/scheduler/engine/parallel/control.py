"""What rank 0 tells the other ranks: how to build their engine, then batch after batch, or order after order.

GPUs are given orders (`orders`). On a CPU a follower needs of a batch what shapes its computation; how tokens are
drawn is rank 0's business, and the drawn tokens come from it. Messages are msgpack behind their length, over a socket
that both processes were born with: when one of them ends, however it ends, the other reads the end of it.
"""

import select
import socket
import struct
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np

from services.scheduler.core.batch import Batch, IntArray, ScoreRow
from services.scheduler.engine.parallel.orders import DrawOrder, PagesOrder, ScoreOrder, StepOrder

_LENGTH: Final = struct.Struct("<Q")


class Setup(msgspec.Struct, array_like=True, frozen=True, tag="setup"):
    """How a follower builds its engine.

    Attributes:
        rank, size: who it is.
        port: where the ranks find each other.
        model: folder or file of the checkpoint.
        config: fields of the EngineConfig.
    """

    rank: int
    size: int
    port: int
    model: str
    config: dict[str, Any]


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """Answer of a follower that is done with a part of its start: it knows what it is to load, or has loaded it."""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """Last word of a follower that cannot go on.

    Attributes:
        error: why.
        is_config: it cannot be served as set; the text says what to set otherwise.
    """

    error: str
    is_config: bool


class Serve(msgspec.Struct, array_like=True, frozen=True, tag="serve"):
    """The start is over on all ranks."""


class WireBatch(msgspec.Struct, array_like=True, frozen=True, tag="batch"):
    """A batch; arrays are the bytes of int32."""

    step: int
    num_decode: int
    slots: bytes
    starts: bytes
    lengths: bytes
    input_ids: bytes
    page_table: bytes
    columns: int
    sample: bytes
    out_index: bytes
    scores: list[tuple[int, int]]


Message = Setup | Ready | Failed | Serve | WireBatch | PagesOrder | StepOrder | DrawOrder | ScoreOrder

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Closed(Exception):
    """The other side has ended."""


class Channel:
    """One end of the socket between rank 0 and a follower. One thread at a time sends, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytes) -> None:
        """Send an encoded message.

        Raises:
            Closed: nobody is there any more.
        """
        try:
            self._end.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as e:
            raise Closed(str(e)) from e

    def receive(self) -> Message:
        """Wait for a message.

        Raises:
            Closed: the other side has ended.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return _decoder.decode(self._read(length))

    def wait_closed(self, seconds: float) -> bool:
        """Wait until the other side has ended or let go, or so long; says whether it has. Reads nothing, any thread."""
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        return bool(poll.poll(1e3 * seconds))

    def fileno(self) -> int:
        """Give what a selector watches."""
        return self._end.fileno()

    def let_go(self) -> None:
        """Let the other side read the end; what it still says can be received. Safe to call twice."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Free the socket, when nothing more is received. Safe to call twice."""
        self._end.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self._end.recv_into(view[at:])
            except OSError as e:
                raise Closed(str(e)) from e
            if not got:
                raise Closed("the other side has ended")
            at += got
        return data


def encode(message: Message) -> bytes:
    """Pack a message."""
    return _encoder.encode(message)


def encode_batch(batch: Batch) -> bytes:
    """Pack what followers need of a batch."""
    return encode(
        WireBatch(
            batch.step,
            batch.num_decode,
            batch.slots.tobytes(),
            batch.starts.tobytes(),
            batch.lengths.tobytes(),
            batch.input_ids.tobytes(),
            np.ascontiguousarray(batch.page_table).tobytes(),
            batch.page_table.shape[1],
            batch.sample.tobytes(),
            batch.out_index.tobytes(),
            [(score.row, len(score.targets)) for score in batch.scores],
        )
    )


def decode_batch(wire: WireBatch) -> Batch:
    """Unpack a batch; what is scored has no targets, only their number."""
    return Batch(
        step=wire.step,
        num_decode=wire.num_decode,
        slots=_ints(wire.slots),
        starts=_ints(wire.starts),
        lengths=_ints(wire.lengths),
        input_ids=_ints(wire.input_ids),
        page_table=_ints(wire.page_table).reshape(-1, wire.columns),
        sample=np.frombuffer(wire.sample, dtype=np.bool_),
        out_index=_ints(wire.out_index),
        scores=tuple(ScoreRow(row, np.zeros(count, np.int32), 0) for row, count in wire.scores),
    )


def _ints(data: bytes) -> IntArray:
    return np.frombuffer(data, dtype=np.int32)
