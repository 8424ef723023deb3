"""What only a GPU can show; `make test-gpu` runs it there: kernels at their real sizes, graphs, streams, memory."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.workloads import MODELS
from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.kernels.decode_attention import (
    DecodeWorkspace,
    decode_attention,
    decode_shape,
    plan_decode,
)
from services.scheduler.engine.kernels.elementwise import rms_norm, silu_mul
from services.scheduler.engine.kernels.gumbel import gumbel_sample
from services.scheduler.engine.kernels.limits import keep_limits
from services.scheduler.engine.kernels.prefill_attention import (
    PrefillShape,
    PrefillWorkspace,
    list_pieces,
    prefill_attention,
)
from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store
from shared.model_files import locate
from shared.sampling import SamplingParams
from tests.engine.driver import GREEDY, Driver
from tests.engine.kernels.references import qkv_reference

pytestmark = pytest.mark.gpu
KV, DIM, PAGE = 8, 128, 64
SEED = int(np.random.default_rng().integers(1 << 30))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print("seed", SEED)
    torch.manual_seed(SEED)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Float32 attention of (tokens, heads, dim) over (kv, seq, dim); the tokens are the last ones."""
    tokens, heads, dim = q.shape
    folded = q.float().view(tokens, KV, heads // KV, dim).permute(1, 2, 0, 3)
    scores = folded @ k.float()[:, None].transpose(2, 3) / math.sqrt(dim)
    at = torch.arange(k.shape[1], device=q.device)
    own = k.shape[1] - tokens + torch.arange(tokens, device=q.device)
    seen = at[None] <= own[:, None]
    if window:
        seen &= at[None] > own[:, None] - window
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ v.float()[:, None]).permute(2, 0, 1, 3).reshape(tokens, heads, dim)


