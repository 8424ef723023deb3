"""Whether a command that a page shows is one that works: by the real program's own reading of it, as far as it goes.

`check` takes one command line. Each program has a reader here, and a program without one is refused, so whoever shows
a new kind of command has to say how it is checked.

    make          `make -n` has the target; what it would run is checked in turn
    python        the module or script is there; flags of the launcher are parsed, those of others are in their source
    docker        compose v2 reads the files with these variables and flags; it knows command and options; the
                  service is there, and what is executed inside of it is checked in turn
    helm          the chart renders with these values; the options are ones of that command
    curl          addresses of the api at its usual port; tests/docs/test_snippets.py sends them
    kubectl       the objects are in the chart as rendered under the name `demo`
    pip           the extras are in pyproject.toml
    others        listed by name in `AS_THEY_ARE`
"""

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import yaml
from helm_python import HelmError

from services.launcher.settings import parse
from tests.docs.pages import ROOT
from tests.ops.chart import CHART, render
from tests.ops.compose_file import Config, compose_programs, config

AS_THEY_ARE: Final = (
    r"git clone <this repository>",
    r"cd millrace",
    r"docker (kill|stop|inspect|compose)",
    r"kill( -USR1)?",
    r"redis-cli ping",
    r"py-spy record -p PID",
    r"perf record -g -p PID",
)
"""Programs of others, in a form that leaves nothing of ours to be wrong."""
RELEASE: Final = "demo"
HELM_OPTIONS: Final = {
    "install": {"--set", "--values", "-f"},
    "upgrade": {"--set", "--values", "-f", "--install", "--reset-then-reuse-values"},
    "rollback": set(),
    "template": {"--set", "--values", "-f"},
    "test": {"--logs"},
}
PASSED_THROUGH: Final = {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
"""Variables that programs of ours read without being settings."""


class Wrong(AssertionError):
    """A command that would not do what its page says."""


def commands(text: str) -> list[str]:
    """Split a shell block: one command each, without comments and line continuations."""
    lines = text.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [part.strip() for line in bare if line for part in re.split(r"&&|;", line)]


def is_command(span: str) -> bool:
    """Say whether inline code is a command line: a program that is known here, and something behind it."""
    words = span.split()
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return len(words) > 1 and Path(words[0]).name in {*READERS, "git", "kill", "redis-cli", "py-spy", "perf"}


def check(line: str) -> None:
    """Check a command line.

    Raises:
        Wrong: it would be refused, or nobody here can tell.
    """
    if any(re.fullmatch(form, line) for form in AS_THEY_ARE):
        return
    words = shlex.split(line)
    variables = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if not words or Path(words[0]).name not in READERS:
        raise Wrong(f"no rule for {line!r}: add one to tests/docs/commands.py")
    READERS[Path(words[0]).name](words[1:], variables)


def _need(good: object, text: str) -> None:
    if not good:
        raise Wrong(text)


# ---- make ----


def recipe(words: Sequence[str], variables: dict[str, str] | None = None) -> list[str]:
    """Give what `make` would run, as if its environment were set up."""
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "-o", ".venv/.run-ready", "-o", ".venv/.dev-ready", *words],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **(variables or {})},
        capture_output=True,
        text=True,
    )
    _need(done.returncode == 0, done.stderr)
    return [part.strip().removeprefix("exec ") for line in done.stdout.splitlines() for part in line.split("&&")]


def _make(words: Sequence[str], variables: dict[str, str]) -> None:
    targets = [word for word in words if "=" not in word]
    _need(targets, "make without a target")
    named = set(re.findall(r"[$(](\w+)", (ROOT / "Makefile").read_text("utf-8")))
    _need({word.partition("=")[0] for word in words if "=" in word} <= named, f"no such variable: {words}")
    for line in recipe(words, variables):
        if re.match(r"\.venv/bin/python -m (services|bench|tools|pytest)|docker compose ", line):
            check(line.partition(" || ")[0])


# ---- Python ----


def _python(words: Sequence[str], variables: dict[str, str]) -> None:
    _need(set(variables) <= PASSED_THROUGH, f"nobody reads {set(variables)}")
    if words[0] != "-m":
        _need_flags(ROOT / words[0], words[1:])
        return
    module, arguments = words[1], words[2:]
    if module == "pip":
        _pip(arguments, variables)
    elif module == "pytest":
        for word in arguments:
            _need(not word.startswith("tests") or any(ROOT.glob(word)), f"there is no {word}")
    elif module == "services.launcher":
        _launcher(arguments)
    else:
        spec = importlib.util.find_spec(module)
        if spec is None:
            raise Wrong(f"no module {module}")
        folders = list(spec.submodule_search_locations or ())
        _need_flags(Path(folders[0] if folders else spec.origin or ""), arguments)


def _need_flags(place: Path, words: Sequence[str]) -> None:
    """Check that a script, or a package, has an argument of each flag's name."""
    _need(place.exists(), f"there is no {place.relative_to(ROOT)}")
    source = "".join(file.read_text("utf-8") for file in (place.glob("*.py") if place.is_dir() else [place]))
    for word in words:
        if word.startswith("--"):
            _need(f'"{word.partition("=")[0]}"' in source, f"{place.name} has no {word}")


