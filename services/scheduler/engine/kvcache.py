"""The paged KV pool: tensors by layer and page. Who owns a page is scheduling's business."""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class ModelSizes(Protocol):
    """What the pool depends on of a model."""

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        ...


class KVCache:
    """Keys and values of every layer, (num_pages, num_kv_heads, page_size, head_dim) each.

    Within a page all tokens of one head lie together: what a head reads of a page is one piece of memory. The
    pool begins as zeros, because a page is read whole and what is masked must still be a number.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim)
        self._pool = _zeros(shape, dtype, device)
        self._used = np.zeros(num_pages, dtype=np.bool_)
        self.keys = [self._pool[i, 0] for i in range(num_layers)]
        self.values = [self._pool[i, 1] for i in range(num_layers)]
        # The same memory as rows: one per token and head to store, one per page and head to read.
        self._token_rows = [self._pool[i].view(2, -1, head_dim) for i in range(num_layers)]
        self._page_rows = [self._pool[i].view(2, -1, page_size * head_dim) for i in range(num_layers)]
        self._stores = [(rows[0], rows[1]) for rows in self._token_rows]
        self._reads = [(rows[0], rows[1]) for rows in self._page_rows]

    @classmethod
    def for_model(
        cls, model: ModelSizes, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        """Make the pool of a model."""
        return cls(
            num_layers=model.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
        )

    @property
    def nbytes(self) -> int:
        """Size of the pool."""
        return self._pool.nbytes

    def clear_pages(self, pages: np.ndarray) -> None:
        """Zero pages that change hands: a former user's NaN must not reach the next through masked places.

        Args:
            pages: (n,) pages that get their first token in this step.
        """
        for page in pages[self._used[pages]].tolist():
            self._pool[:, :, page].zero_()
        self._used[pages] = True

    def store(self, layer_id: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write the keys and values of new tokens.

        Args:
            layer_id: the layer.
            rows: (num_tokens * num_kv_heads,) int64 from `token_rows`.
            k: (num_tokens, num_kv_heads, head_dim).
            v: as k.
        """
        keys, values = self._stores[layer_id]
        keys.index_copy_(0, rows, k.reshape(-1, self.head_dim))
        values.index_copy_(0, rows, v.reshape(-1, self.head_dim))

    def page_rows(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as (num_pages * num_kv_heads, page_size * head_dim), pages outermost."""
        return self._reads[layer_id]

    def token_rows(self, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Rows to store at, of tokens at offsets within pages: (num_tokens * num_kv_heads,) int64."""
        heads = np.arange(self.num_kv_heads, dtype=np.int64)
        rows = (pages[:, None] * self.num_kv_heads + heads) * self.page_size + offsets[:, None]
        return np.asarray(rows, dtype=np.int64).reshape(-1)


def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Size of one page over all layers, keys and values."""
    return num_layers * 2 * page_size * num_kv_heads * head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system gives zeroed memory page by page as it is touched: an idle pool costs nothing.
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
