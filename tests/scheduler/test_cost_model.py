import random

import pytest

from services.scheduler.core.cost_model import COLD_TOKENS, MIN_CHUNK_TOKENS, CostModel, StepShape


def _true_ms(shape: StepShape) -> float:
    return (
        2.0
        + 0.004 * shape.decode_rows
        + 2e-5 * shape.decode_kv
        + 0.002 * shape.prefill_tokens
        + (1.5e-7 * shape.prefill_reads)
    )


def _shape(rng: random.Random, prompt: bool) -> StepShape:
    rows = rng.randint(1, 256)
    tokens = rng.randint(16, 2048) if prompt else 0
    return StepShape(rows, rows * rng.randint(10, 1500), tokens, tokens * rng.uniform(0, 30_000))


def _fitted(noise: float = 0.0, steps: int = 400) -> CostModel:
    rng, model = random.Random(1), CostModel()
    for i in range(steps):
        shape = _shape(rng, prompt=i % 3 == 0)
        model.observe(shape, _true_ms(shape) * (1 + rng.uniform(-noise, noise)))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_prediction_follows_what_was_seen(noise):
    rng, model = random.Random(2), _fitted(noise)
    for i in range(50):
        shape = _shape(rng, prompt=i % 2 == 0)
        assert model.predict_ms(shape) == pytest.approx(_true_ms(shape), rel=0.02 + noise)


@pytest.mark.parametrize("depth", [0, 1000, 32_000])
def test_budget_fills_the_step_up_to_its_ratio(depth):
    model, decode = _fitted(), StepShape(64, 64 * 800, 0, 0.0)
    tokens = model.prefill_budget(decode, depth, 2.5)
    mixed = StepShape(64, 64 * 800, tokens, tokens * (depth + tokens / 2))
    assert _true_ms(mixed) == pytest.approx(2.5 * _true_ms(decode), rel=0.03)


def test_deep_prompts_get_smaller_chunks_but_never_none():
    model, decode = _fitted(), StepShape(1, 100, 0, 0.0)
    budgets = [model.prefill_budget(decode, depth, 2.0) for depth in (0, 10_000, 100_000, 10**9)]
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] == MIN_CHUNK_TOKENS


def test_it_is_careful_before_it_has_seen_prompts():
    model, decode = CostModel(), StepShape(1, 100, 0, 0.0)
    for _ in range(100):
        model.observe(decode, 2.0)
    assert [model.prefill_budget(decode, 0, ratio) for ratio in (1.01, 2.0, 5.0)] == [
        COLD_TOKENS,
        COLD_TOKENS,
        4 * COLD_TOKENS,
    ]
    assert _fitted().prefill_budget(decode, 0, 0.0) is None, "0 switches it off"


def test_a_burst_of_prompts_beside_running_rows_is_enough_to_learn_from():
    rng, model = random.Random(6), CostModel()
    for _ in range(40):
        shape = _shape(rng, prompt=True)
        model.observe(shape, _true_ms(shape))
    decode = StepShape(64, 64 * 800, 0, 0.0)
    assert model.predict_ms(decode) == pytest.approx(_true_ms(decode), rel=0.2)
    assert model.prefill_budget(decode, 0, 2.5) > COLD_TOKENS


def test_an_engine_that_tells_no_times_is_bounded_by_tokens_alone():
    model = CostModel()
    for _ in range(20):
        model.observe(StepShape(1, 100, 100, 5000.0), 0.0)
    assert model.prefill_budget(StepShape(1, 100, 0, 0.0), 0, 2.5) is None


def _cpu_ms(shape: StepShape) -> float:
    """A CPU: the wide form of the weights is read for prompts besides the narrow one, and KV is gathered."""
    base = 20.0 + 1.5 * shape.decode_rows + 4e-4 * shape.decode_kv
    if not shape.prefill_tokens:
        return base
    return base + 14.0 + 0.004 * shape.prefill_kv + 0.5 * shape.prefill_tokens + 2e-4 * shape.prefill_reads


@pytest.mark.parametrize("hiccup", [False, True])
def test_a_long_prompt_beside_a_few_rows_keeps_to_its_ratio(hiccup):
    model, kv = CostModel(), 8 * 100
    for start in (0, 0, 0, 512, 1024, 1536):
        alone = StepShape(0, 0, 512, 512 * (start + 256), start + 512)
        model.observe(alone, _cpu_ms(alone))
    for _ in range(40):
        kv += 8
        model.observe(StepShape(8, kv, 0, 0.0), _cpu_ms(StepShape(8, kv, 0, 0.0)))
    start, ratios = 0, []
    while start < 4000:
        kv += 8
        decode = StepShape(8, kv, 0, 0.0)
        tokens = model.prefill_budget(decode, start, 2.5)
        mixed = StepShape(8, kv, tokens, tokens * (start + tokens / 2), start + tokens)
        took_ms = _cpu_ms(mixed)
        ratios.append((took_ms / _cpu_ms(decode), tokens))
        model.observe(mixed, took_ms * (10 if hiccup and len(ratios) == 5 else 1))
        start += tokens
    steady = [ratio for ratio, tokens in ratios[10:] if tokens > MIN_CHUNK_TOKENS]  # deeper, the least chunk is more
    assert len(steady) > 20
    assert max(steady) < 2.9 and sum(steady) / len(steady) == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("slow", [0.1, 1.0, 5.0, 25.0, 100.0])