def _launcher(arguments: Sequence[str]) -> None:
    if "--help" in arguments:
        arguments = [word for word in arguments if word != "--help"]
    try:
        parse(arguments)
    except SystemExit:
        raise Wrong(f"the launcher refuses {arguments}") from None


def _pip(words: Sequence[str], variables: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words:
        extras = re.fullmatch(r"\.\[([\w,-]+)\]", word)
        tested = any(re.match(rf"{re.escape(word)}\b", needed) for needed in project["optional-dependencies"]["dev"])
        _need(extras or tested or word in ("install", "-e", "-q"), f"no rule for pip's {word}")
        if extras:
            _need(set(extras[1].split(",")) <= set(project["optional-dependencies"]), f"no extra {word}")


# ---- containers ----


@functools.cache
def compose_options(command: str) -> frozenset[str]:
    """Give the options that a command of compose v2 has, by its own help."""
    told = subprocess.run([*compose_programs()["v2"], command, "--help"], capture_output=True, text=True, check=True)
    return frozenset(re.findall(r"(?<![\w-])--?[\w-]+", told.stdout))


@functools.cache
def _config(flags: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> Config:
    return config(compose_programs()["v2"], "--profile", "monitoring", *flags, **dict(variables))


def _docker(words: Sequence[str], variables: dict[str, str]) -> None:
    _need(words[0] == "compose", f"no rule for docker {words[0]}")
    rest, flags = list(words[1:]), []
    while rest[0].startswith("--"):
        _need(rest[0] in ("--env-file", "--profile"), f"no rule for {rest[0]}")
        flags += [rest.pop(0), rest.pop(0)]
    read = "".join(file.read_text("utf-8") for file in ROOT.glob("docker-compose*.yml"))
    for name in variables:
        _need(name.startswith("COMPOSE_") or re.search(rf"\b{name}\b", read), f"compose does not read {name}")
    services = _config(tuple(flags), tuple(sorted(variables.items())))["services"]
    if "--profile" in flags:
        profile = flags[flags.index("--profile") + 1]
        _need(any(profile in service.get("profiles", ()) for service in services.values()), f"no profile {profile}")
    _compose_command(rest, set(services))


def _compose_command(words: list[str], services: set[str]) -> None:
    command, rest = words[0], words[1:]
    known = compose_options(command)
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            _need(word in known, f"compose {command} has no {word}")
            if word == "--scale":
                _need(rest.pop(0).partition("=")[0] in services, "--scale of no service")
            elif word == "--tail":
                rest.pop(0)
        else:
            _need(word in {*services, "SERVICE"}, f"there is no service {word}")
            if command == "exec":
                check(shlex.join(rest))
                return
            if command == "run" and rest:  # the entry point of the images is `python -m`
                check(shlex.join(("python", "-m", *rest)))
                return


# ---- Kubernetes ----


def _helm(words: Sequence[str], variables: dict[str, str]) -> None:
    command, rest = words[0], list(words[1:])
    _need(command in HELM_OPTIONS, f"no rule for helm {command}")
    sets: list[str] = []
    names: list[str] = []
    while rest:
        word = rest.pop(0)
        if word.startswith("-"):
            _need(word in HELM_OPTIONS[command], f"helm {command} has no {word}")
            sets += [rest.pop(0)] if word == "--set" else []
        else:
            names.append(word)
    _need(not names or names[0] == RELEASE, f"the release is called {RELEASE} everywhere")
    _need(all((ROOT / name) == CHART for name in names[1:]), f"no chart at {names[1:]}")
    values: dict[str, object] = {}
    for path, _, value in (one.partition("=") for one in sets):
        *above, last = path.split(".")
        node = values
        for part in above:
            node = node.setdefault(part, {})  # type: ignore[assignment]
        node[last] = yaml.safe_load(value)
    try:
        made = render(values, name=RELEASE)
    except HelmError as e:
        raise Wrong(str(e)) from None
    if command == "test":
        hooks = [manifest["metadata"].get("annotations", {}).get("helm.sh/hook") for manifest in made]
        _need("test" in hooks, "the chart has no test")


def _kubectl(words: Sequence[str], variables: dict[str, str]) -> None:
    _need(words[0] in ("exec", "rollout", "delete", "describe", "get"), f"no rule for kubectl {words[0]}")
    objects = {f"{made['kind'].lower()}/{made['metadata']['name']}" for made in render({}, name=RELEASE)}
    for word in words:
        _need("/" not in word or word.endswith("/...") or word in objects, f"the chart makes no {word}")
    if "--" in words:
        check(shlex.join(words[list(words).index("--") + 1 :]))


def _curl(words: Sequence[str], variables: dict[str, str]) -> None:
    _need(
        [word for word in words if re.match(r"(http://127\.0\.0\.1:8000|127\.0\.0\.1:PORT)/\w", word)],
        f"curl {words} asks nobody of ours",
    )


READERS: Final[dict[str, Callable[[Sequence[str], dict[str, str]], None]]] = {
    "make": _make,
    "python": _python,
    "pip": _pip,
    "docker": _docker,
    "docker-compose": lambda words, variables: _docker(["compose", *words], variables),
    "helm": _helm,
    "kubectl": _kubectl,
    "curl": _curl,
}
