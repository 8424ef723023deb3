"""A whole stack for measurements: launched as a user launches it, and what its processes use.

Owns the launcher process, its run folder, and the reading of CPU times and memory. Knows no load.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Self

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
READY_LIMIT_S: Final = 300.0
STOP_LIMIT_S: Final = 60.0
_LAUNCHES: Final = 3
"""A free port that the launcher has found may be taken by somebody else before it is used."""


class Stack:
    """One launcher with its services and its Redis, on free ports.

    Args:
        flags: of the launcher.
        env: variables on top of the environment, of which none with our prefix is inherited.

    Attributes:
        port: of the api.
        host: likewise.
        model: what clients call it.
        log: what launcher and services have logged.
    """

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-bench-")
        self.log = Path(self._folder.name) / "log"
        self._run_dir = Path(self._folder.name) / "run"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        argv = [sys.executable, "-m", "services.launcher", "serve", "--port", "0", "--run-dir", str(self._run_dir)]
        argv += ["--log-level", "warning", *flags]
        announced = ""
        for left in reversed(range(_LAUNCHES)):
            self._launch(argv, {**clean, **(env or {})})
            announced = self._announcement()
            if announced.startswith("Millrace is ready: "):
                break
            self._stop()
            if not left:
                raise RuntimeError(f"the launcher did not get ready:\n{self.log.read_text(errors='replace')[-3000:]}")
        self.host, port = announced.split()[3].removeprefix("http://").removesuffix("/v1").split(":")
        self.port = int(port)
        self.model = announced.rpartition("(model ")[2].removesuffix(")\n")
        self.processes = {name: psutil.Process(pid) for name, pid in self.pids().items()}

    def ports(self) -> dict[str, int]:
        """Read instance -> port."""
        ports: dict[str, int] = json.loads((self._run_dir / "ports.json").read_text())
        return ports

    def pids(self) -> dict[str, int]:
        """Read instance -> process, as it is now: the dead are started again."""
        pids: dict[str, int] = json.loads((self._run_dir / "pids.json").read_text())
        return pids

    def cpu_s(self) -> dict[str, float]:
        """Read the CPU seconds that each instance has used, with its children."""
        return {name: sum(map(cpu_s, family(process))) for name, process in self.processes.items()}

    def rss_bytes(self) -> dict[str, int]:
        """Read the resident memory of each instance, with its children."""
        return {
            name: sum(int(p.memory_info().rss) for p in family(process)) for name, process in self.processes.items()
        }

    def close(self) -> None:
        """End it, by force if need be."""
        self._stop()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        """Give the stack; it is ended at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def _launch(self, argv: list[str], env: dict[str, str]) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=env)

    def _announcement(self) -> str:
        """Wait for the line that says all is ready; anything else when the launcher has ended."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(READY_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            return self._process.stdout.readline()
        finally:
            watchdog.cancel()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def family(process: psutil.Process) -> list[psutil.Process]:
    """List a process and its descendants."""
    return [process, *process.children(recursive=True)]


def cpu_s(process: psutil.Process) -> float:
    """Read the CPU seconds a process has used, in user mode and in the kernel."""
    return time.clock_gettime((~process.pid << 3) | 2)  # the clock of that process, which is finer than its ticks


def machine() -> str:
    """Name the machine, and how busy it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, load average {load}"


def favour(pids: Iterable[int], nice: int) -> None:
    """Put processes before those of others on a shared machine; needs the right to, and does nothing for 0.

    Each process is a session of its own, and Linux weighs sessions first, so both are told.
    """
    for pid in pids if nice else ():
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        autogroup = Path(f"/proc/{pid}/autogroup")
        if autogroup.exists():
            autogroup.write_text(str(nice))
