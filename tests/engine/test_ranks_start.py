"""Ranks that come to harm while they start: all end at once, and rank 0 tells why in the words of whoever knows."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch

from services.scheduler.core.ports import EngineFault
from services.scheduler.engine import engine as engine_module
from services.scheduler.engine.engine import build_engine
from services.scheduler.engine.local import LocalEngine
from services.scheduler.engine.memory import within_memory
from services.scheduler.engine.parallel import group
from services.scheduler.engine.parallel.comm import open_store
from services.scheduler.engine.parallel.group import Followers, RankLost
from shared.errors import ConfigError
from shared.model_files import locate
from tests.engine.driver import TINY
from tests.waiting import eventually

Build = Callable[..., LocalEngine]
BROKEN = "tests.engine.broken_follower"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """broken("make_comm:die") -> what followers come to."""

    def choose(harm: str) -> None:
        monkeypatch.setattr(group, "FOLLOWER", BROKEN)
        monkeypatch.setenv("BROKEN", harm)

    return choose


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize(
    "place",
    [
        "plan_model",
        "make_comm",  # rank 0 waits to meet it
        "make_cache",  # rank 0 waits for its number
    ],
)
def test_what_a_rank_cannot_serve_is_told_by_rank_0_at_once(
    place: str, broken: Callable[[str], None], build: Build
) -> None:
    broken(f"{place}:refuse")
    with pytest.raises(ConfigError, match=r"^rank 1: there is no room here$"):
        build("llama", ranks=2)


@pytest.mark.parametrize(
    ("harm", "words"),
    [("make_comm:break", "rank 1 ended: ValueError: a fault"), ("make_comm:die", "ended with status -9\n  dying")],
)
def test_a_rank_that_does_not_come_is_not_waited_for(
    harm: str, words: str, broken: Callable[[str], None], build: Build
) -> None:
    broken(harm)
    with pytest.raises(RankLost, match=words):
        build("llama", ranks=2)


def test_a_rank_that_cannot_even_begin_is_told_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, build: Build, tmp_path: Path
) -> None:
    monkeypatch.setattr(group, "FOLLOWER", "no.such.module")
    with pytest.raises(RankLost, match=r"rank 1 ended with status 1\n.*No module named 'no'|ModuleNotFoundError"):
        build("llama", ranks=2)
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RankLost, match=r"rank 1 cannot be started: .*No such file"):
        build("llama", ranks=2)
    python.write_text("#!/bin/sh\necho no library like that >&2\nexit 127\n")
    python.chmod(0o755)
    with pytest.raises(RankLost, match="rank 1 ended with status 127\n  no library like that"):
        build("llama", ranks=2)


def test_a_rank_ends_by_itself_when_rank_0_fails(
    broken: Callable[[str], None], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for; nobody has to kill it."""
    monkeypatch.setattr(group, "_END_TIMEOUT_S", 60.0)
    broken("make_comm:hang")
    followers = Followers(2, open_store(2).port, str(checkpoint("llama")), asdict(replace(TINY, ranks=2)))
    followers.wait_ready()
    followers.close()
    assert [each.process.returncode for each in followers._ranks] == [1]
    assert followers.lost is None


def test_who_sends_to_a_rank_that_has_died_learns_how_it_did(
    broken: Callable[[str], None], checkpoint: Callable[[str], Path]
) -> None:
    broken("make_comm:hang")
    followers = Followers(2, open_store(2).port, str(checkpoint("llama")), asdict(replace(TINY, ranks=2)))
    followers.wait_ready()
    process = followers._ranks[0].process
    process.kill()
    process.wait()
    with pytest.raises(RankLost, match="rank 1 ended with status -9"):
        followers.serve()
    followers.close()


def test_a_rank_ends_with_the_process_of_rank_0(
    broken: Callable[[str], None], checkpoint: Callable[[str], Path]
) -> None:
    broken("make_comm:hang")
    code = f"""if True:
        import os
        from dataclasses import asdict
        from services.scheduler.engine.engine import EngineConfig
        from services.scheduler.engine.parallel import group
        from services.scheduler.engine.parallel.comm import open_store
        group.FOLLOWER = {BROKEN!r}
        store = open_store(2)
        followers = group.Followers(2, store.port, {str(checkpoint("llama"))!r}, asdict(EngineConfig(ranks=2)))
        followers.wait_ready()
        print(followers._ranks[0].process.pid, flush=True)
        os._exit(0)
    """
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    pid = int(run.stdout)

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(has_ended, "the rank has ended")


# What a GPU would wait for, and what its destructors would.
ON_A_GPU = """if True:
    import os, sys, threading
    from pathlib import Path
    from services.scheduler.engine import engine
    from services.scheduler.engine.parallel import group
    from shared.errors import ConfigError
    from shared.model_files import locate

    class Device:
        def __del__(self):
            threading.Event().wait()
    def wait_for_ranks(*args, **kwargs):
        Path(os.environ["GATE"]).touch()
        threading.Event().wait()
    def refuse(plan, files, device):
        raise ConfigError("rank 0 has no room")
    group.FOLLOWER = "tests.engine.broken_follower"
    engine.runs_on_kernels = lambda plan, backend: True
    engine.make_comm = wait_for_ranks if sys.argv[2] == "waits" else lambda *args, **kwargs: Device()
    engine.load_model = refuse
    try:
        engine.build_engine(engine.EngineConfig(ranks=2), locate(sys.argv[1]))
    except ConfigError as e:
        print("told:", e)
"""


@pytest.mark.parametrize(
    ("rank_0", "harm", "status", "words"),
    [
        ("waits", "make_comm:refuse", 2, "rank 1: there is no room here"),
        ("waits", "make_comm:die", 1, "rank 1 ended with status -9"),
        ("refuses", "make_comm:hang", 2, "told: rank 0 has no room"),
    ],
)
def test_a_process_whose_gpu_waits_ends_with_the_status_of_the_reason(
    rank_0: str, harm: str, status: int, words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    reason = tmp_path / "reason"
    reason.touch()
    run = subprocess.run(
        [sys.executable, "-c", ON_A_GPU, str(checkpoint("llama")), rank_0],
        env={**os.environ, "BROKEN": harm, "MILLRACE_REASON_FILE": str(reason), "GATE": str(tmp_path / "gate")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == status, run.stderr[-3000:]
    assert words in run.stdout + run.stderr
    assert rank_0 != "waits" or words in reason.read_text()


def test_attention_of_torch_has_one_gpu(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path]) -> None:
    """A rank that is lost would leave its steps waiting for ever."""
    monkeypatch.setattr(engine_module, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = replace(TINY, device="cuda", ranks=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, .*attention_backend 'torch' cannot be had"):
        build_engine(replace(config, attention_backend="torch"), locate(str(checkpoint("llama-bias"))))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, but attention by torch has one GPU$"):
        build_engine(config, locate(str(checkpoint("qwen3"))))  # heads of 20


def test_a_start_that_lacks_memory_says_what_to_lower() -> None:
    """Also in a step that warms the engine up, where any error is a fault of the engine."""
    lack = torch.OutOfMemoryError("tried to allocate 20 GiB")
    fault = EngineFault("a step failed")
    fault.__cause__ = lack
    for error in (lack, fault):
        with (
            pytest.raises(ConfigError, match=r"20 GiB.*lower memory_ratio.*raise tensor_parallel_size"),
            within_memory(),
        ):
            raise error
    with pytest.raises(EngineFault), within_memory():
        raise EngineFault("another")
