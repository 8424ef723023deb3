"""Mixtures of experts on a GPU: the kernels at the sizes of a real layer, graphs, and a whole small model."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from bench.workloads import MODELS
from services.scheduler.core.ports import Engine
from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.kernels.grouped_linear import combine, multiply, tile_for
from services.scheduler.engine.kernels.route import Routing, route, sort_pairs
from services.scheduler.engine.layers.moe import Experts
from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.models.config import read_config
from services.scheduler.engine.models.registry import model_class
from shared.model_files import locate
from tests.engine.driver import GREEDY, Driver, Seq
from tests.engine.kernels.references import experts_reference, route_reference

pytestmark = pytest.mark.gpu
HIDDEN, INNER, EXPERTS, PER_TOKEN = 2048, 768, 128, 8


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def make_layer(dtype: torch.dtype = torch.bfloat16, experts: int = EXPERTS, per_token: int = PER_TOKEN) -> Experts:
    layer = Experts(
        HIDDEN,
        INNER,
        experts,
        per_token,
        normalise=True,
        activation_name="silu",
        dtype=dtype,
        device=torch.device("cuda"),
    )
    layer.router.tensor.normal_(0, HIDDEN**-0.5)
    layer._gate_up.normal_(0, HIDDEN**-0.5)
    layer._down.normal_(0, INNER**-0.5)
    return layer


@pytest.fixture(scope="module")
def layer() -> Experts:
    torch.manual_seed(21)
    return make_layer()


def wanted_of(layer: Experts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The layer in float32, one expert's weights at a time."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in sorted(set(routing.experts.flatten().tolist())):
        if expert < routing.num_experts:
            token, place = (routing.experts == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token].float(), layer._gate_up[expert].float()).chunk(2, -1)
            answer = F.linear(F.silu(gate) * up, layer._down[expert].float())
            out.index_add_(0, token, answer * routing.weights[token, place][:, None])
    return out


def routing_of(layer: Experts, x: torch.Tensor, mapping: torch.Tensor | None = None) -> Routing:
    return route(F.linear(x, layer.router.tensor), layer._per_token, normalise=True, mapping=mapping)


def test_routing() -> None:
    torch.manual_seed(1)
    for rows, experts, per_token in ((1, 128, 8), (300, 128, 8), (77, 60, 4), (9, 512, 10), (5, 3, 3)):
        logits = torch.randn(rows, experts, device="cuda")
        mapping = torch.randint(-2, 9, (rows,), device="cuda").int()
        found = route(logits, per_token, normalise=True, mapping=mapping)
        wanted = route_reference(logits, per_token, normalise=True, mapping=mapping)
        assert torch.equal(found.experts, wanted.experts)
        assert torch.allclose(found.weights, wanted.weights, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 33, 64, 200, 256, 700, 1024, 4000])
def test_a_layer_equals_float32(layer: Experts, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
    mapping = torch.arange(num_tokens, device="cuda").int()
    if num_tokens > 3:
        mapping[num_tokens - num_tokens // 4 :] = -1
        x[num_tokens - num_tokens // 4 :] = torch.nan
    real = mapping >= 0
    found = layer(x, mapping)
    assert error(found[real], wanted_of(layer, x, routing_of(layer, x, mapping))[real]) < 1e-2
    assert not found[~real].any()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_few_tokens_equal_float32(layer: Experts, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    norm = RMSNorm(HIDDEN, 1e-6, torch.bfloat16, torch.device("cuda"))
    norm.weight.tensor.uniform_(0.5, 1.5)
    few = layer.make_few(norm)
    assert few is not None
    stream = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
    mapping = torch.arange(num_tokens, device="cuda").int()
    if num_tokens > 2:
        mapping[-1] = -1
    x = F.rms_norm(stream.float(), (HIDDEN,), norm.weight.tensor.float(), 1e-6).bfloat16()
    found = stream.clone()
    layer.add_few(found, (norm.weight.tensor, 1e-6), mapping)
    real = mapping >= 0
    wanted = stream.float() + wanted_of(layer, x, routing_of(layer, x, mapping))
    assert error(found[real], wanted[real]) < 1e-2
    assert torch.equal(found[~real], stream[~real])


@pytest.mark.parametrize("per_token", [1, 2, 5, 8])
def test_float32_is_tight_for_any_routing(per_token: int) -> None:
    torch.manual_seed(per_token)
    first, second = torch.randn(8, 2 * 96, 136, device="cuda"), torch.randn(8, 136, 96, device="cuda")
    for rows in (1, 7, 90, 300):
        x = torch.randn(rows, 136, device="cuda")
        for kind in ("any", "one", "two"):
            logits = torch.randn(rows, 8, device="cuda")
            if kind == "one":
                logits[:, :per_token] += 100
            elif kind == "two":
                logits[: rows // 2, :per_token] += 100
            routing = route(logits, per_token, normalise=False)
            pairs = sort_pairs(routing, tile_for(routing.num_pairs, 8))
            inner = multiply(x, first, pairs, per_token=per_token, gated=True)
            found = combine(multiply(inner, second, pairs), pairs, routing)
            wanted = experts_reference(x.double(), first.double(), second.double(), routing)
            assert error(found, wanted) < 1e-5


def test_company_changes_nothing(layer: Experts) -> None:
    torch.manual_seed(3)
    x = torch.randn(100, HIDDEN, device="cuda").bfloat16()
    routing = routing_of(layer, x)
    some = torch.tensor([99, 5, 42], device="cuda")

    def run(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
        pairs = sort_pairs(routing, 16)
        inner = multiply(rows, layer._gate_up, pairs, per_token=PER_TOKEN, gated=True)
        return combine(multiply(inner, layer._down, pairs), pairs, routing)

    alone = Routing(routing.experts[some], routing.weights[some], EXPERTS)
    assert torch.equal(run(x[some], alone), run(x, routing)[some])


def test_experts_that_nobody_goes_to_are_not_used(layer: Experts) -> None:
    torch.manual_seed(4)
    x = torch.randn(6, HIDDEN, device="cuda").bfloat16()
    mapping = torch.tensor([0, 1, -1, 2, 3, -1], device="cuda").int()
    real = mapping >= 0
    used = set(routing_of(layer, x, mapping).experts.flatten().tolist())
    broken = copy.copy(layer)
    broken._gate_up, broken._down = layer._gate_up.clone(), layer._down.clone()
    unused = [expert for expert in range(EXPERTS) if expert not in used]
    broken._gate_up[unused] = torch.nan
    broken._down[unused] = torch.nan
    assert torch.equal(broken(x, mapping)[real], layer(x, mapping)[real])


@pytest.mark.parametrize("num_tokens", [8, 256, 2048])
def test_a_captured_layer_serves_any_routing(layer: Experts, num_tokens: int) -> None:
    torch.manual_seed(5)
    x = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
    mapping = torch.arange(num_tokens, device="cuda").int()
    layer(x, mapping)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer(x, mapping)
    for run in range(3):
        x.normal_()
        if run == 2:
            mapping[num_tokens // 2 :] = -1
        graph.replay()
        real = mapping >= 0
        assert torch.equal(result[real], layer(x, mapping)[real])


# --- a whole model

SHAPE = MODELS["Qwen3-30B-A3B"] | {
    "vocab_size": 4000,
    "hidden_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "intermediate_size": 96,
    "mlp_only_layers": [1],
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
PROMPTS = [np.random.default_rng(n).integers(3, 4000, n).tolist() for n in (1, 63, 64, 65, 130, 700)]
CONFIG = EngineConfig(device="cuda", dtype="bfloat16", max_running=24, max_seq_len=1024, num_pages=200)
ON_CPU = replace(CONFIG, device="cpu", dtype="float32", page_size=64, max_step_tokens=2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, large enough that the likeliest token leads."""
    path, generator = tmp_path_factory.mktemp("moe"), torch.Generator().manual_seed(7)
    (path / "config.json").write_text(json.dumps(SHAPE))
    model = model_class("Qwen3MoeForCausalLM")(read_config(SHAPE), 64, torch.float32, torch.device("cpu"))

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        return 1 + 0.2 * values if len(shape) == 1 else 0.1 * values

    tensors = {name: draw(target.part_shape(part)) for name, (target, part) in model.targets().items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Iterator[Engine]:
    engine = build_engine(ON_CPU, locate(str(folder)))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[GpuEngine]:
    built = build_engine(CONFIG, locate(str(folder)))
    assert isinstance(built, GpuEngine)
    yield built
    built.close()


class Margins(Driver):
    """Keeps by how much the likeliest token of each step leads: margins[slot]."""

    margins: dict[int, list[float]]

    def settle(self, launched: Any) -> Any:
        result = super().settle(launched)
        for row, found in result.logprobs.items():
            best = np.sort(found.top_logprobs)[::-1]
            self.margins.setdefault(launched[1][row].slot, []).append(float(best[0] - best[1]))
        return result


def with_margins(engine: Engine, tokens: int) -> list[tuple[Seq, list[float]]]:
    driver = Margins(engine)
    driver.margins = {}
    return [(seq, driver.margins[seq.slot]) for seq in driver.run(PROMPTS, tokens, GREEDY)]


def test_graphs_are_captured(engine: GpuEngine) -> None:
    assert engine._run.decode_graphs.sizes == [1, 2, 4, 8, 16, 24]
    assert len(engine._run.mixed_graphs.sizes) > 20 and engine._run.mixed_graphs.sizes[-1] == 2048


def test_float32_says_what_the_cpu_says(folder: Path, cpu: Engine) -> None:
    gpu = build_engine(replace(CONFIG, dtype="float32", cuda_graph_max_bs=0), locate(str(folder)))
    found = Driver(gpu).run(PROMPTS, 16, GREEDY)
    gpu.close()
    compared = 0
    for ours, (theirs, margins) in zip(found, with_margins(cpu, 16), strict=True):
        for token, wanted, margin in zip(ours.output, theirs.output, margins, strict=True):
            if token != wanted:
                assert margin < 0.1
                break
            compared += 1
    assert compared > 60


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_bfloat16_finds_its_words_as_likely_as_the_cpu_does(engine: GpuEngine, cpu: Engine, rows: int) -> None:
    """What the graphs of single tokens drew, scored in float32 on the CPU."""
    driver, judge = Driver(engine), Driver(cpu)
    for seq in driver.run(PROMPTS[1 : 1 + rows] if rows < 6 else PROMPTS, 24, GREEDY):
        said = judge.add(seq.prompt + seq.output)
        result = judge.settle(judge.launch([(said, len(said.prompt))], num_top=1))
        scores = np.asarray(result.scores[0].logprobs)[len(seq.prompt) - 1 :][: len(seq.output)]
        judge.release(said)
        differences = np.abs(scores - np.asarray(seq.logprobs)[: len(scores)])
        # Rounding sends a token to another expert now and then, so single differences may be large.
        assert len(scores) >= 23 and np.median(differences) < 0.2 and differences.mean() < 0.4, differences


def test_graphs_change_nothing(engine: GpuEngine, folder: Path) -> None:
    eager = build_engine(replace(CONFIG, cuda_graph_max_bs=0), locate(str(folder)))
    assert isinstance(eager, GpuEngine) and not eager._run.decode_graphs.sizes and not eager._run.mixed_graphs.sizes
    found, wanted = Driver(engine).run(PROMPTS, 20), with_margins(eager, 20)
    eager.close()
    for ours, (theirs, margins) in zip(found, wanted, strict=True):
        # Padded products may round in another way, so what is nearly a tie may fall otherwise.
        differ = [i for i, pair in enumerate(zip(ours.output, theirs.output, strict=True)) if pair[0] != pair[1]]
        same = differ[0] if differ else len(ours.output)
        assert same == len(ours.output) or margins[same] < 0.5
        differences = np.abs(np.asarray(ours.logprobs[:same]) - np.asarray(theirs.logprobs[:same]))
        assert same == 0 or np.median(differences) < 0.1
