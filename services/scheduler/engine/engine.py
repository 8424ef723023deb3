"""The engine of one rank: it launches batches behind each other and hands back what they drew.

Owns the model, the KV pool, the sampler's state and the thread they run on. Knows slots, pages and steps;
knows neither requests, nor the broker, nor how a batch was chosen.
"""

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from services.scheduler.core.batch import Batch, MaskArray, SlotSetup, StepResult
from services.scheduler.core.ports import EngineFault, EngineLimits, Step
from services.scheduler.engine.attention.base import IndexArray
from services.scheduler.engine.attention.select import select_backend
from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.device import pick_device, pick_dtype, set_threads
from services.scheduler.engine.inputs import prepare
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.memory import plan_pages
from services.scheduler.engine.models.config import ModelConfig, read_config
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.models.registry import model_class
from services.scheduler.engine.sampler import Guides, Sampler, score_tokens
from services.scheduler.engine.weights.loader import load_weights
from shared.errors import ConfigError
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from shared.model_files import ModelFiles

log = logging.getLogger(__name__)

CPU_STEP_TOKENS: Final = 512
GPU_STEP_TOKENS: Final = 8192
"""Tokens of one step, unless a setting says otherwise."""
_WARM_UP_TOKENS: Final = 16
_CLOSE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine; `service` fills it from its settings.

    Attributes:
        device: "auto", "cpu" or "cuda".
        dtype: "auto" (the checkpoint's; on a CPU bfloat16 where the processor has AMX or AVX-512-BF16, else
            float32), "float32", "bfloat16" or "float16".
        load_format: "auto" reads the checkpoint, "dummy" draws random weights.
        attention_backend: "auto" or a name of `attention.select`.
        page_size: tokens per KV page.
        num_pages: pages of the pool; None derives them from `kv_bytes` or `memory_ratio`.
        kv_bytes: size of the pool in bytes, an upper bound; None takes the device's default.
        memory_ratio: share of a GPU's memory that weights and pool may use together.
        max_running: request slots.
        max_seq_len: tokens of prompt and answer together; None takes the model's.
        max_step_tokens: tokens computed in one step at most; None takes the device's default.
        threads: threads of one operation on a CPU; None takes OMP_NUM_THREADS or the cores this process may use.
    """

    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    attention_backend: str = "auto"
    page_size: int = 16
    num_pages: int | None = None
    kv_bytes: int | None = None
    memory_ratio: float = 0.9
    max_running: int = 64
    max_seq_len: int | None = None
    max_step_tokens: int | None = None
    threads: int | None = None


def build_engine(config: EngineConfig, files: "ModelFiles") -> "LocalEngine":
    """Load a model and make it ready to launch.

    Args:
        config: what to build.
        files: the checkpoint.

    Returns:
        An engine whose `limits` say what fits.

    Raises:
        ConfigError: the model, the device or a size cannot be served as asked; the message names it.
    """
    device = pick_device(config.device)
    threads = set_threads(config.threads) if device.type == "cpu" else 1
    model_config = read_config(files.config)
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    max_seq_len = _max_seq_len(config, files.max_seq_len)
    started = time.monotonic()
    with torch.inference_mode():
        model = model_class(model_config.architecture)(model_config, max_seq_len, dtype, device)
        load_weights(model, files, config.load_format)
    cache = _make_cache(config, model_config, max_seq_len, dtype, device)
    default_tokens = CPU_STEP_TOKENS if device.type == "cpu" else GPU_STEP_TOKENS
    limits = EngineLimits(
        fingerprint=f"{files.fingerprint if config.load_format == 'auto' else 'dummy'}-{dtype}".replace("torch.", ""),
        vocab_size=model_config.vocab_size,
        eos_token_ids=frozenset(files.eos_token_ids),
        max_seq_len=max_seq_len,
        page_size=config.page_size,
        num_pages=cache.num_pages,
        max_running=config.max_running,
        max_step_tokens=max(config.max_step_tokens or default_tokens, config.max_running),
        kv_bytes=cache.nbytes,
    )
    engine = LocalEngine(model, cache, limits, config.attention_backend, threads)
    engine.warm_up()
    log.info(
        "engine ready in %.1f s: %s in %s on %s, %d pages of %d tokens (%d MB)",
        time.monotonic() - started,
        model_config.architecture,
        dtype,
        device,
        cache.num_pages,
        config.page_size,
        cache.nbytes >> 20,
    )
    return engine


def _max_seq_len(config: EngineConfig, of_model: int) -> int:
    if config.max_seq_len is None:
        return of_model
    if config.max_seq_len > of_model:
        raise ConfigError(f"max_seq_len {config.max_seq_len} is more than the model's {of_model}")
    return config.max_seq_len


def _make_cache(
    config: EngineConfig, model: ModelConfig, max_seq_len: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    num_pages = plan_pages(
        model,
        dtype=dtype,
        device=device,
        page_size=config.page_size,
        max_seq_len=max_seq_len,
        num_pages=config.num_pages,
        kv_bytes=config.kv_bytes,
        memory_ratio=config.memory_ratio,
    )
    return KVCache(
        num_layers=model.num_layers,
        num_pages=num_pages,
        page_size=config.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        device=device,
    )


class LocalStep:
    """A launched batch, and later its result."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.done = threading.Event()
        self.guided = threading.Event()
        self.masks: MaskArray | None = None
        self.result: StepResult | None = None
        self.fault: BaseException | None = None


