"""The cost model: how long a step will take, learnt from how long steps took.

A step costs a fixed part, a part per decode row and per token of KV that those rows read, and a part per prompt
token that grows with the depth it is computed at. The five factors are fitted by recursive least squares with slow
forgetting, so the model follows the machine. Scheduling asks one question of it: how many prompt tokens fit
into a step without making running streams wait too long.
"""

import math
from dataclasses import dataclass

import numpy as np

FORGETTING = 0.995
MIN_STEPS = 8
"""Steps with prompt tokens to learn from before the model counts as fitted."""

WARM_UP_STEPS = 2
"""First steps of each kind teach nothing: they pay for what is compiled or allocated once."""

COLD_TOKENS = 256
"""Prompt tokens beside running rows while the model is not fitted."""

MAX_SURPRISE = 4.0
"""A step that took longer than this many times what was expected counts as this much: a hiccup is no trend."""

MIN_CHUNK_TOKENS = 16
"""A prompt always advances by this much, or the requests behind it would never start."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the cost of a step depends on.

    Attributes:
        decode_rows: rows that compute one token.
        decode_kv: tokens of KV that those rows read.
        prefill_tokens: prompt tokens computed.
        prefill_reads: sum over them of the tokens before each.
    """

    decode_rows: int
    decode_kv: int
    prefill_tokens: int
    prefill_reads: float


class CostModel:
    """Predicts milliseconds of a step, once it has seen enough of them."""

    def __init__(self) -> None:
        self._weights = np.zeros(5)
        self._spread = np.eye(5) * 1e4
        self._seen = [0, 0]
        self._num_untimed = 0

    @property
    def is_fitted(self) -> bool:
        """Whether steps with prompt tokens were seen often enough."""
        return self._seen[1] >= MIN_STEPS + WARM_UP_STEPS

    def observe(self, shape: StepShape, forward_ms: float) -> None:
        """Learn from a step that has retired; steps of unknown duration teach nothing."""
        if forward_ms <= 0.0 or not math.isfinite(forward_ms):
            self._num_untimed += 1
            return
        kind = int(shape.prefill_tokens > 0)
        self._seen[kind] += 1
        if self._seen[kind] <= WARM_UP_STEPS:
            return
        if self.is_fitted:
            forward_ms = min(forward_ms, MAX_SURPRISE * self.predict_ms(shape))
        x = _features(shape)
        gain = self._spread @ x
        gain /= FORGETTING + x @ gain
        self._weights += gain * (forward_ms - x @ self._weights)
        self._spread = (self._spread - np.outer(gain, x @ self._spread)) / FORGETTING
        # Without this a feature that stays at zero for long would let its uncertainty grow beyond all bounds.
        np.fill_diagonal(self._spread, np.minimum(self._spread.diagonal(), 1e6))

    def predict_ms(self, shape: StepShape) -> float:
        """Predict the duration of a step; no factor counts as negative."""
        return float(_features(shape) @ np.maximum(self._weights, 0.0))

    def prefill_budget(self, decode: StepShape, depth: int, max_gap_ratio: float) -> int | None:
        """How many prompt tokens may join a step of decode rows.

        Args:
            decode: the step without prompt tokens.
            depth: tokens before the first prompt token.
            max_gap_ratio: how many times as long as without them the step may take.

        Returns:
            Tokens, or None where nothing bounds them: the ratio is 0, or the engine does not tell how long it takes.
        """
        if max_gap_ratio <= 0.0 or self._num_untimed > sum(self._seen):
            return None
        if not self.is_fitted:
            return COLD_TOKENS
        per_token, per_read = np.maximum(self._weights[3:], 0.0) / 1e3
        spare_ms = max(0.0, max_gap_ratio - 1.0) * self.predict_ms(decode)
        linear = per_token + per_read * depth / 1e3
        square = per_read / 2e3
        if square > 0.0:
            tokens = (math.sqrt(linear * linear + 4.0 * square * spare_ms) - linear) / (2.0 * square)
        elif linear > 0.0:
            tokens = spare_ms / linear
        else:
            return None
        return max(MIN_CHUNK_TOKENS, int(tokens))


def _features(shape: StepShape) -> np.ndarray:
    """Scaled so that factors of real machines are of one order: rows by 100, reads and tokens by 1000s."""
    return np.array(
        [1.0, shape.decode_rows / 1e2, shape.decode_kv / 1e5, shape.prefill_tokens / 1e3, shape.prefill_reads / 1e6]
    )
