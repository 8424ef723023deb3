"""The engine of one rank: it launches batches behind each other and hands back what they drew.

Owns the model, the KV pool, the sampler's state and the thread they run on. Knows slots, pages and steps;
knows neither requests, nor the broker, nor how a batch was chosen.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.ports import Engine

if TYPE_CHECKING:
    from shared.model_files import ModelFiles


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
        max_step_tokens: tokens computed in one step at most.
        threads: threads of one operation on a CPU; None takes all cores this process may use.
        model_name: goes into the fingerprint with the weights' revision and the dtype.
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
    max_step_tokens: int = 512
    threads: int | None = None
    model_name: str = ""


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
    raise NotImplementedError
