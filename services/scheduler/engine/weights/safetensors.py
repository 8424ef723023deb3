"""Safetensors checkpoints: one file or several shards with an index, mapped and read tensor by tensor."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups
from services.scheduler.engine.layers.weight import Source
from shared.errors import ConfigError

_INDEX: Final = "model.safetensors.index.json"


def open_safetensors(folder: Path) -> Mapping[str, Source]:
    """List the tensors of a folder by their names. Nothing is read yet; the files stay mapped.

    Raises:
        ConfigError: a file is missing or broken; names it.
    """
    sources: dict[str, Source] = {}
    for path in _shards(folder):
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as e:
            raise ConfigError(f"{path}: not readable as safetensors: {e}") from e
        for name in file.keys():  # noqa: SIM118 - not a mapping
            sources[name] = SafetensorsSource(file, name)
    return sources


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{folder}: no *.safetensors in it")
        return found
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(f"{index}: not an index of shards") from e
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is missing, {_INDEX} names it")
    return [folder / name for name in names]


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """One tensor of a file.

    Attributes:
        file: the open file.
        name: its name in it.
    """

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.file.get_slice(self.name).get_shape())

    def read(self) -> Tensor:
        """Read it in its own dtype, mapped where possible."""
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def read_int4(self) -> Int4Groups | None:
        """These files hold no 4-bit groups."""
        return None
