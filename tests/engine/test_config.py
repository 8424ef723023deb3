"""Configs in all their spellings, and what is refused."""

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from services.scheduler.engine.models.config import read_config
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.models.qwen3 import Qwen3Model
from services.scheduler.engine.models.registry import model_class
from shared.errors import ConfigError
from shared.model_files import EMBEDDED_NAME, locate
from tests.engine.test_rotary import BASE


def test_old_and_new_spellings_mean_the_same() -> None:
    old = BASE | {"torch_dtype": "bfloat16", "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {key: value for key, value in BASE.items() if key != "rope_theta"} | {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0},
    }
    per_kind = new | {"rope_parameters": {"full_attention": new["rope_parameters"]}}
    assert read_config(old) == read_config(new) == read_config(per_kind)
    assert read_config(old).dtype == "bfloat16" and read_config(old).rope.theta == 50_000.0


def test_what_transformers_writes_is_read() -> None:
    for config, name in (
        (LlamaConfig(num_key_value_heads=8), "LlamaForCausalLM"),
        (MistralConfig(sliding_window=4096), "MistralForCausalLM"),
        (Qwen2Config(), "Qwen2ForCausalLM"),
        (Qwen3Config(head_dim=128), "Qwen3ForCausalLM"),
    ):
        raw = config.to_dict() | {"architectures": [name]}
        found = read_config(raw)
        assert found.hidden_size == config.hidden_size and found.num_kv_heads == config.num_key_value_heads
        assert found.qkv_bias == (name == "Qwen2ForCausalLM") and not found.o_bias
        assert found.window(0) == (4096 if name == "MistralForCausalLM" else None)


def test_the_embedded_model() -> None:
    config = read_config(locate(EMBEDDED_NAME).config)
    assert (config.num_layers, config.num_qo_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied and config.rope.theta == 100_000.0 and config.norm_eps == pytest.approx(1e-5)


def test_head_dim_stands_apart_from_the_hidden_size() -> None:
    assert read_config(BASE | {"head_dim": 80}).head_dim == 80
    assert read_config(BASE | {"head_dim": None}).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 query heads.*4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"sliding_window": 8, "layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "differ"),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(BASE | changes)


def test_windows_by_layer() -> None:
    raw = BASE | {"num_hidden_layers": 3, "sliding_window": 8}
    assert read_config(raw).windows == (8, 8, 8)
    assert read_config(raw | {"use_sliding_window": False}).windows == ()
    assert read_config(raw | {"use_sliding_window": True, "max_window_layers": 2}).windows == (None, None, 8)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert read_config(raw | {"layer_types": kinds}).windows == (None, 8, None)


def test_architectures_by_name() -> None:
    assert model_class("LlamaForCausalLM") is LlamaModel
    assert model_class("Qwen3ForCausalLM") is Qwen3Model
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        model_class("GPT2LMHeadModel")
