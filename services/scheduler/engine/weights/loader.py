"""Fills a model from its checkpoint, tensor by tensor, and insists that nothing is missing or left over."""

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from tqdm import tqdm

from services.scheduler.engine.layers.weight import Fillable, Source
from services.scheduler.engine.models.llama import LlamaModel, Targets
from services.scheduler.engine.weights.dummy import dummy_sources
from services.scheduler.engine.weights.gguf import open_gguf
from services.scheduler.engine.weights.heap import lean_heap
from services.scheduler.engine.weights.safetensors import open_safetensors
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.model_files import ModelFiles

log = logging.getLogger(__name__)

_MEANINGLESS: Final = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)")
"""Tensors that old checkpoints hold and that nothing reads."""
_MAX_NAMES: Final = 5
_Filling = tuple[Source, tuple[Fillable, int]]


def load_weights(model: LlamaModel, files: "ModelFiles", load_format: str) -> None:
    """Fill a model and make it usable. A bar on stderr shows how far it is, when that is a terminal.

    Args:
        model: with its memory reserved.
        files: the checkpoint.
        load_format: "auto" reads it, "dummy" draws random weights.

    Raises:
        ConfigError: a tensor is missing, left over or of another shape, or a file is broken; names it.
    """
    targets, optional = model.targets(), model.optional_targets()
    sources = _open(model, files, load_format, targets)
    _check_names(sources, targets, optional, tied=model.config.tied)
    fill = {name: (sources[name], target) for name, target in (targets | optional).items() if name in sources}
    with lean_heap():
        for source, (target, part) in _progress(fill.values(), len(fill)):
            expected = target.part_shape(part)
            if tuple(source.shape) != expected:
                raise ConfigError(f"tensor {source.name!r} has shape {tuple(source.shape)}, the model needs {expected}")
            target.fill(source, part)
        model.finish()


def _open(model: LlamaModel, files: "ModelFiles", load_format: str, targets: Targets) -> Mapping[str, Source]:
    if load_format == "dummy":
        return dummy_sources({name: target.part_shape(part) for name, (target, part) in targets.items()})
    if load_format != "auto":
        raise ConfigError(f"load format {load_format!r} is not known; known: auto, dummy")
    if files.kind == "gguf":
        return open_gguf(files.path, model.config)
    if files.kind == "folder":
        return open_safetensors(files.path)
    raise ConfigError(f"a model of kind {files.kind!r} has no weights; only the fake engine runs it")


def _check_names(sources: Mapping[str, Source], targets: Targets, optional: Targets, *, tied: bool) -> None:
    missing = sorted(targets.keys() - sources.keys())
    if missing:
        raise ConfigError(f"the checkpoint lacks {_listed(missing)}")
    extra = sorted(
        name for name in sources.keys() - targets.keys() - optional.keys() if not _MEANINGLESS.fullmatch(name)
    )
    if tied and "lm_head.weight" in extra:
        # Some tools write the tied head a second time; it is the same tensor.
        extra.remove("lm_head.weight")
        log.debug("the checkpoint repeats the embedding as its head")
    if extra:
        raise ConfigError(f"the checkpoint holds what this architecture does not know: {_listed(extra)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread that watches the bar: it would outlive the load


def _progress(items: Iterable[_Filling], total: int) -> Iterable[_Filling]:
    shown = sys.stderr.isatty()
    return _Bar(items, total=total, desc="loading weights", unit="tensor", leave=False, disable=not shown)
