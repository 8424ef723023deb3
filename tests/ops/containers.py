"""A stack of containers under a project name of its own, as `docker compose` runs it, for tests from outside."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from services.launcher.ports import Ports
from shared.version import VERSION
from tests.ops.compose_file import ROOT, SERVICES, clean_environment
from tests.waiting import eventually

HEALTH_PORT = {"api": 8000, "tokenizer": 9101, "scheduler": 9102, "detokenizer": 9103}
IMAGES = {"services": f"millrace/services:{VERSION}", "engine": f"millrace/engine-cpu:{VERSION}"}
MODEL = "smollm2-135m-instruct"
Json = dict[str, Any]


def docker(*args: str, check: bool = True, stdin: str | None = None) -> str:
    """Run a docker command and give what it printed."""
    done = subprocess.run(["docker", *args], capture_output=True, text=True, input=stdin, timeout=300)
    assert done.returncode == 0 or not check, f"docker {' '.join(args)}: {done.stderr}"
    return done.stdout.strip()


def inspect(name: str) -> Json:
    """Give what the engine knows of a container or an image."""
    (found,) = json.loads(docker("inspect", name))
    return dict(found)


def logs(container: str) -> str:
    """Give what a container wrote to both of its outputs."""
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def free_port() -> int:
    """Find a port that nobody listens on."""
    return Ports().next_free("127.0.0.1", 18000)


class ContainerStack:
    """One compose project. Nothing of it is left after `down`.

    Attributes:
        project: name of the project, in front of all that it makes.
        variables: what the files are filled in with.
        client: HTTP client of the published api.
    """

    def __init__(self, project: str, **variables: str) -> None:
        self.project = project
        port = free_port()
        self.variables = {"MILLRACE_PORT": str(port), **variables}
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def compose(self, *args: str, **variables: str) -> str:
        """Run a compose command with the stack's variables and these; give what it printed."""
        done = subprocess.run(
            ["docker", "compose", "--project-name", self.project, "--profile", "monitoring", *args],
            cwd=ROOT,
            env=clean_environment(**{**self.variables, **variables}),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{self.logs()[-3000:]}"
        return done.stdout

    def logs(self) -> str:
        """Give all that the containers have logged."""
        argv = ["docker", "compose", "--project-name", self.project, "--profile", "monitoring", "logs", "--no-color"]
        return subprocess.run(argv, cwd=ROOT, env=clean_environment(), capture_output=True, text=True).stdout

    def up(self, *args: str, services: tuple[str, ...] = ("redis", *SERVICES), **variables: str) -> None:
        """Start services and wait until they are ready."""
        self.compose("up", "--detach", "--wait", "--wait-timeout", "120", *args, *services, **variables)

    def down(self) -> None:
        """Remove the containers, networks and volumes."""
        self.compose("down", "--volumes", "--timeout", "10")
        self.client.close()

    def container(self, service: str, number: int = 1) -> str:
        """Name a container."""
        return f"{self.project}-{service}-{number}"

    def address(self, service: str, number: int = 1) -> str:
        """Give the URL of a container's own port, which is not published."""
        networks = inspect(self.container(service, number))["NetworkSettings"]["Networks"]
        ip = networks[f"{self.project}_default"]["IPAddress"]
        return f"http://{ip}:{HEALTH_PORT[service]}"

    def probe(self, service: str, path: str) -> tuple[int, str]:
        """Ask a container directly: status and text; 0 while it does not answer."""
        try:
            response = httpx.get(self.address(service) + path, timeout=5)
        except httpx.HTTPError:
            return 0, ""
        return response.status_code, response.text

    def kill(self, service: str, number: int = 1) -> None:
        """Kill a container's first process from outside, and wait until the engine has started it again.

        `docker kill` would not do: it counts as a stop by hand, after which nothing is started again.
        """
        name = self.container(service, number)
        pid = int(inspect(name)["State"]["Pid"])
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: inspect(name)["State"]["Pid"] not in (0, pid), f"{name} is started again", 60)

    def wait_healthy(self) -> None:
        """Wait until every container that has a health check says that it is ready."""
        for name in docker("ps", "--filter", f"name=^{self.project}-", "--format", "{{.Names}}").splitlines():
            eventually(
                lambda name=name: inspect(name)["State"].get("Health", {"Status": "healthy"})["Status"] == "healthy",
                f"{name} is healthy",
                90,
            )

    def complete(self, prompt: str, **body: Any) -> str:
        """Ask for a greedy completion and give its text."""
        asked = {"model": MODEL, "prompt": prompt, "temperature": 0, **body}
        response = self.client.post("/v1/completions", json=asked)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    @contextmanager
    def streaming(self, prompt: str, **body: Any) -> Iterator[Iterator[str]]:
        """Open a greedy stream; gives the data of its events one by one, `[DONE]` included."""
        asked = {"model": MODEL, "prompt": prompt, "temperature": 0, "stream": True, **body}
        with self.client.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, response.read()
            yield (line[6:] for line in response.iter_lines() if line.startswith("data: "))
