"""GGUF checkpoints: their tensors under the names and in the row order that the models expect.

Reading and dequantising is the `gguf` package's; this file knows names, the row order of Llama's queries and
keys, and the one quantisation whose values are also a form to compute with.
"""

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import GROUP, Int4Groups
from services.scheduler.engine.layers.weight import Share, Source
from services.scheduler.engine.models.config import ModelConfig
from shared.errors import ConfigError

_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""All experts of a layer in one tensor, the experts outermost."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED_ARCHITECTURES: Final = {"llama"}
"""Architectures whose converter interleaves the two halves of each query and key head."""


def open_gguf(path: Path, config: ModelConfig) -> Mapping[str, Source]:
    """List the tensors of a file by the models' names. Nothing is read yet; the file stays mapped.

    Raises:
        ConfigError: the file is broken.
    """
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as e:
        raise ConfigError(f"{path}: not a readable GGUF file: {e}") from e
    field = reader.get_field("general.architecture")
    architecture = field.contents() if field is not None else ""
    permuted = architecture in _PERMUTED_ARCHITECTURES
    sources: dict[str, Source] = {}
    for tensor in reader.tensors:
        found = _LAYER.fullmatch(tensor.name)
        if found is not None and found[2] in _OF_EXPERTS:
            for expert in range(int(tensor.shape[-1])):
                name = f"model.layers.{found[1]}.mlp.experts.{expert}.{_OF_EXPERTS[found[2]]}.{found[3]}"
                sources[name] = GgufSource(tensor, name, expert=expert)
        else:
            # Of which tensors rows are interleaved hangs on the file alone, not on what this rank has of them.
            mixed = permuted and found is not None and found[2] in ("attn_q", "attn_k")
            name = _rename(tensor.name)
            sources[name] = GgufSource(tensor, name, int(tensor.shape[-1]) // config.head_dim if mixed else 0)
    return sources


@dataclass(frozen=True, slots=True)
class GgufSource:
    """One tensor of the file.

    Attributes:
        tensor: as the reader gives it; dimensions are listed innermost first.
        name: the models' name for it.
        heads: heads whose rows are interleaved, or 0.
        expert: which of a tensor of experts it is, or None.
    """

    tensor: Any
    name: str
    heads: int = 0
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, outermost first."""
        whole = tuple(int(size) for size in reversed(self.tensor.shape))
        return whole if self.expert is None else whole[1:]

    def read(self, share: Share | None = None) -> Tensor:
        """Dequantise it, or a piece of it, float32.

        Raises:
            ConfigError: the quantisation is not known to the `gguf` package.
        """
        kind = self.tensor.tensor_type
        try:
            values = gguf.dequantize(self._rows(share), kind)
        except NotImplementedError as e:
            raise ConfigError(f"tensor {self.tensor.name!r}: GGUF type {kind.name} cannot be read") from e
        found = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(len(values), *self.shape[1:])
        self.forget()
        return found if share is None or share.dim == 0 else share.of(found)

    def read_int4(self, share: Share | None = None) -> Int4Groups | None:
        """Unpack Q4_1 (w = d * q + m in groups of 32); None for every other type."""
        if self.tensor.tensor_type != gguf.GGMLQuantizationType.Q4_1 or len(self.shape) != 2:
            return None
        stored = self._rows(share)
        rows, columns = len(stored), self.shape[1]
        blocks = stored.reshape(rows, columns // GROUP, 4 + GROUP // 2)
        if share is not None and share.dim == 1:
            if share.start % GROUP or share.stop % GROUP:
                return None
            blocks, columns = blocks[:, share.start // GROUP : share.stop // GROUP], share.stop - share.start
        pairs = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16).astype(np.float32)
        packed = blocks[:, :, 4:]
        q = np.concatenate((packed & 15, packed >> 4), -1).reshape(rows, columns)
        scale, low = pairs[:, :, 0], pairs[:, :, 1]
        return Int4Groups(
            torch.from_numpy(q),
            torch.from_numpy(np.ascontiguousarray(scale)),
            torch.from_numpy(low + 8 * scale),
        )

    def forget(self) -> None:
        """Let the system take back the pages of the file that were read."""
        mapped = getattr(self.tensor.data, "base", None)
        while mapped is not None and not hasattr(mapped, "madvise"):
            mapped = getattr(mapped, "base", None) if not hasattr(mapped, "_mmap") else mapped._mmap
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def _rows(self, share: Share | None) -> np.ndarray:
        """The stored rows in the models' order. A row is quantised by itself, so rows move as they are."""
        data: np.ndarray = self.tensor.data if self.expert is None else self.tensor.data[self.expert]
        kept = slice(share.start, share.stop) if share is not None and share.dim == 0 else slice(None)
        if not self.heads:
            return data[kept]
        order = np.arange(len(data)).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return data[order[kept]]


def _rename(name: str) -> str:
    """Name a tensor as the models do; one that is not known keeps its own, and is refused by that."""
    if name in _TOP:
        return _TOP[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _IN_LAYER:
        return name
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"
