"""Our Triton kernels against plain torch, in Triton's interpreter (no GPU needed).

Each test runs in a process of its own: the interpreter must be chosen before Triton is first imported.
"""

import os
import subprocess
import sys
import textwrap

import pytest


def interpret(code: str) -> None:
    """Run a snippet under the interpreter; it must exit 0."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_decode_attention_equals_dense_attention_for_any_lengths() -> None:
    interpret("""
        import math, torch
        from services.scheduler.engine.kernels.decode_attention import DecodeWorkspace, decode_attention, plan_decode
        torch.manual_seed(1)
        kv, dim, page = 2, 64, 16
        for group, lengths in ((2, [700, 130, 65, 64, 1]), (5, [1, 333, 2])):
            seq_lens = torch.tensor(lengths, dtype=torch.int32)
            k, v = torch.randn(2, 100, kv, page, dim)
            table = torch.stack([torch.randperm(100)[:50] for _ in lengths]).int()
            q = torch.randn(len(lengths), kv * group, dim)
            out = torch.empty_like(q)
            ws = DecodeWorkspace.allocate(8, 1024, kv * group, kv, dim, torch.device("cpu"), num_programs=8)
            for chunk in (64, 2048, 64):  # again, with the counters of the launch before
                plan_decode(ws, seq_lens, kv, max_chunk=chunk)
                decode_attention(ws, q, k, v, table, seq_lens, out, 1 / math.sqrt(dim))
                for row, n in enumerate(lengths):
                    pages = table[row, : -(-n // page)].long()
                    keys, values = (x[pages].permute(1, 0, 2, 3).reshape(kv, -1, dim)[:, :n] for x in (k, v))
                    heads = q[row].view(kv, group, dim)
                    want = (torch.softmax(heads @ keys.transpose(1, 2) / math.sqrt(dim), -1) @ values).reshape(-1, dim)
                    assert torch.allclose(out[row], want, atol=2e-6), (group, row, (out[row] - want).abs().max())
            assert int(ws.arrivals.abs().sum()) == 0
    """)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qkv_equals_its_reference(norm: bool, dtype: str) -> None:
    interpret(f"""
        import torch
        from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store, qkv_reference
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
    interpret("""
        import torch
        from services.scheduler.engine.kernels.gumbel import BLOCK, gumbel_sample
        torch.manual_seed(3)
        logits = torch.randn(3, 9000)
        temperatures, seeds = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([5, 2**62, 77])
        value, token = gumbel_sample(logits, temperatures, seeds)
        assert token[0] == logits[0].argmax()
        alone = gumbel_sample(logits[1:2], temperatures[1:2], seeds[1:2])[1]
        assert alone[0] == token[1]
        parts = ((0, BLOCK), (BLOCK, 9000))
        halves = [gumbel_sample(logits[:, a:b].contiguous(), temperatures, seeds, a) for a, b in parts]
        sharded = torch.where(halves[0][0] >= halves[1][0], halves[0][1], halves[1][1])
        assert torch.equal(sharded, token)
        tied = torch.zeros(1, 3000)
        tied[0, [2500, 1500, 2]] = 1.0
        assert gumbel_sample(tied, torch.zeros(1), torch.zeros(1, dtype=torch.int64))[1][0] == 2
        logits[1, 8191] = float("nan")
        value, token = gumbel_sample(logits, temperatures, seeds)
        assert token[1] == -1 and value[1].isnan() and (token[[0, 2]] >= 0).all()
        four = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
        draws = gumbel_sample(four.repeat(2000, 1), torch.ones(2000), torch.arange(2000) * 7919)[1]
        share = torch.bincount(draws.long(), minlength=4) / 2000
        want = torch.softmax(four[0], 0)
        assert (share - want).abs().max() < 0.04, share
    """)
