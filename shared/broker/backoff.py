"""How long to wait before the next attempt to reach something that is away, and how often to tell of it."""

import random
import time
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.05
CAP_S: Final = 2.0
_TELL_S: Final = 30.0


class Backoff:
    """Growing pauses with jitter, so that services do not come back to the broker all at once."""

    def __init__(self, *, first_s: float = FIRST_S, cap_s: float = CAP_S, chance: random.Random | None = None) -> None:
        """Start small.

        Args:
            first_s: the shortest pause.
            cap_s: no pause is longer.
            chance: source of the jitter.
        """
        self._first_s = first_s
        self._cap_s = cap_s
        self._chance = chance or random.Random()
        self._next_s = first_s

    def next_s(self) -> float:
        """Give the next pause: between half and all of a value that doubles up to the cap."""
        pause_s = self._next_s * self._chance.uniform(0.5, 1.0)
        self._next_s = min(self._cap_s, self._next_s * 2)
        return pause_s

    def reset(self) -> None:
        """Begin small again: it worked."""
        self._next_s = self._first_s


class Outage:
    """What is told of an outage: its reason at once, and from then on how long it lasts, every half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with none.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._reason = ""
        self._began_s = 0.0
        self._told_s = 0.0

    def tell(self, reason: str) -> str:
        """Give what is to be told of one more failure; empty most of the time."""
        now_s = self._clock()
        if not self._reason:
            self._began_s = now_s
        elif reason == self._reason and now_s - self._told_s < _TELL_S:
            return ""
        is_new, self._reason, self._told_s = reason != self._reason, reason, now_s
        return reason if is_new else f"{reason} (for {now_s - self._began_s:.0f} s now)"

    def end(self) -> None:
        """Note that it is over."""
        self._reason = ""
