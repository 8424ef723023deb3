"""What the chart's manifests and notes tell people and clusters to run, run for real: against the fake engine."""

import base64
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.launcher.redis_server import Program
from tests.conftest import StartRedis
from tests.ops.chart import Json, find, render_texts
from tests.ops.compose_file import ROOT
from tests.ops.release import Release
from tests.shared.tiny_models import byte_level_tokenizer, write_folder
from tests.waiting import eventually

PASSWORD = "p@ss:w/o?r#d%25 é\"'$x"
FAKE = {"extraEnv": [{"name": "MILLRACE_MODEL", "value": "bytes"}]}
VALUES: Json = {
    "models": {
        "tiny": {
            "servedName": "owner/tiny",
            "settings": {"engine": "fake", "fakeStepMs": 1},
            **FAKE,
            "tokenizer": FAKE,
            "detokenizer": FAKE,
        }
    },
    "redis": {"auth": {"password": PASSWORD}},
    "api": {"auth": {"keys": ["team=sk-1 concurrency=8", "sk-2"], "metricsKey": "scrape"}},
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, redis_program: Program) -> Iterator[Release]:
    running = Release(tmp_path_factory.mktemp("release"), redis_program, VALUES)
    try:
        running.start_all()
        yield running
    finally:
        running.close()


def api_url(release: Release) -> str:
    return f"http://127.0.0.1:{release.containers['rel-millrace-api'].port}"


def test_every_probe_is_content(release: Release) -> None:
    for container in release.containers.values():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "exec" in container.spec[probe]:
                assert container.run_probe(probe) == 0
            else:
                assert container.ask(probe) == 200


def test_helm_test_asks_the_model(release: Release) -> None:
    code, said = release.run("rel-millrace-test")
    assert (code, said) == (0, "owner/tiny: 4 tokens, and a stream to its end\n")


def test_helm_test_fails_when_a_model_does_not_answer(release: Release) -> None:
    code, said = release.run("rel-millrace-test", MODELS="owner/tiny\nowner/other")
    assert code != 0 and "404" in said


