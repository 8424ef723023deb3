"""The names of the attention backends, and which one "auto" is."""

from collections.abc import Callable
from typing import Final

import torch

from services.scheduler.engine.attention.base import AttentionBackend
from services.scheduler.engine.attention.torch_sdpa import TorchAttention
from services.scheduler.engine.kvcache import KVCache
from shared.errors import ConfigError

BACKENDS: Final[dict[str, Callable[[KVCache, torch.dtype, torch.device], AttentionBackend]]] = {"torch": TorchAttention}


def select_backend(name: str, cache: KVCache, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """Make the backend of a name; "auto" is `torch`, which runs everywhere.

    Raises:
        ConfigError: the name is not known, or is not to be had in this installation.
    """
    chosen = "torch" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} is not available; available: auto, {', '.join(BACKENDS)}")
    return BACKENDS[chosen](cache, dtype, device)
