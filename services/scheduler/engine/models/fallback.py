"""Architectures that are not defined here: transformers' own modelling code, with our paged attention plugged in.

Slower than our own definitions, and on one rank. What the attention of an architecture is like is found out by
running it once on a few tokens: what our attention cannot do is refused by its name, never left out. This is the only
file that imports transformers.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.rotary import RopeConfig
from services.scheduler.engine.models.config import ModelConfig
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.model_files import ModelFiles

log = logging.getLogger(__name__)

NAME: Final = "millrace"
"""Our attention in transformers' registry."""
_PROBE_TOKENS: Final = 3
_HARMLESS: Final = frozenset(
    {"dropout", "scaling", "softcap", "sliding_window", "is_causal", "position_ids", "use_cache"}
)
"""What a layer may hand its attention and we understand, or need not."""
_WANDERING_ROPE: Final = "dynamic"
"""The rule whose angles hang on the longest request of a batch, in transformers' code."""
_CHOOSING_ROPE: Final = "longrope"
"""The rule whose angles hang likewise on whether one is longer than the original context."""
_MAX_NAMES: Final = 5


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one layer asked of its attention: its heads, and how far it looks."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


class _Plug:
    """Where the attention of transformers' layers leads: to the step that is computed, or to a probe.

    Attributes:
        context: the step, or None while it is probed.
        seen: layer -> what it asked of the probe.
    """

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.context: ForwardContext | None = None
        self.seen: dict[int, _Seen] = {}

    def attend(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """(1, heads, num_tokens, head_dim) each -> (1, num_tokens, heads, head_dim)."""
        if self.context is None:
            self.seen[layer_id] = _Seen(q.shape[1], k.shape[1], q.shape[3], window)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return found.transpose(1, 2)
        heads, tokens, dim = q.shape[1:]
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))
        out = self.context.attention.run(layer_id, q, k, v, scale=scale, window=window, softcap=softcap)
        return out.view(1, tokens, heads, dim)

    def refuse(self, reason: str) -> ConfigError:
        """Say that the architecture cannot be served."""
        return ConfigError(f"architecture {self.architecture!r} is not supported: {reason}")


