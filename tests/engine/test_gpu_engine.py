"""The GPU engine without a GPU (see `played_gpu`): it computes what the CPU engine computes, replayed or not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.scheduler.engine.graph import decode_sizes
from tests.engine.conftest import INTERPRETED
from tests.engine.snippets import run_snippet

pytestmark = pytest.mark.slow
SETUP = """
import sys
import numpy as np, torch
from services.scheduler.engine.engine import build_engine
from shared.model_files import locate
from shared.sampling import SamplingParams
from tests.engine.driver import GREEDY, TINY, Driver
from tests.engine.played_gpu import make_engine, prompt
model = sys.argv[1]
"""


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", **INTERPRETED)


def test_it_computes_what_the_cpu_engine_computes(model: Path) -> None:
    code = """
        reference = build_engine(TINY, locate(model))
        prompts = [prompt(n) for n in (1, 17, 40)]
        punished = SamplingParams(
            temperature=0.0, logprobs=2, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={7: 2.0}, min_tokens=2
        )
        for params, chunk in ((GREEDY, None), (punished, 15)):
            found = Driver(make_engine(model, 1)).run(prompts, 4, params, chunk)
            wanted = Driver(reference).run(prompts, 4, params, chunk)
            for a, b in zip(found, wanted):
                assert a.output == b.output, (a.output, b.output)
                assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        reference.close()
    """
    run_snippet(code, model, setup=SETUP)


def test_padding_and_replay_change_nothing(model: Path) -> None:
    code = """
        def play_through(engine, params):
            driver = Driver(engine)
            seqs = driver.run([prompt(n) for n in (1, 7, 17)], 3, params)
            late, running = driver.add(prompt(40), params), driver.add(prompt(7), params)
            driver.prefill([running])
            driver.prefill([late], chunk=15, beside=[running])
            driver.decode([running, late], 2)
            return [seq.output for seq in (*seqs, late, running)]
        eager, replayed = make_engine(model, 1), make_engine(model, 1, replayed=True)
        params = SamplingParams(temperature=1.0, top_k=50, seed=3)
        assert play_through(eager, params) == play_through(replayed, params)
        assert (eager._run.path, replayed._run.path) == ("eager", "decode_graph")
        times = [{size: graph.times for size, (graph, _) in graphs._graphs.items()}
                 for graphs in (replayed._run.decode_graphs, replayed._run.mixed_graphs, replayed._rank.draws["whole"])]
        assert times[0][4] == times[2][4] == 4 and sum(times[1].values()) >= 5, times
        replayed.close()
    """
    run_snippet(code, model, setup=SETUP)


def test_masks_scores_and_broken_rows(model: Path) -> None:
    code = """
        from dataclasses import replace
        from services.scheduler.core.batch import ScoreRow, mask_words
        reference, engine = build_engine(TINY, locate(model)), make_engine(model, 1)
        results = []
        for each in (reference, engine):
            driver = Driver(each)
            a, b = driver.add(prompt(9), GREEDY), driver.add(prompt(20), GREEDY)
            launch = each.launch
            targets = np.asarray(prompt(20)[1:], np.int32)
            each.launch = lambda batch: launch(replace(
                batch, guided=np.array([0], np.int32), scores=(ScoreRow(1, targets, 2),)))
            step, seqs = driver.launch([(a, 9), (b, 20)])
            masks = np.zeros((1, mask_words(320)), np.int32)
            masks[0, 2] = 1 << 5  # token 69 alone
            each.guide(step, masks)
            results.append(driver.settle((step, seqs)))
            each.launch = launch
            with torch.inference_mode():
                (each._model if each is reference else each._rank.model).embedding.weight.tensor[11] = torch.nan
            bad = driver.add([5, 11, 6], GREEDY)
            assert driver.step([(bad, 3), (a, 1)]).bad.tolist() == [False, True]
        first, second = results
        assert first.token_ids.tolist() == second.token_ids.tolist() and second.token_ids[0] == 69
        assert np.allclose(first.scores[1].logprobs, second.scores[1].logprobs, atol=1e-4)
        assert (first.scores[1].top_ids == second.scores[1].top_ids).all()
        reference.close()
    """
    run_snippet(code, model, setup=SETUP)


def test_no_graphs_are_asked_for_by_zero_rows() -> None:
    assert decode_sizes(0) == []
    assert decode_sizes(3) == [1, 2, 3] and decode_sizes(300)[-2:] == [288, 300]
