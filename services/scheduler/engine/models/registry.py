"""Architecture name of a checkpoint -> the class that computes it. A new family is one line here."""

from collections.abc import Mapping
from typing import Any, Final

from services.scheduler.engine.models.config import ModelConfig, read_config
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.models.qwen2 import Qwen2Model
from services.scheduler.engine.models.qwen3 import Qwen3Model
from services.scheduler.engine.models.qwen3_moe import Qwen3MoeModel
from shared.errors import ConfigError

MODELS: Final[dict[str, type[LlamaModel]]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": Qwen2Model,
    "Qwen3ForCausalLM": Qwen3Model,
    "Qwen3MoeForCausalLM": Qwen3MoeModel,
}


def is_own(architecture: str) -> bool:
    """Whether it is defined here; transformers may know others (`fallback`)."""
    return architecture in MODELS


def model_class(architecture: str) -> type[LlamaModel]:
    """Find the class of an architecture.

    Raises:
        ConfigError: there is none.
    """
    if architecture not in MODELS:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[architecture]


def describe(raw: Mapping[str, Any]) -> ModelConfig:
    """Understand a config.json, of our architectures or of one that transformers computes for us.

    Raises:
        ConfigError: it cannot be served; says why.
    """
    names = raw.get("architectures") or []
    if len(names) == 1 and not is_own(str(names[0])):
        from services.scheduler.engine.models import fallback

        return fallback.describe(raw)
    return read_config(raw)
