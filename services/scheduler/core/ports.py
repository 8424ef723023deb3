"""The Engine protocol: the one door between scheduling and computation.

Scheduling owns slots, pages and order; an engine owns weights, KV tensors and chance. An engine does what a
Batch says, in the order of its launches, and knows neither requests nor the broker. `tests/contract/test_engine.py`
holds every engine to this page.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from services.scheduler.core.batch import Batch, MaskArray, StepResult


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold, fixed for its life.

    Attributes:
        fingerprint: names weights, revision and dtype; engines of equal fingerprint compute the same.
        vocab_size: ids run from 0 to vocab_size - 1.
        eos_token_ids: every end token of the generation config.
        max_seq_len: tokens of prompt and answer together.
        page_size: tokens per KV page.
        num_pages: pages in the pool; ids run from 0 to num_pages - 1.
        max_running: request slots; ids run from 0 to max_running - 1.
        max_step_tokens: tokens one step may compute at most (its buffers' size).
        kv_bytes: size of the KV pool.
    """

    fingerprint: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_seq_len: int
    page_size: int
    num_pages: int
    max_running: int
    max_step_tokens: int
    kv_bytes: int = 0


class Step(Protocol):
    """A launched batch; opaque to scheduling."""

    @property
    def batch(self) -> Batch:
        """The batch it runs."""
        ...


class Engine(Protocol):
    """Computes batches. All calls come from one thread, except `close`."""

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        ...

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched and return at once.

        Two steps may be in flight. Arrays of the batch are the engine's from here on.
        """
        ...

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Say what the guided rows of a launched step may draw, in the order of `Batch.guided`; returns at once.

        Called once for a step that has guided rows, when every step before it is settled, and not for others.
        """
        ...

    def wait(self, step: Step) -> StepResult:
        """Block, without holding the interpreter, until the step has retired. Steps are waited for in order.

        A step with guided rows must have been guided.

        Raises:
            EngineFault: the device or a worker is lost; the process must end.
        """
        ...

    def check(self) -> None:
        """See whether the engine can go on, while there is nothing to wait for; returns at once.

        Raises:
            EngineFault: as `wait`.
        """
        ...

    def close(self) -> None:
        """Free the device and end the worker threads. Safe to call twice."""
        ...


@runtime_checkable
class ShowsProgress(Protocol):
    """An engine whose steps may take longer than a lease, where a processor is slow or shared.

    Attributes:
        progress: grows while a step is being computed; read by any thread.
    """

    progress: int


class EngineFault(RuntimeError):
    """An engine that cannot go on. Its process exits non-zero and its requests are taken over."""
