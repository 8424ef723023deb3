"""Every example runs as a user runs it, against the embedded model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import ROOT, Stack

FOLDER = ROOT / "examples"
TOLD = {
    "openai_client.py": r".* 4\..*\n.* 4\..*\n\d+ tokens in, \d+ out\n(\s*\d+\.\d%  '.*'\n){3}",
    "langchain_chat.py": r"\S.*\n(.*\n)*\S.*\n(- .*\n(.*\n)*){3}",
    "litellm_router.py": r"\S(.*\n)+\S.*\n",
    "tool_calling.py": r'water_level\({"river": ?"(Rhine|Danube|Elbe)"}\) -> .*215.*\n',
    "structured_output.py": r"(good|bad|mixed), [1-5] stars, about \w+\n19\d\d-[01]\d-[0-3]\d\n",
    "resume.py": r"(.*\n)*.*\[connection lost\](.*\n)+\[the same as without a loss\]\n",
    "offline.py": r"The capital of France is.*Paris(.*\n)+ +16 tokens, length\n",
    "load_test.py": r"6 requests, 3 at a time, 48 tokens in .* s\n.* tokens/s\nfirst token: p50 .*\nbetween",
}
"""What each prints, as an expression."""
ARGUMENTS = {"load_test.py": ["--streams", "3", "--requests", "6", "--max-tokens", "8"]}


@pytest.mark.timeout(300)  # a slow machine may take long to import what some of them need
@pytest.mark.parametrize("name", TOLD)
def test_an_example_runs_and_says_what_it_promises(name: str, real: Stack) -> None:
    env = {**os.environ, "OPENAI_BASE_URL": f"{real.url}/v1", "OPENAI_API_KEY": "none"}
    env["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *ARGUMENTS.get(name, [])],
        capture_output=True,
        text=True,
        timeout=280,
        env=env,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(TOLD[name], done.stdout), done.stdout


def test_the_load_test_refuses_numbers_that_ask_nothing() -> None:
    command = [sys.executable, str(FOLDER / "load_test.py"), "--streams", "1", "--requests", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    assert done.stderr.endswith("argument --requests: 0: at least 1 is needed\n")


def test_all_of_them_are_run_and_listed() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".yaml")}
    assert {name for name in files if Path(name).suffix == ".py"} == set(TOLD)
    page = (FOLDER / "README.md").read_text()
    assert {name for name in files if f"[{name}]({name})" in page} == files
    assert all(len((FOLDER / name).read_text().splitlines()) <= 80 for name in files), (
        "short enough to read at a glance"
    )
