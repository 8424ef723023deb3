"""How the threads of one operation on a CPU wait for each other, and on which cores.

An operation of a small model takes some ten microseconds, as long as it takes the system to wake a thread. So threads
spin for a moment between operations, and only an engine that waits for its next step sleeps. Two that spin on one core
would wait for each other for whole time slices: where there are as many threads as cores, each has a core of its own.
Owns nothing that lasts; knows no model. Imports no torch, because `wait_briefly` must come before it.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

SPIN_COUNT: Final = 20_000
"""Rounds that a thread of libgomp spins before it sleeps: some 0.2 ms, more than lies between two operations."""
_TASKS: Final = Path("/proc/self/task")
_MAX_NAME: Final = 15
"""Letters that Linux keeps of a thread's name."""


def wait_briefly() -> None:
    """Let threads of operations spin for a moment before they sleep; what the user has set stays.

    The OpenMP library reads this when it is loaded, that is before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
        os.environ.setdefault("KMP_BLOCKTIME", "1")  # the same for LLVM's and Intel's library, in ms


def on_passing_thread(work: Callable[[], T]) -> T:
    """Do something on a thread that ends with it, and with it the threads that its operations had.

    An OpenMP library that has more threads in a process than there are cores lets none of them spin, and each thread
    that calls operations has others of its own.
    """
    thread, answer = begin(work, "loading")
    thread.join()
    return answer.result()


def begin(work: Callable[[], T], name: str) -> tuple[threading.Thread, Future[T]]:
    """Do something on a thread of its own, which does not keep the process; returns the thread and the answer."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as e:  # whatever it is belongs to the caller
            answer.set_exception(e)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, answer


def spread(operate: Callable[[], object], threads: int) -> list[int]:
    """Give the calling thread and those of its operations a core each, where that takes all cores.

    Args:
        operate: does an operation that is large enough for all threads.
        threads: how many an operation has.

    Returns:
        Ids of the threads that got a core, the calling one first; empty where the system is left to choose.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") and _TASKS.is_dir() else []
    if not 1 < threads == len(cores):
        return []
    own = threading.get_native_id()
    # A thread inherits the name of the one that starts it.
    name = f"engine-{own}"[:_MAX_NAME]
    (_TASKS / str(own) / "comm").write_text(name)
    operate()
    helpers = [task for task in sorted(map(int, os.listdir(_TASKS))) if task != own and _name_of(task) == name]
    if len(helpers) != threads - 1:  # an OpenMP library that does otherwise
        return []
    for task, core in zip((own, *helpers), cores, strict=True):
        os.sched_setaffinity(task, {core})
    return [own, *helpers]


def _name_of(task: int) -> str:
    try:
        return (_TASKS / str(task) / "comm").read_text().strip()
    except OSError:  # it has ended meanwhile
        return ""
