"""Safetensors checkpoints: one file or several shards with an index, mapped and read tensor by tensor."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups
from services.scheduler.engine.layers.weight import Share, Source
from shared.errors import ConfigError

_INDEX: Final = "model.safetensors.index.json"
_MAPPED_BYTES: Final = 16 << 20


def open_safetensors(folder: Path) -> Mapping[str, Source]:
    """List the tensors of a folder by their names. Nothing is read yet; the files stay mapped.

    Raises:
        ConfigError: a file is missing or broken; names it.
    """
    mapped = _Mapped()
    return {
        name: SafetensorsSource(mapped, path, name)
        for path in _shards(folder)
        for name in mapped.open(path).keys()  # noqa: SIM118 - not a mapping
    }


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


class _Mapped:
    """The one file that is mapped, anew now and then: pages that were read count as memory of this process."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None
        self._num_read = 0

    def open(self, path: Path) -> Any:
        """Map a file, in place of the one before.

        Raises:
            ConfigError: it is broken.
        """
        if self._path != path or self._num_read > _MAPPED_BYTES:
            self._file, self._path, self._num_read = None, None, 0
            try:
                self._file, self._path = safe_open(path, framework="pt"), path
            except (OSError, SafetensorError) as e:
                raise ConfigError(f"{path}: not readable as safetensors: {e}") from e
        return self._file

    def count(self, num_bytes: int) -> None:
        """Note that so much was read."""
        self._num_read += num_bytes


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """One tensor of a file.

    Attributes:
        mapped: maps its file.
        path: the file.
        name: its name in it.
    """

    mapped: _Mapped
    path: Path
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.mapped.open(self.path).get_slice(self.name).get_shape())

    def read(self, share: Share | None = None) -> Tensor:
        """Read it, or a piece of it, in its own dtype."""
        found = self.mapped.open(self.path).get_slice(self.name)
        index: tuple[slice, ...] = (slice(None),)
        if share is not None:
            index = (slice(None),) * share.dim + (slice(share.start, share.stop),)
        tensor: Tensor = found[index if len(index) > 1 else index[0]]
        # A piece of every row touches the pages of all of them.
        self.mapped.count(math.prod(found.get_shape()) * tensor.dtype.itemsize)
        return tensor

    def read_int4(self, share: Share | None = None) -> Int4Groups | None:
        """These files hold no 4-bit groups."""
        return None
