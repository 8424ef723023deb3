"""Architecture name of a checkpoint -> the class that computes it. A new family is one line here."""

from typing import Final

from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.models.qwen2 import Qwen2Model
from services.scheduler.engine.models.qwen3 import Qwen3Model
from shared.errors import ConfigError

MODELS: Final[dict[str, type[LlamaModel]]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": Qwen2Model,
    "Qwen3ForCausalLM": Qwen3Model,
}


def model_class(architecture: str) -> type[LlamaModel]:
    """Find the class of an architecture.

    Raises:
        ConfigError: there is none.
    """
    if architecture not in MODELS:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[architecture]
