"""Choices of device, precision and memory."""

import pytest
import torch

from services.scheduler.engine import device
from services.scheduler.engine.device import available_cores, pick_device, pick_dtype, set_threads
from services.scheduler.engine.memory import CPU_DEFAULT_TOKENS, PoolRequest, plan_pages
from services.scheduler.engine.models.config import read_config
from shared.errors import ConfigError
from shared.model_files import EMBEDDED_NAME, locate

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("native", "checkpoint", "expected"),
    [
        (True, None, torch.bfloat16),
        (True, "bfloat16", torch.bfloat16),
        (True, "float16", torch.bfloat16),
        (True, "float32", torch.float32),
        (False, "bfloat16", torch.float32),
        (False, None, torch.float32),
    ],
)
def test_auto_dtype_of_a_cpu(
    native: bool, checkpoint: str | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_native_bf16", lambda: native)
    assert pick_dtype("auto", checkpoint, CPU) == expected


def test_stated_dtypes() -> None:
    assert pick_dtype("float32", "bfloat16", CPU) == torch.float32
    assert pick_dtype("float16", None, torch.device("cuda")) == torch.float16
    for bad in ("float16", "int8"):
        with pytest.raises(ConfigError, match=bad):
            pick_dtype(bad, None, CPU)


def test_devices_by_name() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="tpu"):
        pick_device("tpu")


def test_threads_are_no_more_than_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(None) == min(before, available_cores()) == torch.get_num_threads()
        assert set_threads(1) == 1 == torch.get_num_threads()
        torch.set_num_threads(4)
        monkeypatch.setattr(device, "available_cores", lambda: 3)
        assert set_threads(None) == 3 == torch.get_num_threads()
        assert set_threads(5) == 5
    finally:
        torch.set_num_threads(before)


def pages(**changes: object) -> int:
    options = {
        "dtype": torch.bfloat16, "device": CPU, "page_size": 16, "max_seq_len": 8192,
    } | changes  # fmt: skip
    pool = PoolRequest(options.pop("num_pages", None), options.pop("kv_bytes", None))  # type: ignore[arg-type]
    return plan_pages(read_config(locate(EMBEDDED_NAME).config), pool, **options)  # type: ignore[arg-type]


def test_pages_from_a_budget() -> None:
    token_bytes = 30 * 2 * 3 * 64 * 2
    assert pages(kv_bytes=100 * 16 * token_bytes + 5) == 100
    assert pages(num_pages=37, kv_bytes=1) == 37
    assert pages(page_size=1, kv_bytes=token_bytes * 64) == 64
    assert pages() == CPU_DEFAULT_TOKENS // 16
    with pytest.raises(ConfigError, match="pages"):
        pages(kv_bytes=token_bytes)


def test_the_default_pool_holds_the_longest_request_where_memory_allows() -> None:
    assert pages(max_seq_len=2 * CPU_DEFAULT_TOKENS) == 2 * CPU_DEFAULT_TOKENS // 16
    assert pages(max_seq_len=10**9) < 10**9 // 16
