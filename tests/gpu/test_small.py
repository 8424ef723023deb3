"""Every kernel of one GPU at small, uneven sizes, in seconds: what `make sanitize` runs under compute-sanitizer.

Reads and writes beside a tensor are seen there when each tensor is an allocation of its own, so sizes are chosen to
end within a block, a page and a tile.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from services.scheduler.engine.kernels.decode_attention import (
    DecodeShape,
    DecodeWorkspace,
    decode_attention,
    plan_decode,
)
from services.scheduler.engine.kernels.elementwise import lay_out_inputs, rms_norm, silu_mul, store_kv
from services.scheduler.engine.kernels.few_experts import add_few_experts
from services.scheduler.engine.kernels.few_linear import few_linear
from services.scheduler.engine.kernels.grouped_linear import combine, multiply
from services.scheduler.engine.kernels.gumbel import gumbel_sample
from services.scheduler.engine.kernels.limits import keep_limits
from services.scheduler.engine.kernels.prefill_attention import (
    PrefillShape,
    PrefillWorkspace,
    list_pieces,
    prefill_attention,
)
from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store
from services.scheduler.engine.kernels.route import route, sort_pairs
from tests.engine.kernels.references import experts_reference, qkv_reference
from tests.gpu.test_gpu_engine import DIM, KV, PAGE, Paged, attend, error

pytestmark = pytest.mark.gpu
GROUP = 3


def ints(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).cuda()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(17)


@pytest.mark.parametrize("window", [None, 70])
def test_decode_attention(window: int | None) -> None:
    """Long rows are cut, and whoever finishes last joins the pieces: that has atomics, and shared memory."""
    lengths = [700, 130, 65, 64, 1]
    paged = Paged(lengths)
    q = torch.randn(len(lengths), KV * GROUP, DIM, device="cuda").bfloat16()
    ws = DecodeWorkspace.allocate(8, 1024, KV * GROUP, KV, DIM, q.device, max_programs=32)
    for chunk in (64, 2048, 64):
        out, shape = torch.full_like(q, torch.nan), DecodeShape(32, max_chunk=chunk)
        plan_decode(ws, ints(lengths), ints(range(5)), KV, shape)
        decode_attention(
            ws, shape, q, paged.keys, paged.values, paged.table, ints(lengths), out, DIM**-0.5, window
        )  # fmt: skip
        for row, length in enumerate(lengths):
            assert error(out[row], attend(q[row : row + 1], *paged.row(row, length), window)[0]) < 1e-2
        assert not ws.arrivals.any()


@pytest.mark.parametrize("window", [None, 90])
def test_prefill_attention(window: int | None) -> None:
    starts, lengths = np.array([0, 100, 7, 2000]), np.array([150, 1, 33, 40])
    ends, offsets = (starts + lengths).tolist(), np.cumsum(lengths) - lengths
    paged = Paged(ends)
    q = torch.randn(int(lengths.sum()), KV * GROUP, DIM, device="cuda").bfloat16()
    out = torch.full_like(q, torch.nan)
    shape = PrefillShape.of(KV * GROUP, KV, torch.cuda.get_device_properties(0).multi_processor_count)
    ws = PrefillWorkspace.allocate(shape, DIM, q.device)
    begins, sizes, places, pieces = (ints(x) for x in (starts, lengths, offsets, list_pieces(starts, lengths, shape)))
    for _ in range(2):
        prefill_attention(
            ws, q, paged.keys, paged.values, paged.table, ints(range(4)), begins, sizes, places, pieces, out,
            DIM**-0.5, window,
        )  # fmt: skip
    for row, (first, length) in enumerate(zip(offsets, lengths, strict=True)):
        chunk = slice(first, first + length)
        assert error(out[chunk], attend(q[chunk], *paged.row(row, ends[row]), window)) < 1e-2


def test_what_lies_between() -> None:
    x, residual = torch.randn(5, 1000, device="cuda").bfloat16(), torch.randn(5, 1000, device="cuda").bfloat16()
    weight, total = torch.rand(1000, device="cuda").bfloat16(), x + residual
    wanted = F.rms_norm(total.float(), (1000,), weight.float(), 1e-6)
    assert error(rms_norm(x, weight, 1e-6, residual), wanted) < 1e-2 and torch.equal(residual, total)
    assert error(silu_mul(x), F.silu(x[:, :500].float()) * x[:, 500:].float()) < 1e-2
    heads, norm = KV * GROUP, torch.rand(DIM, device="cuda").bfloat16()
    angles = torch.randn(40, DIM, device="cuda")
    positions, mapping = ints([0, 39, 7, 7, 1]), ints([3, -1, 2 * PAGE - 1, 0, PAGE])
    qkv = torch.randn(5, (heads + 2 * KV) * DIM, device="cuda").bfloat16()
    pools = [(qkv.clone(), *(torch.zeros(2, KV, PAGE, DIM, device="cuda").bfloat16() for _ in "kv")) for _ in "ab"]
    for run, (merged, keys, values) in zip((qkv_norm_rope_store, qkv_reference), pools, strict=True):
        run(merged, norm, norm, angles, positions, mapping, keys, values, heads, 1e-6)
    for i, (found, wanted) in enumerate(zip(*pools, strict=True)):
        assert (
            error(found[:, : heads * DIM] if i == 0 else found, wanted[:, : heads * DIM] if i == 0 else wanted) < 1e-2
        )
    keys, values = (pool[:, :4] for pool in pools[0][1:])
    fresh = torch.randn(5, 4, DIM, device="cuda").bfloat16()
    store_kv(fresh, fresh, mapping, keys, values)
    assert torch.equal(keys[1, :, PAGE - 1], fresh[2]) and torch.equal(values[1, :, 0], fresh[4])
    last, input_ids, table = ints([7, 8, 9]), torch.zeros(3, dtype=torch.int64, device="cuda"), ints([[0, 0], [0, 0]])
    lay_out_inputs(ints([5, -1, -1]), ints([0, 2, 0]), last, input_ids, ints([[3, 6], [0, 0]]), ints([1]), table)
    assert input_ids.tolist() == [5, 9, 7] and table.tolist() == [[0, 0], [0, 6]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drawing(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 9001, device="cuda") * 3).to(dtype)
    ones = torch.ones(3, device="cuda")
    limits = keep_limits(logits, ones, ints([0, 5, 50]), ones * 0.9, ones * 0.01)
    out, last = ints([0, 0, 0]), ints([-7] * 9)
    seeds = torch.tensor([1, 2, 3], device="cuda")
    gumbel_sample(logits, ones, seeds, limits=limits, out=out, feed=(ints([8, 0, 3]), last))
    assert last[[8, 0, 3]].tolist() == out.tolist()
    assert (logits.gather(1, out.long()[:, None])[:, 0].float() >= limits).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_few_tokens(num_tokens: int) -> None:
    stream = torch.randn(num_tokens, 80, device="cuda").bfloat16()
    norm = torch.rand(80, device="cuda").bfloat16()
    weight = (torch.randn(96, 80, device="cuda") / 9).bfloat16()
    x = F.rms_norm(stream.float(), (80,), norm.float(), 1e-6)
    assert error(few_linear(stream, weight, norm=(norm, 1e-6)), x @ weight.float().t()) < 1e-2
    gate, up = (x @ weight.float().t()).chunk(2, -1)
    assert error(few_linear(stream, weight, norm=(norm, 1e-6), gated=True), F.silu(gate) * up) < 2e-2
    first = (torch.randn(7, 2 * 48, 80, device="cuda") / 9).bfloat16()
    second = (torch.randn(7, 80, 48, device="cuda") / 7).bfloat16()
    routing = route(torch.randn(num_tokens, 7, device="cuda"), 3, normalise=True)
    wanted = stream.float() + experts_reference(x, first.float(), second.float(), routing)
    add_few_experts(stream, first, second, routing, (norm, 1e-6))
    assert error(stream, wanted) < 2e-2


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts(dtype: torch.dtype, tile: int) -> None:
    first = (torch.randn(6, 2 * 40, 72, device="cuda") / 8).to(dtype)
    second = (torch.randn(6, 72, 40, device="cuda") / 6).to(dtype)
    for num_tokens, per_token in ((1, 1), (37, 2), (61, 6)):
        x = torch.randn(num_tokens, 72, device="cuda").to(dtype)
        mapping = torch.arange(num_tokens, device="cuda").int()
        mapping[1::5] = -1
        routing = route(torch.randn(num_tokens, 6, device="cuda"), per_token, normalise=True, mapping=mapping)
        pairs = sort_pairs(routing, tile)
        inner = multiply(x, first, pairs, per_token=per_token, gated=True)
        found = combine(multiply(inner, second, pairs), pairs, routing)
        assert error(found, experts_reference(x.float(), first.float(), second.float(), routing)) < 1e-2
