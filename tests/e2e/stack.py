"""The whole product, launched as a user launches it, for tests that look at it from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from services.launcher.processes import before_exec
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
READY_LIMIT_S = 180.0

Json = dict[str, Any]


class Stack:
    """One launcher with its services, on free ports and with a run folder of its own.

    Attributes:
        url: of the first api, without `/v1`.
        model: what clients call it.
        client: HTTP client of that api.
        announced: the lines the launcher printed when all was ready.
    """

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
        parent = os.getpid()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "services.launcher",
                    "serve",
                    "--port",
                    "0",
                    "--run-dir",
                    str(folder / "run"),
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**clean, **(env or {})},
                start_new_session=True,
                preexec_fn=lambda: before_exec(parent),
            )
        self.announced = self._read_announcement()
        self.url = self.announced[0].split()[3].removesuffix("/v1")
        self.model = self.announced[0].rpartition("(model ")[2].removesuffix(")")
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _read_announcement(self) -> list[str]:
        assert self.process.stdout is not None
        watchdog = threading.Timer(READY_LIMIT_S, self.process.kill)
        watchdog.start()
        try:
            lines = [self.process.stdout.readline().rstrip("\n") for _ in range(2)]
        finally:
            watchdog.cancel()
        assert lines[0].startswith("Millrace is ready: "), f"the launcher did not get ready:\n{self.tail()}"
        return lines

    def tail(self, num_lines: int = 60) -> str:
        """Give the end of what launcher and services have logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def pids(self) -> dict[str, int]:
        """Read instance -> process id."""
        pids: dict[str, int] = json.loads((self.folder / "run" / "pids.json").read_text())
        return pids

    def ports(self) -> dict[str, int]:
        """Read instance -> port."""
        ports: dict[str, int] = json.loads((self.folder / "run" / "ports.json").read_text())
        return ports

    def kill(self, instance: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one instance, and wait until another process has its name."""
        old = self.pids()[instance]
        os.kill(old, signum)
        eventually(lambda: self.pids().get(instance, old) != old, f"a new {instance}")

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until every service says that it serves; the apis last, since they speak of the others."""
        ports = sorted(self.ports().items(), key=lambda named: named[0].startswith("api"))
        for instance, port in ports:
            if instance != "redis":
                eventually(lambda port=port: is_ready(port), f"{instance} is ready", timeout_s)

    def metric(self, instance: str, name: str, **labels: str) -> float:
        """Sum the samples of a metric of one instance that have these labels."""
        text = httpx.get(f"http://127.0.0.1:{self.ports()[instance]}/metrics", timeout=5).text
        rows = [line for line in text.splitlines() if re.split(r"[{ ]", line, maxsplit=1)[0] == name]
        rows = [line for line in rows if all(f'{key}="{value}"' in line for key, value in labels.items())]
        assert rows, f"{instance} has no metric {name} {labels}"
        return sum(float(line.rpartition(" ")[2]) for line in rows)

    def running(self) -> int:
        """Count the requests that have a slot, over all engines."""
        engines = [name for name in self.ports() if name.startswith("scheduler")]
        return int(sum(self.metric(name, "millrace_requests_running") for name in engines))

    def redis(self) -> "redis.Redis":
        """Connect to the stack's own broker."""
        return redis.Redis(port=self.ports()["redis"], decode_responses=True)

    def chat(self, text: str = "hi", **body: Any) -> Json:
        """Ask for a chat answer; give the whole response."""
        response = self.client.post("/v1/chat/completions", json=self.chat_body(text, **body))
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def chat_body(self, text: str = "hi", **body: Any) -> Json:
        """Make a chat request, greedy unless the fields say otherwise."""
        return {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0, **body}

    def complete(self, prompt: Any, **body: Any) -> Json:
        """Ask for a completion; give the whole response."""
        response = self.client.post("/v1/completions", json=self.complete_body(prompt, **body))
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def complete_body(self, prompt: Any, **body: Any) -> Json:
        """Make a completion request, greedy unless the fields say otherwise."""
        return {"model": self.model, "prompt": prompt, "temperature": 0, **body}

    @contextmanager
    def streaming(self, path: str, body: Json) -> Iterator[Iterator[str]]:
        """Open a stream; gives the data of its events one by one, `[DONE]` included."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))

    def stream(self, path: str, body: Json) -> list[Json]:
        """Read a whole stream, which must end in `[DONE]`; gives its chunks."""
        with self.streaming(path, body) as events:
            seen = list(events)
        assert seen[-1] == "[DONE]", seen[-3:]
        return [json.loads(event) for event in seen[:-1]]

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """End the launcher; give its exit code, once nothing of it is left."""
        family = [psutil.Process(pid) for pid in self.pids().values() if psutil.pid_exists(pid)]
        self.process.send_signal(signum)
        try:
            return self.process.wait(timeout_s)
        finally:
            _, left = psutil.wait_procs(family, timeout=1)
            assert not left, f"still there: {left}"
            self.close()

    def close(self) -> None:
        """Let go of everything, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.client.close()


def is_ready(port: int) -> bool:
    """Ask a service whether it serves."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def text_of(chunks: list[Json], index: int = 0) -> str:
    """Join the text of one choice of a stream."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join((c["text"] if "text" in c else c["delta"].get("content")) or "" for c in choices)


def finish_of(chunks: list[Json], index: int = 0) -> str:
    """Give the one finish reason of one choice of a stream."""
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    given = [reason for reason in reasons if reason is not None]
    assert len(given) == 1, given
    assert isinstance(given[0], str)
    return given[0]