def test_machines_of_every_speed_keep_to_the_ratio(slow):
    rng, model, kv = random.Random(2), CostModel(), 8 * 100
    for _ in range(40):
        kv += 8
        decode = StepShape(8, kv, 0, 0.0)
        model.observe(decode, slow * _cpu_ms(decode) * rng.gauss(1.0, 0.02))
    for _ in range(2):
        start, ratios = 0, []
        while start < 4000:
            kv += 8
            decode = StepShape(8, kv, 0, 0.0)
            tokens = model.prefill_budget(decode, start, 2.9)
            mixed = StepShape(8, kv, tokens, tokens * (start + tokens / 2), start + tokens)
            ratios.append(_cpu_ms(mixed) / _cpu_ms(decode))
            model.observe(mixed, slow * _cpu_ms(mixed) * rng.gauss(1.0, 0.02))
            start += tokens
    assert max(ratios[2:]) < 3.5 and sum(ratios) / len(ratios) == pytest.approx(2.9, rel=0.15)


def test_rows_that_never_ran_without_prompts_are_told_by_the_steps_they_ran_in():
    """One stream, then a crowd in which every step has a prompt: its base is not that of the one stream."""
    rng, model = random.Random(3), CostModel()
    for i in range(100):
        model.observe(StepShape(1, 50 + i, 0, 0.0), _cpu_ms(StepShape(1, 50 + i, 0, 0.0)))
    ratios, kv = [], 2000
    for _ in range(80):
        rows = rng.randint(16, 32)
        kv = 100 * rows + rng.randint(0, 500)
        decode = StepShape(rows, kv, 0, 0.0)
        tokens = model.prefill_budget(decode, 0, 2.9)
        mixed = StepShape(rows, kv, tokens, tokens * tokens / 2, tokens)
        ratios.append(_cpu_ms(mixed) / _cpu_ms(decode))
        model.observe(mixed, _cpu_ms(mixed) * rng.gauss(1.0, 0.03))
    assert sum(ratios[12:]) / len(ratios[12:]) == pytest.approx(2.9, rel=0.25)


@pytest.mark.parametrize("seed", range(30))
def test_steps_of_one_length_whatever_is_in_them(seed):
    """Nothing that a step holds costs anything: no factor is found, and still every budget has a bound."""
    rng, model = random.Random(seed), CostModel()
    for _ in range(150):
        decode_rows = rng.choice([0, 4, 4, 8])
        tokens = rng.randint(1, 300) if not decode_rows or rng.random() < 0.3 else 0
        model.observe(StepShape(decode_rows, 100 * decode_rows, tokens, tokens**2 / 2, tokens), rng.gauss(10.0, 0.5))
    budget = model.prefill_budget(StepShape(8, 800, 0, 0.0), 0, 2.9)
    assert budget is not None and MIN_CHUNK_TOKENS <= budget <= 2 * 300


def test_a_machine_that_becomes_eight_times_as_slow_is_believed():
    rng, model = random.Random(6), _fitted()
    for _ in range(600):
        shape = _shape(rng, prompt=rng.random() < 0.3)
        model.observe(shape, 8 * _true_ms(shape))
    shape = StepShape(64, 64 * 800, 0, 0.0)
    assert model.predict_ms(shape) == pytest.approx(8 * _true_ms(shape), rel=0.3)


def test_first_steps_and_hiccups_teach_little():
    rng, model = random.Random(5), CostModel()
    for i in range(600):
        shape = _shape(rng, prompt=i % 2 == 0)
        model.observe(shape, _true_ms(shape) if i >= 4 and i != 500 else 60_000.0)
    shape = StepShape(64, 64 * 800, 0, 0.0)
    assert model.predict_ms(shape) == pytest.approx(_true_ms(shape), rel=0.1)


def test_a_long_time_of_equal_steps_does_not_spoil_it():
    model, decode = _fitted(), StepShape(64, 64 * 800, 0, 0.0)
    for _ in range(50_000):
        model.observe(decode, _true_ms(decode))
    tokens = model.prefill_budget(decode, 0, 2.5)
    assert tokens is not None and 500 < tokens < 5000
    rng = random.Random(3)
    for i in range(100):
        shape = _shape(rng, prompt=i % 2 == 0)
        model.observe(shape, _true_ms(shape))
    assert model.predict_ms(decode) == pytest.approx(_true_ms(decode), rel=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_one_stream_for_hours_neither_spoils_it_nor_overflows(seed):
    """Of what never differs nothing can be known, and not knowing it may not grow without bound."""
    rng, model, kv = random.Random(seed), CostModel(), 100
    for i in range(20_000):
        kv = kv + 1 if kv < 50_000 and rng.random() < 0.99 else 100
        tokens = 200 if rng.random() < 0.002 else 0
        shape = StepShape(1, kv, tokens, tokens * tokens / 2, tokens)
        true_ms = 0.5 + 1e-4 * kv
        model.observe(shape, true_ms * max(0.2, rng.gauss(1.0, 0.3)))
        if i > 200:
            alone_ms = model.predict_ms(StepShape(1, kv, 0, 0.0))
            assert true_ms / 2 < alone_ms < true_ms * 2, f"step {i}"
    many = StepShape(32, 3200, 0, 0.0)
    for _ in range(300):
        model.observe(many, 8.0)
    assert model.predict_ms(many) == pytest.approx(8.0, rel=0.2)


def test_a_machine_that_becomes_slower_is_noticed():
    rng, model = random.Random(4), _fitted()
    for i in range(1500):
        shape = _shape(rng, prompt=i % 3 == 0)
        model.observe(shape, 2 * _true_ms(shape))
    shape = _shape(rng, prompt=False)
    assert model.predict_ms(shape) == pytest.approx(2 * _true_ms(shape), rel=0.05)
