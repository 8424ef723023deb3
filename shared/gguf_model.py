"""What a GGUF file says of its model, in the words of Hugging Face's config.json. It reads no file itself."""

from collections.abc import Mapping
from typing import Any, Final

from shared.errors import ConfigError
from shared.gguf_metadata import GgufHeader

ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""GGUF architecture -> model_type and class of transformers."""

_PLAIN: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS: Final = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
"""Ends of a turn that older converters did not write down as such: a control token of this text is one."""
CONTROL: Final = 3
"""`token_type` of a token that is never text."""


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """Write the config.json that the file's metadata amounts to.

    Raises:
        ConfigError: the architecture is not known, or a number that every model has is missing.
    """
    meta = header.metadata
    arch = str(meta.get("general.architecture", ""))
    if arch not in ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {arch!r} is not supported; known: {', '.join(sorted(ARCHITECTURES))}")
    model_type, class_name = ARCHITECTURES[arch]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [class_name], "hidden_act": "silu"}
    config |= {name: meta[f"{arch}.{key}"] for key, name in _PLAIN.items() if f"{arch}.{key}" in meta}
    for name in ("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if name not in config:
            raise ConfigError(f"GGUF metadata lacks what {name} is made of")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10_000.0)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if model_type == "qwen3_moe":
        config["norm_topk_prob"] = True  # the metadata does not say; every checkpoint of the family has it
    config["rope_scaling"] = _rope_scaling(arch, meta)
    config["vocab_size"] = len(meta.get("tokenizer.ggml.tokens", ())) or meta.get(f"{arch}.vocab_size", 0)
    config["tie_word_embeddings"] = "output.weight" not in header.tensor_names
    for role in ("bos", "pad"):
        if (token_id := meta.get(f"tokenizer.ggml.{_gguf_role(role)}_token_id")) is not None:
            config[f"{role}_token_id"] = token_id
    config["eos_token_id"] = list(end_ids(meta))
    return config


def end_ids(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Collect every token that ends an answer: end of text, of turn, of message."""
    found = [int(meta[f"tokenizer.ggml.{key}"]) for key in _END_KEYS if f"tokenizer.ggml.{key}" in meta]
    types = meta.get("tokenizer.ggml.token_type", ())
    tokens = meta.get("tokenizer.ggml.tokens", ())
    found += [i for i, kind in enumerate(types) if kind == CONTROL and i < len(tokens) and tokens[i] in _TURN_ENDS]
    return tuple(dict.fromkeys(found))


def special_texts(meta: Mapping[str, Any]) -> dict[str, str]:
    """Name the special tokens as chat templates do: `bos_token`, `eos_token`, `unk_token`, `pad_token`."""
    tokens = meta.get("tokenizer.ggml.tokens", ())
    found: dict[str, str] = {}
    for role in ("bos", "eos", "unk", "pad"):
        token_id = meta.get(f"tokenizer.ggml.{_gguf_role(role)}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[f"{role}_token"] = str(tokens[token_id])
    return found


def _gguf_role(role: str) -> str:
    return {"unk": "unknown", "pad": "padding"}.get(role, role)


def _rope_scaling(arch: str, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.get(f"{arch}.rope.scaling.factor", 1.0)}
    original = meta.get(f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling
