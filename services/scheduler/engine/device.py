"""Where and in what precision a model runs. Owns the choice of device, dtype and threads; knows no model."""

import os
from pathlib import Path
from typing import Final

import torch

from shared.errors import ConfigError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The precisions a model can run in, by the names of settings and checkpoints."""


def pick_device(name: str) -> torch.device:
    """Choose the device.

    Args:
        name: "auto" (a GPU where there is one), "cpu" or "cuda".

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not known; known: auto, cpu, cuda")
    return torch.device(name)


def pick_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """Choose the precision.

    Args:
        name: "auto" or one of DTYPES. "auto" is the checkpoint's; on a CPU, half precisions run as bfloat16
            where the processor multiplies it natively, else as float32.
        checkpoint: the checkpoint's own dtype by name, or None when it does not say.
        device: where the model runs.

    Raises:
        ConfigError: the name is not known, or that precision cannot run there.
    """
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"dtype {name!r} is not known; known: auto, {', '.join(DTYPES)}")
        if name == "float16" and device.type == "cpu":
            raise ConfigError("dtype 'float16' is not supported on a CPU; use bfloat16 or float32")
        return DTYPES[name]
    if device.type == "cpu":
        return torch.bfloat16 if checkpoint != "float32" and has_native_bf16() else torch.float32
    return DTYPES.get(checkpoint or "", torch.bfloat16)


def has_native_bf16() -> bool:
    """Whether the processor multiplies bfloat16 by itself: AMX, or the BF16 extension of AVX-512."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return False
    line = next((text for text in flags.splitlines() if text.startswith("flags")), "")
    return bool({"amx_bf16", "avx512_bf16"} & set(line.split()))


def describe_processor() -> str:
    """Name the processor, for logs and benchmark reports."""
    try:
        info = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return "unknown processor"
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {available_cores()} cores"


def available_cores() -> int:
    """Cores this process may use: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def available_threads() -> int:
    """Give torch's own choice of threads (OMP_NUM_THREADS, or the physical cores) within what this process may use."""
    return min(torch.get_num_threads(), available_cores())


def set_threads(count: int | None) -> int:
    """Fix the threads of one CPU operation for the calling thread and those after it.

    Operations never run beside each other: a step is a chain.

    Args:
        count: threads; None takes torch's own choice (OMP_NUM_THREADS, or the physical cores), but no more than
            the cores this process may use: threads that wait for a core hold up all others.

    Returns:
        The count in use.
    """
    threads = count or available_threads()
    torch.set_num_threads(threads)
    return threads
