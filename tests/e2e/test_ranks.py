"""One engine of several processes, as the launcher sees it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import ROOT, Stack
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)  # three processes that load torch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model, which has 3 key-value heads, on 3 ranks."""
    stack = Stack(tmp_path_factory.mktemp("ranks"), "--dtype", "float32", "--tp", "3", "--max-running-requests", "8")
    try:
        yield stack
    finally:
        stack.close()


def has_ended(pid: int) -> bool:
    """Whether a process runs no more; an orphan may stay in the table until somebody asks for its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_are_named_and_answer_as_one(ranks: Stack) -> None:
    pids = ranks.pids()
    assert {"scheduler-0", "scheduler-0.1", "scheduler-0.2"} <= pids.keys()
    answer = ranks.chat("What is the capital of France?", max_tokens=24)["choices"][0]["message"]["content"]
    assert "Paris" in answer


def test_a_dead_rank_ends_its_engine_and_another_takes_its_place(ranks: Stack) -> None:
    before = ranks.pids()
    expected = ranks.chat("Name three colours.", max_tokens=16)
    os.kill(before["scheduler-0.2"], signal.SIGKILL)
    eventually(lambda: ranks.pids().get("scheduler-0", 0) != before["scheduler-0"], "a new engine")
    gone = [before[name] for name in ("scheduler-0", "scheduler-0.1", "scheduler-0.2")]
    eventually(lambda: all(map(has_ended, gone)), "all ranks have ended")
    assert "rank 2 ended with status -9" in ranks.log.read_text()
    ranks.wait_ready()
    eventually(lambda: "scheduler-0.2" in ranks.pids(), "its ranks are named")
    again = ranks.chat("Name three colours.", max_tokens=16)
    assert again["choices"][0]["message"] == expected["choices"][0]["message"]


def test_a_size_that_does_not_divide_stops_the_start(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
    command = [sys.executable, "-m", "services.launcher", "serve", "--port", "0", "--tp", "2"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=90, cwd=ROOT, env=clean
    )
    assert done.returncode == 2
    assert "--tp (MILLRACE_TENSOR_PARALLEL_SIZE) 2 does not divide the model's 9 query heads" in done.stderr
    assert "is ready" not in done.stdout
