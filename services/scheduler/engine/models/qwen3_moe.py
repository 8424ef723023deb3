"""Qwen3-MoE: Qwen3 whose layers, but for those the config names, have experts."""

import torch
from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.few import FewFeedForward
from services.scheduler.engine.layers.moe import Experts
from services.scheduler.engine.models.config import ModelConfig
from services.scheduler.engine.models.llama import FeedForward, LlamaMLP, LlamaModel, Targets
from services.scheduler.engine.models.qwen3 import Qwen3Layer
from services.scheduler.engine.parallel.comm import SOLO, Comm


class Qwen3Experts:
    """The experts of one layer."""

    def __init__(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO
    ) -> None:
        self.experts = Experts(
            config.hidden_size,
            config.expert_size,
            config.num_experts,
            config.experts_per_token,
            normalise=config.normalise_experts,
            activation_name=config.activation,
            dtype=dtype,
            device=device,
            comm=comm,
        )

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """(num_tokens, hidden_size) -> the same shape."""
        return self.experts(x, context.mapping)

    def targets(self, prefix: str) -> Targets:
        """The tensors of the checkpoint that fill it."""
        targets: Targets = {f"{prefix}.gate.weight": (self.experts.router, 0)}
        for number, (gate_up, down) in enumerate(zip(self.experts.gate_up, self.experts.down, strict=True)):
            name = f"{prefix}.experts.{number}"
            targets[f"{name}.gate_proj.weight"] = (gate_up, 0)
            targets[f"{name}.up_proj.weight"] = (gate_up, 1)
            targets[f"{name}.down_proj.weight"] = (down, 0)
        return targets


class Qwen3MoeLayer(Qwen3Layer):
    """A layer with experts, or without."""

    def make_mlp(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device, comm: Comm
    ) -> FeedForward:
        """Make the feed-forward part of this layer."""
        kind = LlamaMLP if layer_id in config.dense_layers else Qwen3Experts
        return kind(config, layer_id, dtype, device, comm)

    def make_few_feed_forward(self) -> FewFeedForward | None:
        """Make the form for few tokens of that part."""
        if isinstance(self.mlp, Qwen3Experts):
            return self.mlp.experts.make_few(self.mlp_norm)
        return super().make_few_feed_forward()


class Qwen3MoeModel(LlamaModel):
    """The decoder of such layers."""

    layer_class = Qwen3MoeLayer
