"""Which rows of a step are computed together: rows of like length, so that padding costs less than a call.

Plain index arithmetic on the host; it knows neither tensors nor pages.
"""

import numpy as np

from services.scheduler.engine.attention.base import IndexArray

DECODE_SAVING_TOKENS = 1024
"""Padded tokens that must be saved to be worth another call per layer, for rows of one token."""
PREFILL_SAVING_TOKENS = 32
"""The same for rows of several tokens, in tokens to compute."""
PREFILL_SAVING_PAIRS = 8192
"""The same in pairs of a token and one it looks at."""


def make_buckets(lengths: IndexArray, kv_lengths: IndexArray, num_decode: int) -> list[IndexArray]:
    """Divide rows into buckets; decode rows and rows of prompts are in different ones.

    Args:
        lengths: (rows,) tokens to compute per row.
        kv_lengths: (rows,) tokens each row looks at, its own included.
        num_decode: the first rows, which compute one token each.

    Returns:
        Row numbers per bucket; every row is in one. A single bucket keeps the order of the rows.
    """
    buckets = _split(np.arange(num_decode), kv_lengths, DECODE_SAVING_TOKENS)
    for rows in _split(np.arange(num_decode, len(lengths)), lengths, PREFILL_SAVING_TOKENS):
        width = int(lengths[rows].max())
        buckets += _split(rows, kv_lengths, max(1, PREFILL_SAVING_PAIRS // width))
    return buckets


def _split(rows: IndexArray, sizes: IndexArray, saving: int) -> list[IndexArray]:
    """Cut rows where the cut saves most padding, as long as it saves enough."""
    if len(rows) == 0:
        return []
    if len(rows) == 1:
        return [rows]
    order = rows[np.argsort(-sizes[rows], kind="stable")]
    sorted_sizes = sizes[order]
    saved = (sorted_sizes[0] - sorted_sizes) * np.arange(len(order), 0, -1)
    cut = int(saved.argmax())
    if saved[cut] < saving:
        return [rows]
    return _split(np.sort(order[:cut]), sizes, saving) + _split(np.sort(order[cut:]), sizes, saving)
