"""Names in the pages: links, files, tests, flags, settings, fields. Each is there, and each where it is said to be."""

import re
from functools import cache
from itertools import chain
from typing import Final

import pytest

from services.api.schema import ChatRequest, CompletionRequest
from services.launcher.settings import build_parser, settings_fields
from tests.docs.commands import is_command
from tests.docs.pages import PAGES, ROOT, anchors, blocks, links, own_spans, rows, text_of

README_LINES: Final = 170
FOLDERS: Final = ("services", "shared", "tests", "docs", "tools", "ops", "bench", "examples")
FILE: Final = re.compile(r"[\w.*/-]+\.(py|js|md|ya?ml|toml|lua|tpl|txt|env|gpu|api)")
MADE: Final = {"config.json", "tokenizer.json"}
"""Files that belong to a model, or that a run writes."""


@cache
def files() -> tuple[str, ...]:
    found = chain(ROOT.glob("*"), *((ROOT / folder).rglob("*") for folder in FOLDERS))
    return tuple(f"/{path.relative_to(ROOT).as_posix()}" for path in found if "__pycache__" not in path.parts)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        name = target.resolve().relative_to(ROOT).as_posix()
        assert not anchor or anchor in anchors(name), link
        if path.endswith(".png"):
            assert target.read_bytes().startswith(b"\x89PNG"), link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = [span for span in own_spans(page) if FILE.fullmatch(span) and span not in MADE]
    for name in named:
        form = re.compile(re.escape(f"/{name.removeprefix('./')}").replace(r"\*", "[^/]*") + "$")
        assert any(form.search(file) for file in files()), name


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_a_page_names_are_there(page: str) -> None:
    for name in re.findall(r"\btest_\w+(?![\w*])", " ".join(own_spans(page))):
        assert any(file.endswith(f"/{name}.py") for file in files()), name


@cache
def words_of_the_code() -> frozenset[str]:
    kinds = (".py", ".lua", ".js", ".yml", ".yaml", ".tpl", ".toml")
    sources = [ROOT / file[1:] for file in files() if file.endswith(kinds) and not file.startswith("/tests/docs/")]
    return frozenset(word for source in sources for word in re.findall(r"\w+", source.read_text("utf-8")))


def flags_of_our_programs() -> set[str]:
    """Give the flags of the launcher, and those that the source of our other programs adds."""
    commands = next(action for action in build_parser()._actions if action.dest == "command").choices
    assert isinstance(commands, dict)
    own = {flag for command in commands.values() for action in command._actions for flag in action.option_strings}
    sources = chain((ROOT / "bench").rglob("*.py"), (ROOT / "examples").glob("*.py"))
    return own.union(*(re.findall(r'"(--[a-z][a-z-]+)"', source.read_text("utf-8")) for source in sources))


def test_flags_that_pages_name_are_there() -> None:
    known = flags_of_our_programs()
    named = {
        (page, flag)
        for page in PAGES
        for span in own_spans(page)
        if not is_command(span)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)
    }
    others = {"--scale", "--set", "--index-url"}  # of compose, Helm and pip
    assert not {one for one in named if one[1] not in known | others}


def test_settings_that_pages_name_are_there() -> None:
    known = {f"MILLRACE_{name.upper()}" for name in settings_fields()}
    read = "".join(path.read_text("utf-8") for path in [*ROOT.glob("docker-compose*.yml"), ROOT / "gpu.env"])
    known |= set(re.findall(r"\$\{(MILLRACE_[A-Z_]+)", read))
    named = {(page, name) for page in PAGES for name in re.findall(r"\bMILLRACE_[A-Z][A-Z_]*[A-Z]\b", text_of(page))}
    assert not {one for one in named if one[1] not in known}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/metrics.md"])
def test_codes_and_fields_that_a_page_names_are_there(page: str) -> None:
    """Whatever stands in a page as `a_word_like_this` is one of the code's. Metrics are a test of the dashboards'."""
    named = {span for span in own_spans(page) if re.fullmatch(r"[a-z]+(_[a-z]+)+", span)} - {"guided_json"}  # refused
    assert not {
        name for name in named if not name.startswith(("test_", "millrace_")) and name not in words_of_the_code()
    }


def test_variables_of_compose_are_read_by_it() -> None:
    read = "".join(path.read_text("utf-8") for path in ROOT.glob("docker-compose*.yml"))
    named = [name for row in rows("docs/containers.md", "Settings") for name in re.findall(r"`([A-Z_]+)`", row[0])]
    assert len(named) > 20
    assert not [name for name in named if f"${{{name}" not in read]


def test_fields_said_to_be_the_same_are() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    same = [row for row in rows("docs/from-vllm.md", "Fields of a request") if row[1] == "the same"]
    same += rows("docs/api.md", "Fields")
    named = {name for row in same for name in re.findall(r"`(\w+)`", row[0])}
    assert len(named) > 30 and not named - known


def test_where_to_change_what_names_files() -> None:
    table = list(rows("CONTRIBUTING.md", "Where to change what"))
    assert {"a sampling parameter", "a metric", "a stop rule: when an answer ends", "a value of the Helm chart"} <= {
        row[0] for row in table
    }
    for change, where in table:
        named = [
            span for span in re.findall(r"`([^`]+)`", where) if re.fullmatch(r"[\w.*-]*(/[\w.*-]*)+|[\w-]+\.\w+", span)
        ]
        assert named, change
        for name in named:
            assert any(ROOT.glob(name.rstrip("/"))), f"{change}: there is no {name}"


def test_the_readme_is_for_a_stranger() -> None:
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= README_LINES
    assert len(blocks("mermaid")) >= 1 and re.search(r"!\[[^]]+\]\(docs/images/", readme)
    reached = {link.partition("#")[0] for link in links("README.md")}
    assert {page for page in PAGES if page.startswith("docs/")} <= reached, "every page is reached from here"


def test_each_promise_of_the_readme_links_to_its_proof() -> None:
    table = list(rows("README.md", "What is promised"))
    assert len(table) >= 6
    for row in table:
        assert re.search(r"\]\(tests/\S+\.py\)", row[-1]), row[0]


def test_figures_of_the_readme_are_those_of_the_pages() -> None:
    """The pages say how each was measured; the README repeats some, with the command that measures them again."""
    pages = text_of("docs/performance.md") + text_of("docs/promises.md")
    table = list(rows("README.md", "Figures"))
    assert len(table) >= 4
    for _, figures, machine, command in table:
        numbers = re.findall(r"\d[\d,.]*\d|\d", figures)
        assert numbers and not [n for n in numbers if not re.search(rf"(?<![\d.,]){re.escape(n)}(?!\d|[.,]\d)", pages)]
        assert machine and re.search(r"`make [a-z-]+", command)
