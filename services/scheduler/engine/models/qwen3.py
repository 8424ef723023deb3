"""Qwen3: Llama with a norm on every query and key head."""

import torch

from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.models.config import ModelConfig
from services.scheduler.engine.models.llama import LlamaAttention, LlamaLayer, LlamaModel


class Qwen3Attention(LlamaAttention):
    """Attention with norms per head."""

    def head_norms(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> tuple[RMSNorm | None, RMSNorm | None]:
        """One norm for all query heads and one for all key heads."""
        eps = config.norm_eps
        return RMSNorm(config.head_dim, eps, dtype, device), RMSNorm(config.head_dim, eps, dtype, device)


class Qwen3Layer(LlamaLayer):
    """A layer with that attention."""

    attention_class = Qwen3Attention


class Qwen3Model(LlamaModel):
    """The decoder of such layers."""

    layer_class = Qwen3Layer
