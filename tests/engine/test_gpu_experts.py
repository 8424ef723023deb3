"""A mixture of experts on the GPU engine without a GPU: its kernels in Triton's interpreter, its graphs played."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import INTERPRETED
from tests.engine.snippets import run_snippet
from tests.engine.test_gpu_engine import SETUP

pytestmark = pytest.mark.slow

OF_EXPERTS = """
import torch.nn.functional as F
from services.scheduler.engine.layers.moe import Experts
seen = []
def as_on_a_gpu(self, x, mapping=None):
    seen.append(None if mapping is None else int((mapping < 0).sum()))
    return self._on_gpu(x, F.linear(x, self.router.tensor), mapping)
"""


def test_padding_and_replay_change_nothing_and_the_cpu_computes_the_same(checkpoint: Callable[..., Path]) -> None:
    code = """
        def play_through(engine):
            driver = Driver(engine)
            seqs = driver.run([prompt(n) for n in (1, 7, 17)], 3)
            late, running = driver.add(prompt(40)), driver.add(prompt(7))
            driver.prefill([running])
            driver.prefill([late], chunk=15, beside=[running])
            driver.decode([running, late], 2)
            return [(seq.output, seq.logprobs) for seq in (*seqs, late, running)]
        reference = build_engine(TINY, locate(model))
        wanted = play_through(reference)
        reference.close()
        Experts.__call__ = as_on_a_gpu
        eager, replayed = make_engine(model, 1), make_engine(model, 1, replayed=True)
        assert max(seen) == 64  # a step of padding alone
        outputs = [play_through(eager), play_through(replayed)]
        assert (eager._run.path, replayed._run.path) == ("eager", "decode_graph")
        assert {1, 2, 0} <= set(seen), seen
        for found in outputs:
            for (output, logprobs), (other, others) in zip(found, wanted, strict=True):
                assert output == other
                assert np.allclose(logprobs, others, atol=1e-4)
    """
    run_snippet(code, checkpoint("qwen3-moe", **INTERPRETED), setup=SETUP + OF_EXPERTS)
