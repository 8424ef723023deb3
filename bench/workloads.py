"""The workload and the model shapes that the GPU figures are quoted for, and the floor of the two.

Lengths are drawn as mini-sglang's offline benchmark draws them, with seed 0: 256 requests, prompts and answers of
100 to 1024 tokens. Models are shapes alone; their weights are drawn at the start.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def write_model(name: str, folder: Path) -> Path:
    """Write a model's config into a folder; returns the folder of the model."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return path


def draw_lengths(number: int = 256, shortest: int = 100, longest: int = 1024) -> list[tuple[int, int]]:
    """Lengths of prompt and answer of each request."""
    rng = random.Random(0)
    prompts = []
    for _ in range(number):
        length = rng.randint(shortest, longest)
        for _ in range(length):
            rng.randint(0, 10000)  # the ids of the prompt, which are drawn in between
        prompts.append(length)
    return [(length, rng.randint(shortest, longest)) for length in prompts]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does at best.

    Attributes:
        bytes_per_s: of a large copy, read and written.
        flops_per_s: of a large bf16 product.
    """

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model in numbers, bf16.

    Attributes:
        layer_weights: of all layers, that every token is multiplied by.
        head_weights: of the head.
        kv_bytes_per_token: of all layers.
        expert_weights: one expert in every layer; 0 in a model without experts.
        num_experts: of a layer.
        per_token: experts that a token is multiplied by.
    """

    layer_weights: int
    head_weights: int
    kv_bytes_per_token: int
    expert_weights: int = 0
    num_experts: int = 0
    per_token: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Sizes":
        """Count them."""
        hidden, dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layers, experts = config["num_hidden_layers"], config.get("num_experts", 0)
        layer = hidden * dim * (2 * heads + 2 * kv_heads)
        layer += hidden * experts if experts else 3 * hidden * config["intermediate_size"]
        return cls(
            layer * layers,
            hidden * config["vocab_size"],
            2 * 2 * kv_heads * dim * layers,
            3 * hidden * config.get("moe_intermediate_size", 0) * layers,
            experts,
            config.get("num_experts_per_tok", 0),
        )

    @property
    def token_weights(self) -> int:
        """Weights of the layers that a token is multiplied by."""
        return self.layer_weights + self.per_token * self.expert_weights

    def read_weights(self, num_tokens: int) -> float:
        """Weights of layers that a step of so many tokens reads: of experts, those that are hit in the mean."""
        if not self.num_experts:
            return self.layer_weights
        missed = (1 - self.per_token / self.num_experts) ** num_tokens
        return self.layer_weights + self.expert_weights * self.num_experts * (1 - missed)


def floor_s(sizes: Sizes, lengths: list[tuple[int, int]], ceilings: Ceilings) -> float:
    """The least time of the workload when all its requests start at once.

    It counts the products of all prompts, and per decode step the weights read once (or their products, where those
    take longer) and the KV of each row read once.
    """
    prompt_tokens = sum(prompt for prompt, _ in lengths)
    total = 2.0 * sizes.token_weights * prompt_tokens / ceilings.flops_per_s
    for step in range(1, max(answer for _, answer in lengths)):
        rows = [prompt + step for prompt, answer in lengths if answer > step]
        reads = 2.0 * (sizes.read_weights(len(rows)) + sizes.head_weights) / ceilings.bytes_per_s
        products = 2.0 * (sizes.token_weights + sizes.head_weights) * len(rows) / ceilings.flops_per_s
        total += max(reads, products)
        total += sum(rows) * sizes.kv_bytes_per_token / ceilings.bytes_per_s
    return total
