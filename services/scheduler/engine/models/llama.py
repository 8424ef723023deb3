"""The dense decoder that most checkpoints are a variation of: Llama, SmolLM2, Mistral.

A family that differs in a projection or a norm subclasses the part that differs; see qwen2 and qwen3.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.activation import activation, silu_and_mul
from services.scheduler.engine.layers.attention import Attention
from services.scheduler.engine.layers.embedding import Embedding, Head
from services.scheduler.engine.layers.few import FewFeedForward, FewLayer, make_few, make_few_mlp
from services.scheduler.engine.layers.linear import By, Linear
from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.layers.rotary import Angles, Rotary
from services.scheduler.engine.layers.weight import Fillable
from services.scheduler.engine.models.config import ModelConfig
from services.scheduler.engine.parallel.comm import SOLO, Comm

Targets = dict[str, tuple[Fillable, int]]
"""Name of a checkpoint's tensor -> what it fills, and as which part."""


class Model(Protocol):
    """What an engine sees of a model, ours or another's."""

    @property
    def config(self) -> ModelConfig:
        """What this rank has of it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        ...

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step: (num_tokens,) ids -> what `logits` takes, of the tokens that are wanted."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Make (n, vocab_size) logits of what `forward` gave for n tokens."""
        ...


class FeedForward(Protocol):
    """What follows the attention of a layer."""

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """(num_tokens, hidden_size) -> the same shape."""
        ...

    def targets(self, prefix: str) -> Targets:
        """The tensors of the checkpoint that fill it."""
        ...


class LlamaAttention:
    """The attention of one layer with its projections."""

    def __init__(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO
    ) -> None:
        q_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
        make = partial(Linear, dtype=dtype, device=device, comm=comm)
        self.qkv = make(config.hidden_size, (q_size, kv_size, kv_size), bias=config.qkv_bias, by=By.OUTPUTS)
        self.output = make(q_size, (config.hidden_size,), bias=config.o_bias, by=By.INPUTS)
        self.q_norm, self.k_norm = self.head_norms(config, dtype, device)
        self.attention = Attention(
            layer_id,
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.window(layer_id),
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )

    def head_norms(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> tuple[RMSNorm | None, RMSNorm | None]:
        """Norms of query and key heads; Llama has none."""
        return None, None

    def __call__(self, x: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """(num_tokens, hidden_size) -> the same shape."""
        qkv = self.qkv(x, context.num_decode)
        return self.output(self.attention(qkv, angles, context), context.num_decode)

    def targets(self, prefix: str) -> Targets:
        """The tensors of the checkpoint that fill it."""
        names = ("q_proj", "k_proj", "v_proj")
        found = {f"{prefix}.{name}.weight": (self.qkv.weight, part) for part, name in enumerate(names)}
        targets: Targets = {**found, f"{prefix}.o_proj.weight": (self.output.weight, 0)}
        if self.qkv.bias is not None:
            targets |= {f"{prefix}.{name}.bias": (self.qkv.bias, part) for part, name in enumerate(names)}
        if self.output.bias is not None:
            targets[f"{prefix}.o_proj.bias"] = (self.output.bias, 0)
        if self.q_norm is not None and self.k_norm is not None:
            targets[f"{prefix}.q_norm.weight"] = (self.q_norm.weight, 0)
            targets[f"{prefix}.k_norm.weight"] = (self.k_norm.weight, 0)
        return targets


class LlamaMLP:
    """The gated feed-forward part of one layer."""

    def __init__(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO
    ) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        make = partial(Linear, bias=bias, dtype=dtype, device=device, comm=comm)
        self.gate_up = make(hidden, (inner, inner), by=By.OUTPUTS)
        self.down = make(inner, (hidden,), by=By.INPUTS)
        self.activate = activation(config.activation)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """(num_tokens, hidden_size) -> the same shape."""
        num_decode = context.num_decode
        return self.down(self.activate(self.gate_up(x, num_decode)), num_decode)

    def targets(self, prefix: str) -> Targets:
        """The tensors of the checkpoint that fill it."""
        targets: Targets = {
            f"{prefix}.gate_proj.weight": (self.gate_up.weight, 0),
            f"{prefix}.up_proj.weight": (self.gate_up.weight, 1),
            f"{prefix}.down_proj.weight": (self.down.weight, 0),
        }
        if self.gate_up.bias is not None and self.down.bias is not None:
            targets[f"{prefix}.gate_proj.bias"] = (self.gate_up.bias, 0)
            targets[f"{prefix}.up_proj.bias"] = (self.gate_up.bias, 1)
            targets[f"{prefix}.down_proj.bias"] = (self.down.bias, 0)
        return targets


class LlamaLayer:
    """One decoder layer. Its residual stream is owned by the forward pass and changed in place."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO
    ) -> None:
        self.attention = self.attention_class(config, layer_id, dtype, device, comm)
        self.mlp = self.make_mlp(config, layer_id, dtype, device, comm)
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device, comm)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device, comm)

    def make_mlp(
        self, config: ModelConfig, layer_id: int, dtype: torch.dtype, device: torch.device, comm: Comm
    ) -> FeedForward:
        """Make the feed-forward part of this layer."""
        return LlamaMLP(config, layer_id, dtype, device, comm)

    def __call__(self, x: Tensor, residual: Tensor, angles: Angles, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Run the layer on the output of the one before.

        Returns:
            What is still to be added to the residual stream, of all ranks, and the stream.
        """
        x, residual = self.input_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, angles, context), residual)
        return self.mlp(x, context), residual

    def make_few(self) -> FewLayer | None:
        """Make its form for few tokens, once its weights are there; None where it has none."""
        attention, feed_forward = self.attention, self.make_few_feed_forward()
        return make_few(self.input_norm, attention.qkv, attention.attention, attention.output, feed_forward)

    def make_few_feed_forward(self) -> FewFeedForward | None:
        """Make that form of its feed-forward part."""
        mlp = self.mlp
        if not isinstance(mlp, LlamaMLP) or mlp.activate is not silu_and_mul:
            return None
        return make_few_mlp(self.mlp_norm, mlp.gate_up, mlp.down)

    def targets(self, prefix: str) -> Targets:
        """The tensors of the checkpoint that fill it."""
        return {
            **self.attention.targets(f"{prefix}.self_attn"),
            **self.mlp.targets(f"{prefix}.mlp"),
            f"{prefix}.input_layernorm.weight": (self.input_norm.weight, 0),
            f"{prefix}.post_attention_layernorm.weight": (self.mlp_norm.weight, 0),
        }


