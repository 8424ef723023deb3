"""Chance by statistics with fixed seeds: the right distribution, and draws that small errors leave alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.engine.chance import draw_keys, draw_rule, race, uniforms
from shared.sampling import SamplingParams
from tests.engine.driver import ints
from tests.engine.test_sampler import chi_square, random_logits


def keys_of(num: int, index: int = 1) -> np.ndarray:
    """Keys of that many seeds."""
    return draw_keys(np.arange(num, dtype=np.uint64), ints(np.full(num, index)))


def test_uniform_numbers_are_uniform_and_fixed() -> None:
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 100)
    keys = draw_keys(seeds, ints(np.tile(np.arange(1, 101), 200)))
    values = uniforms(keys[:, None], np.arange(4, dtype=np.uint64))
    assert values.min() > 0.0 and values.max() < 1.0 and len(np.unique(values)) == values.size
    counts = np.histogram(values, bins=64, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(64, 1 / 64))) < 4
    by_draw = values.reshape(200, 100, 4)
    for one, other in (
        (by_draw[:-1], by_draw[1:]),
        (by_draw[:, :-1], by_draw[:, 1:]),
        (by_draw[..., :-1], by_draw[..., 1:]),
    ):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.03
    ends = np.array([[0], [2**64 - 1]], dtype=np.uint64)
    assert (uniforms(ends, np.zeros(1, np.uint64)) > 0.0).all()
    # Written down: a change would break the promise that a seed keeps its text.
    keys = draw_keys(np.array([0, 42, 2**64 - 1], dtype=np.uint64), ints([1, 5, 1000]))
    assert keys.tolist() == [9735418304920043012, 2747794492358934890, 6289187201338707565]
    assert race(torch.ones(3, 49152), keys).tolist() == [32213, 36477, 28892]


@pytest.mark.parametrize("vocab", [1, 5, 128, 300, 1024])
def test_a_race_follows_the_probabilities(vocab: int) -> None:
    probs = torch.softmax(random_logits(1, 3, vocab), -1)
    rows = 40_000
    counts = np.bincount(race(probs.expand(rows, vocab), keys_of(rows)), minlength=vocab)
    assert counts.sum() == rows and len(counts) == vocab
    if vocab > 1:
        assert abs(chi_square(counts, probs[0].double().numpy())) < 4


def test_a_race_needs_no_sum_of_one() -> None:
    probs = torch.softmax(random_logits(50, 3), -1)
    assert race(probs * 0.25, keys_of(50)).tolist() == race(probs, keys_of(50)).tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-45, 1e-30, 1e-8, 0.1, 1.0]), min_size=1, max_size=400).filter(any),
    st.integers(0, 2**64 - 1),
)
def test_what_has_no_weight_never_wins(weights: list[float], key: int) -> None:
    token = int(race(torch.tensor([weights]), np.array([key], dtype=np.uint64))[0])
    assert 0 <= token < len(weights) and weights[token] > 0


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_small_errors_of_the_logits_rarely_change_a_draw(spread: float) -> None:
    rows, vocab = 2000, 4096
    logits = random_logits(1, 5, vocab).expand(rows, vocab) / 2 * spread
    noise = 1e-2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(6))
    exact, near = torch.softmax(logits, -1), torch.softmax(logits + noise, -1)
    variation = float((exact - near).abs().sum(-1).mean() / 2)
    flips = (race(exact, keys_of(rows)) != race(near, keys_of(rows))).mean()
    # As the inverse of the cumulative distribution would draw, with one number per row.
    chance = torch.rand(rows, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    inverse = [torch.searchsorted(probs.double().cumsum(-1), chance) for probs in (exact, near)]
    assert flips <= 3 * variation
    assert flips * 5 < (inverse[0] != inverse[1]).double().mean()


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=1e-10), True),
        (SamplingParams(temperature=2.0, top_k=1), True),
        (SamplingParams(temperature=2.0, top_p=1 / 300), True),
        (SamplingParams(temperature=2.0, min_p=1.0), True),
        (SamplingParams(temperature=2.0, top_p=1 / 299), False),
        (SamplingParams(temperature=0.01, min_p=0.99, top_k=2), False),
    ],
)
def test_who_always_takes_the_likeliest(params: SamplingParams, greedy: bool) -> None:
    rule = draw_rule(params, 300)
    assert (rule.temperature == 0.0) is greedy
    assert rule.is_filtered is not greedy


def test_a_top_k_of_the_whole_vocabulary_leaves_nothing_out() -> None:
    for top_k in (0, -1, 300, 1000):
        assert not draw_rule(SamplingParams(temperature=1.0, top_k=top_k), 300).is_filtered
