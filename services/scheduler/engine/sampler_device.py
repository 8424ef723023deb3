"""Draws tokens on a device without asking it for anything, so that steps can be launched behind each other.

Chance is Gumbel noise that depends on the request's seed, the token's index and the entry alone; filters become
a smallest logit first. What a row wants besides (bias, penalties, masks, log probabilities) is done with torch's
own operations on the same logits. The parameters of a step's rows travel in its block.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import IntArray, RowLogprobs, SlotSetup
from services.scheduler.engine.chance import draw_keys, draw_rule
from services.scheduler.engine.kernels.gumbel import gumbel_choose, gumbel_piece, gumbel_sample
from services.scheduler.engine.kernels.limits import keep_limits
from services.scheduler.engine.logits import apply_masks
from services.scheduler.engine.logits_device import DeviceProcessors
from services.scheduler.engine.parallel.comm import Comm
from services.scheduler.engine.sampler import MIN_LOGPROB, Guides
from services.scheduler.engine.staging import StepBlock, StepImage


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log probabilities on their way.

    Attributes:
        rows: (num_wanted,) places among the rows that drew.
        num_top: (num_wanted,) alternatives each wants.
        own: (num_wanted,) float32, of the drawn token.
        top: (num_wanted, most) float32, and `top_ids` int64.
        source: of a copy under way, what it is copied from.
    """

    rows: npt.NDArray[np.int64]
    num_top: npt.NDArray[np.int64]
    own: Tensor
    top: Tensor
    top_ids: Tensor
    source: "PendingLogprobs | None" = None

    def to_host(self) -> "PendingLogprobs":
        """Start the copy to pinned memory on the current stream."""

        def pinned(values: Tensor) -> Tensor:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            return host.copy_(values, non_blocking=True)

        return PendingLogprobs(self.rows, self.num_top, pinned(self.own), pinned(self.top), pinned(self.top_ids), self)

    def read(self) -> dict[int, RowLogprobs]:
        """Read what has been copied: place -> log probabilities."""
        own, top, ids = self.own.numpy(), self.top.numpy(), self.top_ids.numpy().astype(np.int32)
        return {
            int(row): RowLogprobs(float(own[i]), ids[i, : self.num_top[i]], top[i, : self.num_top[i]])
            for i, row in enumerate(self.rows)
        }


