"""What of a draw is left to chance, and the chance: from a request's seed and a token's index alone.

Owns the rule that says when a request always takes the likeliest token, the keys of draws, and the race that turns
probabilities into a token on the host. Knows no slots and no logits.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import IntArray
from shared.sampling import SamplingParams

Uint64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

_BLOCK: Final = 128
"""Tokens that race as one before they race with each other."""
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BLOCK: Final = np.uint64(2**32)
"""Counter of the first block; counters below are token ids."""


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How a request draws.

    Attributes:
        temperature: 0 for the likeliest token always; filters are then off.
        top_k: how many of the likeliest tokens are left, or 0 for all.
        top_p, min_p: as in the request.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are left out before the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def draw_rule(params: SamplingParams, vocab_size: int) -> DrawRule:
    """Work out how a request draws from a vocabulary of this size."""
    # The likeliest token has at least an even share: a smaller top_p keeps that one alone.
    if params.is_greedy or params.top_p * vocab_size <= 1.0 or params.min_p >= 1.0:
        return DrawRule(0.0, 0, 1.0, 0.0)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return DrawRule(params.temperature, top_k, params.top_p, params.min_p)


def draw_keys(seeds: Uint64, indices: IntArray) -> Uint64:
    """Make one well mixed number per (seed, index), the same everywhere and for ever.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), over the hashed seed plus a counter.

    Args:
        seeds: (n,) seeds of the requests.
        indices: (n,) 1-based indices of the tokens.
    """
    keyed = _mix(seeds + _STRIDE)
    return _mix(_mix(keyed + indices.astype(np.uint64) * _STRIDE) ^ keyed)


def uniforms(keys: Uint64, counters: Uint64) -> npt.NDArray[np.float64]:
    """Make numbers inside (0, 1), never at its ends: output `counter` of a SplitMix64 whose state is the key.

    Args:
        keys: (n, 1) from `draw_keys`.
        counters: (n, m) or (m,).
    """
    mixed = _mix(keys + counters * _STRIDE)
    return ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def race(probs: Tensor, keys: Uint64) -> Int64:
    """Draw a token per row by an exponential race, which hardly notices small changes of the probabilities.

    Every contender with weight w arrives after -log(u) / w, with a number u of its own; the first one wins. Arrivals
    are independent exponential times of rate w, so each wins with probability w / (sum of all w): the distribution
    exactly. u belongs to (seed, index, contender), so probabilities that are a little off move each arrival a little,
    and the winner stays unless another was as close: a race differs with a chance of at most twice the total variation
    between the two distributions. An inverse of the cumulative distribution would move the borders of all tokens
    behind one that changed. To need few numbers, blocks of tokens race first with their summed weights, then the
    tokens of the winning block; P(block) P(token | block) is P(token) again.

    Source: exponential races are the Gumbel-max trick (Yellott 1977; Maddison, Tarlow, Minka 2014); as a coupling of
    draws made apart, Daliri, Musco, Suresh 2024.

    Args:
        probs: (rows, vocab_size) float32, not negative, some positive in each row; need not sum to 1.
        keys: (rows,) from `draw_keys`.

    Returns:
        (rows,) ids, each with a positive probability.
    """
    rows, vocab_size = probs.shape
    whole = vocab_size // _BLOCK * _BLOCK
    sums = probs[:, :whole].view(rows, -1, _BLOCK).sum(-1)
    if whole < vocab_size:
        sums = torch.cat((sums, probs[:, whole:].sum(-1, keepdim=True)), 1)
    counters = np.arange(sums.shape[1], dtype=np.uint64) + _FIRST_BLOCK
    block = _first(sums.cpu().numpy(), keys, counters)
    ids = block[:, None] * _BLOCK + np.arange(_BLOCK)
    known = torch.from_numpy(np.minimum(ids, vocab_size - 1)).to(probs.device)
    inside = np.where(ids < vocab_size, probs.gather(1, known).cpu().numpy(), np.float32(0.0))
    tokens: Int64 = block * _BLOCK + _first(inside, keys, ids.astype(np.uint64))
    return tokens


def _first(weights: npt.NDArray[np.float32], keys: Uint64, counters: Uint64) -> Int64:
    """(rows, n) weights -> (rows,) place of who arrives first; one without weight never does."""
    with np.errstate(divide="ignore"):
        arrivals = -np.log(uniforms(keys[:, None], counters)) / weights
    first: Int64 = arrivals.argmin(-1)
    return first


def _mix(x: Uint64) -> Uint64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
