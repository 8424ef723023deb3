"""A release as processes of this machine: containers run with the commands, variables and secrets of the manifests.

What is not there is the cluster: names of Services become 127.0.0.1, container ports become free ones, and what a
volume mounts lies in a folder.
"""

import base64
import http.client
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from services.launcher.processes import before_exec
from services.launcher.redis_server import Program, free_port
from tests.ops.chart import Json, env, find, pods, render
from tests.ops.compose_file import ROOT, SERVICES
from tests.waiting import eventually

SERVICE_NAME: Final = re.compile(r"rel-[a-z0-9-]+\.ns\.svc:\d+")
PORT_SETTING: Final = {"http": "MILLRACE_PORT", "metrics": "MILLRACE_HEALTH_PORT"}


class Container:
    """One container's process.

    Attributes:
        process: running, or ended.
        port: where it answers, in place of the port it declares.
        log: what it wrote.
    """

    def __init__(self, release: "Release", owner: str, pod: Json, container: Json, **more: str) -> None:
        self.spec = container
        self.port = free_port()
        self.folder = release.folder / f"{owner}-{container['name']}"
        self.folder.mkdir()
        self.log = self.folder / "log"
        self._mount(release, pod, container)
        argv = [self._local(word) for word in container.get("command", ["python", "-m"]) + container.get("args", [])]
        argv[0] = sys.executable if argv[0] == "python" else argv[0]
        given = {name: self._value(release, owner, value) for name, value in env(container).items()}
        given |= {PORT_SETTING[p["name"]]: str(self.port) for p in container.get("ports", []) if p["name"] != "redis"}
        own = {"PATH": release.path, "HOME": str(self.folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._environment = {**own, **given, **more}
        parent = os.getpid()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                env=self._environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: before_exec(parent),
            )

    def _mount(self, release: "Release", pod: Json, container: Json) -> None:
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        self._mounts: dict[str, str] = {}
        for mount in container.get("volumeMounts", []):
            place = self.folder / mount["name"]
            place.mkdir()
            self._mounts[mount["mountPath"]] = str(place)
            secret = volumes.get(mount["name"], {}).get("secret")
            if secret:
                held = find(release.manifests, "Secret", secret["secretName"])["data"]
                for item in secret.get("items", [{"key": key, "path": key} for key in held]):
                    (place / item["path"]).write_bytes(base64.b64decode(held[item["key"]]))

    def _local(self, text: str) -> str:
        """Turn paths of the container into those of this machine, in a word of a command or a variable."""
        inside = "|".join(map(re.escape, self._mounts))
        text = re.sub(rf"(?<![\w.])({inside})(?=[/ ]|$)", lambda found: self._mounts[found[0]], text)
        return text.replace("port 6379", f"port {self.port}")

    def _value(self, release: "Release", owner: str, value: Any) -> str:
        if isinstance(value, str):
            return self._local(SERVICE_NAME.sub(release.address_of, value))
        if "fieldRef" in value:
            return f"{owner}-0"
        return release.secret(value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]).decode()

    def execute(self, *words: str) -> str:
        """Run a command beside the container's own, with its variables (`kubectl exec`): what it printed."""
        argv = [sys.executable if word == "python" else word for word in words]
        done = subprocess.run(argv, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_probe(self, probe: str) -> int:
        """Run an exec probe as kubelet does, with the container's variables: its exit code."""
        words = [self._local(word) for word in self.spec[probe]["exec"]["command"]]
        argv = [word.replace("redis-cli", f"redis-cli -p {self.port}") for word in words]
        return subprocess.run(argv, env=self._environment, capture_output=True, timeout=60).returncode

    def ask(self, probe: str, timeout_s: float = 5.0) -> int:
        """Ask an HTTP probe of the manifest as kubelet does: the status, or 0 without an answer."""
        path = self.spec[probe]["httpGet"]["path"]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until the readiness probe is content."""
        eventually(lambda: self.process.poll() is not None or self.ask("readinessProbe") == 200, str(self.log), 90)
        assert self.process.poll() is None, self.log.read_text("utf-8")

    def stop(self) -> None:
        """End it as a test ends: at once."""
        self.process.kill()
        self.process.wait()


class Release:
    """The containers of a release that were started so far. `close` ends them."""

    def __init__(self, folder: Path, redis: Program, values: Json) -> None:
        self.folder = folder
        self.manifests = render(values)
        self.containers: dict[str, Container] = {}
        self._ports: dict[str, int] = {}
        programs = folder / "bin"
        programs.mkdir()
        (programs / "redis-server").symlink_to(redis.path)
        (programs / "redis-cli").symlink_to(redis.path.parent / "redis-cli")
        self.path = f"{programs}:{os.environ['PATH']}"

    def secret(self, name: str, key: str) -> bytes:
        """Give what a Secret of the release holds."""
        return base64.b64decode(find(self.manifests, "Secret", name)["data"][key])

    def address_of(self, name: "re.Match[str]") -> str:
        """Give where the pods of a Service are."""
        return f"127.0.0.1:{self.containers[name[0].partition('.')[0]].port}"

    def start(self, owner: str, *, init: bool = False, **more: str) -> Container:
        """Start the container of an object (or the one that runs before it), with further variables."""
        pod = dict(pods(self.manifests))[owner]
        container = pod["spec"]["initContainers" if init else "containers"][0]
        started = Container(self, owner, pod, container, **more)
        self.containers[f"{owner}-init" if init else owner] = started
        return started

    def start_all(self) -> None:
        """Start Redis and all services, and wait until each is ready."""
        redis = self.start("rel-millrace-redis")
        eventually(lambda: redis.process.poll() is not None or redis.run_probe("readinessProbe") == 0, "redis", 60)
        assert redis.process.poll() is None, redis.log.read_text("utf-8")
        owners = [owner for owner, pod in pods(self.manifests) if pod["spec"]["containers"][0]["name"] in SERVICES]
        for owner in owners:
            self.start(owner)
        for owner in owners:
            self.containers[owner].wait_ready()

    def run(self, owner: str, **more: str) -> tuple[int, str]:
        """Run a pod to its end: the exit code, and what it printed."""
        container = self.start(owner, **more)
        code = container.process.wait(180)
        del self.containers[owner]
        text = container.log.read_text("utf-8")
        container.folder.rename(container.folder.with_name(f"{owner}-{len(list(self.folder.iterdir()))}"))
        return code, text

    def close(self) -> None:
        """End everything."""
        for container in self.containers.values():
            container.stop()
