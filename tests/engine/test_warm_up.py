"""What an engine computes before it serves reaches every kernel, whatever a request asks for; no GPU is needed."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests.engine.test_gpu_engine import SETUP

pytestmark = pytest.mark.slow

AS_ON_A_GPU = """
import importlib, pkgutil
from triton.runtime.interpreter import InterpretedFunction
from services.scheduler.engine import kernels
from services.scheduler.engine.kernels.elementwise import rms_norm
from services.scheduler.engine.layers import linear, norm
from services.scheduler.engine.warm_up import warm_up

# What layers take for the sign of a GPU.
torch.Tensor.is_cuda = property(lambda self: ".layers." in sys._getframe(1).f_globals["__name__"])
count_part, init = linear.Linear.count_part, norm.RMSNorm.__init__
def keep_plain(self):
    if self._missing == 1 and self.bias is None:
        self._plain = self._weight.tensor
    count_part(self)
def fused_norm(self, *args):
    init(self, *args)
    self._fused = rms_norm
linear.Linear.count_part, norm.RMSNorm.__init__ = keep_plain, fused_norm

launched = set()
launch = InterpretedFunction.__getitem__
def note(self, grid):
    def call(*args, **kwargs):
        launched.add((self.fn.__module__.rpartition(".")[2], self.fn.__name__, args[0].dtype))
        return launch(self, grid)(*args, **kwargs)
    return call
InterpretedFunction.__getitem__ = note

def known():
    '''Kernels that are launched somewhere: `name[...](` stands in their file.'''
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        loaded = importlib.import_module(f"{kernels.__name__}.{module.name}")
        source = Path(loaded.__file__).read_text()
        found |= {(module.name, name) for name, value in vars(loaded).items()
                  if isinstance(value, InterpretedFunction) and f" {name}[" in source}
    return found

def warm(family):
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "head_dim": 16, "tie_word_embeddings": False}
    files = locate(str(write_checkpoint(Path(tempfile.mkdtemp()), family, **shape)))
    config, dtype = read_config(files.config), torch.float16
    with torch.inference_mode():
        model = model_class(config.architecture)(config, 512, dtype, cpu)
        load_weights(model, files, "auto")
    limits = EngineLimits("x", config.vocab_size, frozenset(files.eos_token_ids), 64, 16, 64, 4, 32)
    cache = KVCache.for_model(config, 64, 16, dtype, cpu)
    warm_up(GpuEngine(GpuRank(model, cache, limits, NoStreams())))
"""


def test_warming_up_reaches_every_kernel() -> None:
    code = """
        warm("qwen3")
        warm("qwen3-moe")
        # Sums between GPUs and embedding from a piece of the vocabulary are in every step of several ranks, and there
        # alone; keys and values that are stored apart from the rotation are those of no model yet.
        apart = {each for each in known() if each[0] in ("all_reduce", "sum_norm")}
        apart |= {("elementwise", "_store_kernel"), ("elementwise", "_embed_kernel")}
        reached = {each[:2] for each in launched}
        assert len(reached) > 10 and reached == known() - apart, reached ^ (known() - apart)
        # Bias, penalties and masks are applied in float32.
        for each in (("limits", "_limit_kernel"), ("gumbel", "_block_kernel")):
            assert {dtype for *name, dtype in launched if tuple(name) == each} == {torch.float16, torch.float32}
    """
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SETUP + AS_ON_A_GPU + textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