class DeviceSampler:
    """Per-slot parameters and the drawing itself. Used by one thread, on one stream.

    Attributes:
        tokens: (max_rows,) int32, device; what was drawn last, -1 where the logits were not numbers.
    """

    def __init__(self, max_running: int, vocab_size: int, eos_token_ids: frozenset[int], block: StepBlock) -> None:
        device = block.table.device
        self.tokens = torch.zeros(block.max_rows, dtype=torch.int32, device=device)
        self._block = block
        self._vocab_size = vocab_size
        self._processors = DeviceProcessors(max_running, vocab_size, eos_token_ids, device)
        self._temperature = np.zeros(max_running, dtype=np.float32)
        self._top_k = np.zeros(max_running, dtype=np.int32)
        self._top_p = np.ones(max_running, dtype=np.float32)
        self._min_p = np.zeros(max_running, dtype=np.float32)
        self._seed = np.zeros(max_running, dtype=np.uint64)
        self._num_logprobs = np.full(max_running, -1, dtype=np.int64)

    def set_up(self, setup: SlotSetup) -> None:
        """Begin a request in a slot."""
        params, slot = setup.params, setup.slot
        rule = draw_rule(params, self._vocab_size)
        self._temperature[slot] = rule.temperature
        self._top_k[slot] = rule.top_k
        self._top_p[slot] = rule.top_p
        self._min_p[slot] = rule.min_p
        self._seed[slot] = np.uint64(params.seed % 2**64)
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._processors.set_up(setup)

    def describe(self, image: StepImage, slots: IntArray, out_index: IntArray, padded: int) -> None:
        """Write down how the rows that draw do so.

        Args:
            image: the step.
            slots: (num_drawn,) slot of each row.
            out_index: (num_drawn,) 1-based index of the token to draw.
            padded: rows with the padding behind them.
        """
        num, pad = len(slots), padded - len(slots)
        image.put("draw_slots", slots)
        image.fill("draw_slots", num, padded, self._block.padding_slot)
        image.put("temperatures", self._temperature[slots], pad)
        image.put("top_k", self._top_k[slots], pad)
        image.put("top_p", self._top_p[slots])
        image.fill("top_p", num, padded, 1)
        image.put("min_p", self._min_p[slots], pad)
        image.put("seeds", draw_keys(self._seed[slots], out_index).view(np.int64), pad)

    def is_plain(self, slots: IntArray) -> bool:
        """Whether some rows' slots want nothing but a token."""
        return not (self._num_logprobs[slots] >= 0).any() and not self._processors.concern(slots)

    def is_filtered(self, slots: IntArray) -> bool:
        """Whether any of some rows' slots leaves unlikely tokens out."""
        return bool((self._top_k[slots] > 0).any() or (self._top_p[slots] < 1).any() or (self._min_p[slots] > 0).any())

    def draw_pieces(self, logits: Tensor, first_id: int, comm: Comm) -> None:
        """Draw one token per row that filters nothing, each rank from its piece of the logits; may be captured.

        Args:
            logits: (rows, size of the piece).
            first_id: of the piece.
            comm: the ranks, which all end up with the same tokens.
        """
        rows, block = logits.shape[0], self._block
        pairs = gumbel_piece(logits, block.view("temperatures", rows), block.view("seeds", rows), first_id)
        feed = (block.view("draw_slots", rows), block.last_tokens)
        gumbel_choose(comm.gather(pairs), self.tokens[:rows], feed)

    def take_told(self, rows: int, comm: Comm) -> None:
        """Take the tokens that rank 0 has drawn."""
        tokens = comm.broadcast(self.tokens[:rows])
        self._block.last_tokens.index_copy_(0, self._block.view("draw_slots", rows).long(), tokens)

    def draw_plain(self, logits: Tensor) -> None:
        """Draw one token per row, from (rows, vocab_size) logits, as the block says; may be captured."""
        rows, block = logits.shape[0], self._block
        temperatures = block.view("temperatures", rows)
        limits = keep_limits(
            logits, temperatures, block.view("top_k", rows), block.view("top_p", rows), block.view("min_p", rows)
        )
        gumbel_sample(
            logits,
            temperatures,
            block.view("seeds", rows),
            limits=limits,
            out=self.tokens[:rows],
            feed=(block.view("draw_slots", rows), block.last_tokens),
        )

    def draw(
        self, logits: Tensor, slots: IntArray, out_index: IntArray, guides: Guides | None = None
    ) -> PendingLogprobs | None:
        """Draw one token per row, with all that the rows want.

        Args:
            logits: (num_drawn, vocab_size); may be changed.
            slots: (num_drawn,) slot of each row.
            out_index: (num_drawn,) 1-based index of the token to draw.
            guides: what some rows may draw.
        """
        if guides is not None or self._processors.concern(slots):
            logits = logits.float()
            self._processors.apply(logits, slots, out_index)
            if guides is not None:
                apply_masks(logits, guides.rows, guides.masks)
        self.draw_plain(logits)
        tokens = self.tokens[: len(slots)]
        self._processors.note(slots, tokens)
        rows = np.flatnonzero(self._num_logprobs[slots] >= 0)
        return self._logprobs(logits, tokens, rows, self._num_logprobs[slots[rows]]) if len(rows) else None

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: npt.NDArray[np.int64], num_top: npt.NDArray[np.int64]
    ) -> PendingLogprobs:
        places = torch.from_numpy(rows).to(logits.device)
        scores = torch.log_softmax(logits[places].float(), -1).clamp_(min=MIN_LOGPROB)
        own = scores.gather(1, tokens[places].long().clamp_(min=0)[:, None])[:, 0]
        top, top_ids = scores.topk(max(1, int(num_top.max())), -1)
        return PendingLogprobs(rows, num_top, own, top, top_ids)
