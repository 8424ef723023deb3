"""Times the candidates for decode attention, and our other small kernels, on the GPU at hand.

Lengths are those of a mixed workload (256 requests, prompts and answers of 100 to 1024 tokens) after some
numbers of decode steps. Each figure is the median over replays of one CUDA graph that holds several layers
with KV pools of their own, so that nothing stays in the L2 cache. Prints a table and JSON lines.

Usage: python -m bench.gpu_kernels [--steps 1,100,400,600,900] [--groups 2,5] [--skip-flashinfer]
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable

import torch

from services.scheduler.engine.kernels.decode_attention import (
    DecodeShape,
    DecodeWorkspace,
    decode_attention,
    plan_decode,
)
from services.scheduler.engine.kernels.few_linear import few_linear
from services.scheduler.engine.kernels.gumbel import gumbel_sample
from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store

LAYERS = 6
DIM = 128
NUM_KV = 8


def workload_lengths(step: int, order: str) -> list[int]:
    """Lengths of the rows still running after `step` decode steps, longest first or in arrival order."""
    rng = random.Random(0)
    sizes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    rows = [n_in + step for n_in, n_out in sizes if n_out > step]
    return sorted(rows, reverse=True) if order == "longest" else rows


def time_graph(body: Callable[[], None], replays: int = 15) -> float:
    """Median milliseconds of one replay of `body` captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Problem:
    """Rows of given lengths over shuffled pages, with one KV pool per layer."""

    def __init__(self, lengths: list[int], group: int, page: int) -> None:
        self.lengths, self.group, self.page = lengths, group, page
        self.rows = len(lengths)
        device = torch.device("cuda")
        counts = [-(-n // page) for n in lengths]
        num_pages = sum(counts) + 1
        order = (torch.randperm(num_pages - 1) + 1).int()
        table = torch.zeros((self.rows, max(counts)), dtype=torch.int32)
        at = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[at : at + count]
            at += count
        self.indices = order[:at].to(device)
        self.indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        self.last = torch.tensor([(n - 1) % page + 1 for n in lengths], dtype=torch.int32)
        self.table = table.to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.pools = [
            torch.randn((2, num_pages, NUM_KV, page, DIM), device=device, dtype=torch.bfloat16) for _ in range(LAYERS)
        ]
        self.q = torch.randn((self.rows, NUM_KV * group, DIM), device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.scale = 1 / math.sqrt(DIM)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that one layer must read."""
        return sum(self.lengths) * NUM_KV * DIM * 2 * 2


def reference(p: Problem, layer: int, rows: list[int]) -> torch.Tensor:
    """Float32 attention of some rows, for checking every candidate."""
    outs = []
    for row in rows:
        n = p.lengths[row]
        pages = p.table[row, : -(-n // p.page)].long()
        k, v = (p.pools[layer][i][pages].permute(1, 0, 2, 3).reshape(NUM_KV, -1, DIM)[:, :n].float() for i in (0, 1))
        q = p.q[row].float().view(NUM_KV, p.group, DIM)
        outs.append((torch.softmax(q @ k.transpose(1, 2) * p.scale, -1) @ v).reshape(-1, DIM))
    return torch.stack(outs)


def check(p: Problem, run: Callable[[int], None]) -> float:
    """Relative error, by norm, of the last layer's output against float32."""
    run(LAYERS - 1)
    torch.cuda.synchronize()
    rows = sorted({0, p.rows // 2, p.rows - 1})
    want = reference(p, LAYERS - 1, rows)
    return float((p.out[rows].float() - want).norm() / want.norm())


def triton_runner(
    p: Problem, programs: int, block: int, warps: int, stages: int, chunk: int, rounds: int = 2
) -> tuple[Callable[[], None], Callable[[int], None]]:
    """Our kernel: the plan, and one layer."""
    ws = DecodeWorkspace.allocate(256, 4096, NUM_KV * p.group, NUM_KV, DIM, torch.device("cuda"), 2 * programs)

    shape = DecodeShape(programs, block, warps, stages, chunk, rounds)
    slots = torch.arange(p.rows, dtype=torch.int32, device="cuda")

    def layer(i: int) -> None:
        decode_attention(ws, shape, p.q, p.pools[i][0], p.pools[i][1], p.table, p.seq_lens, p.out, p.scale)

    return (lambda: plan_decode(ws, p.seq_lens, slots, NUM_KV, shape)), layer


def flashinfer_runner(p: Problem, graph: bool) -> tuple[Callable[[], None], Callable[[int], None]]:
    """FlashInfer fa2 with tensor cores, HND pages; in graph mode it splits always."""
    import flashinfer

    space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    extra = {}
    if graph:
        extra = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": p.indptr.cuda(),
            "paged_kv_indices_buffer": p.indices.clone(),
            "paged_kv_last_page_len_buffer": p.last.cuda(),
        }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True, **extra)
    wrapper.plan(
        p.indptr, p.indices, p.last, NUM_KV * p.group, NUM_KV, DIM, p.page, q_data_type=torch.bfloat16, sm_scale=p.scale
    )

    def layer(i: int) -> None:
        wrapper.run(p.q, (p.pools[i][0], p.pools[i][1]), out=p.out)

    return (lambda: None), layer


def measure(
    name: str, p: Problem, runner: tuple[Callable[[], None], Callable[[int], None]], facts: dict[str, object]
) -> float:
    """Check and time one candidate, print a line, return microseconds per layer."""
    plan, layer = runner
    plan()
    error = check(p, layer)

    def body() -> None:
        plan()
        for i in range(LAYERS):
            layer(i)

    us = time_graph(body) * 1e3 / LAYERS
    rate = p.kv_bytes / us / 1e6
    print(
        json.dumps(
            {
                "kernel": name,
                **facts,
                "us_per_layer": round(us, 1),
                "tb_per_s": round(rate, 2),
                "error": round(error, 5),
            }
        ),
        flush=True,
    )
    return us


def attempt(
    name: str,
    p: Problem,
    make: Callable[[], tuple[Callable[[], None], Callable[[int], None]]],
    facts: dict[str, object],
) -> None:
    """Measure a candidate; one that cannot run says why and the others go on."""
    try:
        measure(name, p, make(), facts)
    except (RuntimeError, ValueError, ImportError) as e:
        print(json.dumps({"kernel": name, **facts, "failed": str(e)[:200]}), flush=True)


def _shapes(rows: int) -> list[tuple[int, int, int, int, int]]:
    """Cuts worth trying: programs per multiprocessor, block, warps, stages, rounds."""
    if rows <= 16:
        return [(per, 64, 4, s, r) for s in (2, 3, 4) for per in (1, 2, 3, 4, 6, 8) for r in (1, 2)]
    return [(per, 64, 4, s, r) for s in (2, 3) for per in (3, 4) for r in (1, 2, 4)]


def bench_few() -> None:
    """The products of a layer of Qwen3-0.6B for a handful of tokens, beside cuBLAS."""
    for rows in (1, 2, 4):
        for name, size, num_out in (
            ("qkv", 1024, 4096),
            ("o", 2048, 1024),
            ("gate_up", 1024, 6144),
            ("down", 3072, 1024),
        ):
            weights = [torch.randn(num_out, size, device="cuda").bfloat16() for _ in range(20)]
            x = torch.randn(rows, size, device="cuda").bfloat16()
            stream = torch.randn(rows, num_out, device="cuda").bfloat16()
            norm = (torch.ones(size, device="cuda").bfloat16(), 1e-6)

            def ours(name=name, weights=weights, x=x, stream=stream, norm=norm) -> None:
                for weight in weights:
                    if name in ("qkv", "gate_up"):
                        few_linear(x, weight, norm=norm, gated=name == "gate_up")
                    else:
                        few_linear(x, weight, add_to=stream)

            def theirs(weights=weights, x=x) -> None:
                for weight in weights:
                    torch.nn.functional.linear(x, weight)

            us = {who: round(time_graph(body) * 50, 2) for who, body in (("ours", ours), ("cublas", theirs))}
            print(json.dumps({"kernel": f"few {name}", "rows": rows, **us}), flush=True)


def bench_attention(steps: list[int], groups: list[int], with_flashinfer: bool, sweep: bool) -> None:
    """All candidates over lengths, groups, orders and page sizes."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for group in groups:
        for step in steps:
            for order in ("longest",) if sweep else ("arrival", "longest"):
                lengths = [840] * -step if step < 0 else workload_lengths(step, order)
                for page in (64,) if sweep else (16, 64):
                    p = Problem(lengths, group, page)
                    facts: dict[str, object] = {
                        "group": group,
                        "rows": p.rows,
                        "step": step,
                        "order": order,
                        "page": page,
                    }
                    shapes = _shapes(p.rows) if sweep else [(4, 64, 4, 2, 2)]
                    for per, block, warps, stages, rounds in shapes:
                        more = {
                            **facts, "per_sm": per, "block": block, "warps": warps, "stages": stages, "rounds": rounds,
                        }  # fmt: skip
                        attempt(
                            "triton",
                            p,
                            lambda per=per, b=block, w=warps, s=stages, r=rounds, p=p: triton_runner(
                                p, sms * per, b, w, s, 2048, r
                            ),
                            more,
                        )
                    if with_flashinfer:
                        attempt("fa2", p, lambda p=p: flashinfer_runner(p, False), facts)
                        attempt("fa2-graph", p, lambda p=p: flashinfer_runner(p, True), facts)


def bench_small() -> None:
    """QKV kernel and sampler at the sizes of Qwen3-0.6B and 14B."""
    for heads in (16, 40):
        for rows in (1, 16, 64, 256):
            qkv = torch.randn(rows, (heads + 16) * DIM, device="cuda", dtype=torch.bfloat16)
            weight = torch.ones(DIM, device="cuda", dtype=torch.bfloat16)
            table = torch.randn(4096, DIM, device="cuda")
            pos = torch.arange(rows, device="cuda", dtype=torch.int32)
            pool = torch.zeros(2, 64, NUM_KV, 64, DIM, device="cuda", dtype=torch.bfloat16)

            def body(qkv=qkv, weight=weight, table=table, pos=pos, pool=pool, heads=heads) -> None:
                for _ in range(20):
                    qkv_norm_rope_store(qkv, weight, weight, table, pos, pos, pool[0], pool[1], heads, 1e-6)

            print(
                json.dumps({"kernel": "qkv", "heads": heads, "rows": rows, "us": round(time_graph(body) * 50, 2)}),
                flush=True,
            )
    for rows in (1, 16, 64, 256):
        logits = torch.randn(rows, 151936, device="cuda", dtype=torch.bfloat16)
        temperature = torch.full((rows,), 0.6, device="cuda")
        seeds = torch.arange(rows, device="cuda", dtype=torch.int64) * 7919

        def draw(logits=logits, temperature=temperature, seeds=seeds) -> None:
            for _ in range(10):
                gumbel_sample(logits, temperature, seeds)

        print(json.dumps({"kernel": "gumbel", "rows": rows, "us": round(time_graph(draw) * 100, 2)}), flush=True)


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", default="1,100,400,600,900,-1,-16", help="decode steps done; -N means N rows of 840 tokens"
    )
    parser.add_argument("--groups", default="2,5")
    parser.add_argument("--skip-flashinfer", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="try every shape of our kernel")
    parser.add_argument("--skip-small", action="store_true")
    flags = parser.parse_args()
    print(json.dumps({"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda}))
    steps = [int(s) for s in flags.steps.split(",")]
    groups = [int(g) for g in flags.groups.split(",")]
    if not flags.skip_small:
        bench_few()
        bench_small()
    bench_attention(steps, groups, not flags.skip_flashinfer, flags.sweep)


if __name__ == "__main__":
    main()
