"""The `torch` attention backend: pages are gathered, then attended to with torch's own operations.

It runs on every device and is the reference for the others; on a CPU it is also the fast one. Grouped query
heads are folded into the query's length, so that a key is read once for all heads that share it.

Decode rows go through two batched products; rows of prompts through the fused kernel, or in tiles where that is
faster. The ways round differently, and which one rows of prompts take depends on the device alone, so that no result
depends on how much of a prompt was cached. So it is with decode rows, except in bfloat16 on a CPU: a few short ones go
through the fused kernel there, one call in place of five, and so how one rounds depends on those beside it, as it does
in its linear layers (kernels/packed_linear.py).
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.attention.base import AttentionRows, IndexArray
from services.scheduler.engine.attention.buckets import make_buckets
from services.scheduler.engine.attention.tiles import Tile, attend_in_tiles, cut_tiles
from services.scheduler.engine.kvcache import KVCache

_FEW_KEYS: Final = 768
"""Keys of a bucket of decode rows, padding included, up to which the fused kernel is faster in bfloat16 on a CPU."""


class TorchAttention:
    """Attention over the pool with torch's operations."""

    def __init__(self, cache: KVCache, dtype: torch.dtype, device: torch.device) -> None:
        self._cache = cache
        self._dtype = dtype
        self._device = device
        # Torch's fused kernel is slow in bfloat16 on a CPU: three to five times as slow as plain products of tiles.
        self._by_products = device.type == "cpu" and dtype == torch.bfloat16

    def plan(self, rows: AttentionRows) -> "TorchPlan":
        """Lay out where tokens are stored and what each bucket of rows reads."""
        cache = self._cache
        columns, offsets = np.divmod(rows.positions, cache.page_size)
        pages = rows.page_table[rows.token_rows, columns]
        fresh = pages[offsets == 0]
        if len(fresh):
            cache.clear_pages(fresh)
        stores = self._index(cache.token_rows(pages, offsets))
        groups = make_buckets(rows.lengths, rows.starts + rows.lengths, rows.num_decode)
        return TorchPlan(cache, stores, [self._bucket(rows, group) for group in groups])

    def _bucket(self, rows: AttentionRows, members: IndexArray) -> "_Bucket":
        cache = self._cache
        lengths, starts = rows.lengths[members], rows.starts[members]
        width = int(lengths.max())
        # (members, width): which token stands there; short rows repeat their last one.
        steps = np.minimum(np.arange(width), lengths[:, None] - 1)
        tokens = rows.offsets[members][:, None] + steps
        num_pages = -(-(starts + lengths) // cache.page_size)
        # Places behind a row's last page read that page again: it holds the row's own numbers, and is masked.
        columns = np.minimum(np.arange(int(num_pages.max())), num_pages[:, None] - 1)
        pages = rows.page_table[members[:, None], columns]
        heads = np.arange(cache.num_kv_heads)[:, None]
        reads = self._index((pages[:, None, :] * cache.num_kv_heads + heads).reshape(-1))
        whole = width == 1 and len(members) == len(rows.lengths)
        flat = tokens.reshape(-1)
        real = np.arange(width) < lengths[:, None]
        decodes = int(members[0]) < rows.num_decode
        kv_len = columns.shape[1] * cache.page_size
        few = decodes and self._by_products and len(members) * kv_len <= _FEW_KEYS
        return _Bucket(
            num_rows=len(members),
            batched=decodes and not few,
            width=width,
            kv_len=kv_len,
            tokens=None if whole else self._index(flat),
            targets=None if whole else self._index(tokens[real]),
            real=None if real.all() else self._index(np.flatnonzero(real.reshape(-1))),
            q_positions=torch.from_numpy(starts[:, None] + steps).to(self._device),
            reads=reads,
            keys=torch.empty(len(reads), cache.page_size * cache.head_dim, dtype=self._dtype, device=self._device),
            values=torch.empty(len(reads), cache.page_size * cache.head_dim, dtype=self._dtype, device=self._device),
            tiled=self._by_products and not decodes,
        )

    def _index(self, values: IndexArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


@dataclass(slots=True)
class _Bucket:
    """Rows computed together.

    Attributes:
        num_rows: their number.
        batched: whether they are decode rows that go through batched products.
        width: tokens computed per row, padding included.
        kv_len: tokens looked at per row, padding included.
        tokens: (num_rows * width,) token at each place, or None when the bucket is the whole step in order.
        targets: tokens that are real, in order of place; None likewise.
        real: places that are real, or None when all are.
        q_positions: (num_rows, width).
        reads: (num_rows * num_kv_heads * pages,) rows of `KVCache.page_rows`.
        keys, values: what was gathered; one buffer for all layers.
        tiled: whether rows of prompts are computed in tiles.
        masks: additive masks by window, made on first use.
        tiles: made on first use.
    """

    num_rows: int
    batched: bool
    width: int
    kv_len: int
    tokens: Tensor | None
    targets: Tensor | None
    real: Tensor | None
    q_positions: Tensor
    reads: Tensor
    keys: Tensor
    values: Tensor
    tiled: bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    tiles: list[Tile] = field(default_factory=list)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """0 where a query may look, minus infinity elsewhere: (num_rows, 1, width * group or 1, kv_len)."""
        if window not in self.masks:
            positions = torch.arange(self.kv_len, device=self.q_positions.device)
            seen = positions <= self.q_positions[:, :, None]
            if window is not None:
                seen &= positions > self.q_positions[:, :, None] - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            self.masks[window] = (mask if self.width == 1 else mask.repeat_interleave(group, 1))[:, None]
        return self.masks[window]


class TorchPlan:
    """A planned step."""

    def __init__(self, cache: KVCache, stores: Tensor, buckets: list[_Bucket]) -> None:
        self._cache = cache
        self._stores = stores
        self._buckets = buckets

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store, then attend; see `PlannedAttention`."""
        self._cache.store(layer_id, self._stores, k, v)
        num_tokens, heads, head_dim = q.shape
        if len(self._buckets) == 1 and self._buckets[0].tokens is None:
            found = self._attend(layer_id, q, self._buckets[0], scale, window, softcap)
            return found.reshape(num_tokens, heads * head_dim)
        out = torch.empty(num_tokens, heads * head_dim, dtype=q.dtype, device=q.device)
        for bucket in self._buckets:
            assert bucket.tokens is not None and bucket.targets is not None
            found = self._attend(layer_id, q.index_select(0, bucket.tokens), bucket, scale, window, softcap)
            found = found.reshape(-1, heads * head_dim)
            out.index_copy_(0, bucket.targets, found if bucket.real is None else found.index_select(0, bucket.real))
        return out

    def _attend(
        self, layer_id: int, q: Tensor, bucket: _Bucket, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attend for q of (num_rows * width, heads, head_dim); gives the same order of places."""
        cache = self._cache
        kv_heads, head_dim = cache.num_kv_heads, cache.head_dim
        rows, width = bucket.num_rows, bucket.width
        group = q.shape[1] // kv_heads
        keys, values = cache.page_rows(layer_id)
        torch.index_select(keys, 0, bucket.reads, out=bucket.keys)
        torch.index_select(values, 0, bucket.reads, out=bucket.values)
        # (rows, width, kv_heads, group, dim) -> (rows, kv_heads, width * group, dim)
        folded = q.view(rows, width, kv_heads, group, head_dim)
        if width == 1:
            folded = folded.view(rows, kv_heads, group, head_dim)
        else:
            folded = folded.transpose(1, 2).reshape(rows, kv_heads, width * group, head_dim)
        k = bucket.keys.view(rows, kv_heads, -1, head_dim)
        v = bucket.values.view(rows, kv_heads, -1, head_dim)
        if softcap is not None:
            found = _attend_capped(folded, k, v, bucket.mask(window, group, q.dtype), scale, softcap)
        elif bucket.batched:
            return _attend_batched(folded, k, v, bucket.mask(window, group, q.dtype), scale)
        elif bucket.tiled:
            size = (kv_heads, group, bucket.kv_len, cache.page_size)
            bucket.tiles = bucket.tiles or cut_tiles(bucket.q_positions, *size)
            found = attend_in_tiles(folded, k, v, bucket.tiles, bucket.q_positions, scale=scale, window=window)
        else:
            mask = bucket.mask(window, group, q.dtype)
            found = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        if width == 1:
            return found
        return found.view(rows, kv_heads, width, group, head_dim).transpose(1, 2)


def _attend_batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Two batched products for rows of one token: (rows, kv_heads, group, head_dim)."""
    rows, kv_heads, group, head_dim = q.shape
    blocks = rows * kv_heads
    scores = torch.bmm((q * scale).view(blocks, group, head_dim), k.view(blocks, -1, head_dim).transpose(1, 2))
    weights = torch.softmax(scores.view(rows, kv_heads, group, -1).add_(mask), -1)
    return torch.bmm(weights.view(blocks, group, -1), v.view(blocks, -1, head_dim)).view(q.shape)


def _attend_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Attend with scores squeezed into (-softcap, softcap): (rows, kv_heads, width * group, head_dim)."""
    scores = torch.matmul(q * scale, k.transpose(2, 3))
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v)
