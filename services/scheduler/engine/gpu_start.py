"""Brings a GPU up: measures what a step takes, sizes the pool by what is left, captures, warms up.

Several ranks do so together: each measures its own GPU, and the pool is as large as the least of them has room for.
"""

import gc
import logging
from dataclasses import replace
from typing import Final

import torch

from services.scheduler.core.ports import EngineLimits
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.gpu_follower import GpuFollower
from services.scheduler.engine.gpu_rank import GpuRank
from services.scheduler.engine.graph import decode_sizes, mixed_sizes
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.memory import PoolRequest, plan_pages
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.parallel.comm import SOLO, Comm
from services.scheduler.engine.parallel.group import Followers
from services.scheduler.engine.stream import Streams
from services.scheduler.engine.warm_up import warm_up

log = logging.getLogger(__name__)

MAX_GRAPH_ROWS: Final = 512
_GRAPH_BYTES: Final = 8 << 20
"""What a graph takes besides the tensors in it."""
_PROBE_PAGES: Final = 2


def start_gpu_engine(
    model: LlamaModel,
    limits: EngineLimits,
    pool: PoolRequest,
    max_graph_rows: int | None,
    comm: Comm = SOLO,
    followers: Followers | None = None,
) -> GpuEngine:
    """Make an engine that is ready to launch.

    Args:
        model: with its weights.
        limits: what it shall hold; the pages are decided here.
        pool: how large the pool is to be.
        max_graph_rows: rows of the largest captured step; None takes the default.
        comm: the other ranks, which are in `start_gpu_follower` meanwhile.
        followers: their processes. Until the engine is ready, who is told of a lost one stays as it is.

    Raises:
        ConfigError: the pool would be too small.
        torch.OutOfMemoryError: the memory does not suffice; `memory.within_memory` says what to lower.
    """
    engine = GpuEngine(_prepare(model, limits, pool, max_graph_rows, comm), followers)
    warm_up(engine)
    if followers is not None:
        followers.watch(engine.lose)
    return engine


def start_gpu_follower(
    model: LlamaModel, limits: EngineLimits, pool: PoolRequest, max_graph_rows: int | None, comm: Comm
) -> GpuFollower:
    """Make a rank above 0 that is ready to follow; see `start_gpu_engine`."""
    return GpuFollower(_prepare(model, limits, pool, max_graph_rows, comm))


def _prepare(
    model: LlamaModel, limits: EngineLimits, pool: PoolRequest, max_graph_rows: int | None, comm: Comm
) -> GpuRank:
    """Size the pool and capture the graphs; every rank of a model does so at the same time."""
    streams = Streams(model.device)
    most = MAX_GRAPH_ROWS if max_graph_rows is None else max_graph_rows
    sizes = decode_sizes(min(limits.max_running, most))
    reserve = 0
    if pool.num_pages is None and pool.kv_bytes is None:
        reserve = _measure(model, limits, streams, sizes, comm)
    num_pages = plan_pages(
        model.config,
        pool,
        dtype=model.dtype,
        device=model.device,
        page_size=limits.page_size,
        max_seq_len=limits.max_seq_len,
        reserve=reserve,
    )
    num_pages = comm.least(num_pages)
    cache = KVCache.for_model(model.config, num_pages, limits.page_size, model.dtype, model.device)
    rank = GpuRank(model, cache, replace(limits, num_pages=num_pages, kv_bytes=cache.nbytes), streams, comm)
    rank.capture(sizes, mixed=bool(sizes), show=comm.ranks.rank == 0)
    return rank


def _measure(model: LlamaModel, limits: EngineLimits, streams: Streams, sizes: list[int], comm: Comm) -> int:
    """Find how many bytes the largest step and the graphs take beside the pool."""
    cache = KVCache.for_model(model.config, _PROBE_PAGES, limits.page_size, model.dtype, model.device)
    probe = GpuRank(model, cache, replace(limits, num_pages=_PROBE_PAGES), streams, comm)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    probe.compute_padding(limits.max_step_tokens)
    streams.finish()
    step_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(model.device)[0]
    probe.capture(sizes[-1:], mixed=False, show=False)
    streams.finish()
    graph_bytes = max(0, free - torch.cuda.mem_get_info(model.device)[0])
    if sizes:
        graph_bytes += _GRAPH_BYTES * (len(sizes) + len(mixed_sizes(limits.max_step_tokens)))
    probe.close()
    own_bytes = before - torch.cuda.memory_allocated() if before else 0
    del probe, cache
    gc.collect()
    torch.cuda.empty_cache()
    log.info("beside the pool: %d MB for a step, %d MB for graphs", step_bytes >> 20, graph_bytes >> 20)
    return step_bytes + graph_bytes + max(0, own_bytes)
