"""The GPU engine without a GPU, by every way that it goes on one, with a note of each kernel that is launched.

To be imported where `played_gpu` may be, before it makes anything. Run as a module it is a rank above 0, which leaves
its notes in the folder that `NOTES` names: what was launched until rank 0 served, and afterwards.
"""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from services.scheduler.engine import kernels
from services.scheduler.engine.kernels.elementwise import rms_norm
from services.scheduler.engine.layers import linear, norm
from tests.engine import played_gpu

FOLDER = "NOTES"
Kernel = tuple[str, str, str]
"""Module, name, and the dtype of its first argument."""

launched: set[Kernel] = set()
played_gpu.FOLLOWER = __name__ if __name__ != "__main__" else "tests.engine.noted_gpu"
played_gpu.DTYPE = torch.float16
played_gpu.LIMITS = replace(played_gpu.LIMITS, max_seq_len=64, max_running=4, max_step_tokens=32)

# What layers take for the sign of a GPU.
torch.Tensor.is_cuda = property(lambda self: ".layers." in sys._getframe(1).f_globals["__name__"])  # type: ignore[assignment]
_count_part, _init, _launch = linear.Linear.count_part, norm.RMSNorm.__init__, InterpretedFunction.__getitem__


def _keep_plain(self: Any) -> None:
    if self._missing == 1 and self.bias is None:
        self._plain = self._weight.tensor
    _count_part(self)


def _fuse(self: Any, *args: Any) -> None:
    _init(self, *args)
    self._fused = rms_norm


def _note(self: Any, grid: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        launched.add((self.fn.__module__.rpartition(".")[2], self.fn.__name__, str(args[0].dtype)))
        return _launch(self, grid)(*args, **kwargs)

    return call


linear.Linear.count_part = _keep_plain  # type: ignore[method-assign]
norm.RMSNorm.__init__ = _fuse  # type: ignore[method-assign, assignment]
InterpretedFunction.__getitem__ = _note


def known() -> set[tuple[str, str]]:
    """Kernels that are launched somewhere: `name[...](` stands in their file."""
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        loaded = importlib.import_module(f"{kernels.__name__}.{module.name}")
        source = Path(str(loaded.__file__)).read_text()
        names = (name for name, value in vars(loaded).items() if isinstance(value, InterpretedFunction))
        found |= {(module.name, name) for name in names if f" {name}[" in source}
    return found


def write_notes(when: str) -> None:
    """Leave in the folder what was launched since the last time."""
    (Path(os.environ[FOLDER]) / when).write_text(json.dumps(sorted(launched)))
    launched.clear()


def read_notes(when: str) -> set[Kernel]:
    """Read what a rank has left there."""
    return {tuple(each) for each in json.loads((Path(os.environ[FOLDER]) / when).read_text())}


if __name__ == "__main__":
    played_gpu.follow(int(sys.argv[1]), lambda: write_notes("start"), lambda: write_notes("serving"))
