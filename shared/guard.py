"""The guard of a process: takes its signals, and ends it when it does not end by itself.

Owns signal handlers and the thread that acts on them, the watch over a stuck loop and over a drain that takes
too long. A handler runs on the main thread, which may hold any lock at that moment, so it does no more than pass
the signal on to the guard's thread. Stacks are asked for where that thread may be the one that stands still, so the
number of every signal also goes through a pipe, which the interpreter fills at once; they are printed by a thread that
holds the interpreter, because whoever looks at frames that run meanwhile may crash.
"""

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from shared.health import Pulse

log = logging.getLogger(__name__)

EXIT_FAULT: Final = 1
EXIT_STUCK: Final = 70

_LOOK_S: Final = 0.25
_GRACE_S: Final = 2.0
"""How long after the drain deadline the process is ended from outside its loop."""
_ECHO_S: Final = 1.0
"""A signal of another kind this soon after the first is the same wish, sent to the group and to the process."""


class Interrupted(BaseException):
    """Raised on the main thread by a signal, where nothing is in hand and so nothing can be lost."""


class Guard:
    """Watches over one process, on a thread of its own.

    Args:
        pulse: of the service's loop.
        stuck_after_s: seconds without a beat after which the process ends; 0 never.
        drain: begins the drain; called for the first signal.
        drain_left_s: seconds until the drain deadline, infinite while not draining.
        look: looks at once who lives; called when somebody is known to have died.
        kill: ends the process with a code, at once.

    Attributes:
        may_interrupt: whether a signal may raise `Interrupted` on the main thread.
    """

    def __init__(
        self,
        pulse: Pulse,
        *,
        stuck_after_s: float,
        drain: Callable[[], None],
        drain_left_s: Callable[[], float],
        kill: Callable[[int], object],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.may_interrupt = True
        self._pulse = pulse
        self._stuck_after_s = stuck_after_s
        self._drain = drain
        self._drain_left_s = drain_left_s
        self._look = look
        self._kill = kill
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._first_signal: tuple[int, float] | None = None
        self._overdue_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._stacks: threading.Thread | None = None
        self._pipe = (-1, -1)
        self._over = False

    def connect_signals(self) -> None:
        """Take SIGTERM and SIGINT; SIGUSR1 prints the stacks of all threads, SIGUSR2 looks. Main thread only."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGUSR2, lambda number, _: self._signals.put(number))
        signal.signal(signal.SIGUSR1, lambda number, _: None)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._stacks = threading.Thread(target=self._show_stacks, name="stacks", daemon=True)
        self._stacks.start()

    def start(self) -> None:
        """Begin to watch; signals that came before are heeded now."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more; stacks that were asked for are printed first. Of a guard with signals main thread only."""
        self._over = True
        if self._stacks is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._pipe[1], b"\0")
            self._stacks.join()
            self._stacks = None
            for end in self._pipe:
                os.close(end)
        self._signals.put(0)
        if self._thread.is_alive():
            self._thread.join()

    def is_stuck(self, share: float = 1.0) -> bool:
        """Whether the loop has not come round for that share of the time it has."""
        return self._stuck_after_s > 0 and self._pulse.age_s > self._stuck_after_s * share

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.put(number)
        if self.may_interrupt:
            raise Interrupted

    def _show_stacks(self) -> None:
        asked = b""
        while 0 not in asked:
            asked = os.read(self._pipe[0], 64)
            if signal.SIGUSR1 in asked:
                faulthandler.dump_traceback(all_threads=True)

    def _run(self) -> None:
        while not self._over:
            with contextlib.suppress(queue.Empty):
                number = self._signals.get(timeout=_LOOK_S)
                if number:
                    self._heed(number)
            if self.is_stuck():
                log.critical("the loop is stuck for %.0f s; ending, so that others take over", self._pulse.age_s)
                faulthandler.dump_traceback(all_threads=True)
                self._kill(EXIT_STUCK)
                return
            if self._is_overdue():
                log.error("the drain deadline is over; ending")
                self._kill(EXIT_FAULT)
                return

    def _heed(self, number: int) -> None:
        """Do what a signal asks for: look, drain, or end at once."""
        if number == signal.SIGUSR2:
            self._look()
            return
        now = time.monotonic()
        name = signal.Signals(number).name
        if self._first_signal is None:
            self._first_signal = (number, now)
            self._drain()
            log.info("%s: draining, for %.0f s at most", name, self._drain_left_s())
            return
        first, at = self._first_signal
        if number == first or now - at > _ECHO_S:
            log.info("%s: a second signal ends the process now", name)
            self._kill(128 + number)

    def _is_overdue(self) -> bool:
        """Whether the drain deadline, and the grace after it, are over."""
        if self._drain_left_s() > 0:
            return False
        if self._overdue_s is None:
            self._overdue_s = time.monotonic()
        return time.monotonic() - self._overdue_s > _GRACE_S
