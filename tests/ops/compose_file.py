"""What compose makes of the project's files, read with each compose that is found; needs no engine."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICES = ("tokenizer", "scheduler", "detokenizer", "api")
Config = dict[str, Any]


def compose_programs() -> dict[str, list[str]]:
    """Find compose v2 (it comes with the development packages) and, where it is installed, docker-compose 1.29."""
    spec = importlib.util.find_spec("compose")
    places = [Path(place) / "docker-compose" for place in (spec.submodule_search_locations or ())] if spec else []
    found = {"v2": [str(place)]} if (place := next(filter(Path.is_file, places), None)) else {}
    old = shutil.which("docker-compose", path="/usr/bin:/usr/local/bin")
    if old and "1.29" in subprocess.run([old, "version", "--short"], capture_output=True, text=True).stdout:
        found["1.29"] = [old]
    return found


def clean_environment(**variables: str) -> dict[str, str]:
    """Give an environment in which nothing of the caller's changes the stack."""
    own = ("MILLRACE_", "COMPOSE_", "HF_")
    return {k: v for k, v in os.environ.items() if not k.startswith(own)} | variables


def config(program: Sequence[str], *flags: str, folder: Path = ROOT, **variables: str) -> Config:
    """Give the file as compose understands it, everything filled in."""
    done = subprocess.run(
        [*program, *flags, "config"], cwd=folder, env=clean_environment(**variables), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    read: Config = yaml.safe_load(done.stdout)
    return read


def default_config(*flags: str, **variables: str) -> Config:
    """Give the file as compose v2 understands it, with the monitoring profile."""
    return config(compose_programs()["v2"], "--profile", "monitoring", *flags, **variables)