@pytest.mark.parametrize("keyed", [True, False])
def test_the_commands_of_the_notes_work(release: Release, keyed: bool) -> None:
    values = VALUES if keyed else {**VALUES, "api": {}}
    notes = next(text for path, text in render_texts(values).items() if path.endswith("NOTES.txt"))
    commands = [line.strip() for line in notes.splitlines() if line.startswith("  curl ")]
    assert len(commands) == 2
    assert ("API_KEY=..." in notes) == keyed
    forwarded = f"127.0.0.1:{release.containers['rel-millrace-api'].port}"
    answers = [
        subprocess.run(
            ["bash", "-c", command.replace("127.0.0.1:8000", forwarded).replace("curl ", "curl -sS ")],
            env={"PATH": release.path, "API_KEY": "sk-2"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for command in commands
    ]
    assert ("data: [DONE]" in answers[0]) == keyed, answers[0]
    assert keyed or json.loads(answers[0])["error"]["type"]
    assert json.loads(answers[1]) == {"ready": True, "missing": []}


def test_the_notes_name_objects_that_exist(release: Release) -> None:
    notes = next(text for path, text in render_texts(VALUES).items() if path.endswith("NOTES.txt"))
    named = re.findall(r"(deployment|service)/([a-z0-9-]+)", notes)
    assert len(named) == 2
    for kind, name in named:
        find(release.manifests, kind.capitalize(), name)
    service = find(release.manifests, "Service", "rel-millrace-api")["spec"]["ports"][0]["port"]
    assert f"8000:{service} " in notes


def test_given_up_requests_are_looked_after_from_a_pod(release: Release) -> None:
    page = (ROOT / "docs/operations.md").read_text("utf-8")
    command = re.search(r"kubectl exec deployment/demo-(\S+) -- (.+)", page)
    assert command is not None
    assert release.containers[f"rel-{command[1]}"].execute(*command[2].split()) == "0 letters\n"


def test_keys_of_clients_and_of_metrics_hold(release: Release) -> None:
    url = api_url(release)
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-1"}).status_code == 200
    assert httpx.get(f"{url}/metrics").status_code == 401
    assert httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer scrape"}).status_code == 200


def test_redis_runs_as_the_protocol_wants_it(release: Release) -> None:
    port = release.containers["rel-millrace-redis"].port
    with redis.Redis(port=port, password=PASSWORD, decode_responses=True) as client:
        assert client.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
        assert client.config_get("maxmemory")["maxmemory"] == str(512 << 20)
        assert client.config_get("append*")["appendonly"] == "yes"
        assert client.config_get("save")["save"] == ""
        assert {key.partition(":")[0] for key in client.scan_iter()} == {"ns.rel-millrace"}
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_no_secret_is_in_a_log(release: Release) -> None:
    for container in release.containers.values():
        text = container.log.read_text("utf-8", "replace")
        assert not [secret for secret in (PASSWORD, "sk-1", "scrape") if secret in text]


def certificate(folder: Path) -> dict[str, str]:
    """Make a certificate for this machine that signs itself; give the files of its secret."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    subprocess.run(argv, check=True, capture_output=True)
    pem = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in ("tls.key", "tls.crt")}
    return {**pem, "ca.crt": pem["tls.crt"]}


def test_redis_with_tls(tmp_path: Path, redis_program: Program) -> None:
    place = tmp_path / "release"
    place.mkdir()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "data": certificate(tmp_path)}
    tls = {"tls": {"enabled": True, "existingSecret": "tls"}, "auth": {"password": PASSWORD}}
    release = Release(place, redis_program, {**VALUES, "redis": tls, "extraObjects": [secret]})
    try:
        server = release.start("rel-millrace-redis")
        speaks_tls = "libssl" in subprocess.run(["ldd", redis_program.path], capture_output=True, text=True).stdout
        if not speaks_tls:
            assert server.process.wait(60) != 0, "a server without TLS never serves without it"
            return
        eventually(lambda: server.run_probe("readinessProbe") == 0, "Redis answers", 60)
        service = release.start("rel-millrace-detokenizer-tiny")
        service.wait_ready()
        assert server.run_probe("livenessProbe") == 0
    finally:
        release.close()


def test_a_redis_outside_with_a_user_limited_to_the_prefix(
    tmp_path: Path, redis_program: Program, start_redis: StartRedis
) -> None:
    server = start_redis()
    documented = re.search(r"`~<prefix>:\* ([^`]+)`", (ROOT / "docs/operations.md").read_text("utf-8"))
    assert documented is not None
    with redis.Redis(port=server.port) as admin:
        rules = documented[1].split()
        admin.execute_command("ACL", "SETUSER", "mill", "on", f">{PASSWORD}", "~ns.rel-millrace:*", *rules)
        admin.execute_command("ACL", "SETUSER", "default", "off")
    outside = {"host": "127.0.0.1", "port": server.port, "username": "mill", "password": PASSWORD}
    values = {**VALUES, "redis": {"enabled": False}, "externalRedis": outside}
    release = Release(tmp_path, redis_program, values)
    try:
        release.start("rel-millrace-detokenizer-tiny").wait_ready()
    finally:
        release.close()


class SlowHub:
    """A hub with one model, whose files are not handed out before `open` is set."""

    def __init__(self, folder: Path) -> None:
        self.open = threading.Event()
        self.num_asked = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path.startswith("/api/models/owner/tiny"):
                    files = [{"rfilename": path.name} for path in folder.iterdir()]
                    body = json.dumps({"id": "owner/tiny", "sha": "0" * 40, "siblings": files}).encode()
                    if "/tree/" in self.path:
                        listed = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                                  for p in folder.iterdir()]  # fmt: skip
                        body = json.dumps(listed).encode()
                else:
                    hub.num_asked += 1
                    hub.open.wait(90)
                    body = (folder / self.path.rpartition("/")[2]).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
                self.send_header("X-Repo-Commit", "0" * 40)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients that are killed
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SlowHub]:
    folder = write_folder(tmp_path / "model", tokenizer=byte_level_tokenizer(), config=MODEL)
    serving = SlowHub(folder)
    yield serving
    serving.close()


MODEL = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 1, "vocab_size": 264}
FROM_HUB: Json = {"source": {"type": "hub", "id": "owner/tiny"}, "settings": {"engine": "fake"}}


@pytest.fixture
def slow(tmp_path: Path, redis_program: Program, hub: SlowHub) -> Iterator[Release]:
    hub_values = {"huggingface": {"endpoint": hub.url, "token": "hf_x"}, "models": {"tiny": FROM_HUB}}
    running = Release(tmp_path, redis_program, hub_values)
    running.start("rel-millrace-redis")
    yield running
    running.close()


def test_a_slow_load_is_waited_for(slow: Release, hub: SlowHub, redis_program: Program, tmp_path: Path) -> None:
    """The probes of the chart, asked again and again while a model does not come: nothing would restart the pod."""
    place = tmp_path / "direct"
    place.mkdir()
    values = {"huggingface": {"endpoint": hub.url}, "models": {"tiny": {**FROM_HUB, "download": False}}}
    release = Release(place, redis_program, values)
    release.start("rel-millrace-redis")
    try:
        for role in ("scheduler", "tokenizer", "detokenizer"):
            num_asked = hub.num_asked
            loading = release.start(f"rel-millrace-{role}-tiny", HF_HOME=str(place / f"cache-{role}"))
            eventually(lambda c=loading: c.ask("livenessProbe") == 200, "the process answers", 90)
            eventually(lambda n=num_asked: hub.num_asked > n, "it asks for the model", 90)
            failures, liveness = 0, loading.spec["livenessProbe"]
            for _ in range(10):
                failures = 0 if loading.ask("livenessProbe", liveness["timeoutSeconds"]) == 200 else failures + 1
                assert failures < liveness["failureThreshold"], "kubelet would start it again"
                assert loading.ask("startupProbe", 30) == 503
                assert loading.ask("readinessProbe", 30) == 503
        hub.open.set()
        for owner, container in release.containers.items():
            if owner != "rel-millrace-redis":
                eventually(lambda c=container: c.ask("startupProbe") == 200, f"{owner} has started", 90)
                assert container.process.poll() is None
                assert container.ask("readinessProbe") == 200
    finally:
        release.close()


def test_a_model_is_fetched_before_the_service_starts(slow: Release, hub: SlowHub, tmp_path: Path) -> None:
    hub.open.set()
    cache = {"HF_HOME": str(tmp_path / "cache")}
    fetched = slow.start("rel-millrace-scheduler-tiny", init=True, **cache)
    assert fetched.process.wait(90) == 0, fetched.log.read_text("utf-8")
    hub.close()
    serving = slow.start("rel-millrace-scheduler-tiny", **cache)
    serving.wait_ready()


def test_a_model_that_cannot_be_fetched_is_told(slow: Release, hub: SlowHub, tmp_path: Path) -> None:
    hub.close()
    failed = slow.start("rel-millrace-tokenizer-tiny", init=True, HF_HOME=str(tmp_path / "cache"))
    assert failed.process.wait(90) == 1
    assert "'owner/tiny'" in failed.log.read_text("utf-8")


def test_the_command_lines_hold_no_secret(release: Release) -> None:
    for container in release.containers.values():
        words = shlex.join([*container.spec.get("command", []), *container.spec["args"]])
        assert PASSWORD not in words
