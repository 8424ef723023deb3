"""What only two GPUs can show: the sums between them, graphs that hold them, and the end of a rank."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.workloads import MODELS
from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.parallel.comm import open_store
from shared.errors import ConfigError
from shared.model_files import locate
from shared.sampling import SamplingParams
from tests.engine.driver import GREEDY, Driver, Seq, pack_mask
from tests.gpu.two_gpus import REFUSED

pytestmark = pytest.mark.gpu
VOCAB = 4003
TINY = MODELS["Qwen3-0.6B"] | {"num_hidden_layers": 3, "vocab_size": VOCAB, "eos_token_id": 2, "bos_token_id": 1}
CONFIG = EngineConfig(device="cuda", load_format="dummy", max_running=24, max_seq_len=2048, num_pages=200)
PROMPTS = [np.random.default_rng(n).integers(3, 4000, n).tolist() for n in (1, 63, 64, 65, 130, 700)]
WAYS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=9, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, logprobs=2),
]
MARGIN = 0.05
"""How far two likely tokens must be apart for bf16 sums that round elsewhere to agree on them."""


def test_sums_between_gpus() -> None:
    store = open_store(2)
    own = [sys.executable, "-m", "tests.gpu.two_gpus", "sums"]
    ranks = [subprocess.Popen([*own, str(rank), str(store.port)]) for rank in range(2)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engines(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, GpuEngine, GpuEngine]]:
    config = replace(CONFIG, dtype=request.param)
    both = [build_engine(replace(config, ranks=ranks), locate(str(folder))) for ranks in (1, 2)]
    alone, shared = both
    assert isinstance(alone, GpuEngine) and isinstance(shared, GpuEngine)
    yield request.param, alone, shared
    for engine in both:
        engine.close()


def assert_alike(dtype: str, params: SamplingParams, found: list[Seq], wanted: list[Seq]) -> None:
    """Equal in float32; in bf16 until the first token of which a rounding decides, which few draws are."""
    if dtype == "float32":
        assert [seq.output for seq in found] == [seq.output for seq in wanted]
    parted = 0
    for a, b in zip(found, wanted, strict=True):
        same = next((i for i, pair in enumerate(zip(a.output, b.output, strict=True)) if len(set(pair)) > 1), 16)
        assert np.allclose(a.logprobs[:same], b.logprobs[:same], atol=1e-3 if dtype == "float32" else MARGIN)
        if same < 16:
            parted += 1
            if not params.temperature:
                margin = b.logprobs[same] - b.tops[same].get(a.output[same], -np.inf)
                assert margin < MARGIN, (same, margin)
    assert not params.temperature or parted <= 2


@pytest.mark.parametrize("params", WAYS, ids=["greedy", "seeded", "filtered", "penalised"])
def test_two_gpus_draw_what_one_draws(engines: tuple[str, GpuEngine, GpuEngine], params: SamplingParams) -> None:
    dtype, alone, shared = engines
    wanted = Driver(alone).run(PROMPTS, 16, params)
    assert_alike(dtype, params, Driver(shared).run(PROMPTS, 16, params), wanted)
    assert_alike(dtype, params, Driver(shared, seed=1).run(PROMPTS, 16, params, chunk=50), wanted)


def test_prefixes_masks_and_scores(engines: tuple[str, GpuEngine, GpuEngine]) -> None:
    dtype, *both = engines
    outputs, scores = [], []
    for engine in both:
        driver = Driver(engine)
        first = driver.add(PROMPTS[5])
        driver.prefill([first])
        again = driver.add(PROMPTS[5])
        driver.share(again, first, 640)
        driver.prefill([again], beside=[first])
        guided, scored = driver.add(PROMPTS[2]), driver.add(PROMPTS[4])
        masks = {guided.slot: pack_mask({69, 70}, VOCAB)}
        result = driver.settle(driver.launch([(guided, 64), (scored, 130)], masks, num_top=2))
        driver.settle(driver.launch([(guided, 1), (first, 1)], {guided.slot: pack_mask({5}, VOCAB)}))
        driver.decode([first, again, guided, scored], 5)
        assert guided.output[0] in (69, 70) and guided.output[1] == 5
        outputs.append([seq.output for seq in (first, again, guided, scored)])
        scores.append(next(iter(result.scores.values())).logprobs)
        for seq in (first, guided, scored):
            driver.release(seq)
    if dtype == "float32":
        assert outputs[0] == outputs[1]
    assert np.allclose(scores[0], scores[1], atol=1e-3 if dtype == "float32" else 0.2)


def test_a_lost_rank_ends_the_engine_and_its_process(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.two_gpus", "lost", str(folder)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode != 0
    assert "told: " in run.stdout and "rank 1 ended" in run.stdout + run.stderr, run.stderr[-3000:]


NO_ROOM = "the KV cache would have 0 pages"


@pytest.mark.parametrize(("rank", "words"), [(0, f"told: {NO_ROOM}"), (1, f"rank 1: {NO_ROOM}")])
def test_what_one_gpu_has_no_room_for_ends_all_ranks(rank: int, words: str, folder: Path) -> None:
    """The other rank waits on its GPU meanwhile. The run is over when no rank has its output open any more."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.two_gpus", "cramped", str(rank), str(folder)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == REFUSED, run.stdout + run.stderr[-3000:]
    assert words in run.stdout + run.stderr


def test_attention_of_torch_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend 'torch' cannot be had on several"):
        build_engine(replace(CONFIG, ranks=2, attention_backend="torch"), locate(str(folder)))


def test_two_ranks_start_without_a_compiler_when_warmed_up(folder: Path, tmp_path: Path) -> None:
    flags = ["--model", str(folder), "--cache-dir", str(tmp_path), "--tensor-parallel-size", "2", "--num-pages", "200"]
    flags += ["--max-running-requests", "24", "--max-seq-len", "2048", "--cuda-graph-max-bs", "8"]
    said = []
    for compiler in ({}, {"CC": "/bin/false"}):
        run = subprocess.run(
            [sys.executable, "-m", "services.launcher", "warmup", *flags],
            env={**os.environ, **compiler},
            capture_output=True,
            text=True,
            timeout=400,
        )
        said.append(run.stdout + run.stderr)
        assert run.returncode == 0, said[-1][-3000:]
    assert "compiled " in said[0] and "for 2 ranks" in said[0]
    assert "nothing to compile: all " in said[1] and "(0 of them new, for 2 ranks)" in said[1], said[1]
