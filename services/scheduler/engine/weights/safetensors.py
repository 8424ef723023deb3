"""Safetensors checkpoints: one file or several shards with an index, mapped and read tensor by tensor."""

import json
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
_MAPPED_BYTES: Final = 64 << 20


def open_safetensors(folder: Path) -> Mapping[str, Source]:
    """List the tensors of a folder by their names. Nothing is read yet; the files stay mapped.

    Raises:
        ConfigError: a file is missing or broken; names it.
    """
    sources: dict[str, Source] = {}
    for path in _shards(folder):
        shard = _Shard(path)
        for name in shard.names():
            sources[name] = SafetensorsSource(shard, name)
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


class _Shard:
    """A file, mapped anew now and then: the pages of a mapping that were read count as memory of this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._num_read = 0

    def names(self) -> list[str]:
        """List the tensors in it."""
        return list(self._open().keys())

    def slice_of(self, name: str) -> Any:
        """Give what reads pieces of a tensor."""
        return self._open().get_slice(name)

    def count(self, num_bytes: int) -> None:
        """Note that so much was read."""
        self._num_read += num_bytes

    def _open(self) -> Any:
        if self._file is None or self._num_read > _MAPPED_BYTES:
            try:
                self._file = safe_open(self._path, framework="pt")
            except (OSError, SafetensorError) as e:
                raise ConfigError(f"{self._path}: not readable as safetensors: {e}") from e
            self._num_read = 0
        return self._file


@dataclass(frozen=True, slots=True)
class SafetensorsSource:
    """One tensor of a file.

    Attributes:
        shard: the file.
        name: its name in it.
    """

    shard: _Shard
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.shard.slice_of(self.name).get_shape())

    def read(self, share: Share | None = None) -> Tensor:
        """Read it, or a piece of it, in its own dtype."""
        found = self.shard.slice_of(self.name)
        index: tuple[slice, ...] = (slice(None),)
        if share is not None:
            index = (slice(None),) * share.dim + (slice(share.start, share.stop),)
        tensor: Tensor = found[index if len(index) > 1 else index[0]]
        self.shard.count(tensor.nbytes)
        return tensor

    def read_int4(self, share: Share | None = None) -> Int4Groups | None:
        """These files hold no 4-bit groups."""
        return None
