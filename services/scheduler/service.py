"""The scheduler service: puts engine, scheduler, step loop and link together, and ends them in order.

Owns the composition and the drain. Knows no rule of scheduling and no key of the broker.
"""

import logging
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from services.scheduler.broker_link import BrokerLink
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.page_pool import LIVE, QUARANTINED
from services.scheduler.core.ports import Engine, EngineLimits, ShowsProgress
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.threads import wait_briefly
from services.scheduler.fake_engine import FakeEngine, FakeEngineConfig
from services.scheduler.grammar.compiler import GrammarCompiler, GrammarVocabulary
from services.scheduler.link_config import LinkConfig
from services.scheduler.loop import StepLoop
from services.scheduler.metrics import Gauges, SchedulerMetrics, StepTimes
from services.scheduler.settings import SchedulerSettings
from shared.errors import ConfigError, MillraceError
from shared.messages import Heartbeat
from shared.model_files import BYTES_NAME, ModelFiles, locate
from shared.runtime import Life
from shared.vocab import load_vocabulary

if TYPE_CHECKING:
    from services.scheduler.engine.engine import EngineConfig

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S: Final = 5e-4
"""The I/O thread waits at most so long for the interpreter while the step loop computes."""
FLUSH_S: Final = 2.0
"""Kept of the drain time for sending what is left and handing over."""
FAKE_NUM_PAGES: Final = 4096
FAKE_PAGE_SIZE: Final = 16
FAKE_STEP_TOKENS: Final = 2048


