"""The clock in the text of the fake engine: benchmarks read at the client when a token was drawn.

Four tokens in a row spell the wall clock of the first of them, in base 64, so every fourth token of a choice is
timed from the step that drew it to the byte that carried it, and no message knows of it. A reading goes round
every 268 seconds.
"""

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch import IntArray

STAMP_TOKENS: Final = 4
"""Tokens of one reading; the first token of a choice begins one."""
STAMP_UNIT_NS: Final = 16_000
_RANGE: Final = 64**STAMP_TOKENS
_DIGITS: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_IDS: Final[IntArray] = np.frombuffer(_DIGITS, np.uint8).astype(np.int32)
_VALUES: Final = np.zeros(256, np.int64)
_VALUES[_IDS] = np.arange(64)


class StampWriter:
    """Says the tokens of every slot.

    Args:
        num_slots: slots there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._began: IntArray = np.zeros(num_slots, np.int32)

    def draw(self, slots: IntArray, index: IntArray) -> IntArray:
        """Give the tokens of these slots, (rows,), whose 1-based indices these are."""
        digit = (index - 1) % STAMP_TOKENS
        self._began[slots[digit == 0]] = time.time_ns() // STAMP_UNIT_NS % _RANGE
        drawn: IntArray = _IDS[self._began[slots] >> 6 * (STAMP_TOKENS - 1 - digit) & 63]
        return drawn


def read_ages_ns(text: bytes, seen_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give the age of every reading in a choice's text.

    Args:
        text: of the choice, from its first token on; a reading at the end that is not whole is left out.
        seen_ns: (tokens,) wall clock when each token was seen.

    Returns:
        (readings,) time from the drawing of a reading's first token to its being seen, a multiple of the unit.
    """
    whole = len(text) // STAMP_TOKENS
    digits = _VALUES[np.frombuffer(text, np.uint8)[: whole * STAMP_TOKENS]].reshape(whole, STAMP_TOKENS)
    drawn = digits @ 64 ** np.arange(STAMP_TOKENS - 1, -1, -1)
    seen = seen_ns[: whole * STAMP_TOKENS : STAMP_TOKENS] // STAMP_UNIT_NS
    return (seen - drawn) % _RANGE * STAMP_UNIT_NS
