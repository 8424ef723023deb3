"""Every rope rule against transformers, and the refusal of those that are not known."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.scheduler.engine.layers.rotary import Rotary, rotate
from services.scheduler.engine.models.config import read_config
from shared.errors import ConfigError

LONGEST = 4001
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 50_000.0,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 512}
RULES: dict[str, dict[str, Any] | None] = {
    "absent": {},
    "null": {"rope_scaling": None},
    "default": {"rope_scaling": {"rope_type": "default"}},
    "linear old": {"rope_scaling": {"type": "linear", "factor": 2}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    "yarn exact": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "truncate": False,
            "beta_fast": 20,
            "beta_slow": 2,
        }
    },
    "yarn stated": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
    "yarn mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1}},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}},
    "parameters llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7000.0, **LLAMA3}},
    "head_dim": {"head_dim": 32},
}


def angles_of(raw: dict[str, Any], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    config = read_config(raw)
    found = Rotary(config.rope, LONGEST, torch.device("cpu"))(torch.tensor(positions))
    half = found.sin.shape[-1] // 2
    return found.cos[:, 0, :half], found.sin[:, 0, half:]


@pytest.mark.parametrize("name", RULES)
def test_angles_equal_transformers(name: str) -> None:
    raw = BASE | (RULES[name] or {})
    positions = [0, 1, 100, 2047, 4000]
    config = LlamaConfig(**{key: value for key, value in raw.items() if key != "architectures"})
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    cos, sin = angles_of(raw, positions)
    half = cos.shape[-1]
    assert torch.allclose(cos, expected[0][0, :, :half], atol=1e-3)
    assert torch.allclose(sin, expected[1][0, :, :half], atol=1e-3)


def test_dynamic_angles_equal_transformers_token_by_token() -> None:
    raw = BASE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    config = LlamaConfig(**{key: value for key, value in raw.items() if key != "architectures"})
    rotary = LlamaRotaryEmbedding(config)
    for position in (0, 1, 2047, 2048, 3000, 4000):
        expected = rotary(torch.zeros(1), torch.tensor([[position]]))
        cos, sin = angles_of(raw, [position])
        half = cos.shape[-1]
        assert torch.allclose(cos, expected[0][0, :, :half], atol=2e-3)
        assert torch.allclose(sin, expected[1][0, :, :half], atol=2e-3)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 64 for i in range(32)],
    "long_factor": [2.0 + i / 8 for i in range(32)],
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("changes", [{}, {"factor": 8.0}, {"attention_factor": 1.3}], ids=str)
@pytest.mark.parametrize("longest", [512, 513])
def test_longrope_angles_equal_transformers_by_what_an_engine_holds(longest: int, changes: dict[str, float]) -> None:
    raw = BASE | {"rope_scaling": LONGROPE | changes}
    config = LlamaConfig(**{key: value for key, value in raw.items() if key != "architectures"})
    positions = [0, 1, 100, longest - 1]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    found = Rotary(read_config(raw).rope, longest, torch.device("cpu"))(torch.tensor(positions))
    assert torch.allclose(found.cos[:, 0], expected[0][0], atol=1e-3)
    assert torch.allclose(found.sin[:, 0, 32:], expected[1][0, :, 32:], atol=1e-3)


@pytest.mark.parametrize("changes", [{"short_factor": None}, {"long_factor": [1.0] * 31}, {"long_factor": 2.0}])
def test_longrope_without_its_lists_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"longrope.*{next(iter(changes))}, a list of 32"):
        read_config(BASE | {"rope_scaling": LONGROPE | changes})


def test_rules_differ_from_the_default() -> None:
    """The comparison above would be empty if a rule were ignored on both sides."""
    default = angles_of(BASE, [100])[0]
    for name in ("linear", "llama3", "yarn", "yarn stated"):
        assert not torch.allclose(angles_of(BASE | (RULES[name] or {}), [100])[0], default, atol=1e-2)


@pytest.mark.parametrize("field", ["type", "rope_type"])
@pytest.mark.parametrize("holder", ["rope_scaling", "rope_parameters"])
def test_unknown_rules_are_refused_by_name(field: str, holder: str) -> None:
    with pytest.raises(ConfigError, match="bogus"):
        read_config(BASE | {holder: {field: "bogus", "factor": 2.0}})


def test_a_rule_without_its_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"linear.*factor"):
        read_config(BASE | {"rope_scaling": {"type": "linear"}})


def test_rotation_turns_pairs_and_keeps_the_rest() -> None:
    rope = read_config(BASE | {"partial_rotary_factor": 0.5}).rope
    rotary = Rotary(rope, 16, torch.device("cpu"))
    assert rope.rotary_dim == 32
    x = torch.randn(3, 2, 64)
    angles = rotary(torch.tensor([0, 5, 9]))
    turned = rotate(x, angles)
    assert torch.equal(turned[0], x[0]) and torch.equal(turned[..., 32:], x[..., 32:])
    first, second = x[1, :, :16], x[1, :, 16:32]
    cos, sin = angles.cos[1, :, :16], angles.sin[1, :, 16:]
    assert torch.allclose(turned[1, :, :16], first * cos - second * sin, atol=1e-6)
    assert torch.allclose(turned[1, :, 16:32], second * cos + first * sin, atol=1e-6)
