"""The torch backend against full attention written out, in batches of every kind; and how rows are bucketed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.engine.attention.base import AttentionRows
from services.scheduler.engine.attention.buckets import make_buckets
from services.scheduler.engine.attention.select import BACKENDS, select_backend
from services.scheduler.engine.kvcache import KVCache, bytes_per_page
from shared.errors import ConfigError

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 8, 2
CPU = torch.device("cpu")


class World:
    """Requests with all their queries, keys and values, and a pool that learns them step by step."""

    def __init__(self, page_size: int, lengths: list[int], seed: int, backend: str = "torch") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        pages_each = [-(-length // page_size) for length in lengths]
        self.cache = KVCache(
            num_layers=LAYERS,
            num_pages=sum(pages_each) + 1,
            page_size=page_size,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype=torch.float32,
            device=CPU,
        )
        # What others left behind must not be seen.
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(torch.nan)
        self.cache._used[:] = True
        self.backend = select_backend(backend, self.cache, torch.float32, CPU)
        self.seed = seed
        order = np.random.default_rng(seed).permutation(sum(pages_each) + 1)
        self.pages = np.split(order[:-1], np.cumsum(pages_each)[:-1])
        self.q = [self.random(length, HEADS) for length in lengths]
        self.kv = [[(self.random(n, KV_HEADS), self.random(n, KV_HEADS)) for n in lengths] for _ in range(LAYERS)]

    def random(self, length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, DIM, generator=self.generator)

    def step(self, work: list[tuple[int, int, int]], window: int | None) -> None:
        """Compute (request, start, length) rows in one step and compare every layer; odd seeds decode those of one."""
        work = sorted(work, key=lambda row: row[2] != 1)
        num_decode = sum(row[2] == 1 for row in work) if self.seed % 2 else 0
        starts, lengths = (np.array([row[i] for row in work], dtype=np.int64) for i in (1, 2))
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        token_rows = np.repeat(np.arange(len(work)), lengths)
        table = np.zeros((len(work), max(len(self.pages[row[0]]) for row in work)), dtype=np.int64)
        for row, (request, _, _) in enumerate(work):
            table[row, : len(self.pages[request])] = self.pages[request]
        positions = np.arange(offsets[-1]) - (offsets[:-1] - starts)[token_rows]
        plan = self.backend.plan(AttentionRows(starts, lengths, offsets, table, token_rows, positions, num_decode))
        q = torch.cat([self.q[request][start : start + n] for request, start, n in work])
        for layer in range(LAYERS):
            k, v = (torch.cat([self.kv[layer][r][i][start : start + n] for r, start, n in work]) for i in (0, 1))
            found = plan.run(layer, q, k, v, scale=0.3, window=window)
            expected = torch.cat([self.full(layer, *row, window) for row in work])
            assert torch.allclose(found, expected, atol=1e-5)

    def full(self, layer: int, request: int, start: int, length: int, window: int | None) -> torch.Tensor:
        end = start + length
        group = HEADS // KV_HEADS
        k, v = (self.kv[layer][request][i][:end].repeat_interleave(group, 1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", self.q[request][start:end], k) * 0.3
        distance = torch.arange(start, end)[:, None] - torch.arange(end)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, HEADS * DIM)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    window=st.sampled_from([None, 5, 1]),
    seed=st.integers(0, 100),
)
def test_equals_full_attention(backend: str, page_size: int, lengths: list[int], window: int | None, seed: int) -> None:
    world = World(page_size, lengths, seed, backend)
    rng = np.random.default_rng(seed)
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        work = []
        for request in rng.permutation(len(lengths)).tolist():
            left = lengths[request] - done[request]
            count = int(rng.choice([0, 1, 1, min(left, 9), left])) if left else 0
            if count and count <= left:
                work.append((request, done[request], count))
                done[request] += count
        if work:
            world.step(work, window)


def test_many_rows_of_one_token_take_the_batched_way() -> None:
    world = World(4, [30] * 20, seed=1)
    world.step([(request, 0, 29 - request) for request in range(20)], None)
    world.step([(request, 29 - request, 1) for request in range(20)], None)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5000)), min_size=1, max_size=40), st.integers(0, 40))
def test_buckets_hold_every_row_once(rows: list[tuple[int, int]], num_decode: int) -> None:
    lengths = np.array([length for length, _ in rows])
    num_decode = min(num_decode, len(rows))
    lengths[:num_decode] = 1
    kv_lengths = lengths + np.array([start for _, start in rows])
    buckets = make_buckets(lengths, kv_lengths, num_decode)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(rows)))
    for bucket in buckets:
        assert len(set((bucket < num_decode).tolist())) == 1


def test_buckets_part_long_from_short_and_leave_like_together() -> None:
    ones = np.ones(40, dtype=np.int64)
    like = np.arange(100, 140)
    assert [len(bucket) for bucket in make_buckets(ones, like, 40)] == [40]
    mixed = np.concatenate(([4000], np.arange(100, 139)))
    assert sorted(len(bucket) for bucket in make_buckets(ones, mixed, 40)) == [1, 39]


def test_pool_size_and_zeros() -> None:
    cache = KVCache(
        num_layers=3, num_pages=5, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, device=CPU
    )
    assert cache.nbytes == 5 * bytes_per_page(3, 4, 2, 8, torch.bfloat16)
    assert not any(bool(tensor.any()) for tensor in (*cache.keys, *cache.values))


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match="flash"):
        select_backend("flash", World(4, [3], 0).cache, torch.float32, CPU)
