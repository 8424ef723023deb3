"""Chance by statistics with fixed seeds, filters and penalties against plain references."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.batch import ScoreRow, SlotSetup
from services.scheduler.engine.sampler import Draws, Guides, Sampler, filter_probs, score_tokens
from shared.sampling import SEED_MAX, SEED_MIN, SamplingParams
from tests.engine.driver import ints, pack_mask

VOCAB = 300
EOS = frozenset({2, 7})


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Deviations from the expected counts in units of their spread: about normal(0, 1)."""
    expected = probs * counts.sum()
    used = expected > 5
    freedom = int(used.sum()) - 1
    statistic = float((((counts - expected)[used]) ** 2 / expected[used]).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5


def draw(
    logits: torch.Tensor,
    params: list[SamplingParams],
    index: int | list[int] = 1,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
) -> Draws:
    rows = len(params)
    sampler = Sampler(rows + 2, logits.shape[1], EOS)
    for slot, each in enumerate(params):
        prompt = ints(prompts[slot] if prompts else [])
        sampler.set_up(SlotSetup(slot, each, prompt, ints(outputs[slot] if outputs else [])))
    indices = ints([index] * rows if isinstance(index, int) else index)
    return sampler.draw(logits.clone(), ints(np.arange(rows)), indices)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def plain_filter(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = np.argsort(-probs, kind="stable")
    kept = [int(i) for i in order[:top_k]]
    mass, chosen, total = 0.0, [], probs[kept].sum()
    for token in kept:
        if top_p < 1.0 and mass >= top_p * total:
            break
        chosen.append(token)
        mass += probs[token]
    return {token for token in chosen if probs[token] >= min_p * probs.max()}


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 3, 100, 200, 2500, 5000]),
    st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.sampled_from([0.05, 1.0, 3.0]),
)
def test_filters_equal_their_definition(seed: int, top_k: int, top_p: float, min_p: float, spread: float) -> None:
    vocab = 5000
    probs = torch.softmax(random_logits(2, seed, vocab) * spread, -1)
    rows = filter_probs(probs, np.array([top_k, vocab]), np.array([top_p, 1.0]), np.array([min_p, 0.0]))
    expected = plain_filter(probs[0].double().numpy(), top_k, top_p, min_p)
    found = set(rows[0].nonzero()[:, 0].tolist())
    # Sums are rounded differently: a token at the border may fall on either side.
    assert len(found ^ expected) <= 1
    assert torch.equal(rows[1], probs[1])


def test_draws_follow_temperature_and_filters() -> None:
    logits = random_logits(1, 5)
    rows = 20_000
    for params in (
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.01),
    ):
        draws = draw(logits.expand(rows, -1), [msgspec_seed(params, seed) for seed in range(rows)])
        probs = torch.softmax(logits[0].double() / params.temperature, -1).numpy()
        kept = plain_filter(probs, params.top_k or VOCAB, params.top_p, params.min_p)
        probs[[i for i in range(VOCAB) if i not in kept]] = 0
        counts = np.bincount(draws.tokens, minlength=VOCAB)
        assert counts[probs == 0].sum() == 0
        assert abs(chi_square(counts, probs / probs.sum())) < 4


def msgspec_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=seed
    )


def test_a_draw_does_not_depend_on_batch_or_slot() -> None:
    logits = random_logits(9, 8)
    params = [SamplingParams(temperature=1.2, seed=seed, top_p=0.95 if seed % 2 else 1.0) for seed in range(9)]
    together = draw(logits, params, index=list(range(1, 10))).tokens
    for row in range(9):
        sampler = Sampler(40, VOCAB, EOS)
        slot = 39 - row
        sampler.set_up(SlotSetup(slot, params[row], ints([]), ints([])))
        alone = sampler.draw(logits[row : row + 1].clone(), ints([slot]), ints([row + 1])).tokens[0]
        assert alone == together[row]


