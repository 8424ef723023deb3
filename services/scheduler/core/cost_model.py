"""The cost model: how long a step will take, learnt from how long steps took.

The decode rows of a step cost a fixed part, a part per row and per token of KV that they read. Prompt tokens add a
fixed part (the weights are read in another form, or once more), a part per token of KV that their rows read, and a
part per prompt token that grows with the depth it is computed at. Both halves are fitted by recursive least squares
with slow forgetting, so the model follows the machine; the decode half by steps without prompt tokens, as soon as
there are some. Scheduling asks one question: how many prompt tokens fit into a step without making running
streams wait too long.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FORGETTING = 0.995

LEAST_KNOWN = 1e-6
"""What stays known of a factor, as the inverse of a variance, however long no step has told of it."""

MIN_STEPS = 8
"""Steps of a kind to learn from before its half counts as fitted."""

WARM_UP_STEPS = 2
"""First steps of each kind teach nothing: they pay for what is compiled or allocated once."""

COLD_TOKENS = 64
"""Prompt tokens beside running rows while the model is not fitted, for each time that a step may take longer."""

LEARN_EVERY = 8
"""So many decode steps teach together, as their mean, once their half is fitted: they are many and alike, and learning
takes the step loop longer than settling them does."""

LONG_MS = 30.0
"""A longer step counts for less, by the square of how many times it is as long: what it took beside what is to be
learnt grows with it."""

MAX_SURPRISE, TREND = 1.5, 4
"""A step that took longer than this many times what was expected counts as this much: a hiccup is no trend, but more
than so many of them in a row are."""

FAR = 2
"""Steps with more than so many times the rows of those without prompts lately are too far from them to be told by
them: under load every step may have prompts in it, so what those rows cost is learnt from such steps alone."""

GROWTH = 2
"""A step has at most so many times the prompt tokens of the largest one before it: beyond those it is a guess."""

MIN_CHUNK_TOKENS = 16
"""A prompt always advances by this much, or the requests behind it would never start. Fewer would hardly be cheaper:
what tokens share, reading the weights and the prompt's KV once more, is most of what they cost."""

