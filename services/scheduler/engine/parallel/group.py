"""The other ranks as rank 0 sees them: processes that are started, told batches, listened to, and ended together."""

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from services.scheduler.core.batch import Batch
from services.scheduler.engine.parallel.control import Channel, Closed, Failed, Serve, Setup, encode, encode_batch
from services.scheduler.engine.parallel.orders import Order
from services.scheduler.engine.threads import begin
from shared.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)

FOLLOWER: Final = "services.scheduler.engine.follower"
_END_TIMEOUT_S: Final = 3.0
_STATUS_TIMEOUT_S: Final = 1.0
"""How long a rank that has let go of its socket may take to be gone; a GPU may hold it."""
_KEPT_BYTES: Final = 4096
_TOLD_LINES: Final = 3
_STDERR: Final = 2
_ROOT: Final = Path(__file__).resolve().parents[4]


class RankLost(RuntimeError):
    """A rank has ended although it was not told to.

    Attributes:
        refusal: what that rank cannot serve as set, if that is why.
    """

    def __init__(self, text: str, refusal: ConfigError | None = None) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(slots=True, eq=False)
class _Follower:
    """One rank above 0.

    Attributes:
        rank: its number.
        process: with its stderr in a pipe.
        channel: to it.
        num_ready: parts of its start that it is done with.
        failed: its last word, if it had one.
        has_ended: it is not there any more.
        said: the end of what it has written to stderr.
    """

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    num_ready: int = 0
    failed: Failed | None = None
    has_ended: bool = False
    said: bytes = b""

    def forward(self) -> bool:
        """Pass on what it has written to stderr; whether more may come."""
        assert self.process.stderr is not None
        with suppress(BlockingIOError):
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                self.said = (self.said + data)[-_KEPT_BYTES:]
                with suppress(OSError):  # ours may be closed
                    os.write(_STDERR, data)
            return False
        return True

    def last_lines(self) -> str:
        """Give the end of what it has written to stderr."""
        lines = [line for line in self.said.decode("utf-8", "replace").splitlines() if line.strip()]
        return "".join(f"\n  {line.rstrip()}" for line in lines[-_TOLD_LINES:])


