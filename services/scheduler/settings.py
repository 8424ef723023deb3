"""The settings of a scheduler: which model, on what, how much of it, and how the broker side behaves.

Each field is the environment variable `MILLRACE_<FIELD>` and the launcher's flag `--<field>`. Knows names and
bounds only; what a value means for a device is the engine's to decide.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from shared.settings import ModelSettings


def _split(value: Any) -> Any:
    """Turn "1, 2" into (1, 2)."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


IdList = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_split)]


class SchedulerSettings(ModelSettings):
    """What one scheduler is told at its start.

    Attributes:
        engine: `fake` computes hashes instead of a model: the whole stack without weights and without torch.
        device: where the model runs.
        dtype: `auto` is the checkpoint's; on a CPU bfloat16 where the processor is made for it, else float32.
        load_format: `dummy` draws random weights, for benchmarks.
        tensor_parallel_size: GPUs (or, on a CPU, processes) that share one model.
        page_size: tokens per KV page, unset is chosen by the device.
        num_pages: KV pages; unset takes what fits the memory.
        memory_ratio: share of a GPU's memory for weights and KV pages together.
        max_running_requests: requests that have a slot at one time.
        max_seq_len: tokens of prompt and answer together; unset is what the model allows.
        max_prefill_tokens: prompt tokens computed in one step, unset is chosen by the device.
        max_gap_ratio: while answers run, a step may take this many times as long for the prompts in it, and up to four
            times that while more requests wait than run: more starts long prompts sooner, less makes the gaps of the
            others shorter; 0 lets prompts take whole steps.
        cache: `naive` computes every prompt from its first token.
        attention_backend: name, or `prefill,decode` names.
        moe_backend: kernels of mixture-of-experts layers: `auto` is all that there is, they follow a step's tokens.
        cuda_graph_max_bs: largest batch with a captured graph on a GPU; 0 captures none, unset is chosen by the device.
        kernel_cache_dir: folder of a GPU's compiled kernels, which `launcher warmup` fills ahead of a start; unset is
            TRITON_CACHE_DIR, or `millrace/kernels` in the user's cache.
        disable_overlap: settle each step before the next is planned.
        disable_custom_all_reduce: NCCL alone between GPUs; small sums do not go by their own memory.
        stuck_after: seconds one step may take; then the process tells where it stands and ends, so that others take
            its requests over. A step on a slow processor may take long; 0 waits for ever.
        threads: threads of one operation on a CPU; unset is all cores the process may use.
        fake_step_ms: time a step of the fake engine takes.
        fake_row_us: microseconds the fake engine adds to a step per decoding request.
        fake_token_us: microseconds it adds per prompt token.
        fake_eos_every: on average one token in so many ends an answer of the fake engine; 0 is never.
        fake_crash_marker: ids with commas; a prompt that holds them in a row ends the process.
        fake_stall_marker: likewise; a prompt that holds them is never done.
        fake_nan_marker: likewise; for a prompt that holds them no valid numbers are computed.
        fake_check: have the fake engine verify every batch.
        fake_stamps: the text of the fake engine tells when each token was drawn, for benchmarks.
    """

    health_port: int = Field(default=9102, ge=0, le=65535)
    engine: Literal["real", "fake"] = "real"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    page_size: int | None = Field(default=None, ge=1, le=1024)
    num_pages: int | None = Field(default=None, ge=2)
    memory_ratio: float = Field(default=0.9, gt=0.0, le=1.0)
    max_running_requests: int = Field(default=64, ge=1, le=4096)
    max_seq_len: int | None = Field(default=None, ge=2)
    max_prefill_tokens: int | None = Field(default=None, ge=1)
    max_gap_ratio: float = Field(default=2.9, ge=0.0, allow_inf_nan=False)
    cache: Literal["radix", "naive"] = "radix"
    attention_backend: str = "auto"
    moe_backend: Literal["auto"] = "auto"
    cuda_graph_max_bs: int | None = Field(default=None, ge=0)
    kernel_cache_dir: Path | None = None
    disable_overlap: bool = False
    disable_custom_all_reduce: bool = False
    stuck_after: float = Field(default=300.0, ge=0.0)
    threads: int | None = Field(default=None, ge=1)
    fake_step_ms: float = Field(default=1.0, ge=0.0)
    fake_row_us: float = Field(default=0.0, ge=0.0)
    fake_token_us: float = Field(default=0.0, ge=0.0)
    fake_eos_every: int = Field(default=0, ge=0)
    fake_crash_marker: IdList = ()
    fake_stall_marker: IdList = ()
    fake_nan_marker: IdList = ()
    fake_check: bool = True
    fake_stamps: bool = False

    @field_validator("attention_backend")
    @classmethod
    def _backend_names(cls, value: str) -> str:
        known = {"auto", "torch", "triton"}
        names = value.split(",")
        if len(names) > 2 or not set(names) <= known:
            raise ValueError(f"one of {', '.join(sorted(known))}, or two of them: prefill,decode")
        return value
