"""Attention in bfloat16 on a CPU against full attention in float64, and that a chunk's place changes nothing."""

import itertools

import numpy as np
import pytest
import torch

from services.scheduler.engine.attention import tiles, torch_sdpa
from services.scheduler.engine.attention.base import AttentionRows
from services.scheduler.engine.attention.select import select_backend
from services.scheduler.engine.kvcache import KVCache

attend_batched = torch_sdpa._attend_batched
SHAPES = [(3, 3, 64), (2, 4, 128), (7, 2, 64), (1, 5, 32)]
PAGE_SIZE, LENGTH, OTHER = 16, 330, 75


class Prompts:
    """Two prompts in one pool, in bfloat16 on the CPU; the second keeps the first company."""

    def __init__(self, group: int, kv_heads: int, head_dim: int) -> None:
        self.group, self.kv_heads, self.head_dim = group, kv_heads, head_dim
        self.pages = [-(-n // PAGE_SIZE) for n in (LENGTH, OTHER)]
        generator = torch.Generator().manual_seed(group)
        total, heads = LENGTH + OTHER, group * kv_heads
        self.q = torch.randn(total, heads, head_dim, generator=generator).bfloat16()
        self.k, self.v = (torch.randn(total, kv_heads, head_dim, generator=generator).bfloat16() for _ in range(2))
        self.cache = KVCache(
            num_layers=1,
            num_pages=sum(self.pages),
            page_size=PAGE_SIZE,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        self.backend = select_backend("torch", self.cache, torch.bfloat16, torch.device("cpu"))

    def step(self, work: list[tuple[int, int, int]], window: int | None = None, *, num_decode: int = 0) -> torch.Tensor:
        """Compute (prompt, start, length) rows in one step."""
        starts, lengths = (np.array([row[i] for row in work], dtype=np.int64) for i in (1, 2))
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        token_rows = np.repeat(np.arange(len(work)), lengths)
        table = np.zeros((len(work), max(self.pages)), dtype=np.int64)
        for row, (prompt, _, _) in enumerate(work):
            table[row, : self.pages[prompt]] = np.arange(self.pages[prompt]) + prompt * self.pages[0]
        positions = np.arange(offsets[-1]) - (offsets[:-1] - starts)[token_rows]
        plan = self.backend.plan(AttentionRows(starts, lengths, offsets, table, token_rows, positions, num_decode))
        places = torch.cat([torch.arange(start, start + n) + prompt * LENGTH for prompt, start, n in work])
        q, k, v = self.q[places], self.k[places], self.v[places]
        return plan.run(0, q, k, v, scale=self.head_dim**-0.5, window=window)

    def full(self, prompt: int, window: int | None) -> torch.Tensor:
        first, size = prompt * LENGTH, (LENGTH, OTHER)[prompt]
        q = self.q[first : first + size].double()
        k, v = (t[first : first + size].double().repeat_interleave(self.group, 1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        distance = torch.arange(size)[:, None] - torch.arange(size)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(size, -1)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_full_attention(shape: tuple[int, int, int], window: int | None) -> None:
    prompts = Prompts(*shape)
    for cuts in ([0, LENGTH], [0, 1, 50, 200, LENGTH]):
        found = torch.cat([prompts.step([(0, a, b - a)], window) for a, b in itertools.pairwise(cuts)])
        expected = prompts.full(0, window)
        assert (found.double() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("scores", [1, 6 * LENGTH * 20])
def test_few_scores_fit_a_tile_and_nothing_else_changes(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Prompts(2, 4, 128).step([(0, 0, LENGTH)])
    monkeypatch.setattr(tiles, "_TILE_SCORES", scores)
    assert torch.equal(Prompts(2, 4, 128).step([(0, 0, LENGTH)]), whole)
    cut = tiles.cut_tiles(torch.arange(LENGTH)[None], 4, 2, LENGTH, PAGE_SIZE)
    assert all(tile.last - tile.first == 1 or 4 * 2 * (tile.last - tile.first) * LENGTH <= scores for tile in cut)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chunk_gives_what_the_whole_prompt_gives(shape: tuple[int, int, int]) -> None:
    """To the last bit: what was cached must not show."""
    prompts = Prompts(*shape)
    for start, stop in [(0, 100), (100, 200), (37, 300), (LENGTH - 1, LENGTH), (LENGTH - 40, LENGTH)]:
        whole = prompts.step([(0, 0, LENGTH)])
        assert torch.equal(prompts.step([(0, start, stop - start)]), whole[start:stop])


@pytest.mark.parametrize("few_keys", [0, 10_000])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_rows_see_the_same_either_way(
    shape: tuple[int, int, int], window: int | None, few_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdpa, "_FEW_KEYS", few_keys)
    batched = []
    monkeypatch.setattr(torch_sdpa, "_attend_batched", lambda *a: batched.append(a) or attend_batched(*a))
    prompts = Prompts(*shape)
    prompts.step([(0, 0, LENGTH), (1, 0, OTHER)], window)
    for rows in ([(0, LENGTH - 1, 1)], [(0, LENGTH - 1, 1), (1, OTHER - 1, 1)]):
        found = prompts.step(rows, window, num_decode=len(rows))
        expected = torch.cat([prompts.full(prompt, window)[-1:] for prompt, _, _ in rows])
        assert bool(batched) == (few_keys == 0)
        assert (found.double() - expected).norm() < 1e-2 * expected.norm()


def test_prompts_of_unlike_depth_share_a_step() -> None:
    prompts = Prompts(3, 3, 64)
    prompts.step([(0, 0, LENGTH)])
    prompts.step([(1, 0, OTHER)])
    both = prompts.step([(0, LENGTH - 33, 33), (1, OTHER - 30, 30)])
    for found, expected in ((both[:33], prompts.full(0, None)[-33:]), (both[33:], prompts.full(1, None)[-30:])):
        assert (found.double() - expected).norm() < 1e-2 * expected.norm()
