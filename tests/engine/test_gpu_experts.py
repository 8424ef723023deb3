"""A mixture of experts on the GPU engine without a GPU: its kernels in Triton's interpreter, its graphs played."""

import os
import subprocess
import sys
import textwrap

import pytest

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


def test_padding_and_replay_change_nothing_and_the_cpu_computes_the_same() -> None:
    code = """
        def play_through(engine):
            driver = Driver(engine)
            seqs = driver.run([prompt(n) for n in (1, 7, 17)], 3)
            late, running = driver.add(prompt(40)), driver.add(prompt(7))
            driver.prefill([running])
            driver.prefill([late], chunk=15, beside=[running])
            driver.decode([running, late], 2)
            return [(seq.output, seq.logprobs) for seq in (*seqs, late, running)]
        reference = build_engine(TINY, files)
        wanted = play_through(reference)
        reference.close()
        Experts.__call__ = as_on_a_gpu
        eager, replayed = new_engine(), new_engine()
        with torch.inference_mode():
            replayed._rank.capture([1, 4, 8], mixed=True)
        assert max(seen) == 64  # a step of padding alone
        outputs = [play_through(eager), play_through(replayed)]
        assert (eager._run.path, replayed._run.path) == ("eager", "decode_graph")
        assert {1, 2, 0} <= set(seen), seen
        for found in outputs:
            for (output, logprobs), (other, others) in zip(found, wanted, strict=True):
                assert output == other
                assert np.allclose(logprobs, others, atol=1e-4)
    """
    setup = SETUP.replace('"qwen3"', '"qwen3-moe"')
    assert setup != SETUP
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", setup + OF_EXPERTS + textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