@pytest.mark.parametrize("seed", [0, -1, SEED_MIN, SEED_MAX])
def test_every_seed_of_64_bits_is_its_own(seed: int) -> None:
    logits = torch.zeros(40, VOCAB)
    own, other = (
        draw(logits, [SamplingParams(seed=value)] * 40, list(range(1, 41))).tokens for value in (seed, seed ^ 1)
    )
    assert len(set(own.tolist())) > 20 and (own != other).sum() > 30


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [40, 9, 200]] = 5.0
    logits[1, 299] = 1.0
    assert draw(logits, [SamplingParams(temperature=0.0)] * 3).tokens.tolist() == [9, 299, 0]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=t, seed=3) for t in (1e-6, 1e-10, 1e-45, 5e-324)]
    + [SamplingParams(temperature=2.0, top_p=p, seed=3) for p in (0.0, 1e-9, 1e-45)]
    + [SamplingParams(temperature=2.0, top_k=1, seed=3), SamplingParams(temperature=2.0, min_p=1.0, seed=3)],
)
def test_extreme_values_take_the_best_token(params: SamplingParams) -> None:
    logits = random_logits(4, 11)
    assert draw(logits, [params] * 4).tokens.tolist() == logits.argmax(-1).tolist()


def test_small_temperatures_stay_finite() -> None:
    logits = random_logits(4, 11) * 50
    draws = draw(logits, [SamplingParams(temperature=2e-5, seed=seed, logprobs=1) for seed in range(4)])
    assert draws.tokens.tolist() == logits.argmax(-1).tolist() and not draws.bad.any()


def plain_logits(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """The processors, one token after the other."""
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if len(output) < params.min_tokens:
        for token in (*EOS, *params.stop_token_ids):
            values[token] = -np.inf
    for token in range(len(values)):
        if token in prompt or token in output:
            rep = params.repetition_penalty
            values[token] = values[token] / rep if values[token] > 0 else values[token] * rep
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    return values


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.sampled_from([1.0, 0.5, 1.3]),
    st.sampled_from([0.0, -1.5, 2.0]),
    st.sampled_from([0.0, 0.7, -2.0]),
    st.lists(st.integers(0, 20), max_size=12),
    st.lists(st.integers(0, 20), max_size=12),
    st.dictionaries(st.integers(0, 30), st.floats(-100, 100, width=32), max_size=5),
    st.integers(0, 14),
)
def test_processors_equal_their_definition(
    seed: int, repetition: float, presence: float, frequency: float,
    prompt: list[int], output: list[int], bias: dict[int, float], min_tokens: int,
) -> None:  # fmt: skip
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        logit_bias=bias, min_tokens=min_tokens, stop_token_ids=[11], logprobs=VOCAB,
    )  # fmt: skip
    logits = random_logits(2, seed)
    # Half of the output is known at the start, the rest is drawn: forced by the logits of those steps.
    sampler = Sampler(4, VOCAB, EOS)
    known = len(output) // 2
    sampler.set_up(SlotSetup(1, params, ints(prompt), ints(output[:known])))
    for place, token in enumerate(output[known:], known):
        forced = torch.full((1, VOCAB), -1e9)
        forced[0, token] = 1e9
        drawn = int(sampler.draw(forced, ints([1]), ints([place + 1])).tokens[0])
        output[place] = drawn
    draws = sampler.draw(logits[:1].clone(), ints([1]), ints([len(output) + 1]))
    expected = torch.log_softmax(torch.from_numpy(plain_logits(logits[0].numpy(), params, prompt, output)), -1)
    found = draws.logprobs[0]
    values = np.full(VOCAB, np.nan)
    values[found.top_ids] = found.top_logprobs
    assert values == pytest.approx(expected.clamp(min=-9999).numpy(), abs=2e-4)
    assert draws.tokens[0] == int(expected.argmax())


def test_processors_of_one_row_leave_the_others_alone() -> None:
    logits = random_logits(3, 2)
    special = SamplingParams(temperature=0.0, logit_bias={5: 100.0, 10**6: 1.0}, frequency_penalty=2.0, logprobs=3)
    plain = SamplingParams(temperature=0.0, logprobs=3)
    draws = draw(logits, [plain, special, plain], outputs=[[1], [5, 5], [1]])
    alone = draw(logits[:1], [plain])
    assert draws.tokens.tolist() == [int(logits[0].argmax()), 5, int(logits[2].argmax())]
    assert draws.logprobs[0].logprob == alone.logprobs[0].logprob


