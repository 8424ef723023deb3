"""Every command that a page shows, in a block or in a line of text, is one that works."""

import re

import pytest

from tests.docs import commands
from tests.docs.pages import FOREIGN, PAGES, blocks, rows, spans


def shown(page: str) -> list[str]:
    """Give a page's commands, each once."""
    lines = [line for block in blocks("sh") if block.page == page for line in commands.commands(block.text)]
    lines += [span for span in spans(page) if commands.is_command(span)]
    return [line for line in dict.fromkeys(lines) if FOREIGN.get(page, "\n") not in line]


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in shown(page)])
def test_a_command_works(page: str, line: str) -> None:
    commands.check(line)


def test_every_block_says_what_it_is() -> None:
    known = {"sh", "python", "yaml", "json", "text", "mermaid"}
    assert not [str(block) for block in blocks() if block.language not in known]


@pytest.mark.parametrize(
    "line",
    [
        "make fly",
        "make run SPEED=9",
        'make run ARGS="--no-such-flag 1"',
        'make chaos ARGS="--louder"',
        "make test T=tests/nowhere",
        "python -m services.launcher live",
        "python -m bench.nothing",
        ".venv/bin/python examples/nothing.py",
        "pip install -e '.[all]'",
        "pip install 'millrace[otel]'",
        "docker compose --env-file cpu.env up",
        "docker compose --profile extra up",
        "docker compose up --wide",
        "docker compose stop engine",
        "MILLRACE_SPEED=9 docker compose up",
        "docker compose exec api python -m services.launcher dead lost",
        "helm install demo ops/helm/other",
        "helm install demo ops/helm/millrace --set image.registri=x",
        "helm install demo ops/helm/millrace --wide",
        "kubectl exec deployment/demo-api -- python -m services.launcher dead list",
        "kubectl fly",
        "docker swarm init",
        "curl http://127.0.0.1:8000/",
        "nothing at all",
    ],
)
def test_a_command_that_does_not_work_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        commands.check(line)


def test_every_target_is_listed_by_the_one_that_lists_them() -> None:
    (awk,) = commands.recipe(["help"])
    assert "MAKEFILE_LIST" not in awk and "Makefile" in awk
    listed = set(re.findall(r"^([a-z0-9-]+):.*## ", (commands.ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {word for page in PAGES for line in shown(page) if line.startswith("make ") for word in line.split()[1:2]}
    assert named <= {*listed, "lint-ops"}


def test_tables_are_read_to_their_end() -> None:
    assert len(list(rows("CONTRIBUTING.md", "Where to change what"))) > 10
