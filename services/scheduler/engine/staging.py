"""What a step tells the device, as one block of integers that is copied once.

Owns the block on the device, its pinned images on the host, and the mirror of the page table. The front of the
block has a fixed place for everything that a captured graph reads; what only eager steps need lies behind it.
A pinned image is written again only after the copy that read it has ended.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import Batch, IntArray
from services.scheduler.engine.kernels.elementwise import lay_out_inputs
from services.scheduler.engine.stream import new_event

NUM_IMAGES: Final = 4
"""Steps in flight, and one to spare."""
MAX_CHANGES: Final = 512
"""Changes of the page table that go with one step; more are sent ahead of it."""
_ALIGN: Final = 4
"""Words; kernels may read 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    words: int
    dtype: str = "int32"


def _sections(max_rows: int, max_tokens: int, piece_words: int) -> tuple[list[_Section], list[_Section]]:
    """The front of the block, and what lies behind it."""
    # The least number of places that a step padded for a graph may fill.
    chunks = max(max_rows, 32)
    front = [
        _Section("slots", max_rows),
        _Section("seq_lens", max_rows),
        _Section("ids", max_rows),
        _Section("positions", max_rows),
        _Section("mapping", max_rows),
        _Section("draw_slots", max_rows),
        _Section("temperatures", max_rows, "float32"),
        _Section("top_k", max_rows),
        _Section("top_p", max_rows, "float32"),
        _Section("min_p", max_rows, "float32"),
        _Section("seeds", 2 * max_rows, "int64"),
        _Section("num_changes", 1),
        _Section("changes", 2 * MAX_CHANGES),
    ]
    behind = [
        _Section("chunk_slots", chunks),
        _Section("chunk_starts", chunks),
        _Section("chunk_lengths", chunks),
        _Section("chunk_offsets", chunks),
        _Section("pieces", piece_words),
        _Section("token_ids", max_tokens),
        _Section("token_slots", max_tokens),
        _Section("token_positions", max_tokens),
        _Section("token_mapping", max_tokens),
        _Section("wanted", 2 * (max_rows + max_tokens), "int64"),
    ]
    return front, behind


