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

from services.scheduler.engine.kernels import chain

MIN_CHUNK = 64
MAX_CHUNK = 2048
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How the kernel is cut for a number of rows.

    Attributes:
        programs: size of the persistent grid.
        block: tokens per inner step, a multiple of 16.
        warps: per program.
        stages: of the software pipeline.
        max_chunk: tokens of one work item at most.
        rounds: work items per program that are aimed at.
    """

    programs: int
    block: int = 64
    warps: int = 4
    stages: int = 2
    max_chunk: int = MAX_CHUNK
    rounds: int = 2


def decode_shape(rows: int, multiprocessors: int) -> DecodeShape:
    """The cut that was fastest on an H200 for that many rows."""
    if rows > 128:
        return DecodeShape(4 * multiprocessors)
    if 4 < rows <= 24:
        return DecodeShape(3 * multiprocessors, stages=3, rounds=1)
    return DecodeShape(4 * multiprocessors, stages=3, rounds=1)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of the decode kernel for up to `max_rows` rows; one set serves all layers of a device.

    Attributes:
        items: (max_items, 4), int32, device: row, line of the page table, first token and end of each work item.
        plan: (4,), int32, device: number of items.
        partial: (max_items, num_qo_heads, head_dim), float32, device: unnormalised outputs of split rows.
        lse: (max_items, num_qo_heads, 2), float32, device: maximum and sum of each partial.
        first_item: (max_rows + 1,), int32, device: where a row's items begin.
        arrivals: (max_rows, num_kv_heads), int32, device: chunks done; zero between launches.
        max_rows: rows it is for.
    """

    items: torch.Tensor
    plan: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    first_item: torch.Tensor
    arrivals: torch.Tensor
    max_rows: int

    @staticmethod
    def allocate(
        max_rows: int,
        max_seq_len: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        max_programs: int,
    ) -> "DecodeWorkspace":
        """Allocate for the worst case that the planner can produce (see `_plan_kernel`)."""
        # A row has at most ceil(max_seq_len / MAX_CHUNK) chunks, unless chunks are shorter, which the
        # planner allows only while all items together stay near the grid's size.
        longest = -(-max_seq_len // MAX_CHUNK)
        max_items = max_rows * longest + 2 * max_programs + max_rows
        return DecodeWorkspace(
            items=torch.zeros((max_items, 4), dtype=torch.int32, device=device),
            plan=torch.zeros(4, dtype=torch.int32, device=device),
            partial=torch.zeros((max_items, num_qo_heads, head_dim), dtype=torch.float32, device=device),
            lse=torch.zeros((max_items, num_qo_heads, 2), dtype=torch.float32, device=device),
            first_item=torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            arrivals=torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
            max_rows=max_rows,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    seq_lens,
    slots,
    items,
    plan,
    first_item,
    num_rows,
    num_heads,
    programs,
    ROWS: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Choose the chunk so that all items fill the grid a few times, cut rows evenly, and list the pieces by row."""
    chain.follow(CHAIN)
    r = tl.arange(0, ROWS)
    lens = tl.load(seq_lens + r, mask=r < num_rows, other=0)
    total = tl.sum(lens)
    want = tl.cdiv(total * num_heads, programs)
    chunk = tl.minimum(tl.maximum(tl.cdiv(want, LO) * LO, LO), HI)
    counts = tl.cdiv(lens, chunk)
    ends = tl.cumsum(counts, 0)
    tl.store(first_item + r, ends - counts, mask=r < num_rows)
    tl.store(first_item + num_rows, tl.sum(counts))
    tl.store(plan, tl.sum(counts))
    slot = tl.load(slots + r, mask=r < num_rows, other=0)
    size = tl.cdiv(tl.cdiv(lens, tl.maximum(counts, 1)), LO) * LO
    most = tl.max(counts)
    for c in range(0, most):
        at = (ends - counts + c) * 4
        here = c < counts
        tl.store(items + at, r, mask=here)
        tl.store(items + at + 1, slot, mask=here)
        tl.store(items + at + 2, tl.minimum(c * size, lens), mask=here)
        tl.store(items + at + 3, tl.minimum((c + 1) * size, lens), mask=here)


@triton.jit
def _decode_kernel(
    q, k_cache, v_cache, out, page_table, seq_lens, items, plan, first_item, arrivals, partial, lse,
    scale, stride_q, stride_page, stride_head, stride_table, stride_out,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    chain.follow(CHAIN)
    num_items = tl.load(plan) * NUM_KV
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM)
    t = tl.arange(0, BLOCK)
    for w in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = w // NUM_KV
        head = w % NUM_KV
        row = tl.load(items + item * 4)
        table = page_table + tl.load(items + item * 4 + 1).to(tl.int64) * stride_table
        begin = tl.load(items + item * 4 + 2)
        end = tl.load(items + item * 4 + 3)
        first = tl.load(first_item + row)
        parts = tl.load(first_item + row + 1) - first
        if WINDOW > 0:
            begin = tl.maximum(begin, tl.load(seq_lens + row) - WINDOW)
        qo = head * GROUP + g
        query = tl.load(q + row * stride_q + qo[:, None] * DIM + d[None, :], mask=g[:, None] < GROUP, other=0.0)
        top = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
        mass = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
        for at in range(begin, end, BLOCK):
            pos = at + t
            live = pos < end
            page = tl.load(table + pos // PAGE, mask=live, other=0).to(tl.int64)
            base = page * stride_page + head * stride_head + (pos % PAGE) * DIM
            k = tl.load(k_cache + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
            v = tl.load(v_cache + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
            score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(live[None, :], score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            mass = mass * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            top = new_top
        heads = g < GROUP
        out_at = out + row * stride_out + qo[:, None] * DIM + d[None, :]
        if parts == 1:
            tl.store(out_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=heads[:, None])
        else:
            slot = item * NUM_KV * GROUP + qo
            tl.store(partial + slot[:, None] * DIM + d[None, :], acc, mask=heads[:, None])
            tl.store(lse + slot * 2, top, mask=heads)
            tl.store(lse + slot * 2 + 1, mass, mask=heads)
            tl.debug_barrier()
            seen = tl.atomic_add(arrivals + row * NUM_KV + head, 1, sem="acq_rel")
            if seen == parts - 1:
                tl.debug_barrier()
                top = tl.full((GROUP_PAD,), -float("inf"), tl.float32)
                mass = tl.zeros((GROUP_PAD,), tl.float32)
                acc = tl.zeros((GROUP_PAD, DIM), tl.float32)
                for i in range(0, parts, 4):
                    # Four at a time: their loads do not wait for each other.
                    for j in tl.static_range(4):
                        here = heads & (g * 0 + i + j < parts)
                        other = (first + i + j) * NUM_KV * GROUP + qo
                        o_top = tl.load(lse + other * 2, mask=here, other=-float("inf"), cache_modifier=".cg")
                        o_mass = tl.load(lse + other * 2 + 1, mask=here, other=0.0, cache_modifier=".cg")
                        o_at = partial + other[:, None] * DIM + d[None, :]
                        o_acc = tl.load(o_at, mask=here[:, None], other=0.0, cache_modifier=".cg")
                        new_top = tl.maximum(top, o_top)
                        # A part wholly outside the window has no maximum and no weight.
                        a = tl.where(top == new_top, 1.0, tl.exp2(top - new_top))
                        b = tl.where(o_top == new_top, 1.0, tl.exp2(o_top - new_top))
                        mass = mass * a + o_mass * b
                        acc = acc * a[:, None] + o_acc * b[:, None]
                        top = new_top
                tl.store(out_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=heads[:, None])
                tl.store(arrivals + row * NUM_KV + head, 0)


def plan_decode(
    ws: DecodeWorkspace, seq_lens: torch.Tensor, slots: torch.Tensor, num_kv_heads: int, shape: DecodeShape
) -> None:
    """Write the step's work list. Once per step, before the layers.

    Args:
        ws: where it goes.
        seq_lens: (rows,), int32, device; tokens to attend to, the row's own included. A row of length 0 is padding:
            nothing of it is read, and its output is not written.
        slots: (rows,), int32, device; the line of the page table that each row reads.
        num_kv_heads: key and value heads.
        shape: how the kernel will be cut.
    """
    _plan_kernel[(1,)](
        seq_lens, slots, ws.items, ws.plan, ws.first_item, seq_lens.shape[0], num_kv_heads, shape.programs * shape.rounds,
        ROWS=triton.next_power_of_2(max(ws.max_rows, 2)), LO=MIN_CHUNK, HI=shape.max_chunk, num_warps=4, **chain.options(),
    )  # fmt: skip


def decode_attention(
    ws: DecodeWorkspace, shape: DecodeShape, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    seq_lens: torch.Tensor, out: torch.Tensor, scale: float, window: int | None = None,
) -> None:  # fmt: skip
    """Attend with one query per row over the row's pages.

    Args:
        ws: planned by `plan_decode` for the same rows and shape.
        shape: how to cut the work.
        q: (rows, num_qo_heads, head_dim), bf16, f16 or f32, device; rows may be strided.
        k_cache: (num_pages, num_kv_heads, page_size, head_dim), device.
        v_cache: like k_cache, of equal strides.
        page_table: (slots, columns), int32, device.
        seq_lens: (rows,), int32, device.
        out: (rows, num_qo_heads, head_dim), device, written.
        scale: factor on the scores before the softmax.
        window: tokens a row sees, its own included; None for all.
    """
    _, num_qo, dim = q.shape
    num_kv, page = k_cache.shape[1], k_cache.shape[2]
    group = num_qo // num_kv
    _decode_kernel[(shape.programs,)](
        q, k_cache, v_cache, out, page_table, seq_lens, ws.items, ws.plan, ws.first_item, ws.arrivals, ws.partial, ws.lse,
        scale * LOG2_E, q.stride(0), k_cache.stride(0), k_cache.stride(1), page_table.stride(0), out.stride(0),
        NUM_KV=num_kv, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), DIM=dim, PAGE=page, BLOCK=shape.block,
        WINDOW=window or 0, num_warps=shape.warps, num_stages=shape.stages, **chain.options(),
    )  # fmt: skip
