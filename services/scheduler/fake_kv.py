"""The books of the fake engine: what every place of every page holds, and whether a batch may do what it asks for.

The hash of tokens t_0 .. t_n is the sum of (t_i + 1) * K**i modulo 2**64, which grows with one addition per token.
"""

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch import FROM_DEVICE, Batch, IntArray
from services.scheduler.core.ports import EngineFault, EngineLimits

HashArray = npt.NDArray[np.uint64]


class Corruption(EngineFault):
    """A batch refers to a page, position or token that is not its own, or a step is not treated as `ports` says."""


def require(holds: bool, what: str) -> None:
    """Raise Corruption unless something holds."""
    if not holds:
        raise Corruption(what)


class KvModel:
    """What the pages hold: per place the token, its position and the hash of its prefix."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        places = limits.num_pages * limits.page_size
        self._tokens: IntArray = np.full(places, -1, np.int32)
        self._positions: IntArray = np.full(places, -1, np.int32)
        self._hashes: HashArray = np.zeros(places, np.uint64)
        self._next_step = 0

    def admit(self, batch: Batch, in_flight: list[Batch]) -> None:
        """Check that a batch fits the limits, and that what it takes or writes is nobody else's."""
        limits, slots, ends = self._limits, batch.slots, batch.starts + batch.lengths
        require(batch.step == self._next_step, f"step {batch.step} where {self._next_step} was due")
        self._next_step += 1
        require(len(in_flight) < 2, "three steps in flight")
        require(0 < len(slots) <= limits.max_running, f"{len(slots)} rows")
        require(len(np.unique(slots)) == len(slots), "a slot has two rows")
        require(bool(((slots >= 0) & (slots < limits.max_running)).all()), "a slot out of range")
        require(len(batch.input_ids) == batch.lengths.sum() <= limits.max_step_tokens, "number of input ids")
        require(bool((batch.lengths > 0).all() and (batch.starts >= 0).all()), "an empty row")
        require(bool((batch.lengths[: batch.num_decode] == 1).all()), "a decode row of more than one token")
        require(int(ends.max()) <= limits.max_seq_len, "a row beyond the context")
        require(bool(((batch.page_table >= 0) & (batch.page_table < limits.num_pages)).all()), "a page out of range")
        began = {setup.slot for setup in batch.setups}
        busy = {int(slot) for other in in_flight for slot in other.slots}
        require(not began & busy, f"slots {began & busy} change hands while a step in flight refers to them")
        require(began <= set(slots.tolist()), "a setup without a row")
        users: dict[int, set[int]] = {}
        for other in [*in_flight, batch]:
            for row, slot in enumerate(other.slots.tolist()):
                last = (other.starts[row] + other.lengths[row] - 1) // limits.page_size
                for page in other.page_table[row, : last + 1].tolist():
                    users.setdefault(page, set()).add(slot)
        for row, slot in enumerate(slots.tolist()):
            first, last = batch.starts[row] // limits.page_size, (ends[row] - 1) // limits.page_size
            for page in batch.page_table[row, first : last + 1].tolist():
                require(users[page] == {slot}, f"page {page} is written by slot {slot} and used by {users[page]}")

    def compute(
        self, batch: Batch, tokens: IntArray, length: IntArray, prompt_len: IntArray, powers: HashArray
    ) -> None:
        """Check what each row reads against what its slot has said, then write what it computes."""
        size, at = self._limits.page_size, 0
        for row, slot in enumerate(batch.slots.tolist()):
            start, end = int(batch.starts[row]), int(batch.starts[row] + batch.lengths[row])
            given = batch.input_ids[at : at + end - start]
            at += end - start
            past = tokens[slot, :end]
            name = f"step {batch.step}, slot {slot}, tokens {start} to {end}"
            require(end <= length[slot], f"{name}: only {length[slot]} are known")
            require(bool(((given == past[start:]) | (given == FROM_DEVICE)).all()), f"{name}: other input ids")
            if batch.sample[row]:
                require(end == length[slot], f"{name}: draws from the middle of {length[slot]}")
                require(batch.out_index[row] == end - prompt_len[slot] + 1, f"{name}: index {batch.out_index[row]}")
            positions = np.arange(end)
            places = batch.page_table[row, positions // size] * size + positions % size
            hashes = prefix_hashes(past, powers)
            read, written = places[:start], places[start:]
            sound = self._positions[read] == positions[:start]
            sound &= (self._tokens[read] == past[:start]) & (self._hashes[read] == hashes[:start])
            require(bool(sound.all()), f"{name}: KV of position {int(sound.argmin()) if start else 0} is not its own")
            self._tokens[written], self._positions[written] = past[start:], positions[start:]
            self._hashes[written] = hashes[start:]


def prefix_hashes(ids: IntArray, powers: HashArray) -> HashArray:
    """Hash of each prefix of some tokens: (n,)."""
    hashes: HashArray = np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * powers[: len(ids)], dtype=np.uint64)
    return hashes
