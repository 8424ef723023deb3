"""The Dockerfiles, the locks they install, and the health check they carry; without an engine."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement

from shared.health import HealthServer, Readiness
from shared.metrics import Metrics
from tests.ops.compose_file import ROOT

DOCKERFILES = ["Dockerfile.api", "Dockerfile.gpu"]
LOCKS = {
    "api": ("api", "tokenizer", "modelscope"),
    "cpu": ("cpu", "modelscope"),
    "gpu": ("gpu", "modelscope"),
}
"""Lock of an image -> the optional dependencies of the project that it holds."""
OUTSIDE = {"torch", "triton"}
"""Installed by the build argument TORCH: each build of torch pins the triton it goes with."""
CHECK = ROOT / "ops/container/healthcheck.py"


def instructions(name: str) -> list[str]:
    """Give a Dockerfile's instructions, each on one line."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / name).read_text("utf-8"))
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def locked(name: str) -> dict[str, list[Requirement]]:
    """Read a lock: name of a package -> its pins (more than one where markers tell them apart)."""
    text = (ROOT / "ops/requirements" / f"{name}.txt").read_text("utf-8").replace("\\\n", " ")
    pins: dict[str, list[Requirement]] = {}
    for line in text.splitlines():
        if line and not line.lstrip().startswith("#"):
            requirement = Requirement(line.partition("--hash=")[0])
            pins.setdefault(requirement.name, []).append(requirement)
    return pins


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_last_stage_is_plain(name: str) -> None:
    lines = instructions(name)
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:0" in last
    assert 'ENTRYPOINT ["python", "-m"]' in last
    assert any(line.startswith('CMD ["services.') for line in last)
    assert any(line.startswith("HEALTHCHECK ") and "healthcheck.py" in line for line in last)
    assert any("org.opencontainers.image.version" in line for line in last)
    assert not [line for line in last if "pip" in line or "apt-get" in line]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_every_builder_reads_it(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert "<<" not in text and "# syntax=" not in text and "--mount" not in text and "--chmod" not in text


def test_the_base_is_an_argument() -> None:
    for name in DOCKERFILES:
        lines = instructions(name)
        assert lines[0].startswith("ARG BASE=")
        assert {line.split()[1] for line in lines if line.startswith("FROM ")} <= {"${BASE}", "base"}


@pytest.mark.parametrize("lock", [*LOCKS, "model"])
def test_a_lock_holds_every_file_by_its_hash(lock: str) -> None:
    text = (ROOT / "ops/requirements" / f"{lock}.txt").read_text("utf-8")
    for entry in re.split(r"\n(?=[a-z0-9])", text.replace("\\\n", " ")):
        assert "--hash=sha256:" in entry, entry
    assert "://" not in text


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_what_the_project_asks_for(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra in LOCKS[lock] for line in optional[extra])]
    pins = locked(lock)
    for line in asked:
        wanted = Requirement(line)
        name = wanted.name.lower().replace("_", "-")
        if name in OUTSIDE:
            continue
        assert name in pins, f"{name} is not in the lock: make lock"
        for pin in pins[name]:
            (version,) = [specifier.version for specifier in pin.specifier]
            assert wanted.specifier.contains(version), f"{pin} does not serve {line}: make lock"
    assert not OUTSIDE & set(pins)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_holds_what_torch_needs(lock: str) -> None:
    pins = locked(lock)
    needed = {"sympy", "networkx", "jinja2", "fsspec", "filelock", "setuptools"}
    assert (needed <= set(pins)) == (lock != "api")
    assert not [name for name in pins if name.startswith(("nvidia-cublas", "nvidia-cudnn-cu", "nvidia-nccl"))]


def test_a_build_gets_nothing_but_what_the_images_hold() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert next(line for line in lines if line and not line.startswith("#")) == "*"
    copied = {
        source.partition("/")[0]
        for name in DOCKERFILES
        for line in instructions(name)
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == {line[1:].partition("/")[0] for line in lines if line.startswith("!")}


@pytest.fixture
def probed() -> Iterator[tuple[HealthServer, Readiness]]:
    readiness = Readiness("model")
    metrics = Metrics("tokenizer", "t", "m", "0")
    server = HealthServer("127.0.0.1", 0, strict=True, metrics=metrics, readiness=readiness, version="0")
    server.start()
    yield server, readiness
    server.stop()


def check(port: int) -> tuple[int, str]:
    """Run the health check as the images do: without the site's packages."""
    argv = [sys.executable, "-I", "-S", str(CHECK), str(port)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert not done.stderr
    return done.returncode, done.stdout


def test_the_health_check_says_what_is_missing(probed: tuple[HealthServer, Readiness]) -> None:
    server, readiness = probed
    code, said = check(server.port)
    assert (code, '"model"' in said) == (1, True)
    readiness.have("model")
    assert check(server.port)[0] == 0


def test_the_health_check_of_a_closed_port(probed: tuple[HealthServer, Readiness]) -> None:
    server, _ = probed
    server.stop()
    assert check(server.port) == (1, "nobody listens yet\n")
