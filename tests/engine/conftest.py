"""Tiny random checkpoints written by transformers, and the references computed from them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.local import LocalEngine
from shared.model_files import EMBEDDED_NAME, locate
from tests.engine.driver import TINY
from tests.smollm2 import load_transformers_model

VOCAB = 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
INTERPRETED = {"head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": False}
"""What is changed of SHAPE where Triton's interpreter computes."""
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain": ("Qwen3Moe", {"head_dim": 16, **EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2}),
}


def write_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """Write a random checkpoint of a family."""
    name, own = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**(SHAPE | own | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


Reference = Callable[[list[int]], torch.Tensor]
"""Token ids -> (len, vocab) log probabilities of what follows each."""


def reference_of(model: Any) -> Reference:
    def compute(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.float(), -1)

    return compute


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """family, changes of its shape -> folder, written once."""
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = f"{family} {changes}"
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """family -> what transformers computes."""
    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            model = AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager")
            made[family] = reference_of(model.float().eval())
        return made[family]

    return get


@pytest.fixture
def build(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., LocalEngine]]:
    """Build small engines that end with the test: build("qwen3", page_size=1)."""
    engines: list[LocalEngine] = []

    def make(family: str | Path, **changes: Any) -> LocalEngine:
        folder = checkpoint(family) if isinstance(family, str) else family
        engines.append(build_engine(replace(TINY, **changes), locate(str(folder))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LocalEngine]:
    """The embedded default model in float32."""
    config = EngineConfig(dtype="float32", num_pages=128, max_running=8, max_step_tokens=256)
    engine = build_engine(config, locate(EMBEDDED_NAME))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def smollm2_bf16() -> Iterator[LocalEngine]:
    """The same model in the precision of machines that have it."""
    config = EngineConfig(dtype="bfloat16", num_pages=128, max_running=8, max_step_tokens=256)
    engine = build_engine(config, locate(EMBEDDED_NAME))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def smollm2_reference() -> Reference:
    """The same file, dequantised here into a model of transformers."""
    return reference_of(load_transformers_model())
