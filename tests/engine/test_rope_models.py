"""Whole models under every rope rule against transformers, near and far."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.scheduler.engine.local import LocalEngine
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.engine.conftest import VOCAB, reference_of, write_checkpoint
from tests.engine.driver import Driver

HALF = 8
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + i for i in range(HALF)],
}
RULES: dict[str, dict[str, Any]] = {
    "absent": {},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **LLAMA3}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        }
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, **LONGROPE}},
}
EVERY = SamplingParams(temperature=0.0, logprobs=VOCAB)


def check(engine: LocalEngine, folder: Path, lengths: list[int]) -> None:
    """Compare what follows prompts of these lengths, token by token of the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    reference = reference_of(model.eval())
    ids = torch.randint(3, VOCAB, (max(lengths),), generator=torch.Generator().manual_seed(2)).tolist()
    driver = Driver(engine)
    for length in lengths:
        seq = driver.add(ids[:length], EVERY)
        while (left := length - seq.computed) > 0:
            result = driver.step([(seq, min(left, 512))])
        found = torch.full((VOCAB,), torch.nan)
        found[torch.from_numpy(result.logprobs[0].top_ids).long()] = torch.from_numpy(result.logprobs[0].top_logprobs)
        expected = reference(seq.prompt)[-1]
        assert int(expected.argmax()) == seq.output[0], length
        assert torch.allclose(found, expected, atol=1e-3), length
        driver.release(seq)


@pytest.mark.parametrize("name", RULES)
def test_logits_equal_transformers(name: str, tmp_path: Path, build: Callable[..., LocalEngine]) -> None:
    folder = write_checkpoint(tmp_path, "qwen2", **SHAPE, **RULES[name])
    engine = build(folder, num_pages=256, max_step_tokens=512)
    # Beyond its original context alone does longrope hang on nothing else in transformers.
    check(engine, folder, [600, 4001] if name == "longrope" else [2, 101, 4001])


def test_longrope_in_an_engine_of_the_original_context(tmp_path: Path, build: Callable[..., LocalEngine]) -> None:
    folder = write_checkpoint(tmp_path, "qwen2", **SHAPE, **RULES["longrope"])
    check(build(folder, max_seq_len=512, max_step_tokens=512), folder, [2, 101, 500])


def test_an_unknown_rule_is_refused_at_load(tmp_path: Path, build: Callable[..., LocalEngine]) -> None:
    folder = write_checkpoint(tmp_path, "qwen2", **SHAPE)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rope_type": "default"', '"rope_type": "bogus"'))
    with pytest.raises(ConfigError, match=r"rope type 'bogus' is not supported; supported: .*longrope"):
        build(folder)
