"""Our Triton kernels against plain torch, in Triton's interpreter (no GPU needed)."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.engine.snippets import environment, run_snippet

ATTENTION = """
import math, torch, numpy as np
from services.scheduler.engine.kernels.decode_attention import *
from services.scheduler.engine.kernels import prefill_attention as prefill_kernel
from services.scheduler.engine.kernels.prefill_attention import *
kv, dim, page = 2, 64, 16
k, v = torch.randn(2, 100, kv, page, dim)
def dense(q, pages, window):
    '''(tokens, heads, dim) queries that are the last ones of their row.'''
    n = len(pages) * page
    keys, values = (x[pages.long()].permute(1, 0, 2, 3).reshape(kv, -1, dim) for x in (k, v))
    return lambda last: attend(q, keys[:, :last], values[:, :last], window)
def attend(q, keys, values, window):
    tokens, heads, _ = q.shape
    folded = q.view(tokens, kv, heads // kv, dim).permute(1, 2, 0, 3)
    scores = folded @ keys[:, None].transpose(2, 3) / math.sqrt(dim)
    at = torch.arange(keys.shape[1]); own = keys.shape[1] - tokens + torch.arange(tokens)
    seen = at[None] <= own[:, None]
    if window: seen &= at[None] > own[:, None] - window
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(tokens, heads, dim)
"""


@pytest.mark.parametrize("window", [None, 70])
def test_decode_attention_equals_dense_attention_for_any_lengths(window: int | None) -> None:
    run_snippet(f"""{textwrap.indent(ATTENTION, " " * 8)}
        torch.manual_seed(1)
        for group, lengths in ((2, [700, 130, 65, 64, 1]), (5, [1, 333, 2, 0])):
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            slots = torch.randperm(len(lengths)).int()
            table = torch.stack([torch.randperm(100)[:50] for _ in lengths]).int()
            q = torch.randn(len(lengths), kv * group, dim)
            out = torch.full_like(q, torch.nan)
            ws = DecodeWorkspace.allocate(8, 1024, kv * group, kv, dim, torch.device("cpu"), max_programs=8)
            for chunk in (64, 2048, 64):  # again, with the counters of the launch before
                shape = DecodeShape(8, max_chunk=chunk)
                plan_decode(ws, seq_lens, slots, kv, shape)
                decode_attention(ws, shape, q, k, v, table, seq_lens, out, 1 / math.sqrt(dim), {window})
                for row, n in enumerate(lengths):
                    if n:
                        want = dense(q[row : row + 1], table[slots[row], : -(-n // page)], {window})(n)[0]
                        assert torch.allclose(out[row], want, atol=2e-6), (group, row, (out[row] - want).abs().max())
            assert int(ws.arrivals.abs().sum()) == 0
    """)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("cut", [False, True])
def test_prefill_attention_equals_dense_attention_for_any_chunks(window: int | None, cut: bool) -> None:
    run_snippet(f"""{textwrap.indent(ATTENTION, " " * 8)}
        torch.manual_seed(4)
        group, starts, lengths = 3, np.array([0, 100, 7, 63]), np.array([300, 1, 130, 128])
        offsets = np.cumsum(lengths) - lengths + 2  # two tokens of others come first
        prefill_kernel.MIN_PIECE = 64
        shape = PrefillShape(group, kv, 64 if {cut} else 1)
        pieces = list_pieces(starts, lengths, shape)
        assert len(pieces) > 20 if {cut} else len(pieces) == 8 + 1 + 4 + 3
        ws = PrefillWorkspace.allocate(shape, dim, torch.device("cpu"))
        table = torch.stack([torch.randperm(100)[:20] for _ in lengths]).int()
        slots = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
        q = torch.randn(2 + lengths.sum(), kv * group, dim)
        out = torch.full_like(q, 7.0)
        ints = [torch.from_numpy(x).int() for x in (starts, lengths, offsets, pieces)]
        for _ in range(2):  # again, with the counters of the launch before
            prefill_attention(ws, q, k, v, table, slots, *ints, out, 1 / math.sqrt(dim), {window})
        assert int(ws.arrivals.abs().sum()) == 0
        assert (out[:2] == 7.0).all()
        for row, (start, n, at) in enumerate(zip(starts, lengths, offsets)):
            pages = table[slots[row], : -(-(start + n) // page)]
            want = dense(q[at : at + n], pages, {window})(start + n)
            assert torch.allclose(out[at : at + n], want, atol=3e-6), (row, (out[at : at + n] - want).abs().max())
    """)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qkv_equals_its_reference(norm: bool, dtype: str) -> None:
    run_snippet(f"""
        import torch
        from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store
        from tests.engine.kernels.references import qkv_reference
        torch.manual_seed(2)
        dtype, heads, kv, dim, page = torch.{dtype}, 6, 2, 64, 16
        qkv = torch.randn(5, (heads + 2 * kv) * dim + 8).to(dtype)[:, :-8]  # strided rows
        weights = [torch.randn(dim).to(dtype) if {norm} else None for _ in "qk"]
        positions = torch.tensor([0, 5, 9, 3, 70], dtype=torch.int32)
        slots = torch.tensor([3, -1, 40, 17, 99], dtype=torch.int32)
        angles = torch.outer(torch.arange(100).float(), 10000 ** (-torch.arange(0, dim, 2).float() / dim))
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        got, want = (([qkv.clone(), *torch.zeros(2, 10, kv, page, dim, dtype=dtype)]) for _ in range(2))
        qkv_norm_rope_store(got[0], *weights, cos_sin, positions, slots, got[1], got[2], heads, 1e-6)
        qkv_reference(want[0], *weights, cos_sin, positions, slots, want[1], want[2], heads, 1e-6)
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        queries = heads * dim
        for a, b in ((got[0][:, :queries], want[0][:, :queries]), (got[1], want[1]), (got[2], want[2])):
            assert torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        assert got[1].abs().sum() > 0
    """)


def test_gumbel_draws_by_probability_whatever_the_row() -> None:
    run_snippet("""
        import torch
        from services.scheduler.engine.kernels.gumbel import BLOCK, gumbel_choose, gumbel_piece, gumbel_sample
        torch.manual_seed(3)
        logits = torch.randn(3, 9000)
        temperatures, seeds = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([5, 2**62, 77])
        token = gumbel_sample(logits, temperatures, seeds)
        assert token[0] == logits[0].argmax()
        alone = gumbel_sample(logits[1:2], temperatures[1:2], seeds[1:2])
        assert alone[0] == token[1]

        def draw_in_pieces(*borders):
            pieces = [gumbel_piece(logits[:, a:b].contiguous(), temperatures, seeds, a)
                      for a, b in zip((0, *borders), (*borders, 9000))]
            out, last = torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
            gumbel_choose(torch.stack(pieces), out, (torch.tensor([4, 0, 2], dtype=torch.int32), last))
            assert last.tolist() == [out[1], 0, out[2], 0, out[0]]
            return out
        for borders in ((BLOCK,), (4496,), (3000, 6000), (17, 5000, 8999)):
            assert torch.equal(draw_in_pieces(*borders), token), borders
        tied = torch.zeros(1, 3000)
        tied[0, [2500, 1500, 2]] = 1.0
        assert gumbel_sample(tied, torch.zeros(1), torch.zeros(1, dtype=torch.int64))[0] == 2
        logits[1, 8191] = float("nan")
        token = gumbel_sample(logits, temperatures, seeds)
        assert token[1] == -1 and (token[[0, 2]] >= 0).all()
        assert torch.equal(draw_in_pieces(4496), token)
        four = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
        draws = gumbel_sample(four.repeat(600, 1), torch.ones(600), torch.arange(600) * 7919)
        share = torch.bincount(draws.long(), minlength=4) / 600
        want = torch.softmax(four[0], 0)
        assert (share - want).abs().max() < 0.07, share
    """)


def test_limits_keep_what_sorting_keeps() -> None:
    run_snippet("""
        import torch, numpy as np
        from services.scheduler.engine.kernels.limits import keep_limits
        from services.scheduler.engine.sampler import filter_probs
        torch.manual_seed(5)
        rows = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (50, 0.9, 0.01)]
        rows += [(1, 0.5, 0.0), (9999, 0.95, 0.0)]
        top_k = torch.tensor([r[0] for r in rows], dtype=torch.int32)
        top_p, min_p = (torch.tensor([r[i] for r in rows]) for i in (1, 2))
        temperatures = torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.3, 1.0])
        for dtype in (torch.bfloat16, torch.float32):
            logits = (torch.randn(len(rows), 10_000) * 3).to(dtype)
            limits = keep_limits(logits, temperatures, top_k, top_p, min_p)
            assert limits[0] == -torch.inf
            for row in range(1, len(rows)):
                probs = torch.softmax(logits[row : row + 1].float() / temperatures[row], -1)
                k = np.array([rows[row][0] or 10_000])
                kept = filter_probs(probs, k, np.array([rows[row][1]]), np.array([rows[row][2]])) > 0
                got = logits[row].float() >= limits[row]
                differ = (got != kept[0]).nonzero()[:, 0]
                # Rounding of the sums may move the border of top_p by one entry.
                assert len(differ) <= (1 if rows[row][1] < 1.0 else 0), (dtype, row, got.sum(), kept.sum())
    """)


def test_a_limit_bans_and_the_drawn_token_is_fed_back() -> None:
    run_snippet("""
        import torch
        from services.scheduler.engine.kernels.gumbel import gumbel_sample
        torch.manual_seed(6)
        logits = torch.randn(4, 6000)
        logits[3, 10] = torch.inf
        limits = torch.tensor([-torch.inf, 2.0, 9.0, -torch.inf])
        last, slots = torch.full((9,), -7, dtype=torch.int32), torch.tensor([8, 0, 3, 4], dtype=torch.int32)
        out = torch.zeros(4, dtype=torch.int32)
        for seed in range(20):
            seeds = torch.arange(4) + 4 * seed
            token = gumbel_sample(logits, torch.ones(4), seeds, limits=limits, out=out, feed=(slots, last))
            assert token is out and (last[slots.long()] == out).all()
            assert logits[1, token[1]] >= 2.0 and token[2] == -1 and token[3] == -1 and token[0] >= 0
        assert (last[[1, 2, 5, 6, 7]] == -7).all()
    """)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_kernels_equal_their_plain_forms(dtype: str) -> None:
    run_snippet(f"""
        import torch, torch.nn.functional as F
        from services.scheduler.engine.kernels.elementwise import lay_out_inputs, rms_norm, silu_mul, store_kv
        torch.manual_seed(8)
        dtype = torch.{dtype}
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        x, residual = torch.randn(2, 5, 96).to(dtype)
        weight = torch.rand(96).to(dtype)
        total = x + residual
        got = rms_norm(x, weight, 1e-6, residual)
        def close(a, b):  # the interpreter truncates where the device rounds
            return torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        assert close(residual, total)
        assert close(got, F.rms_norm(total.float(), (96,), weight.float(), 1e-6))
        assert close(rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (96,), weight.float(), 1e-6))
        both = torch.randn(3, 2 * 1100).to(dtype)
        want = F.silu(both[:, :1100]) * both[:, 1100:]
        assert close(silu_mul(both), want)
        ids = torch.tensor([4, -1, -1, 9], dtype=torch.int32)
        slots = torch.tensor([0, 2, 1, 0], dtype=torch.int32)
        last = torch.tensor([11, -1, 13], dtype=torch.int32)
        changes = torch.tensor([[0, 5], [7, 6], [3, 8]], dtype=torch.int32)
        table, found = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
        lay_out_inputs(ids, slots, last, found, changes, torch.tensor([2], dtype=torch.int32), table)
        assert found.tolist() == [4, 13, 0, 9]
        assert table.flatten().tolist() == [5, 0, 0, 0, 0, 0, 0, 6, 0, 0]
        k, v = torch.randn(2, 3, 2, 32).to(dtype)
        pools = torch.zeros(2, 4, 2, 8, 32, dtype=dtype)
        store_kv(k, v, torch.tensor([9, -1, 31], dtype=torch.int32), *pools)
        for pool, new in zip(pools, (k, v)):
            assert torch.equal(pool[1, :, 1], new[0]) and torch.equal(pool[3, :, 7], new[2])
            assert pool.abs().sum() == new[[0, 2]].abs().sum()
    """)


def test_few_linear_equals_its_plain_form() -> None:
    run_snippet("""
        import torch, torch.nn.functional as F
        from services.scheduler.engine.kernels.few_linear import few_linear, fits
        torch.manual_seed(9)
        for size, num_out in ((1024, 64), (600, 96)):
            assert fits(num_out, size)
            x, weight, norm = torch.randn(3, size), torch.randn(2 * num_out, size), torch.rand(size)
            normed = F.rms_norm(x, (size,), norm, 1e-6)
            tolerance = {"rtol": 1e-4, "atol": 1e-3}
            assert torch.allclose(few_linear(x, weight, norm=(norm, 1e-6)), normed @ weight.t(), **tolerance)
            gate, up = (normed @ weight.t()).chunk(2, -1)
            found = few_linear(x, weight, norm=(norm, 1e-6), gated=True)
            assert torch.allclose(found, F.silu(gate) * up, **tolerance)
            stream = torch.randn(3, 2 * num_out)
            want = stream + x @ weight.t()
            assert few_linear(x, weight, add_to=stream) is stream
            assert torch.allclose(stream, want, **tolerance)
    """)


RANK = """
import sys, torch, numpy as np
from services.scheduler.engine.kernels import all_reduce as kernels
from services.scheduler.engine.kernels import sum_norm
kernels.SMALL_WORDS, kernels.LARGE_WORDS, kernels._SMALL_TILE, kernels._TILE, kernels.CHANNELS = 128, 384, 64, 128, 4
rank, ranks, *names = sys.argv[1:]
rank, ranks = int(rank), int(ranks)
arrays = [np.memmap(name, np.int64, "r+") for name in names]
addresses = torch.tensor([array.ctypes.data for array in arrays])
places = kernels.PeerPlaces(addresses, torch.zeros((2, 4), dtype=torch.int32), rank, ranks)

def numbers(of, call, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * call + of)).to(dtype)

call = 0
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (2, 130, 258, 2, 512) if dtype == torch.float32 else (130, 600):
        call += 1
        each = [numbers(of, call, size, dtype) for of in range(ranks)]
        assert kernels.fits(each[0], 2)
        found = kernels.all_reduce(each[rank], places)
        wanted = torch.stack([x.float() for x in each]).sum(0)
        # The interpreter cuts bfloat16 off, where a GPU rounds.
        close = 2**-7 if dtype == torch.bfloat16 else 2**-11 if dtype == torch.float16 else 0
        assert torch.allclose(found.float(), wanted, close, 0), (rank, dtype, size)
        if kernels.fits_gather(each[0]):
            assert torch.equal(kernels.all_gather(each[rank], places), torch.stack(each)), (rank, dtype, size)
sum_norm.SMALL_ROWS = 3
for rows, size in ((1, 96), (3, 100), (4, 96), (7, 96), (2, 96)):  # a row per channel, or two, or none in the last
    call += 1
    each = [numbers(of, call, rows * size, torch.float32).view(rows, size) for of in range(ranks)]
    residual = numbers(9, call, rows * size, torch.float32).view(rows, size)
    weight = numbers(8, call, size, torch.float32)
    stream = residual + torch.stack(each).sum(0)
    assert sum_norm.fits(each[0], ranks)
    found = sum_norm.sum_norm(each[rank], residual, weight, 1e-6, places)
    assert torch.equal(residual, stream), (rank, rows)
    assert torch.allclose(found, torch.nn.functional.rms_norm(stream, (size,), weight, 1e-6), atol=1e-5), (rank, rows)
for dtype in (torch.bfloat16, torch.float16):
    call += 1
    each = [numbers(of, call, 300, dtype).view(3, 100) for of in range(ranks)]
    residual, weight = numbers(9, call, 300, dtype).view(3, 100), numbers(8, call, 100, dtype)
    stream = residual.float() + torch.stack([x.float() for x in each]).sum(0)
    found = sum_norm.sum_norm(each[rank], residual, weight, 1e-6, places)
    wanted = torch.nn.functional.rms_norm(stream, (100,), weight.float(), 1e-6)
    assert (residual.float() - stream).abs().max() < 0.1 and (found.float() - wanted).abs().max() < 0.1, (rank, dtype)
assert not sum_norm.fits(torch.zeros(2, 129), 2) and not sum_norm.fits(torch.zeros(17, 90), 2)
assert not kernels.fits(torch.zeros(1537), 2) and not kernels.fits(torch.zeros(3, dtype=torch.float16), 2)
assert not kernels.fits(torch.zeros(769), 3)
assert not kernels.fits_gather(torch.zeros(257))
"""


@pytest.mark.parametrize("ranks", [3])
def test_ranks_add_up_in_each_others_memory(ranks: int, tmp_path: Path) -> None:
    """Each rank is a process that runs the kernels for real, but for the device: they meet in shared memory."""
    names = [str(tmp_path / f"memory{rank}") for rank in range(ranks)]
    for name in names:
        Path(name).write_bytes(bytes(1 << 16))
    own = [sys.executable, "-c", RANK]
    env = environment(interpreted=True)
    processes = [subprocess.Popen([*own, str(rank), str(ranks), *names], env=env) for rank in range(ranks)]
    try:
        for process in processes:
            assert process.wait(100) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_rank_that_is_ahead_is_not_waited_for() -> None:
    """Whoever has this rank's flag may set its next one before this rank has looked."""
    run_snippet("""
        import numpy as np, torch
        from services.scheduler.engine.kernels import all_reduce as kernels
        kernels.LARGE_WORDS, kernels._SMALL_TILE, kernels._TILE, kernels.CHANNELS = 256, 64, 128, 4
        own, other = (np.zeros(kernels.num_words(2), np.int64) for _ in range(2))
        addresses = torch.tensor([own.ctypes.data, other.ctypes.data])
        places = kernels.PeerPlaces(addresses, torch.zeros((2, 4), dtype=torch.int32), 0, 2)
        first = places.first_large
        large = own[first:].view(np.int32)
        theirs = torch.randn(512)
        for channel in range(4):
            at = ((1 * 2 + 1) * 4 + channel) * 256
            large[at : at + 128] = theirs[128 * channel : 128 * channel + 128].view(torch.int32).numpy()
        flags = own[first + 2 * 4 * 256 :].view(np.int32)
        flags[4:8] = 2
        mine = torch.randn(512)
        assert torch.equal(kernels.all_reduce(mine, places), mine + theirs)
        assert places.calls.tolist() == [[0] * 4, [1] * 4]
        assert other[first + 2 * 4 * 256 :].view(np.int32)[:4].tolist() == [1] * 4
    """)


def test_pieces_of_a_vocabulary_embed_their_own() -> None:
    run_snippet("""
        import torch
        from services.scheduler.engine.kernels.elementwise import embed_piece
        weight, ids = torch.randn(50, 1500), torch.tensor([0, 16, 17, 49, 33, 34])
        parts = [embed_piece(ids, weight[first : first + 17].contiguous(), first) for first in (0, 17, 34)]
        assert torch.equal(sum(parts), weight[ids]) and sum(int((part == 0).all(-1).sum()) for part in parts) == 12
    """)
