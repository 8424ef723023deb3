"""The clock in the fake engine's text can be read back, whatever the streams look like when they are seen."""

import time

import numpy as np

from services.scheduler.core.batch import IntArray
from services.scheduler.fake_stamps import STAMP_TOKENS, STAMP_UNIT_NS, StampWriter, read_ages_ns


def draw(writer: StampWriter, slots: list[int], index: int) -> bytes:
    """Draw a token of the same index in some slots."""
    drawn: IntArray = writer.draw(np.array(slots, np.int32), np.full(len(slots), index, np.int32))
    return bytes(drawn.astype(np.uint8))


def test_every_fourth_token_tells_its_age() -> None:
    writer, text, began = StampWriter(4), b"", time.time_ns()
    for index in range(1, 10):
        text += draw(writer, [2], index)
    ended = time.time_ns()
    seen = np.full(9, ended + 5_000_000_000, np.int64)
    ages = read_ages_ns(text, seen)
    assert len(ages) == 9 // STAMP_TOKENS
    assert (ages >= 5_000_000_000 - STAMP_UNIT_NS).all()
    assert (ages <= 5_000_000_000 + ended - began + STAMP_UNIT_NS).all()


def test_each_slot_has_its_own_reading() -> None:
    writer = StampWriter(2)
    first = draw(writer, [0], 1)
    now = time.time_ns()
    while time.time_ns() < now + 3 * STAMP_UNIT_NS:
        pass
    second = draw(writer, [1], 1)
    texts = [first, second]
    for index in range(2, STAMP_TOKENS + 1):
        both = draw(writer, [1, 0], index)
        texts = [texts[0] + both[1:], texts[1] + both[:1]]
    seen = np.full(STAMP_TOKENS, time.time_ns(), np.int64)
    older, younger = (read_ages_ns(text, seen)[0] for text in texts)
    assert older > younger


def test_what_was_just_drawn_is_young_and_readings_are_letters() -> None:
    writer, text = StampWriter(1), b""
    for index in range(1, STAMP_TOKENS + 1):
        text += draw(writer, [0], index)
    assert text.replace(b"-", b"").replace(b"_", b"").isalnum()
    (age,) = read_ages_ns(text, np.full(STAMP_TOKENS, time.time_ns(), np.int64))
    assert age < 1_000_000_000
