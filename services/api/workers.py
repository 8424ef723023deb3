"""Several api processes on one port: starts them, starts the dead again, passes signals on, waits for them.

Each worker is a whole replica with an incarnation and an inbox of its own; the kernel spreads connections over
them (SO_REUSEPORT). Their metrics are added up through files that this process owns.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import FrameType
from typing import Final

from services.api.metrics import MULTIPROCESS_DIR, forget_worker
from services.api.server import listen
from services.api.settings import ApiSettings
from shared.broker.backoff import Backoff

log = logging.getLogger(__name__)

_POLL_S: Final = 0.1
_STABLE_S: Final = 10.0
"""A worker that lived this long starts again at once; the others with growing pauses."""
_GRACE_S: Final = 10.0


class Workers:
    """The parent of the workers of one port. `run` is its whole life."""

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings.model_copy(update={"api_reuse_port": True})
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._born: dict[int, float] = {}
        self._due: dict[int, float] = {}
        self._backoffs = {number: Backoff(first_s=0.2, cap_s=5.0) for number in range(settings.api_workers)}
        self._signals = 0

    def run(self) -> int:
        """Serve until a signal, then wait for the workers' drain; gives the exit code."""
        reserve = listen(self._settings)  # bound but not listening: holds the port, gets no connection
        port = reserve.getsockname()[1]
        directory = tempfile.mkdtemp(prefix="millrace-metrics-")
        os.environ[MULTIPROCESS_DIR] = directory
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._on_signal)
        log.info("listening on http://%s:%d with %d workers", self._settings.host, port, self._settings.api_workers)
        try:
            for number in self._backoffs:
                self._spawn(number, port)
            while not self._signals:
                self._look(port)
                time.sleep(_POLL_S)
            return self._wait()
        finally:
            for child in self._children.values():
                child.kill()
                child.wait()
            shutil.rmtree(directory, ignore_errors=True)
            reserve.close()

    def _spawn(self, number: int, port: int) -> None:
        name = f"{self._settings.instance_name('api')}-{number}"
        told = {"API_WORKERS": "1", "API_REUSE_PORT": "1", "PORT": str(port), "NAME": name}
        environment = {**os.environ, **{f"MILLRACE_{key}": value for key, value in told.items()}}
        self._children[number] = subprocess.Popen([sys.executable, "-m", "services.api"], env=environment)
        self._born[number] = time.monotonic()

    def _look(self, port: int) -> None:
        """Start again what has died."""
        now = time.monotonic()
        for number, child in list(self._children.items()):
            if child.poll() is None:
                continue
            del self._children[number]
            forget_worker(child.pid)
            if now - self._born[number] > _STABLE_S:
                self._backoffs[number].reset()
            pause = self._backoffs[number].next_s()
            log.error("worker %d ended with %s, it is started again", number, child.returncode)
            self._due[number] = now + pause
        for number, due in list(self._due.items()):
            if now >= due:
                del self._due[number]
                self._spawn(number, port)

    def _wait(self) -> int:
        """Wait for the drain; what outlasts it is killed."""
        deadline = time.monotonic() + self._settings.drain_timeout + _GRACE_S
        while any(child.poll() is None for child in self._children.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        codes = {child.poll() for child in self._children.values()}
        return 0 if codes <= {0, -signal.SIGTERM, -signal.SIGINT} else 1  # a signal may come before its handler

    def _on_signal(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(sig)
