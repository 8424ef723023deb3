"""One supervised process: how it is started, whether it serves, when it may be started again.

Owns the promises a child is born with: a session of its own (a Ctrl-C in the terminal reaches the launcher
alone, which then stops everything in order) and death with the launcher, even if that is killed outright.
Knows neither what a service does nor in which order they go.
"""

import ctypes
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import psutil

from shared.ids import BIRTH
from shared.reason import MAX_BYTES, REASON_FILE

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PROBE_TIMEOUT_S: Final = 0.5
_BACKOFF_FIRST_S: Final = 0.1
_BACKOFF_MAX_S: Final = 10.0
_HEALTHY_AFTER_S: Final = 10.0
RANK_MODULE: Final = "services.scheduler.engine.follower"
"""Command of a rank; its number is the last argument."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What an instance says of itself; `waiting_for` is for people, in its own words, empty if it says nothing."""

    ready: bool
    waiting_for: str = ""


Probe = Callable[[], Readiness]


@dataclass(frozen=True, slots=True)
class Spec:
    """How one instance is run.

    Attributes:
        instance: its name, `<role>-<number>`, or `redis`.
        role: decides when it is stopped.
        argv: the command.
        env: its whole environment.
        port: where it is reached, for `.run/ports.json`.
        probe: asks it whether it serves.
        ranks: processes that it consists of; it starts the others itself.
    """

    instance: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    port: int
    probe: Probe
    ranks: int = 1


def http_probe(host: str, port: int) -> Probe:
    """Make the probe of a service: its `/readyz`, whose body names what is missing."""

    def probe() -> Readiness:
        connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/readyz")
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return Readiness(False)  # not up yet, or slow just now: what it said last still holds
        finally:
            connection.close()
        return Readiness(response.status == 200, "" if response.status == 200 else _missing(body))

    return probe


def _missing(body: bytes) -> str:
    """Read what a `/readyz` answer says is missing."""
    try:
        missing = json.loads(body)["missing"]
    except (ValueError, KeyError, TypeError):
        return "not ready"
    return ", ".join(missing) if isinstance(missing, list | dict) else str(missing)


def before_exec(launcher_pid: int) -> None:
    """Run in the new process before the command: die with the launcher, take signals again.

    SIGUSR2 means nothing until a service says what, rather than its end. The launcher is single-threaded and imports
    nothing here, so that this is safe between fork and exec.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # it died between the fork and the line above
        os._exit(1)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class Child:
    """One instance through its restarts. `launch` may be called again after `poll` has said that it ended."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.ready = False
        self.was_ready = False
        self.waiting_for = "starting"
        self.failures = 0
        self.due_s: float | None = None
        """When it is to be started again, on the monotonic clock; None while it runs."""
        self.birth = ""
        """Mark of its last start, which is in the heartbeats of all that was started with it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reason_fd = os.memfd_create(spec.instance)
        weakref.finalize(self, os.close, self._reason_fd)
        self._started_s = 0.0

    @property
    def pid(self) -> int | None:
        """Process id, or None while it does not run."""
        return self._process.pid if self._process is not None else None

    def pids(self) -> dict[str, int]:
        """Give instance -> process id of what runs: the process itself, and the ranks that it has started."""
        if self._process is None:
            return {}
        found = {self.spec.instance: self._process.pid}
        try:
            children = psutil.Process(self._process.pid).children() if self.spec.ranks > 1 else []
            commands = [(child.pid, child.cmdline()) for child in children]
        except psutil.Error:
            return found  # one of them ended meanwhile; the next look tells
        ranks = {int(command[-1]): pid for pid, command in commands if RANK_MODULE in command}
        return found | {f"{self.spec.instance}.{rank}": pid for rank, pid in sorted(ranks.items())}

    def launch(self) -> None:
        """Start the process.

        Raises:
            OSError: the command cannot be run.
        """
        launcher_pid = os.getpid()
        os.ftruncate(self._reason_fd, 0)
        self.birth = secrets.token_hex(8)
        self._process = subprocess.Popen(
            self.spec.argv,
            env={**self.spec.env, REASON_FILE: f"/proc/{launcher_pid}/fd/{self._reason_fd}", BIRTH: self.birth},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # stdout belongs to the launcher: the line that says it is ready
            start_new_session=True,
            preexec_fn=lambda: before_exec(launcher_pid),
        )
        self._started_s = time.monotonic()
        self.ready = False
        self.waiting_for = "starting"
        self.due_s = None

    def poll(self) -> int | None:
        """Give the exit status if it has ended since the last call (negative: the signal), and plan its return."""
        if self._process is None:
            return None
        status = self._process.poll()
        if status is None:
            return None
        self._end_group()
        self._process = None
        self.ready = False
        self.waiting_for = "restart"
        now = time.monotonic()
        self.failures = 1 if now - self._started_s > _HEALTHY_AFTER_S else self.failures + 1
        self.due_s = now + min(_BACKOFF_FIRST_S * 2 ** (self.failures - 1), _BACKOFF_MAX_S)
        return status

    def probe(self) -> bool:
        """Ask whether it serves; remember the answer."""
        if self._process is None:
            return False
        readiness = self.spec.probe()
        self.ready = readiness.ready
        self.was_ready = self.was_ready or readiness.ready
        self.waiting_for = readiness.waiting_for or self.waiting_for
        return readiness.ready

    def reason(self) -> str:
        """Give why its start failed, in its own words; empty if it has told nothing."""
        return os.pread(self._reason_fd, MAX_BYTES, 0).decode(errors="replace")

    def signal(self, signum: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """End it and whatever it started, at once, and wait for that."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._end_group()
            self._process = None

    def _end_group(self) -> None:
        """Kill what is left of its session: nothing that an instance started outlives it."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nobody is left, which is the rule


def describe_exit(status: int) -> str:
    """Say in words how a process ended."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def service_argv(role: str) -> tuple[str, ...]:
    """Give the command that runs a service from its environment."""
    return (sys.executable, "-m", f"services.{role}")