Features = tuple[float, ...]
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the cost of a step depends on.

    Attributes:
        decode_rows: rows that compute one token.
        decode_kv: tokens of KV that those rows read.
        prefill_tokens: prompt tokens computed.
        prefill_reads: sum over them of the tokens before each.
        prefill_kv: tokens of KV that the rows of prompts read, each once.
    """

    decode_rows: int
    decode_kv: int
    prefill_tokens: int
    prefill_reads: float
    prefill_kv: int = 0


class _Fit:
    """Recursive least squares of a few factors, none of which counts as negative.

    Args:
        spread: how far from zero each factor may be expected. What equal steps cannot tell apart goes to the factors
            with the widest.

    Attributes:
        factors: milliseconds of each feature.
    """

    def __init__(self, *spread: float) -> None:
        self._weights: Matrix = np.zeros(len(spread))
        self._known: Matrix = np.diag(1.0 / np.array(spread))
        self._one = np.eye(len(spread))
        self._seen = 0
        self.factors: Features = (0.0,) * len(spread)

    @property
    def is_fitted(self) -> bool:
        """Whether enough was seen."""
        return self._seen >= MIN_STEPS

    def predict(self, features: Features) -> float:
        """Milliseconds for features."""
        return _dot(features, self.factors)

    def observe(self, features: Features, took_ms: float, whole_ms: float, steps: int = 1) -> None:
        """Learn from a step.

        Args:
            features: of the step, or the means of several.
            took_ms: what the factors are to explain of it.
            whole_ms: all that it took, over 0; decides how much it counts for.
            steps: how many the means are of.
        """
        x, keep, sure = np.array(features), FORGETTING**steps, min(1.0, (LONG_MS / whole_ms) ** 2)
        if not self._seen:
            self._known *= sure  # what is expected beforehand must not outweigh steps that count for little
        self._seen += steps
        weight = steps * sure
        # What is known of a direction in which steps do not differ is forgotten down to a floor: the matrix stays one
        # that can be solved however long they are alike, and a step of another kind teaches at once.
        self._known = keep * self._known + (1.0 - keep) * LEAST_KNOWN * self._one + weight * np.outer(x, x)
        self._weights += np.linalg.solve(self._known, weight * x * (took_ms - x @ self._weights))
        self.factors = tuple(_not_negative(self._known, self._weights).tolist())


class CostModel:
    """Predicts milliseconds of a step, once it has seen enough of them."""

    def __init__(self) -> None:
        self._decode = _Fit(*[1e4] * 3)
        # A cost that may be of each token must not be taken for a fixed one: the budget would have no bound.
        self._prefill = _Fit(1.0, 1.0, 1e4, 1e4)
        self._joint = _Fit(1e4, 1e4, 1e4, 1.0, 1e4, 1e4)
        self._seen = [0, 0]
        self._num_untimed = 0
        self._surprises = [0, 0]
        self._largest = COLD_TOKENS
        self._known_rows = 0.0
        self._alike: list[tuple[Features, float]] = []

    @property
    def is_fitted(self) -> bool:
        """Whether enough was seen of both halves."""
        return self._joint.is_fitted or (self._prefill.is_fitted and self._decode.is_fitted)

    def observe(self, shape: StepShape, forward_ms: float) -> None:
        """Learn from a step that has retired; steps of unknown duration teach nothing."""
        if forward_ms <= 0.0 or not math.isfinite(forward_ms):
            self._num_untimed += 1
            return
        kind = int(shape.prefill_tokens > 0)
        self._seen[kind] += 1
        if self._seen[kind] <= WARM_UP_STEPS:
            return
        decode, prefill = _features(shape)
        if not kind:
            self._known_rows = max(float(shape.decode_rows), 0.99 * self._known_rows)
            self._observe_decode(decode, forward_ms)
            return
        if shape.decode_rows:
            self._largest = max(self._largest, shape.prefill_tokens)
        apart = not shape.decode_rows or self._knows(shape)
        took_ms = forward_ms
        if self._prefill.is_fitted and apart:
            took_ms = self._temper(kind, forward_ms, self.predict_ms(shape))
        if apart:
            base_ms = self._decode.predict(decode) if shape.decode_rows else 0.0
            self._prefill.observe(prefill, max(0.0, took_ms - base_ms), forward_ms)
        else:
            self._joint.observe((*decode, *prefill[1:]), took_ms, forward_ms)

    def _observe_decode(self, decode: Features, forward_ms: float) -> None:
        if not self._decode.is_fitted:
            self._decode.observe(decode, forward_ms, forward_ms)
            return
        self._alike.append((decode, self._temper(0, forward_ms, self._decode.predict(decode))))
        if len(self._alike) == LEARN_EVERY:
            features, took_ms = zip(*self._alike, strict=True)
            mean = tuple(sum(values) / LEARN_EVERY for values in zip(*features, strict=True))
            mean_ms = sum(took_ms) / LEARN_EVERY
            self._decode.observe(mean, mean_ms, mean_ms, LEARN_EVERY)
            self._alike.clear()

    def _temper(self, kind: int, took_ms: float, expected_ms: float) -> float:
        """Give what a step counts as having taken."""
        if took_ms <= MAX_SURPRISE * expected_ms:
            self._surprises[kind] = 0
            return took_ms
        self._surprises[kind] += 1
        hiccup = expected_ms > 0.0 and self._surprises[kind] <= TREND
        return MAX_SURPRISE * expected_ms if hiccup else took_ms

    def predict_ms(self, shape: StepShape) -> float:
        """Predict the duration of a step."""
        decode, prefill = _features(shape)
        of_decode, of_prefill = self._factors(shape)
        base_ms = _dot(decode, of_decode) if shape.decode_rows else 0.0
        return base_ms + (_dot(prefill, of_prefill) if shape.prefill_tokens else 0.0)

    def _knows(self, shape: StepShape) -> bool:
        """Whether steps without prompts tell what these decode rows cost."""
        return self._decode.is_fitted and shape.decode_rows <= FAR * self._known_rows

    def _factors(self, shape: StepShape) -> tuple[Features, Features]:
        """Give those of the decode rows and those of the prompts that hold for such a step."""
        # Where every step has prompt tokens, their fixed part cannot be told from that of the decode rows.
        joint = self._joint.factors[:3], (0.0, *self._joint.factors[3:])
        if shape.decode_rows and not self._knows(shape) and self._joint.is_fitted:
            return joint
        return (
            self._decode.factors if self._decode.is_fitted else joint[0],
            self._prefill.factors if self._prefill.is_fitted else joint[1],
        )

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
        if not (self._joint.is_fitted if not self._knows(decode) else self.is_fitted):
            return int(COLD_TOKENS * max(1.0, max_gap_ratio - 1.0))
        fixed, per_kv, per_token, per_read = self._factors(decode)[1]
        spare_ms = max(0.0, max_gap_ratio - 1.0) * self.predict_ms(decode) - fixed - per_kv * depth / 1e3
        if spare_ms <= 0.0:
            return MIN_CHUNK_TOKENS
        linear = (per_token + per_read * depth / 1e3 + per_kv) / 1e3
        square = per_read / 2e6
        if square > 0.0:
            tokens = (math.sqrt(linear * linear + 4.0 * square * spare_ms) - linear) / (2.0 * square)
        else:
            tokens = spare_ms / linear if linear > 0.0 else math.inf
        return max(MIN_CHUNK_TOKENS, int(min(tokens, GROWTH * self._largest)))


def _not_negative(known: Matrix, weights: Matrix) -> Matrix:
    """Fit without the factors that come out negative, until none does: left out alone they would bias the others."""
    wanted, found = known @ weights, weights
    while (found < 0.0).any():
        keep = found > 0.0
        found = np.zeros_like(weights)
        found[keep] = np.linalg.solve(known[np.ix_(keep, keep)], wanted[keep])
    return found


def _features(shape: StepShape) -> tuple[Features, Features]:
    """Of the decode rows and of the prompts; scaled so that factors of real machines are of one order."""
    decode = (1.0, shape.decode_rows / 1e2, shape.decode_kv / 1e5)
    prefill = (1.0, shape.prefill_kv / 1e3, shape.prefill_tokens / 1e3, shape.prefill_reads / 1e6)
    return decode, prefill


def _dot(a: Features, b: Features) -> float:
    """Plain numbers: for so few of them an array costs more than the sum."""
    return sum(x * y for x, y in zip(a, b, strict=True))
