"""Several ranks on one machine: the same tokens, clear refusals, and one end for all."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from services.scheduler.core.batch import Batch, ScoreRow
from services.scheduler.core.ports import EngineFault
from services.scheduler.engine.layers.weight import Split, Weight
from services.scheduler.engine.local import LocalEngine
from services.scheduler.engine.models.config import read_config
from services.scheduler.engine.parallel.control import WireBatch, decode_batch, encode_batch
from services.scheduler.engine.parallel.state import Ranks
from services.scheduler.engine.weights.dummy import DummySource
from shared.errors import ConfigError
from shared.model_files import EMBEDDED_NAME, locate
from shared.sampling import SamplingParams
from tests.engine.conftest import FAMILIES, Reference, write_checkpoint
from tests.engine.driver import Driver, ints
from tests.engine.test_engine import PROMPTS, assert_greedy
from tests.engine.test_weights import write_gguf
from tests.waiting import eventually

Build = Callable[..., LocalEngine]


def followers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "services.scheduler.engine.follower" in child.cmdline()]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_draw_what_one_draws(
    family: str, build: Build, reference: Callable[[str], Reference], checkpoint: Callable[[str], Path]
) -> None:
    driver = Driver(build(family, ranks=2))
    seqs = driver.run(PROMPTS, 10)
    for seq in seqs:
        assert_greedy(seq, reference(family))
    prompt = PROMPTS[6]
    first = driver.add(prompt)
    driver.prefill([first])
    again = driver.add(prompt)
    driver.share(again, first, 48)
    driver.prefill([again])
    driver.decode([again], 9)
    assert_greedy(again, reference(family))
    assert again.output == seqs[6].output


def test_sampling_scores_and_chunks_are_those_of_one_rank(build: Build) -> None:
    params = SamplingParams(temperature=0.9, seed=4, top_p=0.9, frequency_penalty=0.4, logprobs=1)
    found = []
    for ranks in (1, 2):
        driver = Driver(build("llama", ranks=ranks))
        seqs = driver.run(PROMPTS, 8, params, chunk=9)
        scored = driver.add(PROMPTS[6])
        scores = driver.settle(driver.launch([(scored, 70)], num_top=2)).scores[0]
        found.append(([seq.output for seq in seqs], scores))
    assert found[0][0] == found[1][0]
    assert found[1][1].logprobs == pytest.approx(found[0][1].logprobs, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [320, 321])
def test_a_vocabulary_need_not_divide(vocab_size: int, tmp_path: Path, build: Build) -> None:
    folder = write_checkpoint(tmp_path, "qwen2", vocab_size=vocab_size)
    outputs = [[seq.output for seq in Driver(build(folder, ranks=n)).run(PROMPTS, 6)] for n in (1, 2)]
    assert outputs[0] == outputs[1]


def test_gguf_pieces_are_read_in_the_right_order(tmp_path: Path, build: Build) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    folder = write_checkpoint(tmp_path / "folder", "llama", rope_parameters=rope)
    path = write_gguf(tmp_path / "model.gguf", folder)
    outputs = [[seq.output for seq in Driver(build(path, ranks=n)).run(PROMPTS, 6)] for n in (1, 2)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("size", "words"),
    [(2, "9 query heads.*by 1, 3, 9"), (4, "9 query heads"), (8, "9 query heads"), (9, "3 key-value heads")],
)
def test_sizes_that_do_not_divide_are_refused_by_name(size: int, words: str) -> None:
    config = read_config(locate(EMBEDDED_NAME).config)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size {size} does not divide the model's {words}"):
        config.share(Ranks(0, size))
    assert config.share(Ranks(2, 3)).num_kv_heads == 1


def test_a_refusal_starts_no_rank(build: Build) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        build("llama", ranks=3)
    assert not followers()


def test_a_broken_checkpoint_ends_all_ranks(tmp_path: Path, build: Build) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        build(folder, ranks=2)
    assert not followers()


def test_close_ends_all_ranks(build: Build) -> None:
    engine = build("llama", ranks=2)
    assert len(followers()) == 1
    engine.close()
    assert not followers()


def test_a_dead_rank_ends_the_engine(build: Build) -> None:
    engine = build("llama", ranks=2)
    Driver(engine).run(PROMPTS[:2], 3)
    os.kill(followers()[0].pid, signal.SIGKILL)

    def is_lost() -> bool:
        try:
            engine.check()
        except EngineFault as e:
            return "rank 1 ended" in str(e)
        return False

    eventually(is_lost, "the engine knows")
    with pytest.raises(EngineFault):
        Driver(engine).run(PROMPTS[:1], 1)
    engine.close()
    assert not followers()


def test_batches_travel_whole() -> None:
    batch = Batch(
        step=7,
        num_decode=1,
        slots=ints([3, 1]),
        starts=ints([9, 0]),
        lengths=ints([1, 4]),
        input_ids=ints([-1, 5, 6, 7, 8]),
        page_table=ints([[4, 5, 6], [7, 0, 0]]),
        sample=np.array([True, False]),
        out_index=ints([2, 0]),
        scores=(ScoreRow(1, ints([6, 7, 8]), 2),),
    )
    found = decode_batch(msgspec.msgpack.decode(encode_batch(batch), type=WireBatch))
    for name in ("slots", "starts", "lengths", "input_ids", "page_table", "sample", "out_index"):
        assert np.array_equal(getattr(found, name), getattr(batch, name)), name
    assert (found.step, found.num_decode) == (7, 1)
    assert [(score.row, len(score.targets)) for score in found.scores] == [(1, 3)]


@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_together_are_the_tensor(dim: int) -> None:
    shape = (5, 7)
    full = shape[dim]
    source = DummySource("x.weight", shape, 1)
    pieces = []
    for rank in range(3):
        local = list(shape)
        local[dim] = -(-full // 3)
        split = Split(dim, Ranks(rank, 3), full)
        share = split.share(tuple(local))
        assert split.whole(tuple(local)) == shape and share is not None
        pieces.append(source.read(share))
    assert torch.equal(torch.cat(pieces, dim), source.read())
    last = Weight((2,), (7,), torch.float32, torch.device("cpu"), Split(0, Ranks(2, 3), 5))
    last.fill(source, 0)
    assert torch.equal(last.tensor[0], source.read()[4]) and not last.tensor[1].any()
