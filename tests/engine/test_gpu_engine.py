"""The GPU engine without a GPU: its kernels in Triton's interpreter, its graphs played by the calls they would record.

Each test is a process of its own, as the interpreter must be chosen before Triton is first imported.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from services.scheduler.engine.graph import decode_sizes

pytestmark = pytest.mark.slow
SETUP = """
import sys, tempfile
from pathlib import Path
import numpy as np, torch
from services.scheduler.core.ports import EngineLimits
from services.scheduler.engine import gpu_forward
from services.scheduler.engine.engine import build_engine
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.gpu_rank import GpuRank
from services.scheduler.engine.graph import StepGraphs
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.config import read_config
from services.scheduler.engine.models.registry import model_class
from services.scheduler.engine.weights.loader import load_weights
from shared.model_files import locate
from shared.sampling import SamplingParams
from tests.engine.conftest import TINY, write_checkpoint
from tests.engine.driver import GREEDY, Driver
from tests.engine.no_streams import NoStreams

shape = {"head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": False}
files = locate(str(write_checkpoint(Path(tempfile.mkdtemp()), "qwen3", **shape)))
config, cpu = read_config(files.config), torch.device("cpu")
with torch.inference_mode():
    model = model_class(config.architecture)(config, 512, torch.float32, cpu)
    load_weights(model, files, "auto")
LIMITS = EngineLimits("x", config.vocab_size, frozenset(files.eos_token_ids), 512, 16, 64, 8, 256)

def new_engine():
    cache = KVCache.for_model(config, 64, 16, torch.float32, cpu)
    return GpuEngine(GpuRank(model, cache, LIMITS, NoStreams()))

def prompt(n):
    return np.random.default_rng(n).integers(3, 320, n).tolist()

class Played:
    '''A graph that computes again what it was captured from, and puts the result in the same place.'''
    def __init__(self, compute, size):
        self.compute, self.size, self.times, self.result = compute, size, 0, compute(size).clone()
    def replay(self):
        self.times += 1
        self.result.copy_(self.compute(self.size))

def play(self, size):
    played = Played(self._compute, size)
    return played, played.result
StepGraphs._capture = play
gpu_forward.mixed_sizes = lambda most: [32, 64]
"""


def interpret(code: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_it_computes_what_the_cpu_engine_computes() -> None:
    interpret("""
        reference = build_engine(TINY, files)
        prompts = [prompt(n) for n in (1, 17, 40)]
        punished = SamplingParams(
            temperature=0.0, logprobs=2, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={7: 2.0}, min_tokens=2
        )
        for params, chunk in ((GREEDY, None), (punished, 15)):
            found = Driver(new_engine()).run(prompts, 4, params, chunk)
            wanted = Driver(reference).run(prompts, 4, params, chunk)
            for a, b in zip(found, wanted):
                assert a.output == b.output, (a.output, b.output)
                assert np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        reference.close()
    """)


def test_padding_and_replay_change_nothing() -> None:
    interpret("""
        def play_through(engine, params):
            driver = Driver(engine)
            seqs = driver.run([prompt(n) for n in (1, 7, 17)], 3, params)
            late, running = driver.add(prompt(40), params), driver.add(prompt(7), params)
            driver.prefill([running])
            driver.prefill([late], chunk=15, beside=[running])
            driver.decode([running, late], 2)
            return [seq.output for seq in (*seqs, late, running)]
        eager, replayed = new_engine(), new_engine()
        with torch.inference_mode():
            replayed._rank.capture([1, 4, 8], mixed=True)
        params = SamplingParams(temperature=1.0, top_k=50, seed=3)
        assert play_through(eager, params) == play_through(replayed, params)
        assert (eager._run.path, replayed._run.path) == ("eager", "decode_graph")
        times = [{size: graph.times for size, (graph, _) in graphs._graphs.items()}
                 for graphs in (replayed._run.decode_graphs, replayed._run.mixed_graphs, replayed._rank.draws["whole"])]
        assert times[0][4] == times[2][4] == 4 and sum(times[1].values()) >= 5, times
        replayed.close()
    """)


def test_masks_scores_and_broken_rows() -> None:
    interpret("""
        from dataclasses import replace
        from services.scheduler.core.batch import ScoreRow, mask_words
        reference, engine = build_engine(TINY, files), new_engine()
        results = []
        for each in (reference, engine):
            driver = Driver(each)
            a, b = driver.add(prompt(9), GREEDY), driver.add(prompt(20), GREEDY)
            launch = each.launch
            targets = np.asarray(prompt(20)[1:], np.int32)
            each.launch = lambda batch: launch(replace(
                batch, guided=np.array([0], np.int32), scores=(ScoreRow(1, targets, 2),)))
            step, seqs = driver.launch([(a, 9), (b, 20)])
            masks = np.zeros((1, mask_words(config.vocab_size)), np.int32)
            masks[0, 2] = 1 << 5  # token 69 alone
            each.guide(step, masks)
            results.append(driver.settle((step, seqs)))
            each.launch = launch
            with torch.inference_mode():
                (each._model if hasattr(each, "_model") else model).embedding.weight.tensor[11] = torch.nan
            bad = driver.add([5, 11, 6], GREEDY)
            assert driver.step([(bad, 3), (a, 1)]).bad.tolist() == [False, True]
        first, second = results
        assert first.token_ids.tolist() == second.token_ids.tolist() and second.token_ids[0] == 69
        assert np.allclose(first.scores[1].logprobs, second.scores[1].logprobs, atol=1e-4)
        assert (first.scores[1].top_ids == second.scores[1].top_ids).all()
        reference.close()
    """)


def test_no_graphs_are_asked_for_by_zero_rows() -> None:
    assert decode_sizes(0) == []
    assert decode_sizes(3) == [1, 2, 3] and decode_sizes(300)[-2:] == [288, 300]