class LocalEngine:
    """An Engine whose steps run in order on one thread of this process.

    torch gives the interpreter up inside each operation, so the scheduler goes on meanwhile.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, limits: EngineLimits, attention_backend: str, threads: int
    ) -> None:
        """Take over what was loaded and start the thread.

        Args:
            model: with its weights.
            cache: the pool; nobody else writes to it.
            limits: what callers may ask for.
            attention_backend: "auto" or a name of `attention.select`.
            threads: threads of one operation on a CPU.
        """
        self._model = model
        self._limits = limits
        self._threads = threads
        self._attention = select_backend(attention_backend, cache, model.dtype, model.device)
        self._sampler = Sampler(limits.max_running, limits.vocab_size, limits.eos_token_ids)
        self._last_tokens = torch.zeros(limits.max_running, dtype=torch.int64, device=model.device)
        self._steps: queue.SimpleQueue[LocalStep | None] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._running: LocalStep | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        return self._limits

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched and return at once."""
        step = LocalStep(batch)
        self._steps.put(step)
        return step

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Say what the guided rows of a launched step may draw; returns at once."""
        assert isinstance(step, LocalStep) and len(masks) == len(step.batch.guided)
        step.masks = masks
        step.guided.set()

    def wait(self, step: Step) -> StepResult:
        """Block, without holding the interpreter, until the step has retired.

        Raises:
            EngineFault: this step or one before it failed, or the engine is closed.
        """
        assert isinstance(step, LocalStep)
        step.done.wait()
        if step.result is None:
            raise EngineFault(f"step {step.batch.step} failed: {step.fault!r}") from step.fault
        return step.result

    def close(self) -> None:
        """End the thread, after the step it is in. Steps behind that one fail."""
        if self._fault is None:
            self._fault = RuntimeError("the engine is closed")
        self._steps.put(None)
        if (running := self._running) is not None:
            running.guided.set()  # its masks will not come any more
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def warm_up(self) -> None:
        """Compute a prompt and a token once, so that no request pays for what torch prepares at first use.

        It writes to page 0 and slot 0 before anybody owns them.
        """
        length = min(_WARM_UP_TOKENS, self._limits.page_size, self._limits.max_seq_len - 1)
        ids = np.zeros(length, dtype=np.int32)
        setup = SlotSetup(0, SamplingParams(temperature=1.0), ids, ids[:0])
        for start, count in ((0, length), (length - 1, 1)):
            batch = Batch(
                step=0,
                num_decode=0,
                slots=np.zeros(1, dtype=np.int32),
                starts=np.array([start], dtype=np.int32),
                lengths=np.array([count], dtype=np.int32),
                input_ids=ids[:count],
                page_table=np.zeros((1, 1), dtype=np.int32),
                sample=np.ones(1, dtype=np.bool_),
                out_index=np.ones(1, dtype=np.int32),
                setups=(setup,),
            )
            self.wait(self.launch(batch))

    def _run(self) -> None:
        """The thread: one step after the other; after a fault every step fails."""
        if self._model.device.type == "cpu":
            set_threads(self._threads)
        with torch.inference_mode():
            while (step := self._steps.get()) is not None:
                self._running = step
                if self._fault is None:
                    try:
                        step.result = self._compute(step)
                    except BaseException as e:  # whatever it is, the device's state is not known any more
                        self._fault = e
                step.fault = self._fault
                step.done.set()
        # Whoever waits for a step that came too late must not wait for ever.
        while not self._steps.empty():
            if (step := self._steps.get()) is not None:
                step.fault = self._fault
                step.done.set()

    def _compute(self, step: LocalStep) -> StepResult:
        batch, started = step.batch, time.perf_counter()
        for setup in batch.setups:
            self._sampler.set_up(setup)
        inputs = prepare(batch, self._last_tokens, self._model.device)
        plan = self._attention.plan(inputs.attention)
        context = ForwardContext(inputs.positions, plan, inputs.logits_index, num_decode=batch.num_decode)
        hidden = self._model.forward(inputs.input_ids, context)
        rows = inputs.drawn_rows
        token_ids = np.full(batch.num_rows, -1, dtype=np.int32)
        bad = np.zeros(batch.num_rows, dtype=np.bool_)
        scores, first = {}, len(rows)
        for score in batch.scores:
            last = first + len(score.targets)
            scores[score.row], bad[score.row] = score_tokens(self._model.logits, hidden[first:last], score)
            first = last
        logprobs, waited = {}, 0.0
        if len(rows):
            logits = self._model.logits(hidden[: len(rows)])
            waited = -time.perf_counter()
            guides = self._guides(step, rows)
            waited += time.perf_counter()
            draws = self._sampler.draw(logits, batch.slots[rows], batch.out_index[rows], guides)
            slots = torch.from_numpy(batch.slots[rows].astype(np.int64)).to(self._model.device)
            self._last_tokens.index_copy_(0, slots, torch.from_numpy(draws.tokens.astype(np.int64)).to(slots.device))
            token_ids[rows] = draws.tokens
            bad[rows] |= draws.bad
            logprobs = {int(rows[place]): found for place, found in draws.logprobs.items()}
        return StepResult(token_ids, bad, logprobs, 1e3 * (time.perf_counter() - started - waited), scores)

    def _guides(self, step: LocalStep, rows: IndexArray) -> Guides | None:
        """Wait for the masks of a step that has guided rows."""
        if not len(step.batch.guided):
            return None
        step.guided.wait()
        if step.masks is None:
            raise RuntimeError("the engine was closed while a step waited for its masks")
        return Guides(np.searchsorted(rows, step.batch.guided), step.masks)
