"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, which the config does not always state."""

from services.scheduler.engine.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    """The biases come with `ModelConfig.qkv_bias`, which is set for this family."""