class FallbackModel:
    """A model of transformers in the place of one of ours; see `LlamaModel` for the methods.

    Attributes:
        config: sizes as the probe found them.
        dtype: precision of weights and activations.
        device: where it lies.
    """

    def __init__(self, model: Any, plug: _Plug, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._plug = plug
        self.config, self.dtype, self.device = config, dtype, device

    def forward(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """Compute one step, up to the logits: what lies between the states and them is the architecture's own."""
        self._plug.context = context
        keep: Any = 0 if context.logits_index is None else context.logits_index
        found: Tensor = _run(self._model, input_ids, context.positions, keep)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """They are there already."""
        return hidden


def describe(raw: Mapping[str, Any]) -> ModelConfig:
    """Read what must be known before the weights: the sizes of the heads come from the probe.

    Raises:
        ConfigError: transformers does not know it as a decoder that generates text.
    """
    names = raw.get("architectures") or ["none"]
    transformers = _transformers(str(names[0]))
    plug = _Plug(str(names[0]))
    if raw.get("quantization_config"):
        raise plug.refuse("its weights are quantised")
    try:
        config = transformers.AutoConfig.for_model(**{**raw})
    except (KeyError, ValueError, TypeError) as e:
        raise plug.refuse(f"transformers does not know its model_type {raw.get('model_type')!r}") from e
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_decoder = known is not None and known.__name__ == plug.architecture
    if not is_decoder or getattr(config, "is_encoder_decoder", False):
        raise plug.refuse("transformers does not have it as a decoder that generates text")
    _check_ropes(config, plug)
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return ModelConfig(
        architecture=plug.architecture,
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_layers=int(config.num_hidden_layers),
        num_qo_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=0.0,
        activation="",
        max_position=int(config.max_position_embeddings),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        rope=RopeConfig("default", 1.0, 0, 0),
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
    )


def _check_ropes(config: Any, plug: _Plug) -> None:
    """Refuse the rope rules, of any kind of layers, that transformers does not know or does not keep per request."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        kind = part.get("rope_type", "default")
        if kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise plug.refuse(f"transformers does not know the rope type {kind!r}")
        if kind == _WANDERING_ROPE:
            raise plug.refuse(f"rope type {kind!r} hangs on what else is in a batch there")


def load_fallback(
    config: ModelConfig,
    files: "ModelFiles",
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    max_seq_len: int,
) -> FallbackModel:
    """Load a model through transformers, and find out what its attention is like.

    Args:
        config: from `describe`.
        files: the checkpoint.
        dtype: precision.
        device: where to.
        load_format: "auto" or "dummy".
        max_seq_len: tokens of the longest request.

    Raises:
        ConfigError: it is not supported, or its checkpoint does not fit it; says why.
    """
    transformers = _transformers(config.architecture)
    plug = _Plug(config.architecture)
    if files.kind != "folder":
        raise plug.refuse("only checkpoints in safetensors are read for it")
    log.warning("%s has no definition here: it runs through transformers, slower than those", config.architecture)
    transformers.AttentionInterface.register(NAME, _attend)
    transformers.logging.disable_progress_bar()
    options = {"attn_implementation": NAME, "dtype": dtype}
    try:
        if load_format == "dummy":
            own = transformers.AutoConfig.from_pretrained(files.path)
            model = transformers.AutoModelForCausalLM.from_config(own, **options)
        else:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                files.path, output_loading_info=True, use_safetensors=True, local_files_only=True, **options
            )
            _check(report)
    except (OSError, ValueError, RuntimeError) as e:
        raise plug.refuse(str(e).splitlines()[0]) from e
    model = model.to(device).eval()
    for module in model.modules():
        module.millrace_plug = plug
        _choose_rope(module, plug, max_seq_len)
    return FallbackModel(model, plug, _probe(model, plug, config, device), dtype, device)


def _choose_rope(module: Any, plug: _Plug, max_seq_len: int) -> None:
    """Give a rotary module one set of angles for all requests, by the longest there can be (as `rotary` does)."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, Mapping) and _CHOOSING_ROPE in kind.values():
        raise plug.refuse(f"rope type {_CHOOSING_ROPE!r} for some of its layers")
    if kind != _CHOOSING_ROPE:
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    make = ROPE_INIT_FUNCTIONS[_CHOOSING_ROPE]
    module.inv_freq, module.attention_scaling = make(module.config, module.inv_freq.device, seq_len=max_seq_len)
    module.rope_type = "default"  # nothing is chosen again


def _probe(model: Any, plug: _Plug, config: ModelConfig, device: torch.device) -> ModelConfig:
    """Run a few tokens, and see what each layer asks of its attention."""
    ids = torch.arange(_PROBE_TOKENS, device=device)
    try:
        found = _run(model, ids, ids, ids[:2])
    except (TypeError, AttributeError, NotImplementedError, RuntimeError) as e:
        raise plug.refuse(f"it cannot be run with another attention ({e})") from e
    if found.shape[0] != 2 or sorted(plug.seen) != list(range(config.num_layers)):
        raise plug.refuse("not every layer has an attention that can be replaced")
    kinds = {(seen.num_qo_heads, seen.num_kv_heads, seen.head_dim) for seen in plug.seen.values()}
    if len(kinds) != 1:
        raise plug.refuse("the heads of its layers differ")
    num_qo_heads, num_kv_heads, head_dim = kinds.pop()
    windows = tuple(plug.seen[i].window for i in range(config.num_layers))
    return ModelConfig(
        **{
            **{name: getattr(config, name) for name in config.__dataclass_fields__},
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "windows": windows if any(windows) else (),
        }
    )


def _run(model: Any, input_ids: Tensor, positions: Tensor, keep: Any) -> Tensor:
    """(num_tokens,) -> (num_wanted, vocab_size)."""
    found = model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
    logits: Tensor = found.logits[0]
    return logits


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in place of an attention of its own."""
    plug: _Plug = module.millrace_plug
    unknown = sorted(name for name, given in options.items() if given is not None and name not in _HARMLESS)
    if unknown and plug.context is None:
        raise plug.refuse(f"its attention uses {', '.join(unknown)}")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise plug.refuse("its attention looks ahead")
    if value.shape[-1] != key.shape[-1] or attention_mask is not None:
        raise plug.refuse("its attention has values of another size than keys, or a mask of its own")
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    window, softcap = options.get("sliding_window"), options.get("softcap")
    return plug.attend(module.layer_idx, query, key, value, scale, window, softcap), None


def _check(report: Mapping[str, Any]) -> None:
    """Insist that the checkpoint holds what the model needs, and nothing else."""
    for kind, words in (
        ("missing_keys", "the checkpoint lacks"),
        ("unexpected_keys", "the checkpoint holds what this architecture does not know:"),
        ("mismatched_keys", "the checkpoint has another shape of"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in report.get(kind) or ())
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise ConfigError(f"{words} {', '.join(names[:_MAX_NAMES])}{more}")


def _transformers(architecture: str) -> ModuleType:
    try:
        import transformers
    except ImportError as e:
        raise ConfigError(
            f"architecture {architecture!r} is not defined here, and transformers, which may know it, is not "
            "installed: pip install -e '.[any-model]'"
        ) from e
    module: ModuleType = transformers
    return module