class StepBlock:
    """The block and the page table of a device. Used by one thread, on one stream.

    Attributes:
        max_rows: rows of a step at most.
        table: (slots + 1, columns) int32, device; the last line is padding's and stays 0.
        last_tokens: (slots + 1,) int32, device; the token drawn last for each slot.
        padding_slot: slot of padding rows.
    """

    def __init__(self, max_running: int, columns: int, max_tokens: int, piece_words: int, device: torch.device) -> None:
        """Reserve the memory.

        Args:
            max_running: request slots; a step has no more rows.
            columns: pages of the longest request.
            max_tokens: tokens of the largest step.
            piece_words: of the list of the prefill kernel.
            device: where it lies.
        """
        self.max_rows = max_rows = max_running
        self.padding_slot = max_running
        self.table = torch.zeros((max_running + 1, columns), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_running + 1, dtype=torch.int32, device=device)
        self._mirror = np.zeros((max_running + 1, columns), dtype=np.int32)
        front, behind = _sections(max_rows, max(max_tokens, max_rows), piece_words)
        self._places: dict[str, tuple[int, _Section]] = {}
        at = 0
        for section in (*front, *behind):
            self._places[section.name] = (at, section)
            at += -(-section.words // _ALIGN) * _ALIGN
            if section is front[-1]:
                self._front_words = at
        self._block = torch.zeros(at, dtype=torch.int32, device=device)
        self._views = {name: self._typed(self._block, name) for name in self._places}
        self._is_cuda = device.type == "cuda"
        self._images = deque(_Image(at, self._places, pinned=self._is_cuda) for _ in range(NUM_IMAGES))
        self._input_ids = torch.zeros(max(max_tokens, max_rows), dtype=torch.int64, device=device)

    def view(self, name: str, size: int) -> Tensor:
        """The first entries of a section, on the device: always at the same place."""
        return self._views[name][:size]

    def open(self) -> "StepImage":
        """Begin the next step; waits for the copy that last read the image, which has long ended."""
        image = self._images[0]
        self._images.rotate(-1)
        if image.event is not None:
            image.event.synchronize()
        return StepImage(self, image)

    def changes_of(self, batch: Batch) -> IntArray:
        """Find where the batch's pages differ from the device's table, and count them as sent.

        Returns:
            (num_changes, 2): place in the flat table, and the page.
        """
        width = batch.page_table.shape[1]
        known = self._mirror[batch.slots, :width]
        rows, columns = np.nonzero(known != batch.page_table)
        if not len(rows):
            return np.empty((0, 2), np.int32)
        pages = batch.page_table[rows, columns]
        self._mirror[batch.slots[rows], columns] = pages
        places = batch.slots[rows] * self._mirror.shape[1] + columns
        return np.stack((places, pages), 1).astype(np.int32)

    def lay_out(self, prefix: str, num_tokens: int) -> Tensor:
        """Make the input ids on the device from the copied block; see `lay_out_inputs`.

        Args:
            prefix: "" for the front's ids, "token_" for those of an eager step.
            num_tokens: tokens of the step, padding included.

        Returns:
            (num_tokens,) int64, always at the same place.
        """
        input_ids = self._input_ids[:num_tokens]
        lay_out_inputs(
            self.view(f"{prefix}ids", num_tokens),
            self.view("token_slots" if prefix else "slots", num_tokens),
            self.last_tokens,
            input_ids,
            self.view("changes", 2 * MAX_CHANGES).view(-1, 2),
            self.view("num_changes", 1),
            self.table,
        )
        return input_ids

    def words(self, *, whole: bool) -> int:
        """Size of all of it, or of its front."""
        return len(self._block) if whole else self._front_words

    def send(self, image: "_Image", *, whole: bool) -> None:
        """Copy an image to the device: its front, or all of it."""
        words = self.words(whole=whole)
        self._block[:words].copy_(image.tensor[:words], non_blocking=True)
        if self._is_cuda:
            image.event = image.event or new_event()
            image.event.record()

    def _typed(self, words: Tensor, name: str) -> Tensor:
        at, section = self._places[name]
        return words[at : at + section.words].view(getattr(torch, section.dtype))


class _Image:
    """One pinned image of the block, and its sections."""

    def __init__(self, words: int, places: dict[str, tuple[int, _Section]], *, pinned: bool) -> None:
        self.tensor = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self.host = host = self.tensor.numpy()
        self.sections: dict[str, npt.NDArray[np.generic]] = {
            name: host[at : at + section.words].view(section.dtype) for name, (at, section) in places.items()
        }
        self.event: torch.cuda.Event | None = None


class StepImage:
    """One step while it is written down."""

    def __init__(self, block: StepBlock, image: _Image) -> None:
        self._block = block
        self._image = image

    def put(self, name: str, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", pad: int = 0) -> None:
        """Write the first entries of a section, and `pad` zeros behind them."""
        section, num = self._image.sections[name], values.size
        section[:num] = values if values.ndim == 1 else values.reshape(-1)
        if pad:
            section[num : num + pad] = 0

    def fill(self, name: str, first: int, last: int, value: int) -> None:
        """Write one value to the entries first .. last - 1."""
        self._image.sections[name][first:last] = value

    def fill_lines(self, name: str, first: int, last: int, line: "IntArray") -> None:
        """Write one line of a section of lines to those of the numbers first .. last - 1."""
        lines = self._image.sections[name].reshape(-1, len(line))
        lines[first:last] = line

    def put_changes(self, changes: IntArray) -> IntArray:
        """Write down as many changes of the page table as fit; returns those that do not."""
        now = changes[:MAX_CHANGES]
        self.fill("num_changes", 0, 1, len(now))
        if len(now):
            self.put("changes", now)
        return changes[MAX_CHANGES:]

    def send(self, *, whole: bool) -> None:
        """Copy it to the device."""
        self._block.send(self._image, whole=whole)

    def to_bytes(self, *, whole: bool) -> bytes:
        """All of it, or its front, for another rank's block."""
        return self._image.host[: self._block.words(whole=whole)].tobytes()

    def from_bytes(self, data: bytes) -> None:
        """Write down what another rank has written."""
        words = np.frombuffer(data, dtype=np.int32)
        self._image.host[: len(words)] = words