class Paged:
    """Rows of keys and values on shuffled pages."""

    def __init__(self, lengths: list[int]) -> None:
        counts = [-(-length // PAGE) for length in lengths]
        self.keys, self.values = torch.randn(2, sum(counts) + 1, KV, PAGE, DIM, device="cuda").bfloat16()
        order = (torch.randperm(sum(counts)) + 1).int()
        self.table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
        for row, pages in enumerate(order.split(counts)):
            self.table[row, : len(pages)] = pages
        self.table = self.table.cuda()

    def row(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.table[row, : -(-length // PAGE)].long()
        k, v = (x[pages].permute(1, 0, 2, 3).reshape(KV, -1, DIM)[:, :length] for x in (self.keys, self.values))
        return k, v


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("group", [1, 2, 5, 8])
@pytest.mark.parametrize("rows", [1, 16, 41, 255])
def test_decode_attention(rows: int, group: int, window: int | None) -> None:
    lengths = sorted(torch.randint(1, 3000, (rows,)).tolist(), reverse=True)
    paged = Paged(lengths)
    q = torch.randn(rows, KV * group, DIM, device="cuda").bfloat16()
    out = torch.full_like(q, torch.nan)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    ws = DecodeWorkspace.allocate(256, 4096, KV * group, KV, DIM, q.device, 4 * sms)
    slots, seq_lens = torch.arange(rows).int().cuda(), torch.tensor(lengths).int().cuda()
    for _ in range(3):
        plan_decode(ws, seq_lens, slots, KV, decode_shape(rows, sms))
        decode_attention(
            ws,
            decode_shape(rows, sms),
            q,
            paged.keys,
            paged.values,
            paged.table,
            seq_lens,
            out,
            DIM**-0.5,
            window,
        )
    for row in {0, rows // 2, rows - 1}:
        assert error(out[row], attend(q[row : row + 1], *paged.row(row, lengths[row]), window)[0]) < 1e-2
    assert not out.isnan().any()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_prefill_attention(group: int, window: int | None) -> None:
    starts, lengths = np.array([0, 640, 100, 2000, 31_000]), np.array([1500, 1, 129, 333, 70])
    ends = (starts + lengths).tolist()
    paged = Paged(ends)
    offsets = np.cumsum(lengths) - lengths
    q = torch.randn(int(lengths.sum()), KV * group, DIM, device="cuda").bfloat16()
    out = torch.full_like(q, torch.nan)
    shape = PrefillShape.of(KV * group, KV, torch.cuda.get_device_properties(0).multi_processor_count)
    workspace = PrefillWorkspace.allocate(shape, DIM, q.device)
    ints = [torch.from_numpy(x).int().cuda() for x in (starts, lengths, offsets, list_pieces(starts, lengths, shape))]
    slots = torch.arange(5).int().cuda()
    for _ in range(3):
        prefill_attention(workspace, q, paged.keys, paged.values, paged.table, slots, *ints, out, DIM**-0.5, window)
    for row, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        found = out[offset : offset + length]
        assert error(found, attend(q[offset : offset + length], *paged.row(row, ends[row]), window)) < 1e-2


def test_small_kernels() -> None:
    x, residual = torch.randn(2, 37, 5120, device="cuda").bfloat16()
    weight = torch.rand(5120, device="cuda").bfloat16()
    total = x + residual
    found = rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(residual, total)
    assert error(found, torch.nn.functional.rms_norm(total.float(), (5120,), weight.float(), 1e-6)) < 1e-2
    both = torch.randn(9, 2 * 3072, device="cuda").bfloat16()
    assert error(silu_mul(both), torch.nn.functional.silu(both[:, :3072].float()) * both[:, 3072:].float()) < 1e-2
    qkv = torch.randn(33, (16 + 2 * KV) * DIM, device="cuda").bfloat16()
    norm = torch.rand(DIM, device="cuda").bfloat16()
    positions, mapping = torch.randint(0, 4096, (33,)).int().cuda(), torch.randperm(640)[:33].int().cuda()
    angles = torch.outer(torch.arange(4096).float(), 1e6 ** (-torch.arange(0, DIM, 2).float() / DIM))
    table = torch.cat((angles.cos(), angles.sin()), -1).cuda()
    pools = [(qkv.clone(), *torch.zeros(2, 10, KV, PAGE, DIM, device="cuda").bfloat16()) for _ in range(2)]
    for run, (q, k, v) in zip((qkv_norm_rope_store, qkv_reference), pools, strict=True):
        run(q, norm, norm, table, positions, mapping, k, v, 16, 1e-6)
    for a, b in zip(
        (pools[0][0][:, : 16 * DIM], *pools[0][1:]), (pools[1][0][:, : 16 * DIM], *pools[1][1:]), strict=True
    ):
        assert error(a, b) < 1e-2


def test_draws_follow_the_probabilities() -> None:
    logits = (torch.randn(1, 151_936, device="cuda") * 4).bfloat16().repeat(4096, 1)
    seeds = torch.randint(-(2**62), 2**62, (4096,), device="cuda")
    temperatures = torch.full((4096,), 0.6, device="cuda")
    top_k = torch.full((4096,), 20, dtype=torch.int32, device="cuda")
    ones, zeros = torch.ones(4096, device="cuda"), torch.zeros(4096, device="cuda")
    limits = keep_limits(logits, temperatures, top_k, ones * 0.95, zeros)
    probs = torch.softmax(logits[0].float() / 0.6, -1)
    best, ids = probs.topk(20)
    for limit, kept in ((None, None), (limits, ids)):
        tokens = gumbel_sample(logits, temperatures, seeds, limits=limit)
        if kept is not None:
            assert set(tokens.tolist()) <= set(kept.tolist())
        share = torch.stack([(tokens == i).float().mean() for i in ids[:5]])
        wanted = best[:5] if kept is None else best[:5] / probs[logits[0].float() >= limits[0]].sum()
        assert (share - wanted).abs().max() < 5 * math.sqrt(0.25 / 4096)


TINY = MODELS["Qwen3-0.6B"] | {"num_hidden_layers": 3, "vocab_size": 4000, "eos_token_id": 2, "bos_token_id": 1}
CONFIG = EngineConfig(device="cuda", load_format="dummy", max_running=24, max_seq_len=2048, num_pages=200)
PROMPTS = [np.random.default_rng(n).integers(3, 4000, n).tolist() for n in (1, 63, 64, 65, 130, 700)]
SEEDED = SamplingParams(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[GpuEngine]:
    built = build_engine(CONFIG, locate(str(folder)))
    assert isinstance(built, GpuEngine)
    yield built
    built.close()


def test_reference_equality(engine: GpuEngine, folder: Path) -> None:
    """bf16 kernels against the torch backend: equal while the likeliest token leads by a margin."""
    reference = build_engine(replace(CONFIG, attention_backend="torch"), locate(str(folder)))
    found, wanted = Driver(engine).run(PROMPTS, 12), Driver(reference).run(PROMPTS, 12)
    reference.close()
    for a, b in zip(found, wanted, strict=True):
        for i, (ours, theirs) in enumerate(zip(a.output, b.output, strict=True)):
            if ours != theirs:
                assert abs(a.logprobs[i] - b.logprobs[i]) < 0.1
                break
            assert abs(a.logprobs[i] - b.logprobs[i]) < 0.1


def test_float32_equals_the_cpu(folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    outputs = []
    for backend in ("torch", "triton"):
        config = replace(CONFIG, dtype="float32", attention_backend=backend)
        engine = build_engine(config, locate(str(folder)))
        outputs.append([seq.output for seq in Driver(engine).run(PROMPTS[:5], 8)])
        engine.close()
    assert outputs[0] == outputs[1]


def test_graphs_change_nothing(engine: GpuEngine, folder: Path) -> None:
    eager = build_engine(replace(CONFIG, cuda_graph_max_bs=0), locate(str(folder)))
    assert isinstance(eager, GpuEngine) and not eager._run.decode_graphs.sizes and not eager._run.mixed_graphs.sizes
    for params in (GREEDY, SEEDED, SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=9)):
        found, wanted = Driver(engine).run(PROMPTS, 20, params), Driver(eager).run(PROMPTS, 20, params)
        assert [seq.output for seq in found] == [seq.output for seq in wanted]
    eager.close()


@pytest.mark.parametrize(
    "params", [SEEDED, SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=2)]
)
def test_overlap_chunks_and_restarts_change_nothing(engine: GpuEngine, params: SamplingParams) -> None:
    whole = [seq.output for seq in Driver(engine).run(PROMPTS, 16, params)]
    driver = Driver(engine, seed=1)
    seqs = [driver.add(prompt, params) for prompt in PROMPTS]
    driver.prefill(seqs)
    driver.decode(seqs, 15, overlap=False)
    assert [seq.output for seq in seqs] == whole
    driver = Driver(engine, seed=2)
    resumed = driver.add(PROMPTS[3], params, said=whole[3][:6])
    driver.prefill([resumed])
    driver.decode([resumed], 9)
    assert resumed.output == whole[3]
