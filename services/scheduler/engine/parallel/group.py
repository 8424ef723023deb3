"""The other ranks as rank 0 sees them: processes that are started, told batches, watched, and ended together."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from services.scheduler.core.batch import Batch
from services.scheduler.engine.parallel.control import Channel, Closed, Ready, Setup, encode, encode_batch
from services.scheduler.engine.parallel.orders import Order
from shared.errors import ConfigError

log = logging.getLogger(__name__)

FOLLOWER: Final = "services.scheduler.engine.follower"
_END_TIMEOUT_S: Final = 3.0
_ROOT: Final = Path(__file__).resolve().parents[4]


class RankLost(RuntimeError):
    """A rank has ended although it was not told to."""


class Followers:
    """The ranks above 0.

    Args:
        size: all ranks, this one included.
        port: where they find each other.
        model: folder or file of the checkpoint.
        config: fields of the EngineConfig.
    """

    def __init__(self, size: int, port: int, model: str, config: dict[str, Any]) -> None:
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._on_loss: Callable[[RankLost], None] = lambda lost: None
        self._lost: RankLost | None = None
        self._lock = threading.Lock()
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", FOLLOWER, str(theirs.fileno()), str(rank)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(rank),
                )
            self._processes.append(process)
            self._channels.append(Channel(ours))
            self._channels[-1].send(encode(Setup(rank, size, port, model, config)))
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def wait_ready(self) -> None:
        """Wait until every rank has loaded its weights.

        Raises:
            ConfigError: one cannot serve the model as asked.
            RankLost: one has ended.
        """
        for rank, channel in enumerate(self._channels, start=1):
            try:
                answer = channel.receive()
            except Closed as e:
                raise RankLost(f"rank {rank} ended while it loaded the model") from e
            assert isinstance(answer, Ready)
            if answer.error:
                raise ConfigError(answer.error)

    def watch(self, on_loss: Callable[[RankLost], None]) -> None:
        """Have this called, once and from any thread, when a rank ends by itself."""
        with self._lock:
            self._on_loss = on_loss
            lost = self._lost
        if lost is not None:
            on_loss(lost)

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

    def _send(self, data: bytes) -> None:
        try:
            for channel in self._channels:
                channel.send(data)
        except Closed as e:
            raise RankLost(f"a rank has ended: {e}") from e

    def close(self) -> None:
        """End all ranks and wait for that. Safe to call twice."""
        self._closing = True
        for channel in self._channels:
            channel.close()
        until = time.monotonic() + _END_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closing:
            return
        log.error("rank %d ended with status %d; all ranks end", rank, status)
        with self._lock:
            if self._lost is not None:
                return
            lost = self._lost = RankLost(f"rank {rank} ended with status {status}")
            tell = self._on_loss
        tell(lost)


def _environment(rank: int) -> dict[str, str]:
    """Give what a rank inherits; its instance is named like rank 0 and its number."""
    name = os.environ.get("MILLRACE_NAME")
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **({"MILLRACE_NAME": f"{name}.{rank}"} if name else {})}
