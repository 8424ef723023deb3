"""The fake engine, `--engine fake`: scripted, torch-free, and strict about what it is asked to do.

Every token is a hash of all tokens before it, so that a splice, a lost token or a wrong order shows in the
text. With `check` on it keeps its own KV model and raises on any page, position or input that does not belong.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.core.batch import Batch, StepResult
from services.scheduler.core.ports import EngineLimits, Step


@dataclass(frozen=True, slots=True)
class FakeEngineConfig:
    """Script and size of a fake engine.

    Attributes:
        vocab_size: ids run below it. Ids under 256 are bytes; drawn ids are printable ASCII.
        eos_token_ids: end tokens; drawn only as `eos_every` says.
        eos_every: on average one token in so many is an end token; 0 for never.
        base_ms: time of a step, before what its rows add.
        row_us: added per decode row.
        token_us: added per prompt token.
        check: keep a KV model and verify every batch; off for speed.
        crash_marker: a prompt with these ids in a row ends the process, as a poison request would.
        nan_marker: a prompt with these ids in a row yields bad logits.
    """

    vocab_size: int = 259
    eos_token_ids: tuple[int, ...] = (257,)
    num_pages: int = 4096
    page_size: int = 16
    max_running: int = 64
    max_seq_len: int = 8192
    max_step_tokens: int = 8192
    eos_every: int = 0
    base_ms: float = 1.0
    row_us: float = 0.0
    token_us: float = 0.0
    check: bool = True
    crash_marker: tuple[int, ...] = ()
    nan_marker: tuple[int, ...] = ()
    fingerprint: str = "fake"


class FakeEngine:
    """An Engine without a model."""

    def __init__(self, config: FakeEngineConfig | None = None, *, crash: Callable[[], None] | None = None) -> None:
        self.config = config or FakeEngineConfig()

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        raise NotImplementedError

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched."""
        raise NotImplementedError

    def wait(self, step: Step) -> StepResult:
        """Block until the step's time is over."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to free."""