class LlamaModel:
    """The whole decoder: token ids to final states, and those to logits.

    Attributes:
        config: what it is.
        dtype: precision of weights and activations.
        device: where it lies.
    """

    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(
        self, config: ModelConfig, max_seq_len: int, dtype: torch.dtype, device: torch.device, comm: Comm = SOLO
    ) -> None:
        """Reserve the model's memory; the weights come afterwards through `targets`.

        Args:
            config: what it is; of several ranks, what this one has of it (`ModelConfig.share`).
            max_seq_len: longest request, for the table of angles.
            dtype: precision of weights and activations.
            device: where it lies.
            comm: the other ranks.
        """
        self.config, self.dtype, self.device = config, dtype, device
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype, device, comm)
        self.rotary = Rotary(config.rope, max_seq_len, device)
        self.layers = [self.layer_class(config, i, dtype, device, comm) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, device, comm)
        tied = self.embedding if config.tied else None
        self.head = Head(config.vocab_size, config.hidden_size, dtype, device, tied, comm)
        self._few: list[FewLayer] = []

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step.

        Args:
            input_ids: (num_tokens,) int64.
            context: positions, attention and which logits are wanted.

        Returns:
            (num_wanted, hidden_size) final states of the tokens that `context.logits_index` names; for `logits`.
        """
        x = self.embedding(input_ids)
        angles = self.rotary(context.positions)
        if context.few and self._few:
            for few in self._few:
                few(x, angles, context)
            return self.norm(x)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, context)
        # Only tokens that are drawn after or scored need the end of the model.
        if context.logits_index is not None:
            x, residual = (part.index_select(0, context.logits_index) for part in (x, residual))
        x, _ = self.norm.add(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, hidden_size) final states -> (n, vocab_size) logits in the model's precision."""
        return self.head(hidden)

    def targets(self) -> Targets:
        """Every tensor that the checkpoint must hold."""
        targets: Targets = {
            "model.embed_tokens.weight": (self.embedding.weight, 0),
            "model.norm.weight": (self.norm.weight, 0),
        }
        if self.head.weight is not None:
            targets["lm_head.weight"] = (self.head.weight, 0)
        for i, layer in enumerate(self.layers):
            targets |= layer.targets(f"model.layers.{i}")
        return targets

    def optional_targets(self) -> Targets:
        """Tensors that a checkpoint may hold besides."""
        return {"rope_freqs.weight": (self.rotary, 0)}

    def finish(self) -> None:
        """Make the model usable, once every target is filled."""
        self.head.finish()
        few = [layer.make_few() for layer in self.layers]
        self._few = [layer for layer in few if layer is not None] if None not in few else []
