"""How many KV pages there are: a budget in bytes by the size of a page; and what to say where memory is too small."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psutil
import torch

from services.scheduler.engine.kvcache import bytes_per_page
from services.scheduler.engine.models.config import ModelConfig
from shared.errors import ConfigError

CPU_DEFAULT_TOKENS: Final = 16_384
"""Tokens in the default pool of a CPU; more when one request of full length needs more."""
_CPU_MEMORY_SHARE: Final = 0.25
"""Share of the free memory that the default pool of a CPU may take."""
_MIN_PAGES: Final = 2


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """How large the pool is to be, by the first that is given.

    Attributes:
        num_pages: the answer itself.
        kv_bytes: a budget in bytes.
        memory_ratio: share of a GPU's memory for weights, pool and everything else together.
    """

    num_pages: int | None = None
    kv_bytes: int | None = None
    memory_ratio: float = 0.9


def plan_pages(
    model: ModelConfig,
    pool: PoolRequest,
    *,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    max_seq_len: int,
    reserve: int = 0,
) -> int:
    """Decide the size of the pool. To be called when the weights are in memory.

    Args:
        model: gives the size of a token's keys and values.
        pool: what was asked for.
        dtype: precision of the pool.
        device: where it lies.
        page_size: tokens per page.
        max_seq_len: tokens of the longest request.
        reserve: bytes of a GPU that others will still need.

    Returns:
        The number of pages.

    Raises:
        ConfigError: the budget holds no request.
    """
    page_bytes = bytes_per_page(model.num_layers, page_size, model.num_kv_heads, model.head_dim, dtype)
    num_pages, kv_bytes = pool.num_pages, pool.kv_bytes
    if num_pages is None:
        if kv_bytes is None and device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            kv_bytes = max(0, int(free - (1 - pool.memory_ratio) * total) - reserve)
        elif kv_bytes is None:
            kv_bytes = _default_bytes(page_bytes, page_size, max_seq_len)
        num_pages = kv_bytes // page_bytes
    if num_pages < _MIN_PAGES:
        raise ConfigError(
            f"the KV cache would have {num_pages} pages of {page_size} tokens ({page_bytes} bytes each), "
            f"{_MIN_PAGES} are needed; give it more memory or more pages, or lower max_running and max_step_tokens"
        )
    return num_pages


@contextmanager
def within_memory() -> Iterator[None]:
    """Start an engine in a GPU's memory.

    Raises:
        ConfigError: it does not suffice; the message says what to lower.
    """
    try:
        yield
    except Exception as e:
        lack = e if isinstance(e, torch.OutOfMemoryError) else e.__cause__  # of a step that failed
        if not isinstance(lack, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"the GPU's memory does not suffice ({lack}); lower memory_ratio, max_running_requests, "
            "max_prefill_tokens, max_seq_len or cuda_graph_max_bs, or raise tensor_parallel_size"
        ) from e


def _default_bytes(page_bytes: int, page_size: int, max_seq_len: int) -> int:
    wanted = -(-max(CPU_DEFAULT_TOKENS, max_seq_len) // page_size) * page_bytes
    return min(wanted, int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE))
