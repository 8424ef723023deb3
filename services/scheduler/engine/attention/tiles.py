"""Attention of prompts by batched products, a tile of queries at a time: the fast way on CPUs in bfloat16.

A tile's scores are few enough to be written out, which torch's fused kernel avoids at the price of products that are
several times slower where there is no matrix unit. A tile looks at no key behind its last query, and adds a mask only
to the columns that some of its queries may not see.
"""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

_TILE_ROWS: Final = 384
"""Rows of scores per tile and key-value head. More fill the products better; fewer skip more of what a mask hides."""
_TILE_SCORES: Final = 1 << 25
"""Scores of a tile in all: they are written twice, 64 MiB each time."""


@dataclass(slots=True)
class Tile:
    """Some places of a bucket, and the keys that they may see.

    Attributes:
        first, last: places, from and to.
        low: every one of these places sees all keys below this.
        high: none sees a key at or above this.
        masks: (num_rows, 1, (last - first) * group, high - low) additive masks by window, made on first use; with a
            window they begin at key 0.
    """

    first: int
    last: int
    low: int
    high: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, positions: Tensor, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """0 where a query may look, minus infinity elsewhere."""
        if window not in self.masks:
            own = positions[:, self.first : self.last, None]
            keys = torch.arange(self.low if window is None else 0, self.high, device=positions.device)
            hidden = keys > own
            if window is not None:
                hidden |= keys <= own - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask.repeat_interleave(group, 1)[:, None]
        return self.masks[window]


def cut_tiles(positions: Tensor, kv_heads: int, group: int, kv_len: int, page_size: int) -> list[Tile]:
    """Cut the places of a bucket into tiles.

    Args:
        positions: (num_rows, width) position of the query at each place, rising along a row.
        kv_heads: key-value heads.
        group: query heads per key-value head.
        kv_len: keys there are.
        page_size: the keys of a tile end at a multiple of this.
    """
    rows, width = positions.shape
    step = max(1, min(_TILE_ROWS, _TILE_SCORES // (rows * kv_heads * kv_len)) // group)
    tiles = []
    for first in range(0, width, step):
        last = min(width, first + step)
        low, high = int(positions[:, first].min()) + 1, int(positions[:, last - 1].max()) + 1
        tiles.append(Tile(first, last, low, min(kv_len, -(-high // page_size) * page_size)))
    return tiles


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], positions: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Attend for the rows of a bucket.

    Args:
        q: (num_rows, kv_heads, width * group, head_dim), the heads of a group side by side.
        k: (num_rows, kv_heads, kv_len, head_dim).
        v: like k.
        tiles: from `cut_tiles`.
        positions: (num_rows, width).
        scale: factor of the scores.
        window: how many keys a query sees at most, its own included; None is all.

    Returns:
        Like q.
    """
    rows, kv_heads, places, head_dim = q.shape
    blocks, group = rows * kv_heads, places // positions.shape[1]
    queries = (q * scale).view(blocks, places, head_dim)
    keys, values = k.view(blocks, -1, head_dim), v.view(blocks, -1, head_dim)
    out = torch.empty(blocks, places, head_dim, dtype=q.dtype, device=q.device)
    for tile in tiles:
        part = slice(tile.first * group, tile.last * group)
        # The product wants one piece of memory: copying rows is cheap, turning them, which it would do itself, is not.
        seen = keys[:, : tile.high].contiguous().transpose(1, 2)
        scores = torch.bmm(queries[:, part], seen).view(rows, kv_heads, -1, tile.high)
        first_hidden = tile.low if window is None else 0
        scores[..., first_hidden:].add_(tile.mask(positions, window, group, q.dtype))
        weights = torch.softmax(scores, -1).view(blocks, -1, tile.high)
        out[:, part] = torch.bmm(weights, values[:, : tile.high])
    return out.view(q.shape)
