"""Several ranks of the GPU engine without a GPU (see `played_gpu`): the same tokens as of one, and one end for all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import INTERPRETED
from tests.engine.snippets import run_snippet

pytestmark = pytest.mark.slow
SETUP = """
import os, signal, sys
import numpy as np, psutil, torch
from services.scheduler.core.batch import mask_words
from services.scheduler.core.ports import EngineFault
from shared.sampling import SamplingParams
from tests.engine.driver import GREEDY, Driver, pack_mask
from tests.engine.played_gpu import make_engine, prompt
from tests.waiting import eventually
model = sys.argv[1]
"""


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    # 321 does not divide: the pieces of the vocabulary are not alike, and none begins at a round number.
    return checkpoint("qwen3", **INTERPRETED, vocab_size=321)


def test_two_ranks_draw_what_one_draws(model: Path) -> None:
    """Each way to draw; a prefix that is there already; prompts in pieces beside others; graphs and none."""
    run_snippet(
        """
        ways = [GREEDY, SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.9, top_p=0.8, seed=4),
                SamplingParams(temperature=1.0, seed=5, frequency_penalty=0.5, logit_bias={7: 1.0}, logprobs=2)]

        def play_through(engine):
            said, logprobs, paths = [], [], set()
            for params in ways:
                driver = Driver(engine)
                seqs = driver.run([prompt(n) for n in (1, 17)], 3, params)
                first = driver.add(prompt(40), params)
                driver.prefill([first], chunk=25)
                late = driver.add(prompt(40), params)
                driver.share(late, first, 32)
                driver.prefill([late], beside=[first])
                paths.add(engine._run.path)
                driver.decode([first, late], 1)
                paths.add(engine._run.path)
                said.append([seq.output for seq in (*seqs, first, late)])
                logprobs += [p for seq in (*seqs, first, late) for p in seq.logprobs]
            return said, logprobs, paths

        alone, wanted, _ = play_through(make_engine(model, 1))
        engine = make_engine(model, 2, replayed=True)
        found, logprobs, paths = play_through(engine)
        assert found == alone, (found, alone)
        assert logprobs and np.allclose(logprobs, wanted, atol=1e-4)
        assert paths == {"decode_graph", "mixed_graph"}
        times = {mode: sum(graph.times for graph, _ in graphs._graphs.values())
                 for mode, graphs in engine._rank.draws.items()}
        assert min(times["pieces"], times["whole"]) >= 3, times
        engine.close()
    """,
        model,
        setup=SETUP,
    )


def test_masks_scores_and_many_pages(model: Path) -> None:
    run_snippet(
        """
        outputs, scores = [], []
        for ranks in (1, 2):
            engine = make_engine(model, ranks, direct=ranks == 2)
            driver = Driver(engine)
            a, b = driver.add(prompt(9)), driver.add(prompt(70), SamplingParams(temperature=1.0, seed=8))
            mask = pack_mask({69, 70}, 321)[None]
            step = driver.launch([(a, 9), (b, 70)], masks={a.slot: mask[0]}, num_top=2)
            result = driver.settle(step)
            assert result.token_ids[0] in (69, 70)
            scores.append(np.concatenate([result.scores[row].logprobs for row in (0, 1)]))
            ahead = driver.launch([(a, 1), (b, 1)], masks={a.slot: pack_mask({5, 6}, 321)})
            driver.settle(ahead)
            driver.decode([a, b], 2)
            outputs.append((a.output, b.output, result.scores[1].top_ids.tolist()))
            engine.close()
        assert outputs[0] == outputs[1], outputs
        assert np.allclose(*scores, atol=1e-4)
    """,
        model,
        setup=SETUP,
    )


def test_a_dead_rank_ends_the_engine(model: Path) -> None:
    run_snippet(
        """
        engine = make_engine(model, 2)
        driver = Driver(engine)
        driver.run([prompt(7)], 2)
        follower, = psutil.Process().children(recursive=True)
        os.kill(follower.pid, signal.SIGKILL)

        def is_lost():
            try:
                engine.check()
            except EngineFault as e:
                return "rank 1 ended" in str(e)
            return False
        eventually(is_lost, "the engine knows")
        try:
            driver.run([prompt(7)], 2)
        except EngineFault:
            engine.close()
        else:
            raise AssertionError("it went on")
        assert not psutil.Process().children()
    """,
        model,
        setup=SETUP,
    )
