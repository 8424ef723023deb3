"""The counter between the I/O thread and the step loop: what each hands to the other, and who is woken.

Towards the loop: arrivals, endings, how fresh these are, and whether it must wait. Towards the I/O thread: step
outputs, failures, load, and what the reader thread has read. No method blocks but `sleep`, `await_look` and
`next_mail`. Pure: no broker.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.scheduler.core.link import Arrival, Load, StepOutput
from shared.broker.streams import GenerateEntry
from shared.messages import ErrorBody, GenerateRequest

MAX_READY: Final = 16
"""Nobody more is fenced while so many have been handed over that still have no slot."""
AHEAD: Final = 2
"""Fenced beyond the free slots, so that a slot that falls free is filled by the very next step."""
PATIENCE_S: Final = 0.05
"""The loop waits so long for a look at what has ended; then it goes on without, until the broker answers again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that the loop has ended with an error."""

    uid: str
    attempt: int
    error: ErrorBody


@dataclass(frozen=True, slots=True)
class Read:
    """Entries of the own stream, decoded where they could be; None where not."""

    entries: Sequence[tuple[GenerateEntry, GenerateRequest | None]]


Mail: TypeAlias = StepOutput | Failed | Read | None
"""None only wakes."""


class Desk:
    """Passes things between the step loop's thread and the I/O thread."""

    def __init__(self) -> None:
        self.paused = True
        """Set by the I/O thread; read by the loop."""
        self.load = Load(num_running=0, num_ready=0, free_slots=0, free_pages=0)
        self._lock = threading.Lock()
        self._arrivals: deque[Arrival] = deque()
        self._endings: deque[tuple[str, int]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self._handed = 0
        self._taken = 0
        self._taken_at_report = 0
        self.num_planned = 0
        """Steps planned so far; written by the loop."""
        self._looked = 0
        self._patient = True
        self._fresh = threading.Condition()

    # --- the step loop's side

    def take_arrivals(self) -> list[Arrival]:
        """Take the requests that may start."""
        if not self._arrivals:
            return []
        with self._lock:
            taken = list(self._arrivals)
            self._arrivals.clear()
            self._taken += len(taken)
        return taken

    def take_endings(self) -> list[tuple[str, int]]:
        """Take (uid, attempt) of the requests to forget."""
        taken = []
        while self._endings:
            taken.append(self._endings.popleft())
        return taken

    def planned(self) -> None:
        """Note that a step was planned."""
        self.num_planned += 1

    def await_look(self) -> float:
        """Wait until a look that began after the last step but one was planned is taken in; give the seconds waited."""
        if self._is_fresh() or not self._patient:
            return 0.0
        began = time.monotonic()
        with self._fresh:
            self._patient = self._fresh.wait_for(self._is_fresh, PATIENCE_S)
        return time.monotonic() - began

    def _is_fresh(self) -> bool:
        return self._looked >= self.num_planned - 1

    def report(self, load: Load) -> None:
        """Take in the loop's load; it counts every arrival taken so far."""
        with self._lock:
            self.load = load
            self._taken_at_report = self._taken

    def sleep(self, timeout_s: float) -> None:
        """Wait until there is an arrival or an ending, or the time is over."""
        if not self._arrivals and not self._endings:
            try:
                self._bell.get(timeout=timeout_s)
            except queue.Empty:
                return
        while not self._bell.empty():
            self._bell.get_nowait()

    # --- the I/O thread's side

    def arrive(self, arrival: Arrival) -> None:
        """Hand a request to the loop."""
        with self._lock:
            self._arrivals.append(arrival)
            self._handed += 1
        self.ring()

    def end(self, uid: str, attempt: int) -> None:
        """Have the loop forget a request; one that it has not taken yet is simply taken back."""
        with self._lock:
            for arrival in self._arrivals:
                if arrival.request.uid == uid:
                    self._arrivals.remove(arrival)
                    self._handed -= 1
                    return
        self._endings.append((uid, attempt))
        self.ring()

    def ring(self) -> None:
        """Wake the loop if it sleeps."""
        if self._bell.empty():
            self._bell.put(None)

    def looked(self, num_planned: int) -> None:
        """Note that all is handed over that had ended when so many steps were planned."""
        if num_planned > self._looked:
            with self._fresh:
                self._looked, self._patient = num_planned, True
                self._fresh.notify()

    @property
    def num_handed(self) -> int:
        """Requests handed over that the last report has not counted."""
        return self._handed - self._taken_at_report

    def room(self) -> int:
        """Say how many more requests should be fenced now."""
        with self._lock:
            ready = self.load.num_ready + self.num_handed
            return 0 if ready >= MAX_READY else max(self.load.free_slots, AHEAD) - ready

    def post(self, mail: Mail) -> None:
        """Put something before the I/O thread, from any thread, and wake it."""
        self._mail.put(mail)

    def next_mail(self, timeout_s: float) -> list[Mail]:
        """Wait for mail, then take all there is; empty when the time was over."""
        try:
            taken = [self._mail.get(timeout=timeout_s) if timeout_s > 0 else self._mail.get_nowait()]
        except queue.Empty:
            return []
        while True:
            try:
                taken.append(self._mail.get_nowait())
            except queue.Empty:
                return taken
