"""Draws tokens from logits: greedy or by chance, with filters, and reports log probabilities.

Chance (`chance`) is made from the request's seed and the token's index alone. So a draw does not depend on the
batch, the slot, the threads or the device, and a request that starts again draws the same; numbers that come out
a little different, as from another form of a matrix product, rarely change a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import (
    BoolArray,
    IntArray,
    MaskArray,
    PositionLogprobs,
    RowLogprobs,
    ScoreRow,
    SlotSetup,
)
from services.scheduler.engine.chance import draw_keys, draw_rule, race
from services.scheduler.engine.logits import LogitsProcessors, apply_masks

MIN_LOGPROB: Final = -9999.0
"""Reported in place of anything less likely; JSON has no infinity."""
_SCORED_AT_ONCE: Final = 64
"""Scored positions whose logits are in memory together."""
_CANDIDATES: Final = (128, 2048)
"""How many of the likeliest tokens are looked at, in turn, before all are sorted."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn, one place per row that draws.

    Attributes:
        tokens: (num_drawn,) token ids on the host; 0 in bad rows.
        bad: (num_drawn,) rows whose logits were not numbers.
        logprobs: place -> log probabilities, where asked for.
    """

    tokens: IntArray
    bad: BoolArray
    logprobs: dict[int, RowLogprobs]


@dataclass(frozen=True, slots=True)
class Guides:
    """What rows with a grammar may draw.

    Attributes:
        rows: (num_guided,) places among the rows that draw.
        masks: (num_guided, words) one bit per token.
    """

    rows: npt.NDArray[np.int64]
    masks: MaskArray


class Sampler:
    """Per-slot parameters and the drawing itself. Lives on the thread of the device."""

    def __init__(self, max_running: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._processors = LogitsProcessors(vocab_size, eos_token_ids)
        self._temperature = np.zeros(max_running, dtype=np.float64)
        self._top_k = np.zeros(max_running, dtype=np.int64)
        self._top_p = np.ones(max_running, dtype=np.float64)
        self._min_p = np.zeros(max_running, dtype=np.float64)
        self._greedy = np.ones(max_running, dtype=np.bool_)
        self._filtered = np.zeros(max_running, dtype=np.bool_)
        self._seed = np.zeros(max_running, dtype=np.uint64)
        self._num_logprobs = np.full(max_running, -1, dtype=np.int64)

    def set_up(self, setup: SlotSetup) -> None:
        """Begin a request in a slot."""
        params, slot = setup.params, setup.slot
        rule = draw_rule(params, self._vocab_size)
        self._temperature[slot] = rule.temperature
        self._top_k[slot] = rule.top_k or self._vocab_size
        self._top_p[slot] = rule.top_p
        self._min_p[slot] = rule.min_p
        self._greedy[slot] = rule.temperature == 0.0
        self._filtered[slot] = rule.is_filtered
        self._seed[slot] = np.uint64(params.seed % 2**64)
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._processors.set_up(setup)

    def draw(self, logits: Tensor, slots: IntArray, out_index: IntArray, guides: Guides | None = None) -> Draws:
        """Draw one token per row.

        Args:
            logits: (num_drawn, vocab_size); may be changed.
            slots: (num_drawn,) slot of each row.
            out_index: (num_drawn,) 1-based index of the token to draw.
            guides: what some rows may draw.
        """
        logits = logits.float()
        self._processors.apply(logits, slots, out_index)
        if guides is not None:
            apply_masks(logits, guides.rows, guides.masks)
        peaks = logits.amax(-1)
        # A NaN anywhere is the maximum of its row; all of a row at minus infinity cannot be drawn from either.
        bad = ~torch.isfinite(peaks)
        bad_host: BoolArray = bad.cpu().numpy()
        if bad_host.any():
            logits.masked_fill_(bad[:, None], 0.0)
        tokens = np.zeros(len(slots), dtype=np.int64)
        greedy = self._greedy[slots]
        if greedy.any():
            rows = np.flatnonzero(greedy)
            tokens[rows] = _rows_of(logits, rows).argmax(-1).cpu().numpy()
        if not greedy.all():
            rows = np.flatnonzero(~greedy)
            own = len(rows) < len(slots) or not (self._num_logprobs[slots] >= 0).any()
            tokens[rows] = self._draw_by_chance(_rows_of(logits, rows), slots[rows], out_index[rows], own=own)
        tokens[bad_host] = 0
        logprobs = self._logprobs(logits, slots, tokens, bad_host)
        self._processors.note(slots, tokens.astype(np.int32))
        return Draws(tokens.astype(np.int32), bad_host, logprobs)

    def _draw_by_chance(
        self, logits: Tensor, slots: IntArray, out_index: IntArray, *, own: bool
    ) -> npt.NDArray[np.int64]:
        """Draw by chance; `own` says that nobody else needs these logits any more."""
        device = logits.device
        temperature = torch.from_numpy(self._temperature[slots].astype(np.float32)).to(device)
        scaled = logits.div_(temperature[:, None]) if own else logits / temperature[:, None]
        probs = torch.softmax(scaled, -1)
        filtered = np.flatnonzero(self._filtered[slots])
        if len(filtered):
            chosen = slots[filtered]
            kept = filter_probs(
                _rows_of(probs, filtered), self._top_k[chosen], self._top_p[chosen], self._min_p[chosen]
            )
            if len(filtered) == len(slots):
                probs = kept
            else:
                probs.index_copy_(0, torch.from_numpy(filtered).to(device), kept)
        return race(probs, draw_keys(self._seed[slots], out_index))

    def _logprobs(
        self, logits: Tensor, slots: IntArray, tokens: npt.NDArray[np.int64], bad: BoolArray
    ) -> dict[int, RowLogprobs]:
        wanted = self._num_logprobs[slots]
        rows = np.flatnonzero((wanted >= 0) & ~bad)
        if not len(rows):
            return {}
        scores = torch.log_softmax(_rows_of(logits, rows), -1).clamp_(min=MIN_LOGPROB)
        own = scores.gather(1, torch.from_numpy(tokens[rows]).to(scores.device)[:, None])[:, 0].cpu().numpy()
        top, top_ids = scores.topk(max(1, int(wanted[rows].max())), -1)
        values, ids = top.cpu().numpy(), top_ids.cpu().numpy().astype(np.int32)
        return {
            int(row): RowLogprobs(float(own[i]), ids[i, : wanted[row]], values[i, : wanted[row]])
            for i, row in enumerate(rows)
        }


def score_tokens(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, score: ScoreRow
) -> tuple[PositionLogprobs, bool]:
    """Give the log probabilities of a prompt's own tokens, straight from the model.

    Args:
        logits_of: (n, hidden_size) final states -> (n, vocab_size) logits.
        hidden: (num_scored, hidden_size) final states of the positions before the targets.
        score: the targets, and how many alternatives are wanted.

    Returns:
        The log probabilities, and whether any were not numbers.
    """
    num, bad = len(score.targets), False
    logprobs = np.zeros(num, dtype=np.float32)
    top_ids = np.zeros((num, score.num_top), dtype=np.int32)
    top_logprobs = np.zeros((num, score.num_top), dtype=np.float32)
    for first in range(0, num, _SCORED_AT_ONCE):
        part = slice(first, first + _SCORED_AT_ONCE)
        scores = torch.log_softmax(logits_of(hidden[part]).float(), -1)
        bad |= bool(scores.isnan().any())
        scores.nan_to_num_(nan=MIN_LOGPROB).clamp_(min=MIN_LOGPROB)
        targets = torch.from_numpy(score.targets[part].astype(np.int64)).to(scores.device)
        logprobs[part] = scores.gather(1, targets[:, None])[:, 0].cpu().numpy()
        top, ids = scores.topk(score.num_top, -1)
        top_ids[part], top_logprobs[part] = ids.cpu().numpy(), top.cpu().numpy()
    return PositionLogprobs(logprobs, top_ids, top_logprobs), bad


def filter_probs(
    probs: Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> Tensor:
    """Set to 0 what top_k, then top_p of what is left, then min_p leave out. Equals at a border are kept.

    Args:
        probs: (rows, vocab_size) float32, summing to 1.
        top_k: (rows,) how many of the likeliest to keep, 1 to vocab_size.
        top_p: (rows,) share of what top_k left that the likeliest must reach.
        min_p: (rows,) share of the likeliest token's probability that a token must have.
    """
    vocab_size = probs.shape[1]
    floor: npt.NDArray[np.float64] = min_p * probs.amax(-1).double().cpu().numpy()
    # With min_p alone nothing need be ordered; the others take as many candidates as they turn out to need.
    waiting = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    for size in (*(size for size in _CANDIDATES if size < vocab_size), vocab_size):
        rows = waiting[(top_k[waiting] <= size) | (top_k[waiting] == vocab_size)]
        if len(rows):
            best = _rows_of(probs, rows).topk(size, -1).values.double().cpu().numpy()
            found, known = _smallest_kept(best, top_k[rows], top_p[rows], vocab_size)
            floor[rows[known]] = np.maximum(floor[rows[known]], found[known])
            waiting = np.setdiff1d(waiting, rows[known])
    limits = torch.from_numpy(floor.astype(np.float32)).to(probs.device)
    return probs.masked_fill(probs < limits[:, None], 0.0)


def _smallest_kept(
    best: npt.NDArray[np.float64], top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64], vocab_size: int
) -> tuple[npt.NDArray[np.float64], BoolArray]:
    """Find the smallest probability that top_k and top_p keep.

    Args:
        best: (rows, size) largest probabilities, falling.
        top_k: (rows,) at most size, or vocab_size.
        top_p: (rows,).
        vocab_size: top_k of rows that keep all.

    Returns:
        (rows,) the probabilities, and which of them are right: for the others `best` does not reach far enough.
    """
    rows, size = np.arange(len(best)), best.shape[1]
    sums = best.cumsum(-1)
    limit = np.minimum(top_k, size)
    mass = np.where(top_k <= size, sums[rows, limit - 1], 1.0)
    # A token stays while those before it have not reached the share.
    kept = ((sums - best) < (top_p * mass)[:, None]).sum(-1)
    kept = np.where(top_p < 1.0, np.minimum(kept, limit), limit)
    known = (top_k <= size) | (sums[:, -1] >= top_p * mass) | (size == vocab_size)
    return best[rows, kept - 1], known


def _rows_of(values: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    """Select rows, without a copy when they are all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, torch.from_numpy(rows).to(values.device))
