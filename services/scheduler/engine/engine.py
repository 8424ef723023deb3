"""Builds the engine that a configuration asks for: reads the model, decides its sizes, makes it ready.

Owns the choice between the engines; what they do is theirs.
"""

import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from services.scheduler.core.ports import Engine, EngineLimits
from services.scheduler.engine.device import available_threads, describe_processor, pick_device, pick_dtype, set_threads
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.local import LocalEngine
from services.scheduler.engine.memory import PoolRequest, plan_pages, within_memory
from services.scheduler.engine.models.config import ModelConfig
from services.scheduler.engine.models.llama import LlamaModel, Model
from services.scheduler.engine.models.registry import describe, is_own, model_class
from services.scheduler.engine.parallel.comm import SOLO, Comm, GroupComm, open_store
from services.scheduler.engine.parallel.ending import EXIT_CONFIG, EXIT_FAULT, end_process, leave_device
from services.scheduler.engine.parallel.group import Followers, RankLost
from services.scheduler.engine.parallel.state import Ranks
from services.scheduler.engine.threads import on_passing_thread
from services.scheduler.engine.weights.loader import load_weights
from shared.errors import ConfigError
from shared.reason import tell_reason

if TYPE_CHECKING:
    from shared.model_files import ModelFiles

log = logging.getLogger(__name__)

CPU_STEP_TOKENS: Final = 512
GPU_STEP_TOKENS: Final = 8192
"""Tokens of one step, unless a setting says otherwise."""
CPU_PAGE_SIZE: Final = 16
GPU_PAGE_SIZE: Final = 64
"""Tokens of one page, likewise."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine; `service` fills it from its settings.

    Attributes:
        device: "auto", "cpu" or "cuda".
        dtype: "auto" (the checkpoint's; on a CPU bfloat16 where the processor has AMX or AVX-512-BF16, else
            float32), "float32", "bfloat16" or "float16".
        load_format: "auto" reads the checkpoint, "dummy" draws random weights.
        attention_backend: "auto", or "torch" for the reference on any device, or "triton" on a GPU.
        page_size: tokens per KV page; None takes the device's default.
        num_pages: pages of the pool; None derives them from `kv_bytes` or `memory_ratio`.
        kv_bytes: size of the pool in bytes, an upper bound; None takes the device's default.
        memory_ratio: share of a GPU's memory that weights and pool may use together.
        max_running: request slots.
        max_seq_len: tokens of prompt and answer together; None takes the model's.
        max_step_tokens: tokens computed in one step at most; None takes the device's default.
        cuda_graph_max_bs: rows of the largest captured decode step; 0 captures none, None takes the default.
        threads: threads of one operation on a CPU; None takes OMP_NUM_THREADS or the cores this process may use.
        ranks: processes that share the model, this one included.
        direct_sums: whether small sums of several GPUs may go by their own memory, around NCCL.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    attention_backend: str = "auto"
    page_size: int | None = None
    num_pages: int | None = None
    kv_bytes: int | None = None
    memory_ratio: float = 0.9
    max_running: int = 64
    max_seq_len: int | None = None
    max_step_tokens: int | None = None
    cuda_graph_max_bs: int | None = None
    threads: int | None = None
    ranks: int = 1
    direct_sums: bool = True


def build_engine(config: EngineConfig, files: "ModelFiles") -> Engine:
    """Load a model and make it ready to launch.

    Args:
        config: what to build.
        files: the checkpoint.

    Returns:
        An engine whose `limits` say what fits.

    Raises:
        ConfigError: the model, the device or a size cannot be served as asked; the message names it.
    """
    started = time.monotonic()
    plan = plan_model(config, files, Ranks(0, config.ranks))
    on_gpu = runs_on_kernels(plan, config.attention_backend)
    if config.cuda_graph_max_bs and not on_gpu:
        log.warning("cuda_graph_max_bs is %d, but this engine captures no graphs", config.cuda_graph_max_bs)
    start = _start_ranks if config.ranks > 1 else _start_alone
    engine = start(plan, config, files, on_gpu=on_gpu)
    limits = engine.limits
    log.info(
        "engine ready in %.1f s: %s in %s on %s, %d pages of %d tokens (%d MB)",
        time.monotonic() - started,
        plan.model.architecture,
        plan.dtype,
        describe_processor() if plan.device.type == "cpu" else plan.device,
        limits.num_pages,
        limits.page_size,
        limits.kv_bytes >> 20,
    )
    return engine


def _start_alone(plan: "ModelPlan", config: EngineConfig, files: "ModelFiles", *, on_gpu: bool) -> Engine:
    if on_gpu:
        from services.scheduler.engine.gpu_start import start_gpu_engine  # Triton only where it is used

        with within_memory():
            return start_gpu_engine(load_model(plan, files), plan.limits, plan.pool, config.cuda_graph_max_bs)
    model = on_passing_thread(lambda: _load_any(plan, files))
    cache = make_cache(plan, model)
    engine = LocalEngine(model, cache, _sized(plan.limits, cache), config.attention_backend, plan.threads)
    engine.warm_up()
    return engine


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What one rank is going to load, before anything large is done.

    Attributes:
        model: what it has of the model.
        ranks: who it is.
        threads: of one operation on a CPU.
        limits: what the engine shall hold; the pages are decided when the weights are there.
        pool: how large the pool is to be.
        load_format: of the weights.
    """

    model: ModelConfig
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype
    threads: int
    limits: EngineLimits
    pool: PoolRequest
    load_format: str


