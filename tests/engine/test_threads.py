"""How threads of operations wait, and the cores they get."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from services.scheduler.engine.threads import on_passing_thread, spread, wait_briefly
from tests.waiting import eventually

TASKS = Path("/proc/self/task")


def large_operation() -> None:
    torch.ones(1 << 20).sum()


def on_new_thread(cores: set[int], threads: int) -> tuple[list[int], list[set[int]]]:
    """Spread on a thread that may use some cores; returns who got one, and what each may use then."""
    found: list[tuple[list[int], list[set[int]]]] = []

    def run() -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        tasks = spread(large_operation, threads)
        found.append((tasks, [os.sched_getaffinity(task) for task in tasks]))

    before = torch.get_num_threads()
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    return found[0]


def test_as_many_threads_as_cores_have_one_each() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) == 2:
        tasks, allowed = on_new_thread(set(cores), 2)
        assert len(set(tasks)) == 2
        assert allowed == [{core} for core in cores]
    assert os.sched_getaffinity(0) >= set(cores), "the caller of the thread keeps its own"


def test_fewer_threads_than_cores_and_single_ones_are_left_to_the_system() -> None:
    cores = os.sched_getaffinity(0)
    assert on_new_thread(cores, len(cores) + 1)[0] == []
    assert on_new_thread({min(cores)}, 1)[0] == []


def test_what_a_passing_thread_did_is_given_back_and_its_helpers_are_gone() -> None:
    before = {int(task.name) for task in TASKS.iterdir()}

    def work() -> int:
        torch.set_num_threads(2)
        large_operation()
        return len({int(task.name) for task in TASKS.iterdir()} - before)

    threads = torch.get_num_threads()
    try:
        assert on_passing_thread(work) == 2, "itself and one helper"
    finally:
        torch.set_num_threads(threads)
    eventually(lambda: {int(task.name) for task in TASKS.iterdir()} <= before, "the helper has ended")
    with pytest.raises(KeyError, match="a reason"):
        on_passing_thread(lambda: {}["a reason"])


@pytest.mark.parametrize("of_the_user", [None, ("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "passive")])
def test_threads_spin_for_a_moment_unless_told_otherwise(
    of_the_user: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that what the call sets is undone
        monkeypatch.delenv(name)
    if of_the_user is not None:
        monkeypatch.setenv(*of_the_user)
    wait_briefly()
    found = os.environ.get("GOMP_SPINCOUNT")
    if of_the_user is None:
        assert found is not None and int(found) > 0
    else:
        assert found == ("7" if of_the_user[1] == "7" else None)


def test_the_library_is_told_before_it_is_loaded() -> None:
    code = "import sys, services.scheduler.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
