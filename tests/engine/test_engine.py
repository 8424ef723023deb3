"""The whole engine against transformers, and against itself under other cuts, pages and neighbours."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.scheduler.core.batch import SlotSetup
from services.scheduler.core.ports import EngineFault, ShowsProgress
from services.scheduler.engine.device import describe_processor
from services.scheduler.engine.local import LocalEngine, LocalStep
from shared.model_files import EMBEDDED_NAME, locate
from shared.sampling import SamplingParams
from shared.vocab import load_vocabulary
from tests.engine.conftest import FAMILIES, VOCAB, Reference
from tests.engine.driver import GREEDY, Driver, Seq, ints, pack_mask

Build = Callable[..., LocalEngine]
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (1, 7, 15, 16, 17, 33, 70)]
TOKENS = 12


def assert_greedy(seq: Seq, reference: Reference, tolerance: float = 1e-4) -> None:
    """Each token is the likeliest, with the right log probability, until a tie makes the rest arbitrary."""
    expected = reference(seq.ids[:-1])[len(seq.prompt) - 1 :]
    best = expected.topk(2, -1)
    for i, token in enumerate(seq.output):
        if float(best.values[i, 0] - best.values[i, 1]) < tolerance:
            return
        assert token == int(best.indices[i, 0]), f"token {i} of {seq.output}"
        if seq.logprobs:
            assert seq.logprobs[i] == pytest.approx(float(best.values[i, 0]), abs=tolerance)


def outputs(seqs: list[Seq]) -> list[list[int]]:
    return [seq.output for seq in seqs]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(
    family: str, page_size: int, build: Build, reference: Callable[[str], Reference]
) -> None:
    driver = Driver(build(family, page_size=page_size, num_pages=400 // page_size))
    for seq in driver.run(PROMPTS, TOKENS):
        assert len(seq.output) == TOKENS and not seq.bad
        assert_greedy(seq, reference(family))


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_chunked_prefill_changes_nothing(
    family: str, chunk: int, build: Build, reference: Callable[[str], Reference]
) -> None:
    driver = Driver(build(family))
    for seq in driver.run(PROMPTS[2:], TOKENS, chunk=chunk):
        assert len(seq.output) == TOKENS
        assert_greedy(seq, reference(family))


def test_prefill_beside_decode_changes_nothing(build: Build, reference: Callable[[str], Reference]) -> None:
    driver = Driver(build("qwen2"))
    running = [driver.add(prompt) for prompt in PROMPTS[:3]]
    driver.prefill(running)
    late = driver.add(PROMPTS[6])
    driver.prefill([late], chunk=9, beside=running)
    driver.decode([*running, late], 3)
    assert len(running[0].output) == 1 + 8 + 3
    for seq in (*running, late):
        assert_greedy(seq, reference("qwen2"))


@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_pages_give_the_same_text(page_size: int, build: Build) -> None:
    driver = Driver(build("llama", page_size=page_size, num_pages=512 // page_size))
    prompt = PROMPTS[6]
    first = driver.add(prompt)
    driver.prefill([first])
    driver.decode([first], TOKENS - 1)
    for cached in (16, 48, 64):
        again = driver.add(prompt)
        driver.share(again, first, cached)
        driver.prefill([again])
        driver.decode([again], TOKENS - 1)
        assert again.output == first.output
        assert again.logprobs == pytest.approx(first.logprobs, abs=1e-4)
        driver.release(again, keep_pages=cached // page_size)
    other = driver.add([*prompt[:64], 5, 6, 7])
    driver.share(other, first, 64)
    driver.prefill([other])
    assert other.logprobs[0] == pytest.approx(driver.run([other.prompt], 1)[0].logprobs[0], abs=1e-4)


def test_tokens_come_from_the_device_with_two_steps_in_flight(build: Build) -> None:
    driver = Driver(build("llama"))
    seqs = {overlap: [driver.add(prompt) for prompt in PROMPTS[:4]] for overlap in (False, True)}
    for overlap, members in seqs.items():
        driver.prefill(members)
        driver.decode(members, TOKENS, overlap=overlap)
    assert outputs(seqs[True]) == outputs(seqs[False])


def test_a_request_that_starts_again_goes_on_as_before(build: Build) -> None:
    driver = Driver(build("llama"))
    params = SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5, repetition_penalty=1.2)
    whole = driver.run([PROMPTS[3]], 10, params)[0]
    resumed = driver.add(PROMPTS[3], params, said=whole.output[:4])
    driver.prefill([resumed])
    driver.decode([resumed], 5)
    assert resumed.output == whole.output


def test_slots_and_pages_of_others_are_left_alone(build: Build) -> None:
    driver = Driver(build("llama"))
    alone = driver.run([PROMPTS[5]], TOKENS)[0].output
    params = [
        GREEDY,
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(temperature=0.0, logit_bias={9: 100.0}),
        SamplingParams(temperature=1.3, seed=3, top_k=5),
    ]
    for _ in range(3):
        seqs = [driver.add(PROMPTS[5], each) for each in params]
        driver.prefill(seqs)
        driver.decode(seqs, TOKENS - 1)
        assert seqs[0].output == alone
        assert seqs[2].output == [9] * TOKENS
        for seq in reversed(seqs):
            driver.release(seq)


@pytest.fixture
def poisoned(build: Build) -> LocalEngine:
    """An engine in which token 11 is not a number."""
    engine = build("qwen2")
    with torch.inference_mode():
        engine._model.embedding.weight.tensor[11] = torch.nan
    return engine


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=1, top_p=0.9, logprobs=2)])
def test_a_row_of_nan_is_flagged_and_stays_alone(params: SamplingParams, poisoned: LocalEngine) -> None:
    driver = Driver(poisoned)
    prompts = [PROMPTS[3], PROMPTS[4], PROMPTS[5]]
    prompts = [[token if token != 11 else 12 for token in prompt] for prompt in prompts]
    clean = outputs(driver.run(prompts, 6, params))
    seqs = [driver.add(prompt, params) for prompt in prompts]
    seqs[1].prompt[4] = 11
    driver.prefill(seqs)
    driver.decode(seqs, 5)
    assert [seq.bad for seq in seqs] == [False, True, False]
    assert len(seqs[1].logprobs) == 0
    assert [seqs[0].output, seqs[2].output] == [clean[0], clean[2]]
    for seq in seqs:
        driver.release(seq)
    # The pages that held NaN are used again, partly filled, and must not be seen.
    assert outputs(driver.run(prompts, 6, params)) == clean


def test_smollm2_equals_transformers(smollm2: LocalEngine, smollm2_reference: Reference) -> None:
    prompts = [
        [504, 3575, 282, 4649, 314],  # The capital of France is
        [int(token) for token in np.random.default_rng(2).integers(20, 40000, 130)],
    ]
    seqs = Driver(smollm2).run(prompts, 8)
    assert seqs[0].output[0] == 7042  # Paris
    for seq in seqs:
        assert_greedy(seq, smollm2_reference, tolerance=5e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_copies_far_text(dtype: str, request: pytest.FixtureRequest) -> None:
    """Copying needs right positions; the numbers were computed from the file with numpy alone."""
    text = "one two three four five six seven eight nine ten " * 5 + "one two"
    copied = " three four five six seven eight nine ten one two three four"
    prompt, answer = load_vocabulary(locate(EMBEDDED_NAME)).encoder.encode_batch([text, copied])
    engine = request.getfixturevalue("smollm2" if dtype == "float32" else "smollm2_bf16")
    seq = Driver(engine).run([prompt], 12)[0]
    assert len(prompt) == 52
    assert seq.output == answer
    expected = [-0.136, -0.179, -0.294, -0.256, -0.465, -0.342, -0.088, -0.756, -0.276, -0.053, -0.061, -0.083]
    assert seq.logprobs == pytest.approx(expected, abs=2e-3 if dtype == "float32" else 0.15)


def test_every_layer_is_progress(build: Build) -> None:
    engine = build("llama")
    assert isinstance(engine, ShowsProgress)
    before = engine.progress
    driver = Driver(engine)
    driver.run([PROMPTS[-1]], 1)
    assert engine.progress - before >= driver.num_steps * 2


def test_a_fault_ends_the_engine(build: Build) -> None:
    engine = build("llama")
    driver = Driver(engine)
    seq = driver.add(PROMPTS[2])
    seq.prompt[3] = VOCAB + 5  # outside of the embedding: what a device would call an illegal access
    with pytest.raises(EngineFault):
        driver.prefill([seq])
    with pytest.raises(EngineFault):
        driver.run([PROMPTS[1]], 1)


def test_prompt_scores_equal_transformers(build: Build, reference: Callable[[str], Reference]) -> None:
    driver = Driver(build("qwen3"))
    seq = driver.add(PROMPTS[6])
    scores = driver.settle(driver.launch([(seq, 70)], num_top=3)).scores[0]
    expected = reference("qwen3")(seq.prompt)
    own = expected[torch.arange(69), seq.prompt[1:]]
    assert scores.logprobs == pytest.approx(own.numpy(), abs=1e-4)
    assert scores.top_logprobs == pytest.approx(expected[:69].topk(3, -1).values.numpy(), abs=1e-4)
    assert_greedy(seq, reference("qwen3"))


def test_masks_that_come_late_hold_the_step_back(build: Build) -> None:
    engine = build("llama")
    driver = Driver(engine)
    seq = driver.add(PROMPTS[2])
    mask = pack_mask({77}, VOCAB)
    step = LocalStep(replace(driver.launch([(seq, 15)])[0].batch, guided=ints([0])))
    engine._steps.put(step)
    assert not step.done.wait(0.2)
    engine.guide(step, mask[None])
    assert engine.wait(step).token_ids.tolist() == [77]


def test_close_frees_a_step_that_waits_for_masks(build: Build) -> None:
    engine = build("llama")
    driver = Driver(engine)
    step = engine.launch(replace(driver.launch([(driver.add(PROMPTS[2]), 15)])[0].batch, guided=ints([0])))
    engine.close()
    with pytest.raises(EngineFault):
        engine.wait(step)
    assert not engine._thread.is_alive()


@pytest.mark.parametrize(("largest", "told"), [(64, True), (0, False), (None, False)])
def test_a_graph_that_is_never_captured_is_told_of(
    largest: int | None, told: bool, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build("llama", cuda_graph_max_bs=largest)
    assert ("cuda_graph_max_bs is 64, but" in caplog.text) is told
    assert f"on {describe_processor()}" in caplog.text


def test_close_twice_and_launch_after_it(build: Build) -> None:
    engine = build("llama")
    engine.close()
    engine.close()
    assert not engine._thread.is_alive()


def test_setups_before_the_first_token_do_not_draw(build: Build) -> None:
    driver = Driver(build("llama"))
    seq = driver.add(PROMPTS[6])
    result = driver.step([(seq, 8)])
    assert result.token_ids.tolist() == [-1] and seq.output == [] and not result.bad[0]
    setup = SlotSetup(seq.slot, GREEDY, ints(seq.prompt), ints([]))
    assert setup.slot == seq.slot
