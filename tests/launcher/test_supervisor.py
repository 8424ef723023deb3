"""The supervisor over real processes: start, revival, the order of the end, and that nobody is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcher.processes import Child, Readiness, Spec
from services.launcher.supervisor import Progress
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
Start = Callable[..., "Launch"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Whoever runs the tests may ignore hangups (nohup does), and children would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Launch:
    """A launcher over stand-ins."""

    def __init__(self, folder: Path, stand_ins: dict[str, list[str]], drain_timeout_s: float = 30.0) -> None:
        self.folder = folder
        ports = free_ports(len(stand_ins))
        specs = [[name, [str(port), *args]] for (name, args), port in zip(stand_ins.items(), ports, strict=True)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launcher.drive", str(folder), str(drain_timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(specs))
        self.process.stdin.close()
        self.seen: dict[str, int] = {}

    def pids(self) -> dict[str, int]:
        path = self.folder / "pids.json"
        pids: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        self.seen.update(pids)
        return pids

    def wait_ready(self) -> dict[str, int]:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self.pids()

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(15)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    launches: list[Launch] = []

    def make(stand_ins: dict[str, list[str]], **kwargs: Any) -> Launch:
        launches.append(Launch(tmp_path / "run", stand_ins, **kwargs))
        return launches[-1]

    yield make
    for launch in launches:
        if launch.process.poll() is None:
            launch.process.kill()
        launch.process.wait(10)
        for stream in (launch.process.stdout, launch.process.stderr):
            assert stream is not None
            stream.close()
        for pid in launch.seen.values():
            eventually(lambda pid=pid: not runs(pid), f"the end of {pid}")


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive(pids: dict[str, int]) -> list[str]:
    return [name for name, pid in pids.items() if runs(pid)]


def test_announces_when_all_are_ready_and_tells_who_runs_where(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    launch = start({"api-0": [], "scheduler-0": ["--ready-when", str(gate)], "redis": []})
    pids = eventually(lambda: len(launch.pids()) == 3 and launch.pids(), "three pids")
    assert set(pids) == {"api-0", "scheduler-0", "redis"}
    gate.touch()
    launch.wait_ready()
    ports = json.loads((tmp_path / "run" / "ports.json").read_text())
    for port in ports.values():
        assert listens(port)


def test_revives_a_killed_instance_and_tells_its_new_pid(start: Start) -> None:
    launch = start({"api-0": [], "tokenizer-0": []})
    before = launch.wait_ready()
    os.kill(before["tokenizer-0"], signal.SIGKILL)
    after = eventually(
        lambda: (p := launch.pids()).get("tokenizer-0") not in (None, before["tokenizer-0"]) and p, "pid"
    )
    assert after["api-0"] == before["api-0"]
    port = json.loads((launch.folder / "ports.json").read_text())["tokenizer-0"]
    eventually(lambda: listens(port), "the new one listens")
    assert launch.end(signal.SIGTERM) == 0
    assert "tokenizer-0 ended (signal SIGKILL)" in launch.errors()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_all_against_the_stream(start: Start, tmp_path: Path, signum: int) -> None:
    note = tmp_path / "order"
    names = ["redis", "detokenizer-0", "scheduler-0", "tokenizer-0", "api-1", "api-0"]
    launch = start({name: ["--note", str(note), name.partition("-")[0]] for name in names})
    pids = launch.wait_ready()
    assert launch.end(signum) == 0
    assert note.read_text().split() == ["api", "api", "tokenizer", "scheduler", "detokenizer", "redis"]
    assert not alive(pids)
    assert not (launch.folder / "pids.json").exists()


def test_a_hangup_that_was_ignored_before_stays_ignored(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch = start({"api-0": []})
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = launch.wait_ready()
    launch.process.send_signal(signal.SIGHUP)
    os.kill(pids["api-0"], signal.SIGKILL)
    eventually(lambda: launch.pids().get("api-0") not in (None, pids["api-0"]), "it goes on")
    assert launch.end(signal.SIGTERM) == 0


def test_an_interrupt_is_heard_even_from_the_background_of_a_shell(start: Start) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launch = start({"api-0": []})
    finally:
        signal.signal(signal.SIGINT, before)
    launch.wait_ready()
    assert launch.end(signal.SIGINT) == 0


def test_ctrl_c_ends_even_those_that_will_not_within_five_seconds(start: Start) -> None:
    launch = start({f"{role}-0": ["--stubborn"] for role in ("api", "tokenizer", "scheduler", "detokenizer")})
    pids = launch.wait_ready()
    began = time.monotonic()
    assert launch.end(signal.SIGINT) == 1
    assert time.monotonic() - began < 5
    assert not alive(pids)


def test_sigterm_lets_a_busy_service_finish(start: Start, tmp_path: Path) -> None:
    done, note = tmp_path / "done", tmp_path / "note"
    launch = start({"api-0": ["--busy-until", str(done), "--note", str(note), "api"], "tokenizer-0": []})
    launch.wait_ready()
    launch.process.send_signal(signal.SIGTERM)
    eventually(note.exists, "SIGTERM reaches the api")
    assert len(launch.pids()) == 2
    done.touch()
    assert launch.process.wait(10) == 0


def test_after_the_drain_time_a_service_may_still_tell_its_clients(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "note"
    launch = start({"api-0": ["--stubborn", "--note", str(note), "api"]}, drain_timeout_s=0.1)
    launch.wait_ready()
    launch.process.send_signal(signal.SIGTERM)
    eventually(note.exists, "SIGTERM reaches the api")
    began = time.monotonic()
    eventually(lambda: note.read_text().count("api") == 2, "it is told again")
    assert time.monotonic() - began > 1
    assert launch.process.wait(10) == 1


def test_a_second_signal_cuts_the_drain_short(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "note"
    launch = start({"api-0": ["--stubborn", "--note", str(note), "api"], "tokenizer-0": []})
    pids = launch.wait_ready()
    launch.process.send_signal(signal.SIGTERM)
    eventually(note.exists, "SIGTERM reaches the api")

    def insist() -> bool:
        launch.process.send_signal(signal.SIGTERM)
        return launch.process.poll() is not None

    eventually(insist, "it ends", every_s=0.2)
    assert launch.process.returncode == 1
    assert not alive(pids)


def test_the_echo_of_a_signal_is_not_a_second_one(start: Start, tmp_path: Path) -> None:
    done, note = tmp_path / "done", tmp_path / "note"
    launch = start({"api-0": ["--busy-until", str(done), "--note", str(note), "api"], "tokenizer-0": []})
    launch.wait_ready()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.stderr is not None
    while "SIGTERM: stopping" not in launch.process.stderr.readline():
        pass
    launch.process.send_signal(signal.SIGTERM)
    eventually(note.exists, "SIGTERM reaches the api")
    done.touch()
    assert launch.process.wait(10) == 0
    assert note.read_text() == "api\n"


def test_nobody_survives_a_killed_launcher(start: Start) -> None:
    launch = start({"api-0": ["--stubborn"], "scheduler-0": [], "redis": []})
    pids = launch.wait_ready()
    assert launch.end(signal.SIGKILL) == -signal.SIGKILL
    eventually(lambda: not alive(pids), "the end of all")


def test_what_an_instance_started_ends_with_it(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "grandchild"
    launch = start({"scheduler-0": ["--grandchild", str(note)]})
    pids = launch.wait_ready()
    grandchild = int(note.read_text())
    launch.seen["grandchild"] = grandchild
    os.kill(pids["scheduler-0"], signal.SIGKILL)
    eventually(lambda: not runs(grandchild), "the end of the grandchild")


def test_a_bad_setting_stops_the_start(start: Start) -> None:
    launch = start({"api-0": [], "scheduler-0": ["--exit", "2"]})
    assert launch.process.wait(15) == 2
    errors = launch.errors()
    assert "scheduler-0 cannot start (exit code 2)" in errors
    assert "stand-in: MILLRACE_SOMETHING: is bad" in errors
    assert errors.splitlines()[-1] == "millrace: the start failed: scheduler-0: MILLRACE_SOMETHING: is bad"


def test_a_service_that_never_serves_stops_the_start_after_three_tries(start: Start) -> None:
    launch = start({"api-0": [], "scheduler-0": ["--exit", "1"]})
    assert launch.process.wait(15) == 1
    assert launch.errors().count("starting it again") == 2


def test_two_launchers_do_not_share_a_folder(start: Start) -> None:
    first = start({"api-0": []})
    first.wait_ready()
    second = start({"api-0": []})
    assert second.process.wait(15) == 2
    assert "another launcher runs in" in second.errors()
    assert alive(first.pids()) == ["api-0"]


def test_the_progress_line_fits_the_terminal_and_is_written_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(time, "monotonic", lambda: 7.25)
    progress = Progress()
    for text in ("scheduler-0 (start)", "scheduler-0 (start)", "scheduler-0 (model), " * 9):
        progress.show(text)
    lines = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert [line[8:] for line in lines] == ["scheduler-0 (start)", ("scheduler-0 (model), " * 9)[:31]]


def test_a_slow_answer_leaves_what_was_said_last() -> None:
    answers = iter([Readiness(False, "model"), Readiness(False), Readiness(True)])
    child = Child(Spec("api-0", "api", (sys.executable, "-c", ""), dict(os.environ), 0, lambda: next(answers)))
    child.launch()
    try:
        assert child.waiting_for == "starting"
        assert not child.probe() and child.waiting_for == "model"
        assert not child.probe() and child.waiting_for == "model"
        assert child.probe()
    finally:
        child.kill()


def test_a_stage_has_the_time_that_those_before_it_left(start: Start, tmp_path: Path) -> None:
    """The scheduler alone may take what api and tokenizer do not need."""
    launch = start({"api-0": [], "scheduler-0": ["--stubborn"]})
    launch.wait_ready()
    assert launch.end(signal.SIGINT) == 1
    taken = re.search(r"scheduler-0 did not end in (\S+) s", launch.errors())
    assert taken and float(taken[1]) > 1.5