class Followers:
    """The ranks above 0.

    Args:
        size: all ranks, this one included.
        port: where they find each other.
        model: folder or file of the checkpoint.
        config: fields of the EngineConfig.

    Raises:
        RankLost: a process cannot be started.
    """

    def __init__(self, size: int, port: int, model: str, config: dict[str, Any]) -> None:
        self._ranks: list[_Follower] = []
        self._num_awaited = 0
        self._closing = False
        self._on_loss: Callable[[RankLost], None] = lambda lost: None
        self._lost: RankLost | None = None
        self._news = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name="ranks", daemon=True)
        try:
            for rank in range(1, size):
                self._ranks.append(_start(rank))
        except OSError as e:
            self.close()
            raise RankLost(f"rank {len(self._ranks) + 1} cannot be started: {e}") from e
        for each in self._ranks:
            with suppress(Closed):  # the listener says how it ended
                each.channel.send(encode(Setup(each.rank, size, port, model, config)))
        self._listener.start()

    @property
    def lost(self) -> RankLost | None:
        """The first rank that has ended by itself, if one has."""
        return self._lost

    def wait_ready(self) -> None:
        """Wait until every rank is done with the next part of its start.

        Raises:
            ConfigError: one cannot serve the model as asked.
            RankLost: one has ended.
        """
        self._num_awaited += 1
        with self._news:
            self._news.wait_for(lambda: self._lost or all(r.num_ready >= self._num_awaited for r in self._ranks))
        self._raise_lost()

    def meet(self, work: Callable[[], T]) -> T:
        """Do something that returns when every rank has come, or not at all.

        It is done on a thread of its own, which is left alone with it when a rank is lost.

        Raises:
            ConfigError: a rank cannot serve the model as asked.
            RankLost: one has ended.
        """

        def tell(_: object) -> None:
            with self._news:
                self._news.notify_all()

        _, answer = begin(work, "meeting")
        answer.add_done_callback(tell)
        with self._news:
            self._news.wait_for(lambda: answer.done() or self._lost)
            failed = answer.done() and answer.exception() is not None
            if failed and not isinstance(answer.exception(), ConfigError):  # maybe for a rank that has just ended
                self._news.wait_for(lambda: self._lost, 2 * _STATUS_TIMEOUT_S)
        if failed or not answer.done():
            self._raise_lost()
        return answer.result()

    def watch(self, on_loss: Callable[[RankLost], None]) -> None:
        """Have this called, once and from any thread, when a rank ends by itself; the last one given counts."""
        with self._news:
            self._on_loss = on_loss
            lost = self._lost
        if lost is not None:
            on_loss(lost)

    def serve(self) -> None:
        """Tell every rank that the start is over: what fails from here on is no matter of settings.

        Raises:
            RankLost: one is not there any more.
        """
        self._send(encode(Serve()))

    def send(self, batch: Batch) -> None:
        """Let every rank compute a batch.

        Raises:
            RankLost: one is not there any more.
        """
        self._send(encode_batch(batch))

    def order(self, order: Order) -> None:
        """Have every rank do something.

        Raises:
            RankLost: one is not there any more.
        """
        self._send(encode(order))

    def close(self) -> None:
        """End all ranks and wait for that. Safe to call twice.

        Afterwards `lost` also has what a rank said while it ended.
        """
        self._closing = True
        for each in self._ranks:
            each.channel.let_go()
        _end_all([each.process for each in self._ranks])
        if self._listener.is_alive():
            self._listener.join(_END_TIMEOUT_S)
        if not self._listener.is_alive():
            for each in self._ranks:
                each.channel.close()
                if each.process.stderr is not None:
                    each.process.stderr.close()

    def _send(self, data: bytes) -> None:
        try:
            for each in self._ranks:
                each.channel.send(data)
        except Closed as e:
            with self._news:  # the listener soon knows more
                self._news.wait_for(lambda: self._lost, 2 * _STATUS_TIMEOUT_S)
            raise self._lost or RankLost(f"a rank has ended: {e}") from e

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise self._lost.refusal or self._lost

    # --- the listener's thread

    def _listen(self) -> None:
        """Hear what ranks say, pass their stderr on, and notice their end."""
        with selectors.DefaultSelector() as selector:
            for each in self._ranks:
                assert each.process.stderr is not None
                selector.register(each.channel, selectors.EVENT_READ, (each, self._hear))
                selector.register(each.process.stderr, selectors.EVENT_READ, (each, _Follower.forward))
            left = set(self._ranks)
            while left:
                heard = []
                for key, _ in selector.select():
                    each, take = key.data
                    if not take(each):
                        selector.unregister(key.fileobj)
                    if take == self._hear:
                        heard.append(each)
                # A rank may end for want of another: who says why comes first, and who found a bad setting before all.
                for each in sorted(heard, key=_rank_of_words):
                    self._note(each)
                left -= {each for each in heard if each.has_ended}

    def _hear(self, each: _Follower) -> bool:
        """Take a message; whether more may come."""
        try:
            message = each.channel.receive()
        except Closed:
            each.has_ended = True
            return False
        if isinstance(message, Failed):
            each.failed = message
        else:
            each.num_ready += 1
        return True

    def _note(self, each: _Follower) -> None:
        """Act on what was heard of a rank."""
        with self._news:
            self._news.notify_all()
        if each.failed is not None:
            each.forward()
            error = each.failed.error
            refusal = ConfigError(f"rank {each.rank}: {error}") if each.failed.is_config else None
            self._lose(RankLost(f"rank {each.rank} ended: {error}", refusal))
        if each.has_ended and not self._closing:
            how = "and is not gone yet"
            with suppress(subprocess.TimeoutExpired):
                how = f"with status {each.process.wait(_STATUS_TIMEOUT_S)}"
            each.forward()
            log.error("rank %d ended %s; all ranks end", each.rank, how)
            self._lose(RankLost(f"rank {each.rank} ended {how}{each.last_lines()}"))

    def _lose(self, lost: RankLost) -> None:
        with self._news:
            if self._lost is not None:
                return
            self._lost = lost
            tell = self._on_loss
            self._news.notify_all()
        if not self._closing:
            tell(lost)


def _start(rank: int) -> _Follower:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, str(theirs.fileno()), str(rank)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=_environment(rank),
            )
        except OSError:
            ours.close()
            raise
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    return _Follower(rank, process, Channel(ours))


def _rank_of_words(each: _Follower) -> int:
    if each.failed is None:
        return 2
    return 0 if each.failed.is_config else 1


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until processes have ended, and kill those that do not in time."""
    until = time.monotonic() + _END_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("process %d of a rank does not end; its device may hold it", process.pid)


def _environment(rank: int) -> dict[str, str]:
    """Give what a rank inherits; its instance is named like rank 0 and its number."""
    name = os.environ.get("MILLRACE_NAME")
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **({"MILLRACE_NAME": f"{name}.{rank}"} if name else {})}
