"""How long to wait before the next attempt to reach something that is away."""

import random
from typing import Final

FIRST_S: Final = 0.05
CAP_S: Final = 2.0


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
