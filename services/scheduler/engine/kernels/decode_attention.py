"""Paged attention of one query token per row, as one persistent Triton kernel without a host-side plan.

A tiny kernel turns the rows' lengths into a work list on the device, once per step; every layer then runs
the same list: programs take (row, chunk, KV head) items until none is left, and the program that finishes
the last chunk of a row merges it. Nothing depends on the host, so one CUDA graph serves any lengths, and
rows of very different length keep all multiprocessors busy.

Source: the split of long rows and the merge by log-sum-exp follow Flash-Decoding (Dao et al., 2023); the
work list over a fixed grid follows the idea of FlashInfer's balanced plan (Ye et al., arXiv:2501.01005),
moved to the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_CHUNK = 64
MAX_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of the decode kernel for up to `max_rows` rows; one set serves all layers of a device.

    Attributes:
        items: (max_items, 2), int32, device: row and chunk of each work item.
        plan: (4,), int32, device: number of items, tokens per chunk.
        partial: (max_items, num_qo_heads, head_dim), float32, device: unnormalised outputs of split rows.
        lse: (max_items, num_qo_heads, 2), float32, device: maximum and sum of each partial.
        first_item: (max_rows + 1,), int32, device: where a row's items begin.
        arrivals: (max_rows, num_kv_heads), int32, device: chunks done; zero between launches.
    """

    items: torch.Tensor
    plan: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    first_item: torch.Tensor
    arrivals: torch.Tensor
    num_programs: int

    @staticmethod
    def allocate(
        max_rows: int,
        max_seq_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int,
    ) -> "DecodeWorkspace":
        """Allocate for the worst case that the planner can produce (see `_plan_kernel`)."""
        # A row has at most ceil(max_seq_len / MAX_CHUNK) chunks, unless chunks are shorter, which the
        # planner allows only while all items together stay near num_programs.
        longest = -(-max_seq_len // MAX_CHUNK)
        max_items = max_rows * longest + 2 * num_programs + max_rows
        return DecodeWorkspace(
            items=torch.zeros((max_items, 2), dtype=torch.int32, device=device),
            plan=torch.zeros(4, dtype=torch.int32, device=device),
            partial=torch.zeros((max_items, num_qo_heads, head_dim), dtype=torch.float32, device=device),
            lse=torch.zeros((max_items, num_qo_heads, 2), dtype=torch.float32, device=device),
            first_item=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            arrivals=torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
            num_programs=num_programs,
        )


@triton.jit
def _plan_kernel(
    seq_lens,
    items,
    plan,
    first_item,
    num_rows,
    num_heads,
    programs,
    ROWS: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
):
    """Choose the chunk so that all items fill the grid a few times, then list (row, chunk) in row order."""
    r = tl.arange(0, ROWS)
    lens = tl.load(seq_lens + r, mask=r < num_rows, other=0)
    total = tl.sum(lens)
    want = tl.cdiv(total * num_heads, programs * 2)
    chunk = tl.minimum(tl.maximum(tl.cdiv(want, LO) * LO, LO), HI)
    counts = tl.cdiv(lens, chunk)
    ends = tl.cumsum(counts, 0)
    tl.store(first_item + r, ends - counts, mask=r < num_rows)
    tl.store(first_item + num_rows, tl.sum(counts))
    tl.store(plan, tl.sum(counts))
    tl.store(plan + 1, chunk)
    most = tl.max(counts)
    for c in range(0, most):
        at = (ends - counts + c) * 2
        here = c < counts
        tl.store(items + at, r, mask=here)
        tl.store(items + at + 1, c, mask=here)


@triton.jit
def _decode_kernel(
    q, k_cache, v_cache, out, page_table, seq_lens, items, plan, first_item, arrivals, partial, lse,
    scale, stride_q, stride_page, stride_head, stride_table, stride_out,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    num_items = tl.load(plan) * NUM_KV
    chunk = tl.load(plan + 1)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM)
    t = tl.arange(0, BLOCK)
    for w in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = w // NUM_KV
        head = w % NUM_KV
        row = tl.load(items + item * 2)
        part = tl.load(items + item * 2 + 1)
        seq_len = tl.load(seq_lens + row)
        begin = part * chunk
        end = tl.minimum(begin + chunk, seq_len)
        qo = head * GROUP + g
        query = tl.load(q + row * stride_q + qo[:, None] * DIM + d[None, :], mask=g[:, None] < GROUP, other=0.0)
        top = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
        mass = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
        for at in range(begin, end, BLOCK):
            pos = at + t
            live = pos < end
            page = tl.load(page_table + row * stride_table + pos // PAGE, mask=live, other=0).to(tl.int64)
            base = page * stride_page + head * stride_head + (pos % PAGE) * DIM
            k = tl.load(k_cache + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
            v = tl.load(v_cache + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
            score = tl.dot(query, tl.trans(k)) * scale
            score = tl.where(live[None, :], score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            mass = mass * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
            top = new_top
        heads = g < GROUP
        out_at = out + row * stride_out + qo[:, None] * DIM + d[None, :]
        if seq_len <= chunk:
            tl.store(out_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=heads[:, None])
        else:
            slot = item * NUM_KV * GROUP + qo
            tl.store(partial + slot[:, None] * DIM + d[None, :], acc, mask=heads[:, None])
            tl.store(lse + slot * 2, top, mask=heads)
            tl.store(lse + slot * 2 + 1, mass, mask=heads)
            tl.debug_barrier()
            parts = tl.cdiv(seq_len, chunk)
            seen = tl.atomic_add(arrivals + row * NUM_KV + head, 1, sem="acq_rel")
            if seen == parts - 1:
                tl.debug_barrier()
                first = tl.load(first_item + row)
                top = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
                mass = tl.zeros((GROUP_PAD,), tl.float32)
                acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
                for i in range(first, first + parts):
                    other = i * NUM_KV * GROUP + qo
                    o_top = tl.load(lse + other * 2, mask=heads, other=0.0, cache_modifier=".cg")
                    o_mass = tl.load(lse + other * 2 + 1, mask=heads, other=1.0, cache_modifier=".cg")
                    o_acc = tl.load(
                        partial + other[:, None] * DIM + d[None, :],
                        mask=heads[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_top = tl.maximum(top, o_top)
                    a = tl.exp2(top - new_top)
                    b = tl.exp2(o_top - new_top)
                    mass = mass * a + o_mass * b
                    acc = acc * a[:, None] + o_acc * b[:, None]
                    top = new_top
                tl.store(out_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=heads[:, None])
                tl.store(arrivals + row * NUM_KV + head, 0)


def plan_decode(ws: DecodeWorkspace, seq_lens: torch.Tensor, num_kv_heads: int, max_chunk: int = MAX_CHUNK) -> None:
    """Write the step's work list from `seq_lens`, (rows,), int32, device. Once per step, before the layers."""
    rows = seq_lens.shape[0]
    _plan_kernel[(1,)](
        seq_lens, ws.items, ws.plan, ws.first_item, rows, num_kv_heads, ws.num_programs,
        ROWS=triton.next_power_of_2(max(rows, 2)), LO=MIN_CHUNK, HI=max_chunk, num_warps=4,
    )  # fmt: skip


def decode_attention(
    ws: DecodeWorkspace, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    seq_lens: torch.Tensor, out: torch.Tensor, scale: float, block: int = 64, num_warps: int = 4, num_stages: int = 2,
) -> None:  # fmt: skip
    """Attend with one query per row over the row's pages.

    Args:
        ws: planned by `plan_decode` for the same `seq_lens`.
        q: (rows, num_qo_heads, head_dim), bf16 or f32, device; rows may be strided.
        k_cache: (num_pages, num_kv_heads, page_size, head_dim), device.
        v_cache: like k_cache, of equal strides.
        page_table: (rows, columns), int32, device.
        seq_lens: (rows,), int32, device; tokens to attend to, the row's own included.
        out: (rows, num_qo_heads, head_dim), device, written.
        scale: factor on the scores before the softmax.
        block: tokens per inner step, a multiple of 16.
        num_warps: per program.
        num_stages: of the software pipeline.
    """
    _, num_qo, dim = q.shape
    num_kv, page = k_cache.shape[1], k_cache.shape[2]
    group = num_qo // num_kv
    _decode_kernel[(ws.num_programs,)](
        q, k_cache, v_cache, out, page_table, seq_lens, ws.items, ws.plan, ws.first_item, ws.arrivals, ws.partial, ws.lse,
        scale * 1.4426950408889634, q.stride(0), k_cache.stride(0), k_cache.stride(1), page_table.stride(0), out.stride(0),
        NUM_KV=num_kv, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, PAGE=page, BLOCK=block,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