def test_a_slot_forgets_its_former_user() -> None:
    sampler = Sampler(1, VOCAB, EOS)
    biased = SamplingParams(temperature=0.0, logit_bias={5: 100.0}, frequency_penalty=2.0)
    sampler.set_up(SlotSetup(0, biased, ints([]), ints([])))
    assert sampler.draw(random_logits(1), ints([0]), ints([1])).tokens[0] == 5
    sampler.set_up(SlotSetup(0, SamplingParams(temperature=0.0), ints([]), ints([])))
    assert sampler.draw(random_logits(1), ints([0]), ints([1])).tokens[0] == int(random_logits(1).argmax())


def test_logprobs_are_those_before_temperature_and_end_at_a_finite_number() -> None:
    logits = random_logits(2, 4)
    logits[1, 3:] = -torch.inf
    params = [SamplingParams(temperature=1.8, seed=1, logprobs=0), SamplingParams(temperature=0.3, seed=1, logprobs=5)]
    draws = draw(logits, params)
    expected = torch.log_softmax(logits, -1)
    assert draws.logprobs[0].logprob == pytest.approx(float(expected[0, draws.tokens[0]]), abs=1e-5)
    assert len(draws.logprobs[0].top_ids) == 0 and len(draws.logprobs[1].top_ids) == 5
    assert draws.tokens[1] < 3 and draws.logprobs[1].top_logprobs.min() == -9999.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_are_flagged_alone(value: float, temperature: float) -> None:
    logits = random_logits(4, 6)
    params = [SamplingParams(temperature=temperature, seed=seed, logprobs=1) for seed in range(4)]
    clean = draw(logits, params)
    logits[1, 17] = value
    logits[3] = -torch.inf
    draws = draw(logits, params)
    assert draws.bad.tolist() == [False, True, False, True]
    assert draws.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert set(draws.logprobs) == {0, 2}


def test_half_precision_logits_are_accepted() -> None:
    logits = random_logits(2, 6).to(torch.bfloat16)
    params = [SamplingParams(temperature=1.0, seed=9), SamplingParams(temperature=0.0)]
    assert draw(logits, params).tokens.tolist() == draw(logits.float(), params).tokens.tolist()


def test_guided_rows_draw_what_their_mask_allows() -> None:
    logits = random_logits(4, 9)
    params = [SamplingParams(temperature=t, seed=4, logprobs=2) for t in (0.0, 1.0, 0.0, 1.0)]
    allowed = [{3, 31, 32, 63, 64, 299}, {250}, set()]
    sampler = Sampler(4, VOCAB, EOS)
    for slot, each in enumerate(params):
        sampler.set_up(SlotSetup(slot, each, ints([]), ints([])))
    masks = np.stack([pack_mask(each, VOCAB) for each in allowed])
    guides = Guides(np.array([0, 1, 3]), masks)
    draws = sampler.draw(logits.clone(), ints([0, 1, 2, 3]), ints([1] * 4), guides)
    best = max(allowed[0], key=lambda token: float(logits[0, token]))
    assert draws.tokens[:3].tolist() == [best, 250, int(logits[2].argmax())]
    assert draws.bad.tolist() == [False, False, False, True]
    assert draws.logprobs[1].logprob == pytest.approx(0.0, abs=1e-6)


def test_scores_are_those_of_the_model() -> None:
    logits = random_logits(150, 13)
    targets = ints(np.random.default_rng(1).integers(0, VOCAB, 150))
    found, bad = score_tokens(lambda hidden: hidden, logits, ScoreRow(0, targets, 4))
    expected = torch.log_softmax(logits, -1)
    assert not bad and found.logprobs == pytest.approx(expected[torch.arange(150), targets.tolist()].numpy(), abs=1e-5)
    assert found.top_ids.tolist() == expected.topk(4, -1).indices.tolist()
    logits[149, 2] = float("nan")
    found, bad = score_tokens(lambda hidden: hidden, logits, ScoreRow(0, targets, 0))
    assert bad and np.isfinite(found.logprobs).all() and found.top_ids.shape == (150, 0)
    assert score_tokens(lambda hidden: hidden, logits[:0], ScoreRow(0, ints([]), 2))[0].top_ids.shape == (0, 2)
