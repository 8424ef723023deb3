"""Rotary position embedding: the frequencies of every scaling rule, and the rotation itself.

A position's angles depend on the position alone, never on how a request was cut into steps, so that cached
keys can be shared. All angles are float32.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.scheduler.engine.layers.weight import Source


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The scaling rule of a checkpoint; fields that a rule does not use keep their defaults.

    Attributes:
        kind: one of ROPE_KINDS.
        theta: base of the frequencies.
        rotary_dim: leading numbers of a head that are rotated.
        max_position: context that the checkpoint's config states.
        factor: how much longer the context becomes.
        original_max_position: context before the scaling.
        low_freq_factor, high_freq_factor: borders of the llama3 rule.
        beta_fast, beta_slow: borders of the yarn rule, in rotations.
        attention_factor: factor on cosines and sines of the yarn and the longrope rule.
        truncate: whether yarn rounds its borders to whole dimensions.
        short_factors, long_factors: (rotary_dim / 2,) divisors of the frequencies by the longrope rule: for engines
            that hold no more than the original context, and for those that hold more.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


class Angles:
    """Of a step's tokens; looked up when a layer first asks for them.

    Attributes:
        table: (max_seq_len, rotary_dim) float32, of all positions: cosines, then sines. For kernels that look up
            for themselves.
    """

    def __init__(self, rotary: "Rotary", positions: Tensor) -> None:
        self._rotary = rotary
        self._positions = positions

    @property
    def table(self) -> Tensor:
        """See the class."""
        return self._rotary.table

    @cached_property
    def cos(self) -> Tensor:
        """(num_tokens, 1, rotary_dim) float32."""
        return self._rotary.cos[self._positions]

    @cached_property
    def sin(self) -> Tensor:
        """(num_tokens, 1, rotary_dim) float32; the first half is negated."""
        return self._rotary.sin[self._positions]


class Rotary:
    """A table of angles up to the longest context, shared by all layers.

    Attributes:
        cos: (max_seq_len, 1, rotary_dim) float32.
        sin: likewise, the first half negated.
    """

    def __init__(self, config: RopeConfig, max_seq_len: int, device: torch.device) -> None:
        self._config = config
        self._max_seq_len = max_seq_len
        self._device = device
        self._build(None)

    def __call__(self, positions: Tensor) -> Angles:
        """Look up the angles of (num_tokens,) int64 positions."""
        return Angles(self, positions)

    @cached_property
    def table(self) -> Tensor:
        """(max_seq_len, rotary_dim) float32: cosines, then sines, each once."""
        half = self._config.rotary_dim // 2
        return torch.cat((self.cos[:, 0, :half], self.sin[:, 0, half:]), -1)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape of the divisors that `fill` takes."""
        return (self._config.rotary_dim // 2,)

    def fill(self, source: Source, part: int) -> None:
        """Take divisors of the frequencies, which GGUF files carry in place of a rule."""
        self._build(source.read().double())

    def _build(self, divisors: Tensor | None) -> None:
        config = self._config
        positions = torch.arange(self._max_seq_len, dtype=torch.float32)[:, None]
        if config.kind == "dynamic":
            freqs = _dynamic(config, self._max_seq_len)
        elif config.kind == "longrope":
            freqs = _longrope(config, self._max_seq_len)[None]
        else:
            freqs = _FREQUENCIES[config.kind](config)[None]
        if divisors is not None:
            freqs = (freqs / divisors).float()
        angles = positions * freqs
        cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
        self.cos = torch.cat((cos, cos), -1)[:, None].to(self._device)
        self.sin = torch.cat((-sin, sin), -1)[:, None].to(self._device)
        self.__dict__.pop("table", None)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate (num_tokens, num_heads, head_dim); dimension i turns with i + rotary_dim / 2."""
    rotary_dim = angles.cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned = rotate(x[..., :rotary_dim], angles)
        return torch.cat((turned, x[..., rotary_dim:]), -1)
    wide = x.float()
    return torch.addcmul(wide * angles.cos, wide.roll(rotary_dim // 2, -1), angles.sin).to(x.dtype)


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Factor on cosines and sines where a checkpoint does not state it."""

    def grow(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return grow(mscale) / grow(mscale_all_dim)
    return grow(1.0)


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """Factor on cosines and sines where a checkpoint does not state it."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max_position))


def _powers(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim


def _default(config: RopeConfig) -> Tensor:
    return 1.0 / (config.theta ** _powers(config))


def _linear(config: RopeConfig) -> Tensor:
    return _default(config) / config.factor


def _dynamic(config: RopeConfig, max_seq_len: int) -> Tensor:
    """One row of frequencies per position: beyond the stated context the base grows with the position."""
    lengths = torch.arange(1, max_seq_len + 1, dtype=torch.float32).clamp_(min=config.max_position)
    growth = config.factor * lengths / config.max_position - (config.factor - 1)
    base = config.theta * growth ** (config.rotary_dim / (config.rotary_dim - 2))
    return 1.0 / (base[:, None] ** _powers(config))


def _longrope(config: RopeConfig, max_seq_len: int) -> Tensor:
    """Give one set of frequencies for all that an engine holds: keys must not hang on how long a request grows."""
    factors = config.long_factors if max_seq_len > config.original_max_position else config.short_factors
    return _default(config) / torch.tensor(factors)


def _llama3(config: RopeConfig) -> Tensor:
    freqs = _default(config)
    turns = config.original_max_position * freqs / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return freqs * keep + freqs / config.factor * (1 - keep)


def _yarn(config: RopeConfig) -> Tensor:
    freqs = _default(config)

    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return freqs / config.factor * ramp + freqs * (1 - ramp)


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
ROPE_KINDS = (*_FREQUENCIES, "dynamic", "longrope")
"""The rules that are supported."""