def plan_model(config: EngineConfig, files: "ModelFiles", ranks: Ranks) -> ModelPlan:
    """Understand what is asked for.

    Raises:
        ConfigError: it cannot be; the message names why.
    """
    device = pick_device(config.device)
    if device.type == "cuda" and ranks.size > 1:
        if ranks.size > torch.cuda.device_count():
            raise ConfigError(f"tensor_parallel_size is {ranks.size}, there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", ranks.rank)
    threads = 1
    if device.type == "cpu":
        # Ranks compute at the same time.
        threads = set_threads(max(1, (config.threads or available_threads()) // ranks.size))
    model = describe(files.config)
    if ranks.size > 1 and not is_own(model.architecture):
        raise ConfigError(
            f"architecture {model.architecture!r} runs through transformers, on one rank; "
            f"tensor_parallel_size is {ranks.size}"
        )
    dtype = pick_dtype(config.dtype, model.dtype, device)
    default_page, default_tokens = CPU_PAGE_SIZE, CPU_STEP_TOKENS
    if device.type == "cuda":
        default_page, default_tokens = GPU_PAGE_SIZE, GPU_STEP_TOKENS
    weights = files.fingerprint if config.load_format == "auto" else "dummy"
    # Chance is drawn in another way on a GPU, so an answer cannot go on from one kind of device to the other.
    kind = "-cuda" if device.type == "cuda" else ""
    limits = EngineLimits(
        fingerprint=f"{weights}-{dtype}{kind}".replace("torch.", ""),
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(files.eos_token_ids),
        max_seq_len=_max_seq_len(config, files.max_seq_len),
        page_size=config.page_size or default_page,
        num_pages=0,
        max_running=config.max_running,
        max_step_tokens=max(config.max_step_tokens or default_tokens, config.max_running),
    )
    pool = PoolRequest(config.num_pages, config.kv_bytes, config.memory_ratio)
    return ModelPlan(model.share(ranks), ranks, device, dtype, threads, limits, pool, config.load_format)


def load_model(plan: ModelPlan, files: "ModelFiles", comm: Comm = SOLO) -> LlamaModel:
    """Load a rank's piece of the weights of one of our models.

    Raises:
        ConfigError: the checkpoint does not fit the model; names the tensor.
    """
    build = model_class(plan.model.architecture)
    with torch.inference_mode():
        model = build(plan.model, plan.limits.max_seq_len, plan.dtype, plan.device, comm)
        load_weights(model, files, plan.load_format)
    return model


def _load_any(plan: ModelPlan, files: "ModelFiles") -> Model:
    """Load one of our models, or one that transformers computes for us."""
    if is_own(plan.model.architecture):
        return load_model(plan, files)
    from services.scheduler.engine.models.fallback import load_fallback  # transformers only where it is used

    with torch.inference_mode():
        return load_fallback(plan.model, files, plan.dtype, plan.device, plan.load_format, plan.limits.max_seq_len)


def make_cache(plan: ModelPlan, model: Model, comm: Comm = SOLO) -> KVCache:
    """Make the pool of a rank's heads; all ranks have as many pages.

    Raises:
        ConfigError: the memory does not suffice.
    """
    num_pages = plan_pages(
        model.config,
        plan.pool,
        dtype=plan.dtype,
        device=plan.device,
        page_size=plan.limits.page_size,
        max_seq_len=plan.limits.max_seq_len,
    )
    return KVCache.for_model(model.config, comm.least(num_pages), plan.limits.page_size, plan.dtype, plan.device)


def _sized(limits: EngineLimits, cache: KVCache) -> EngineLimits:
    return replace(limits, num_pages=cache.num_pages, kv_bytes=cache.nbytes)


def _start_ranks(plan: ModelPlan, config: EngineConfig, files: "ModelFiles", *, on_gpu: bool) -> Engine:
    """Start the other ranks, and load this one's piece while they load theirs."""
    store = open_store(config.ranks)
    followers = Followers(config.ranks, store.port, str(files.path), asdict(config))
    try:
        followers.wait_ready()  # they are there
        start = _start_first_gpu if on_gpu else _start_first
        engine = start(plan, config, files, store, followers)
        followers.serve()
    except BaseException as e:
        followers.close()
        lost = followers.lost
        if lost is not None and lost.refusal is not None and not isinstance(e, ConfigError):
            raise lost.refusal from e
        raise
    return engine


def _start_first(
    plan: ModelPlan, config: EngineConfig, files: "ModelFiles", store: Any, followers: Followers
) -> LocalEngine:
    """Make rank 0 on a CPU."""
    comm = followers.meet(lambda: make_comm(plan, store, direct=config.direct_sums))
    model = load_model(plan, files, comm)
    followers.wait_ready()  # they have their weights
    cache = make_cache(plan, model, comm)
    limits = _sized(plan.limits, cache)
    engine = LocalEngine(model, cache, limits, config.attention_backend, plan.threads, comm, followers)
    engine.warm_up()
    return engine


def _start_first_gpu(
    plan: ModelPlan, config: EngineConfig, files: "ModelFiles", store: Any, followers: Followers
) -> Engine:
    """Make rank 0 on a GPU, which may come to wait for a rank that is gone; then the process ends."""
    from services.scheduler.engine.gpu_start import start_gpu_engine

    followers.watch(_end_start)
    try:
        with within_memory():
            comm = make_comm(plan, store, direct=config.direct_sums)
            model = load_model(plan, files, comm)
            followers.wait_ready()  # they have their weights
            return start_gpu_engine(model, plan.limits, plan.pool, config.cuda_graph_max_bs, comm, followers)
    except BaseException as e:
        leave_device(EXIT_CONFIG if isinstance(e, ConfigError) else EXIT_FAULT, e)
        raise


def make_comm(plan: ModelPlan, store: Any, *, direct: bool) -> Comm:
    """Meet the other ranks; `direct` as in EngineConfig."""
    if plan.device.type == "cpu":
        return GroupComm(plan.ranks, store, plan.device)
    from services.scheduler.engine.parallel.device_comm import DeviceComm  # Triton only where it is used

    torch.cuda.set_device(plan.device)
    return DeviceComm(plan.ranks, store, plan.device, direct=direct)


def _end_start(lost: RankLost) -> None:
    """End a start that may wait on its GPU for a rank that is gone, in the words of that rank."""
    error = lost.refusal or lost
    log.critical("%s", error)
    tell_reason(str(error))
    end_process(EXIT_CONFIG if lost.refusal else EXIT_FAULT)


def _max_seq_len(config: EngineConfig, of_model: int) -> int:
    if config.max_seq_len is None:
        return of_model
    if config.max_seq_len > of_model:
        raise ConfigError(f"max_seq_len {config.max_seq_len} is more than the model's {of_model}")
    return config.max_seq_len


def runs_on_kernels(plan: ModelPlan, backend: str) -> bool:
    """Whether the engine for GPUs runs this model.

    Raises:
        ConfigError: it does not, and nothing else does as asked.
    """
    if plan.device.type != "cuda":
        return False
    runs = is_own(plan.model.architecture) and _has_kernels(backend, plan.model)
    if not runs and plan.ranks.size > 1:
        # Its steps wait for each other's sums in calls that nothing ends when a rank is lost.
        raise ConfigError(
            f"tensor_parallel_size is {plan.ranks.size}, but attention by torch has one GPU"
            + (f": attention_backend {backend!r} cannot be had on several" if backend != "auto" else "")
        )
    return runs


def _has_kernels(backend: str, model: ModelConfig) -> bool:
    """Whether our kernels compute this model, and are wanted.

    Raises:
        ConfigError: they are asked for by name and do not.
    """
    if backend not in ("auto", "triton"):
        return False
    head_dim = model.head_dim
    fits = 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0 and model.rope.rotary_dim == head_dim
    if not fits and backend == "triton":
        raise ConfigError(f"attention backend 'triton' needs heads of a power of two, wholly rotated; not {head_dim}")
    if not fits:
        log.warning("heads of %d have no kernel on a GPU: the slow attention of torch is used", head_dim)
    return fits