class SchedulerService:
    """One scheduler with its engine. See `shared.runtime.Service`."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self._scheduler: Scheduler | None = None
        self._grammars: GrammarCompiler | None = None
        self._loop: StepLoop | None = None
        self._link: BrokerLink | None = None
        self._metrics: SchedulerMetrics | None = None
        self._life: Life | None = None
        self._num_steps = 0
        self._times = StepTimes()

    # --- shared.runtime.Service

    def prepare(self, life: Life) -> None:
        """Load the model and build everything that needs no broker."""
        life.readiness.missing("model")
        self._life = life
        self._metrics = SchedulerMetrics(life.metrics)
        began = time.monotonic()
        self._engine = build(self._settings)
        limits = self._engine.limits
        budget = self._settings.max_prefill_tokens or limits.max_step_tokens
        policy = SchedulerConfig(self._settings.cache, budget, self._settings.max_gap_ratio)
        self._grammars = make_compiler(self._settings, limits)
        self._scheduler = Scheduler(limits, policy, self._grammars)
        seconds = time.monotonic() - began
        self._metrics.loaded(seconds)
        self._metrics.describe(
            limits,
            model=self._settings.served_model_name,
            engine=self._settings.engine,
            device=self._settings.device,
            dtype=self._settings.dtype,
            ranks=self._settings.tensor_parallel_size,
            prefix_cache=self._settings.cache,
        )
        log.info(
            "engine ready after %.1f s: %d pages of %d tokens, %d slots, %d tokens of context",
            seconds,
            limits.num_pages,
            limits.page_size,
            limits.max_running,
            limits.max_seq_len,
        )
        life.readiness.have("model")

    def serve(self, life: Life) -> None:
        """Step until the drain; then hand over what is left, or leave it to whoever comes."""
        assert self._engine is not None and self._scheduler is not None and self._metrics is not None
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = LinkConfig(
            me=life.incarnation,
            model=self._settings.served_model_name,
            fingerprint=self._engine.limits.fingerprint,
            num_shards=life.heart.agreement.num_shards,
            lease_s=self._settings.lease_s("scheduler"),
            api_lease_s=self._settings.lease_s("api"),
            dead_letter_bodies=self._settings.dead_letter_bodies,
        )
        link = BrokerLink(
            life.broker, life.heart, config, self._metrics, on_report=self._on_report, on_failure=self._on_failure
        )
        loop = StepLoop(self._engine, link, self._scheduler, overlap=not self._settings.disable_overlap)
        self._link, self._loop = link, loop
        self._metrics.watch(self._read_gauges)
        life.readiness.require("lease", lambda: life.heart.since_beat_s < config.lease_s)
        link.start()
        try:
            loop.run()
            life.pulse.rest()
            self._leave(link, life)
        finally:
            link.close()
            self._engine.close()
            if self._grammars is not None:
                self._grammars.close()

    def heartbeat(self, base: Heartbeat) -> Heartbeat:
        """Add the engine's size and load, and its progress: a step that takes long is not the end of an engine.

        The size is there from the first heartbeat on: an engine that dies before it serves is taken over as well.
        """
        assert self._engine is not None, "registered before the engine is built"
        limits, link = self._engine.limits, self._link
        progress = self._engine.progress if isinstance(self._engine, ShowsProgress) else 0
        base = msgspec.structs.replace(
            base,
            beat=base.beat + progress,
            fingerprint=limits.fingerprint,
            max_seq_len=min(limits.max_seq_len, limits.num_pages * limits.page_size),
            max_running=limits.max_running,
            free_pages=limits.num_pages,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
        )
        if link is None:
            return base
        load, scheduler = link.load, self._scheduler
        assert scheduler is not None, "there is no link without a scheduler"
        return msgspec.structs.replace(
            base,
            num_running=load.num_running,
            num_waiting=link.num_waiting,
            queued_tokens=load.queued_tokens + link.queued_tokens,
            free_pages=load.free_pages,
            tokens_per_s=load.tokens_per_s,
            cached_pages=scheduler.pages.cache.num_evictable,
            cache_query_tokens=scheduler.stats.cache_query_tokens,
            cache_hit_tokens=scheduler.stats.cache_hit_tokens,
            num_taken=link.num_taken,
        )

    def reconnected(self) -> None:
        """The broker is back: everything is compared with it before anything is sent."""
        if self._link is not None:
            self._link.lost_contact()

    def others_died(self) -> None:
        """Have the link look at what a dead engine or api has left."""
        if self._link is not None:
            self._link.others_died()

    # --- the step loop's thread

    def _on_report(self) -> None:
        """Beat, keep the counters, and see whether it is time to end."""
        life, loop, link = self._life, self._loop, self._link
        assert life is not None and loop is not None and link is not None
        life.beat()
        self._record(loop)
        if life.draining and self._may_leave(life, link):
            loop.stop()
            link.wake()

    def _may_leave(self, life: Life, link: BrokerLink) -> bool:
        """Say whether to stop stepping: somebody takes over, nothing is left, or the time is over."""
        if link.has_survivors or not link.num_held:
            return True
        return life.drain_left_s() <= FLUSH_S

    def _record(self, loop: StepLoop) -> None:
        """Tell the metrics what has happened since the last report."""
        assert self._metrics is not None and self._scheduler is not None
        stats, metrics = loop.stats, self._metrics
        metrics.follow(self._scheduler.stats)
        metrics.idle(stats.idle_s)
        if stats.steps == self._num_steps:
            return
        times = StepTimes(stats.python_s, stats.launch_s, stats.wait_s, stats.forward_s)
        metrics.step(stats.rows, stats.tokens, times.minus(self._times), stats.path)
        self._num_steps, self._times = stats.steps, times

    # --- any thread

    def _on_failure(self, reason: str) -> None:
        assert self._life is not None and self._loop is not None and self._link is not None
        self._life.fail(MillraceError(reason))
        self._loop.stop()
        self._link.wake()

    def _read_gauges(self) -> Gauges:
        assert self._engine is not None and self._scheduler is not None and self._link is not None
        limits, pages, load = self._engine.limits, self._scheduler.pages, self._link.load
        return Gauges(
            running=load.num_running,
            waiting=self._link.num_waiting,
            queued_tokens=load.queued_tokens + self._link.queued_tokens,
            slots=limits.max_running,
            pages=limits.num_pages,
            pages_free=pages.pool.num_free,
            pages_live=pages.pool.count(LIVE),
            pages_cached=pages.cache.num_pages,
            pages_quarantined=pages.pool.count(QUARANTINED),
            pages_reach=pages.pool.num_free + pages.cache.num_evictable,
            unconfirmed=self._link.num_unconfirmed,
            paused=self._link.paused,
        )

    # --- the end

    def _leave(self, link: BrokerLink, life: Life) -> None:
        """Send what is left and hand over; without a survivor the entries wait for whoever comes."""
        left = max(0.5, min(life.drain_left_s(), 60.0))
        if link.finish(left):
            log.info("drained: nothing is left with this engine")
        else:
            log.warning("the requests that are left wait for the next engine")


def find_files(settings: SchedulerSettings) -> ModelFiles:
    """Find the files of the model that the settings name.

    Raises:
        ConfigError: it cannot be found.
    """
    is_fake = settings.engine == "fake"
    name = settings.model or (BYTES_NAME if is_fake else "")
    return locate(name, settings.model_source, revision=settings.model_revision, weights=not is_fake)


def make_compiler(settings: SchedulerSettings, limits: EngineLimits) -> GrammarCompiler:
    """Make what compiles grammars; it loads the vocabulary beside everything else."""
    files = find_files(settings)
    source = GrammarVocabulary(lambda: load_vocabulary(files), limits.vocab_size, sorted(limits.eos_token_ids))
    return GrammarCompiler(source)


def build(settings: SchedulerSettings) -> Engine:
    """Build the engine that the settings name.

    Raises:
        ConfigError: the model or the device cannot be served as set.
    """
    files = find_files(settings)
    if settings.engine == "fake":
        if settings.tensor_parallel_size > 1:
            raise ConfigError("MILLRACE_TENSOR_PARALLEL_SIZE: the fake engine has one rank")
        return FakeEngine(fake_config(settings, files))
    wait_briefly()
    from services.scheduler.engine.engine import build_engine  # torch only where it is used
    from services.scheduler.engine.kernel_cache import kept_kernels

    with kept_kernels(settings.kernel_cache_dir, settings.device):
        return build_engine(engine_config(settings), files)


def fake_config(settings: SchedulerSettings, files: ModelFiles) -> FakeEngineConfig:
    """Say how the fake engine is to behave, in place of a model."""
    return FakeEngineConfig(
        vocab_size=int(files.config["vocab_size"]),
        eos_token_ids=files.eos_token_ids,
        fingerprint=f"fake-{files.fingerprint}",
        num_pages=settings.num_pages or FAKE_NUM_PAGES,
        page_size=settings.page_size or FAKE_PAGE_SIZE,
        max_running=settings.max_running_requests,
        max_seq_len=settings.max_seq_len or files.max_seq_len,
        max_step_tokens=step_tokens(settings) or max(FAKE_STEP_TOKENS, settings.max_running_requests),
        eos_every=settings.fake_eos_every,
        base_ms=settings.fake_step_ms,
        row_us=settings.fake_row_us,
        token_us=settings.fake_token_us,
        crash_marker=settings.fake_crash_marker,
        stall_marker=settings.fake_stall_marker,
        nan_marker=settings.fake_nan_marker,
        check=settings.fake_check,
        stamps=settings.fake_stamps,
    )


def engine_config(settings: SchedulerSettings) -> "EngineConfig":
    """Say how the real engine is to be built."""
    from services.scheduler.engine.engine import EngineConfig

    return EngineConfig(
        device=settings.device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        attention_backend=settings.attention_backend,
        page_size=settings.page_size,
        num_pages=settings.num_pages,
        memory_ratio=settings.memory_ratio,
        max_running=settings.max_running_requests,
        max_seq_len=settings.max_seq_len,
        max_step_tokens=step_tokens(settings),
        cuda_graph_max_bs=settings.cuda_graph_max_bs,
        threads=settings.threads,
        ranks=settings.tensor_parallel_size,
        direct_sums=not settings.disable_custom_all_reduce,
    )


def step_tokens(settings: SchedulerSettings) -> int | None:
    """Give the tokens of one step: a full batch decodes beside a full share of prompts. None: the device decides."""
    if settings.max_prefill_tokens is None:
        return None
    return settings.max_prefill_tokens + settings.max_running_requests
