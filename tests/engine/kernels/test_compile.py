"""Every Triton kernel compiles for a real GPU, with the arguments it is called with; no GPU is needed for that."""

import pytest

from tests.engine.snippets import run_snippet

SETUP = """
import math, numpy as np, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Driver:
    '''A GPU that can be compiled for, but not run on.'''
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_device_interface(self): return torch.cuda

driver.set_active(Driver())
from services.scheduler.engine.kernels import chain
chain.is_supported = lambda: True
compiled = []
def compile_only(self, grid):
    def call(*args, **kwargs):
        compiled.append(self.warmup(*args, grid=grid, **kwargs))
    return call
triton.runtime.jit.JITFunction.__getitem__ = compile_only

def check(count):
    assert len(compiled) == count, len(compiled)
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 * 1024, (kernel.name, kernel.metadata.shared)

def ints(*shape): return torch.ones(shape, dtype=torch.int32)
kv, dim, page = 8, 128, 64
"""


def compile_for_gpu(code: str) -> None:
    run_snippet(code, setup=SETUP, interpreted=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("window", [None, 300])
def test_attention(dtype: str, window: int | None) -> None:
    compile_for_gpu(f"""
        from services.scheduler.engine.kernels.decode_attention import *
        from services.scheduler.engine.kernels.prefill_attention import *
        keys, values = torch.zeros(2, 4, kv, page, dim, dtype=torch.{dtype})
        for group in (2, 5):
            q = torch.zeros(7, kv * group, dim, dtype=torch.{dtype})
            ws = DecodeWorkspace.allocate(256, 4096, kv * group, kv, dim, q.device, 528)
            for rows in (7, 40, 200) if group == 2 else (7,):
                shape = decode_shape(rows, 132)
                plan_decode(ws, ints(7), ints(7), kv, shape)
                decode_attention(ws, shape, q, keys, values, ints(9, 3), ints(7), q, 0.1, {window})
        shape = PrefillShape.of(q.shape[1], kv, 132)
        pieces = torch.from_numpy(list_pieces(np.array([0]), np.array([7]), shape))
        ws = PrefillWorkspace.allocate(shape, dim, q.device)
        prefill_attention(ws, q, keys, values, ints(9, 3), *(ints(1) for _ in range(4)), pieces, q, 0.1, {window})
        check(9)
    """)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_others(dtype: str) -> None:
    compile_for_gpu(f"""
        from services.scheduler.engine.kernels.elementwise import lay_out_inputs, rms_norm, silu_mul, store_kv
        from services.scheduler.engine.kernels.gumbel import gumbel_sample
        from services.scheduler.engine.kernels.limits import keep_limits
        from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store
        dtype = torch.{dtype}
        x = torch.zeros(3, 5120, dtype=dtype)
        rms_norm(x, x[0], 1e-6)
        rms_norm(x, x[0], 1e-6, x)
        silu_mul(x)
        keys, values = torch.zeros(2, 4, kv, page, dim, dtype=dtype)
        store_kv(x.view(3, -1, dim)[:, :kv], x.view(3, -1, dim)[:, kv : 2 * kv], ints(3), keys, values)
        qkv = torch.zeros(3, (40 + 2 * kv) * dim, dtype=dtype)
        for norm in (None, x[0, :dim]):
            qkv_norm_rope_store(qkv, norm, norm, torch.zeros(99, dim), ints(3), ints(3), keys, values, 40, 1e-6)
        lay_out_inputs(ints(3), ints(3), ints(9), ints(3).long(), ints(8, 2), ints(1), ints(9, 4))
        logits, floats, seeds = torch.zeros(3, 151_936, dtype=dtype), torch.ones(3), torch.ones(3, dtype=torch.int64)
        limits = keep_limits(logits, floats, ints(3), floats, floats)
        from services.scheduler.engine.kernels.few_linear import few_linear
        x = torch.zeros(4, 1024, dtype=dtype)
        w = torch.zeros(4096, 1024, dtype=dtype)
        few_linear(x, w, norm=(x[0], 1e-6))
        few_linear(x, w, norm=(x[0], 1e-6), gated=True)
        few_linear(x, torch.zeros(1024, 1024, dtype=dtype), add_to=x)
        few_linear(torch.zeros(4, 3072, dtype=dtype), torch.zeros(1024, 3072, dtype=dtype), add_to=x)
        gumbel_sample(logits, floats, seeds)
        gumbel_sample(logits, floats, seeds, limits=limits, out=ints(3), feed=(ints(3), ints(9)))
        check(16)
    """)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_experts(dtype: str) -> None:
    compile_for_gpu(f"""
        from services.scheduler.engine.kernels.few_experts import add_few_experts
        from services.scheduler.engine.kernels.grouped_linear import combine, multiply
        from services.scheduler.engine.kernels.route import Routing, route, sort_pairs
        dtype = torch.{dtype}
        x = torch.zeros(6, 2048, dtype=dtype)
        gate_up = torch.zeros(1, 2 * 768, 2048, dtype=dtype).expand(128, -1, -1)
        down = torch.zeros(1, 2048, 768, dtype=dtype).expand(128, -1, -1)
        route(torch.zeros(6, 128, dtype=dtype), 8, normalise=True, mapping=ints(6))
        routing = Routing(ints(6, 8), torch.ones(6, 8), 128)
        for tile in (16, 32, 64):
            pairs = sort_pairs(routing, tile)
            inner = multiply(x, gate_up, pairs, per_token=8, gated=True)
            answers = multiply(inner, down, pairs)
        combine(answers, pairs, routing)
        add_few_experts(x, gate_up, down, routing, (x[0], 1e-6))
        check(1 + 3 * 3 + 1 + 2)
    """)


@pytest.mark.parametrize(("dtype", "rank", "ranks"), [("bfloat16", 0, 2), ("float16", 2, 4), ("float32", 1, 2)])
def test_sums_over_ranks(dtype: str, rank: int, ranks: int) -> None:
    compile_for_gpu(f"""
        from services.scheduler.engine.kernels.all_reduce import PeerPlaces, all_gather, all_reduce
        from services.scheduler.engine.kernels.gumbel import gumbel_choose, gumbel_piece
        places = PeerPlaces(torch.zeros({ranks}, dtype=torch.int64), ints(2, 128), {rank}, {ranks})
        all_reduce(torch.zeros(1, 5120, dtype=torch.{dtype}), places)
        all_reduce(torch.zeros(256, 5120, dtype=torch.{dtype}), places)
        all_gather(ints(9, 2), places)
        from services.scheduler.engine.kernels.sum_norm import sum_norm
        for rows in (1, 256):
            x = torch.zeros(rows, 2048, dtype=torch.{dtype})
            sum_norm(x, x.clone(), x[0], 1e-6, places)
        logits = torch.zeros(3, 75_968, dtype=torch.{dtype})
        gumbel_piece(logits, torch.ones(3), torch.ones(3, dtype=torch.int64), {rank} * 75_968)
        gumbel_choose(ints({ranks}, 3, 2), ints(3), (ints(3), ints(9)))
        from services.scheduler.engine.kernels.elementwise import embed_piece
        embed_piece(torch.zeros(3, dtype=torch.int64), torch.zeros(75_968, 8, dtype=torch.{dtype}), {rank} * 75_968)
        check(9)
    """)
