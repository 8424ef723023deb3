"""Kernels that start while the one before them ends: programmatic dependent launch, on GPUs that have it.

A chained kernel is launched with `**options()` and calls `follow` first thing. From there on all that earlier
kernels have written is there; before it nothing is read or written. So it costs nothing to chain a kernel behind
any other, and every kernel of ours is.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_HOPPER = (9, 0)


@triton.jit
def follow(CHAIN: tl.constexpr):
    """Wait for the kernels before this one, and let the next one get ready."""
    if CHAIN:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def is_supported() -> bool:
    """Whether the GPU has it."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _HOPPER


def options() -> dict[str, Any]:
    """What a chained kernel is launched with."""
    return {"CHAIN": True, "launch_pdl": True} if is_supported() else {"CHAIN": False}
