"""What an engine computes before it serves reaches every kernel, whatever a request asks for; no GPU is needed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.snippets import run_snippet

pytestmark = pytest.mark.slow
SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 16, "tie_word_embeddings": False}
SETUP = """
import os, sys
from tests.engine.noted_gpu import known, launched, read_notes
from services.scheduler.engine import warm_up as steps
from services.scheduler.engine.warm_up import warm_up
from shared.sampling import SamplingParams
from tests.engine.driver import GREEDY, Driver, pack_mask
from tests.engine.played_gpu import make_engine, prompt
"""


def test_warming_up_reaches_every_kernel(checkpoint: Callable[..., Path]) -> None:
    code = """
        for model in sys.argv[1:]:
            warm_up(make_engine(model, 1))
        # Sums between GPUs and embedding from a piece of the vocabulary are in every step of several ranks, and there
        # alone; keys and values that are stored apart from the rotation are those of no model yet.
        apart = {each for each in known() if each[0] in ("all_reduce", "sum_norm")}
        apart |= {("elementwise", "_store_kernel"), ("elementwise", "_embed_kernel")}
        reached = {each[:2] for each in launched}
        assert len(reached) > 10 and reached == known() - apart, reached ^ (known() - apart)
        # Bias, penalties and masks are applied in float32.
        for each in (("limits", "_limit_kernel"), ("gumbel", "_block_kernel")):
            dtypes = {dtype for *name, dtype in launched if tuple(name) == each}
            assert dtypes == {"torch.float16", "torch.float32"}, (each, dtypes)
    """
    run_snippet(code, checkpoint("qwen3", **SHAPE), checkpoint("qwen3-moe", **SHAPE), setup=SETUP)


def test_warming_up_reaches_what_each_of_two_ranks_launches(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    code = """
        os.environ["NOTES"] = sys.argv[2]
        steps._ROWS, steps._PROMPTS = (3,), (10, 10, 10)  # which kernels there are is no matter of how many tokens
        engine = make_engine(sys.argv[1], 2, direct=True)
        warm_up(engine)
        engine._followers.serve()
        warmed = set(launched)
        launched.clear()
        drawn = [{"seed": 1}, {"seed": 2, "top_p": 0.8}, {"seed": 3, "frequency_penalty": 0.5, "logprobs": 1}]
        for params in (GREEDY, *(SamplingParams(temperature=1.0, **each) for each in drawn)):
            driver = Driver(engine)
            seqs = [driver.add(prompt(9), params), driver.add(prompt(1), params)]
            driver.prefill(seqs)
            driver.settle(driver.launch([(seq, 1) for seq in seqs], {seqs[0].slot: pack_mask({5}, 321)}))
            scored = driver.add(prompt(9), params)
            driver.settle(driver.launch([(scored, 9)], num_top=1))
        engine.close()
        assert len(launched) > 10 and launched <= warmed, launched - warmed
        start, serving = read_notes("start"), read_notes("serving")
        assert len(serving) > 8 and serving <= start, serving - start
        between = {(module, name) for module, name in known() if module in ("all_reduce", "sum_norm")}
        between.add(("elementwise", "_embed_kernel"))
        for own in (warmed, start):
            assert between <= {each[:2] for each in own}, between - {each[:2] for each in own}
    """
    run_snippet(code, checkpoint("qwen3", **SHAPE, vocab_size=321), tmp_path, setup=SETUP)
