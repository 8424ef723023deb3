"""One suite for every engine: what `core/ports.py` promises, whoever computes.

An engine joins with one entry in MAKERS. It must give greedy and seeded tokens that depend on a request alone.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.scheduler.core.batch import SlotSetup
from services.scheduler.core.ports import Engine
from services.scheduler.engine.local import LocalEngine
from services.scheduler.fake_engine import FakeEngine, FakeEngineConfig
from shared.sampling import SamplingParams
from tests.engine.conftest import VOCAB, write_checkpoint
from tests.engine.driver import TINY, Driver, Seq, pack_mask

NAN_TOKEN = 11
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=77)


def make_fake(_: Path) -> Engine:
    return FakeEngine(FakeEngineConfig(num_pages=64, max_running=8, base_ms=0.0, nan_marker=(NAN_TOKEN,)))


def make_cpu(folder: Path) -> Engine:
    from services.scheduler.engine.engine import build_engine
    from shared.model_files import locate

    engine = build_engine(TINY, locate(str(write_checkpoint(folder, "qwen2"))))
    assert isinstance(engine, LocalEngine)
    with torch.inference_mode():
        engine._model.embedding.weight.tensor[NAN_TOKEN] = torch.nan
    return engine


MAKERS: dict[str, Callable[[Path], Engine]] = {"fake": make_fake, "cpu": make_cpu}


@pytest.fixture(params=MAKERS)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    engine = MAKERS[request.param](tmp_path)
    yield Driver(engine)
    engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    ids = np.random.default_rng(seed + 1000 * length).integers(32, min(VOCAB, 126), length)
    return [int(token) for token in ids]


PROMPTS = [prompt(length) for length in (1, 15, 16, 17, 40)]


def outputs(seqs: list[Seq]) -> list[list[int]]:
    return [seq.output for seq in seqs]


def test_limits_are_whole(driver: Driver) -> None:
    limits = driver.engine.limits
    assert limits.fingerprint and limits.vocab_size > NAN_TOKEN
    assert all(0 <= token < limits.vocab_size for token in limits.eos_token_ids)
    assert limits.num_pages * limits.page_size >= limits.page_size * 2
    assert limits.max_step_tokens >= limits.max_running > 0
    assert limits == driver.engine.limits


def test_a_result_has_a_place_per_row_and_no_token_within_a_prompt(driver: Driver) -> None:
    short, long = driver.add(PROMPTS[1], GREEDY), driver.add(PROMPTS[4], GREEDY)
    result = driver.step([(short, 15), (long, 20)])
    assert result.token_ids.shape == result.bad.shape == (2,)
    assert result.token_ids[1] == -1 and 0 <= result.token_ids[0] < driver.limits.vocab_size
    assert not result.bad.any() and result.logprobs == {} and result.forward_ms >= 0.0
    assert driver.step([(long, 20), (short, 1)]).token_ids.min() >= 0


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_tokens_depend_on_the_request_alone(params: SamplingParams, driver: Driver) -> None:
    together = outputs(driver.run(PROMPTS, 8, params))
    alone = [driver.run([each], 8, params)[0].output for each in reversed(PROMPTS)]
    assert together == alone[::-1]
    assert all(0 <= token < driver.limits.vocab_size for output in together for token in output)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_change_nothing(chunk: int, driver: Driver) -> None:
    whole = outputs(driver.run(PROMPTS, 6, SEEDED))
    assert outputs(driver.run(PROMPTS, 6, SEEDED, chunk=chunk)) == whole


def test_two_steps_in_flight_change_nothing(driver: Driver) -> None:
    found = []
    for overlap in (False, True):
        seqs = [driver.add(each, SEEDED) for each in PROMPTS[:3]]
        driver.prefill(seqs)
        driver.decode(seqs, 9, overlap=overlap)
        found.append(outputs(seqs))
        for seq in seqs:
            driver.release(seq)
    assert found[0] == found[1]


def test_prefill_and_decode_in_one_step(driver: Driver) -> None:
    expected = outputs(driver.run([PROMPTS[2], PROMPTS[4]], 9, GREEDY))
    running, late = driver.add(PROMPTS[2], GREEDY), driver.add(PROMPTS[4], GREEDY)
    driver.prefill([running])
    driver.prefill([late], chunk=9, beside=[running])
    driver.decode([running, late], 3)
    assert running.output == expected[0] and late.output == expected[1][:4]


def test_pages_of_another_request_may_be_read(driver: Driver) -> None:
    first = driver.add(PROMPTS[4], SEEDED)
    driver.prefill([first])
    driver.decode([first], 5)
    again = driver.add(PROMPTS[4], SEEDED)
    driver.share(again, first, 32)
    driver.prefill([again])
    driver.decode([again], 5)
    assert again.output == first.output


def test_a_request_goes_on_where_it_stopped(driver: Driver) -> None:
    whole = driver.run([PROMPTS[3]], 10, SEEDED)[0].output
    resumed = driver.add(PROMPTS[3], SEEDED, said=whole[:6])
    driver.prefill([resumed])
    driver.decode([resumed], 3)
    assert resumed.output == whole


def test_seeds_differ(driver: Driver) -> None:
    texts = {tuple(driver.run([PROMPTS[3]], 8, SamplingParams(seed=seed))[0].output) for seed in (0, 1, -1, 2**62)}
    assert len(texts) == 4


def test_bias_forces_and_bans_hold(driver: Driver) -> None:
    eos = next(iter(driver.limits.eos_token_ids))
    bias = {65: 100.0, eos: 90.0}
    forced = driver.run([PROMPTS[1]], 5, SamplingParams(logit_bias=bias))[0].output
    assert forced == [65] * 5
    held = driver.run([PROMPTS[1]], 5, SamplingParams(logit_bias={eos: 100.0}, min_tokens=3))[0].output
    assert eos not in held[:3] and held[3:] == [eos, eos]


def test_logprobs_where_asked(driver: Driver) -> None:
    asked = driver.add(PROMPTS[1], SamplingParams(temperature=0.0, logprobs=3))
    bare = driver.add(PROMPTS[2], SamplingParams(temperature=0.0, logprobs=0))
    silent = driver.add(PROMPTS[3], GREEDY)
    result = driver.step([(asked, 15), (bare, 16), (silent, 17)])
    assert set(result.logprobs) == {0, 1}
    assert len(result.logprobs[0].top_ids) == len(result.logprobs[0].top_logprobs) == 3
    assert len(result.logprobs[1].top_ids) == 0
    assert all(np.isfinite(found.logprob) and found.logprob <= 1e-6 for found in result.logprobs.values())
    assert (np.diff(result.logprobs[0].top_logprobs) <= 0).all()


def test_a_bad_row_is_flagged_alone(driver: Driver) -> None:
    expected = outputs(driver.run([PROMPTS[1], PROMPTS[3]], 5, GREEDY))
    broken = [*PROMPTS[2][:5], NAN_TOKEN, *PROMPTS[2][6:]]
    seqs = [driver.add(each, GREEDY) for each in (PROMPTS[1], broken, PROMPTS[3])]
    driver.prefill(seqs)
    driver.decode(seqs, 4)
    assert [seq.bad for seq in seqs] == [False, True, False]
    assert [seqs[0].output, seqs[2].output] == expected
    for seq in seqs:
        driver.release(seq)
    assert outputs(driver.run([PROMPTS[1], PROMPTS[3]], 5, GREEDY)) == expected


def test_a_slot_forgets_its_former_user(driver: Driver) -> None:
    expected = driver.run([PROMPTS[3]], 4, GREEDY)[0].output
    for _ in range(driver.limits.max_running + 1):
        driver.run([PROMPTS[3]], 2, SamplingParams(temperature=0.0, logit_bias={65: 100.0}))
        assert driver.run([PROMPTS[3]], 4, GREEDY)[0].output == expected


def test_guided_rows_draw_what_is_allowed(driver: Driver) -> None:
    expected = driver.run([PROMPTS[3]], 1, GREEDY)[0].output
    guided, free = driver.add(PROMPTS[1], SEEDED), driver.add(PROMPTS[3], GREEDY)
    allowed = [{70, 90}, {33}, {120, 64}]
    masks = [pack_mask(each, driver.limits.vocab_size) for each in allowed]
    driver.settle(driver.launch([(guided, 15), (free, 17)], masks={guided.slot: masks[0]}))
    for mask in masks[1:]:
        driver.settle(driver.launch([(guided, 1), (free, 1)], masks={guided.slot: mask}))
    assert all(token in each for token, each in zip(guided.output, allowed, strict=True))
    assert free.output[:1] == expected and not guided.bad
    nothing = pack_mask(set(), driver.limits.vocab_size)
    driver.settle(driver.launch([(guided, 1), (free, 1)], masks={guided.slot: nothing}))
    assert guided.bad and not free.bad


def test_prompts_are_scored_whole_or_in_chunks(driver: Driver) -> None:
    found = []
    for chunks in ([40], [16, 24]):
        seq = driver.add(PROMPTS[4], GREEDY)
        parts = [driver.settle(driver.launch([(seq, count)], num_top=2)).scores[0] for count in chunks]
        found.append([np.concatenate([getattr(part, name) for part in parts]) for name in ("logprobs", "top_ids")])
        assert [part.top_logprobs.shape for part in parts][-1] == (len(PROMPTS[4]) - 1 - sum(chunks[:-1]), 2)
        driver.release(seq)
    whole, pieces = found
    assert whole[0].shape == (39,) and whole[1].shape == (39, 2)
    assert np.isfinite(whole[0]).all() and (whole[0] <= 1e-6).all()
    assert pieces[0] == pytest.approx(whole[0], abs=1e-4)
    assert pieces[1].tolist() == whole[1].tolist()


def test_closing_twice_is_safe(driver: Driver) -> None:
    driver.run([PROMPTS[0]], 2)
    driver.engine.close()
    driver.engine.close()


def test_setups_carry_what_was_said(driver: Driver) -> None:
    seq = driver.add(PROMPTS[1], GREEDY, said=[65, 66])
    step, _ = driver.launch([(seq, 17)])
    setup = step.batch.setups[0]
    assert isinstance(setup, SlotSetup) and setup.output_ids.tolist() == [65, 66]
    assert step.batch.out_index.tolist() == [3]
    assert 0 <= driver.engine.wait(step).token_ids[0] < driver.limits.vocab_size
