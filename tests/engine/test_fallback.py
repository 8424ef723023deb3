"""Architectures without a definition here, through transformers with our attention."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from services.scheduler.engine.local import LocalEngine
from services.scheduler.engine.models.registry import describe
from shared.errors import ConfigError
from tests.engine.conftest import SHAPE, reference_of
from tests.engine.driver import Driver
from tests.engine.test_engine import PROMPTS, assert_greedy

Build = Callable[..., LocalEngine]
OTHERS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {"use_parallel_residual": True},
    "Phi": {"partial_rotary_factor": 0.5},
    "Olmo2": {},
    "StableLm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "Starcoder2": {"sliding_window": 24},
    "Gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def write(folder: Path, name: str, **changes: Any) -> Path:
    torch.manual_seed(5)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    config = getattr(transformers, f"{name}Config")(**(shape | OTHERS.get(name, {}) | {"pad_token_id": 0} | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_equal_transformers(
    name: str, tmp_path: Path, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    reference = reference_of(model.eval())
    with caplog.at_level(logging.WARNING):
        driver = Driver(build(folder))
    assert "runs through transformers" in caplog.text
    seqs = driver.run(PROMPTS, 10, chunk=20)
    for seq in seqs:
        assert len(seq.output) == 10 and not seq.bad
        assert_greedy(seq, reference)
    first = driver.add(PROMPTS[6])
    driver.prefill([first])
    again = driver.add(PROMPTS[6])
    driver.share(again, first, 48)
    driver.prefill([again])
    driver.decode([again], 9)
    assert_greedy(again, reference)


@pytest.mark.parametrize(("longest", "original"), [(512, 32), (64, 64)], ids=["long", "short"])
def test_longrope_has_one_set_of_angles(longest: int, original: int, tmp_path: Path, build: Build) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        "original_max_position_embeddings": original,
    }
    folder = write(tmp_path, "Phi3", rope_parameters=rope, original_max_position_embeddings=original)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    # Transformers takes the long set for what is longer than the original context, as these prompts are or are not.
    prompts = [prompt for prompt in PROMPTS if (len(prompt) > original) == (longest > original)]
    prompts = [prompt for prompt in prompts if len(prompt) + 10 <= longest]
    seqs = Driver(build(folder, max_seq_len=longest)).run(prompts, 10)
    assert seqs
    for seq in seqs:
        assert_greedy(seq, reference_of(model.eval()))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("GptOss", {"head_dim": 16}, "'GptOssForCausalLM' is not supported: its attention uses .*s_aux"),
        (
            "GPTNeoX",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}},
            "rope type 'dynamic' hangs on",
        ),
        ("Mamba", {}, "'MambaForCausalLM' is not supported"),
    ],
)
def test_what_our_attention_cannot_do_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path, build: Build
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(write(tmp_path, name, **changes))


@pytest.mark.parametrize("field", ["rope_type", "type"])
@pytest.mark.parametrize("holder", ["rope_parameters", "rope_scaling"])
def test_an_unknown_rope_type_is_refused_by_name(holder: str, field: str) -> None:
    raw = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", holder: {field: "bogus", "factor": 2.0}}
    with pytest.raises(ConfigError, match=r"'GPTNeoXForCausalLM' is not supported: .*rope type 'bogus'"):
        describe(raw)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}, "'NoSuchForCausalLM'.*'nosuch'"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5.*decoder that generates text"),
        ({"architectures": ["BertModel"], "model_type": "bert", "is_decoder": False}, "BertModel"),
    ],
)
def test_what_transformers_does_not_know_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        raw = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9, **config}
        describe(raw | {"max_position_embeddings": 64})


def test_several_ranks_are_refused(tmp_path: Path, build: Build) -> None:
    with pytest.raises(ConfigError, match=r"GPTNeoXForCausalLM.*one rank"):
        build(write(tmp_path, "GPTNeoX"), ranks=2)


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path, build: Build) -> None:
    from safetensors.torch import load_file, save_file

    folder = write(tmp_path, "GPTNeoX")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.attention.dense.weight"))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        build(folder)
