"""What a model is, read from a checkpoint's config in any of the spellings that are about.

The names are those of Hugging Face's config.json; a GGUF's metadata has been brought into them before. Whatever
would change the result and is not known is refused by its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.scheduler.engine.layers.rotary import (
    ROPE_KINDS,
    RopeConfig,
    longrope_attention_factor,
    yarn_attention_factor,
)
from services.scheduler.engine.parallel.state import Ranks
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: class name that the checkpoint states.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        tied: the head is the embedding.
        windows: per layer, tokens a position sees, or None for all.
        dtype: the checkpoint's precision by name, or None.
        num_experts: of a layer that has experts; 0 when none has.
        experts_per_token: to which a token goes.
        expert_size: inner numbers of an expert.
        normalise_experts: the weights of a token's experts add up to one.
        dense_layers: layers without experts, in a model with experts.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position: int
    tied: bool
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: str | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalise_experts: bool = False
    dense_layers: tuple[int, ...] = ()

    def window(self, layer_id: int) -> int | None:
        """Tokens a position of that layer sees, or None for all."""
        return self.windows[layer_id] if self.windows else None

    def share(self, ranks: Ranks) -> "ModelConfig":
        """What one of several ranks has of the model: some of the heads, and a piece of each feed-forward part.

        Raises:
            ConfigError: something cannot be divided by the number of ranks; names it.
        """
        if ranks.size == 1:
            return self
        has_dense = not self.num_experts or self.dense_layers
        inner, experts = self.intermediate_size, self.expert_size
        return replace(
            self,
            num_qo_heads=ranks.piece(self.num_qo_heads, "query heads (num_attention_heads)"),
            num_kv_heads=ranks.piece(self.num_kv_heads, "key-value heads (num_key_value_heads)"),
            intermediate_size=ranks.piece(inner, "inner numbers (intermediate_size)") if has_dense else inner,
            expert_size=ranks.piece(experts, "inner numbers of an expert (moe_intermediate_size)") if experts else 0,
        )


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Understand a config.json.

    Raises:
        ConfigError: a number is missing or makes no sense, or something is asked for that is not supported.
    """
    names = raw.get("architectures") or []
    if len(names) != 1:
        raise ConfigError(f"config.json: architectures is {names!r}, exactly one is needed")
    hidden_size, num_qo_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_qo_heads
    head_dim = raw.get("head_dim") or hidden_size // num_qo_heads
    if num_qo_heads % num_kv_heads:
        raise ConfigError(f"config.json: {num_qo_heads} query heads cannot share {num_kv_heads} key-value heads")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise ConfigError(f"config.json: quantization {method!r} is not supported in safetensors checkpoints")
    qkv_bias = bool(raw.get("attention_bias", raw.get("model_type") == "qwen2"))
    num_layers = _count(raw, "num_hidden_layers")
    return ModelConfig(
        architecture=str(names[0]),
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=str(raw.get("hidden_act") or raw.get("hidden_activation") or "silu"),
        max_position=_count(raw, "max_position_embeddings"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope=_read_rope(raw, head_dim),
        qkv_bias=qkv_bias,
        o_bias=qkv_bias and raw.get("model_type") in ("llama", "qwen3"),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        windows=_read_windows(raw, num_layers),
        dtype=_read_dtype(raw),
        **_read_experts(raw, num_layers),
    )


def _read_experts(raw: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The fields about experts; empty when the model has none."""
    if not (raw.get("num_experts") or raw.get("num_local_experts")):
        return {}
    num_experts = _count(raw, "num_experts" if raw.get("num_experts") else "num_local_experts")
    per_token = _count(raw, "num_experts_per_tok")
    if per_token > num_experts:
        raise ConfigError(f"config.json: num_experts_per_tok is {per_token}, there are {num_experts} experts")
    every = raw.get("decoder_sparse_step") or 1
    named = set(raw.get("mlp_only_layers") or ())
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_size": _count(raw, "moe_intermediate_size"),
        "normalise_experts": bool(raw.get("norm_topk_prob", False)),
        "dense_layers": tuple(i for i in range(num_layers) if i in named or (i + 1) % every),
    }


def _count(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} is {value!r}, a positive integer is needed")
    return value


def _read_dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    return str(value).removeprefix("torch.") if value else None


def _read_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows per layer; empty when no layer has one."""
    window = raw.get("sliding_window")
    if not window or raw.get("use_sliding_window") is False:
        return ()
    if "use_sliding_window" not in raw and str(raw.get("model_type", "")).startswith("qwen"):
        return ()
    kinds = raw.get("layer_types")
    if kinds is None:
        # Qwen counts the layers below which attention is full; Mistral slides everywhere.
        first = int(raw.get("max_window_layers", 0)) if "use_sliding_window" in raw else 0
        return tuple(int(window) if i >= first else None for i in range(num_layers))
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise ConfigError(f"config.json: layer_types {unknown or len(kinds)} not supported for {num_layers} layers")
    windows = tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _read_rope(raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
    scaling = _rope_fields(raw)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    max_position = _count(raw, "max_position_embeddings")
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    if factor is None and kind in ("linear", "dynamic", "llama3"):
        raise ConfigError(f"config.json: rope type {kind!r} needs a factor")
    if factor is None:
        factor = max_position / original if kind in ("yarn", "longrope") and original else 1.0
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    fields: dict[str, Any] = {}
    for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if scaling.get(name) is not None:
            fields[name] = float(scaling[name])
    if kind == "yarn":
        stated = scaling.get("attention_factor")
        derived = yarn_attention_factor(float(factor), scaling.get("mscale"), scaling.get("mscale_all_dim"))
        fields |= {"attention_factor": derived if stated is None else float(stated)}
        fields |= {"truncate": bool(scaling.get("truncate", True))}
    rotary_dim = int(head_dim * partial)
    if kind == "longrope":
        fields |= _read_longrope(scaling, rotary_dim // 2, float(factor), int(original or max_position))
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rotary_dim=rotary_dim,
        max_position=max_position,
        factor=float(factor),
        original_max_position=int(original or max_position),
        **fields,
    )


def _read_longrope(scaling: Mapping[str, Any], num: int, factor: float, original: int) -> dict[str, Any]:
    """The fields of the longrope rule; its two lists have one divisor per frequency."""
    lists: dict[str, tuple[float, ...]] = {}
    for name in ("short_factor", "long_factor"):
        values = scaling.get(name)
        if not isinstance(values, list) or len(values) != num:
            raise ConfigError(f"config.json: rope type 'longrope' needs {name}, a list of {num} numbers")
        lists[f"{name}s"] = tuple(float(value) for value in values)
    stated = scaling.get("attention_factor")
    derived = longrope_attention_factor(factor, original)
    return {**lists, "attention_factor": derived if stated is None else float(stated)}


def _rope_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope settings: `rope_parameters` of new checkpoints, `rope_scaling` of old ones, or none."""
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise ConfigError(f"config.json: rope settings are {fields!r}, an object is needed")
    nested = [value for value in fields.values() if isinstance(value, Mapping)]
    if not nested:
        return fields
    if any(value != nested[0] for value in nested):
        raise ConfigError("config.json: rope settings that differ between kinds of layers are not supported")
    return nested[0]
