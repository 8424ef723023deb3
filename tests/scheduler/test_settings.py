"""The scheduler's settings: bounds, names in complaints, and what they make of the fake engine."""

import pytest

from services.scheduler.service import build, fake_config, step_tokens
from services.scheduler.settings import SchedulerSettings
from shared.errors import ConfigError
from shared.model_files import BYTES_NAME, locate
from shared.settings import load


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAGE_SIZE", "0"),
        ("MEMORY_RATIO", "1.5"),
        ("CACHE", "lru"),
        ("ATTENTION_BACKEND", "torch,torch,torch"),
        ("ATTENTION_BACKEND", "magic"),
        ("FAKE_CRASH_MARKER", "1,two"),
        ("MAX_RUNNING_REQUESTS", "many"),
    ],
)
def test_a_bad_value_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"MILLRACE_{name}", value)
    with pytest.raises(ConfigError, match=f"MILLRACE_{name}"):
        load(SchedulerSettings)


def test_a_backend_may_be_named_for_prefill_and_decode_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_ATTENTION_BACKEND", "torch,triton")
    assert load(SchedulerSettings).attention_backend == "torch,triton"


def test_a_full_batch_decodes_beside_a_full_share_of_prompts() -> None:
    assert step_tokens(SchedulerSettings(max_prefill_tokens=100, max_running_requests=8)) == 108
    assert step_tokens(SchedulerSettings()) is None, "the device decides"


def test_the_fake_engine_speaks_the_vocabulary_of_the_model_it_stands_for() -> None:
    files = locate(BYTES_NAME)
    config = fake_config(SchedulerSettings(fake_crash_marker=(1, 2), max_running_requests=4096), files)
    assert config.vocab_size == files.config["vocab_size"]
    assert config.eos_token_ids == files.eos_token_ids
    assert config.crash_marker == (1, 2)
    assert config.max_step_tokens >= config.max_running


def test_what_the_engine_does_not_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="MILLRACE_TENSOR_PARALLEL_SIZE"):
        build(SchedulerSettings(engine="fake", tensor_parallel_size=2))
    monkeypatch.setenv("MILLRACE_MOE_BACKEND", "fused")
    with pytest.raises(ConfigError, match=r"MILLRACE_MOE_BACKEND.*'auto'"):
        load(SchedulerSettings)
