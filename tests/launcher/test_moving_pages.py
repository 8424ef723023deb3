"""The pages for users of other servers name only what is there: flags, fields, addresses, metrics, files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.api.app import create_app
from services.api.schema import ChatRequest, CompletionRequest
from services.api.service import ApiService
from services.api.settings import ApiSettings
from services.launcher.settings import _ALIASES, LauncherSettings, settings_fields
from tools.metrics_doc import TABLES

ROOT = Path(__file__).parent.parent.parent
PAGES = ["from-mini-sglang.md", "from-vllm.md"]
CODE = re.compile(r"`([^`]+)`")
SAME = "the same"


def rows(page: str, section: str = "") -> Iterator[list[str]]:
    """Give the cells of a page's tables, or of one section's, without their heads."""
    text = (ROOT / "docs" / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line[1:-1].split("|")]


def flags() -> set[str]:
    names = {*settings_fields(), *LauncherSettings.model_fields}
    return {f"--{name.replace('_', '-')}" for name in names} | {alias for all_ in _ALIASES.values() for alias in all_}


def ours(page: str, column: int = 1) -> str:
    """Give all that a page says of us: our column, what is remarked behind it, and the text beside the tables."""
    text = (ROOT / "docs" / page).read_text()
    beside = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    return beside + "\n".join(" ".join(cells[column:]) for cells in rows(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_ours_exists(page: str) -> None:
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours(page, 1)))
    assert len(told) > 15
    assert told - {"--help"} <= flags()


def test_every_metric_of_ours_exists() -> None:
    known = {metric.name for table in TABLES.values() for metric in table}
    told = set(re.findall(r"millrace_\w+", ours("from-vllm.md")))
    assert len(told) > 15
    assert told <= known


def test_every_field_and_address_exists() -> None:
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    for theirs, same, _ in rows("from-vllm.md", "Fields of a request"):
        told = CODE.findall(theirs if same == SAME else same)
        assert told and set(told) <= fields, told
    app: Any = create_app(ApiService(ApiSettings()))
    paths = {re.sub(r"{[^}]+}", "{}", path) for path in app._app.openapi()["paths"]}
    for theirs, same, _ in rows("from-vllm.md", "Addresses"):
        told = CODE.findall(theirs if same == SAME else same)
        assert {re.sub(r"{[^}]+}", "{}", path) for path in told} <= paths


def test_every_file_of_ours_exists() -> None:
    told = set(re.findall(r"`((?:services|shared|bench)/[\w/.]*)`", ours("from-mini-sglang.md", 2)))
    assert len(told) > 30
    assert [path for path in told if not (ROOT / path).exists()] == []
    for page in PAGES:
        links = re.findall(r"\]\(([\w./-]+)\)", (ROOT / "docs" / page).read_text())
        assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
