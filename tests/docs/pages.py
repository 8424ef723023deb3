"""What stands in the project's pages: fenced blocks, inline code, links, headings, tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "examples/README.md",
        ROOT / "ops/helm/millrace/README.md",
        *(ROOT / "docs").glob("*.md"),
    )
)
FOREIGN: Final = {"docs/from-vllm.md": "vllm", "docs/from-mini-sglang.md": "minisgl"}
"""Pages whose tables name another project's things in their first column, and what its commands are known by."""
_FENCE: Final = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_LINK: Final = re.compile(r"\]\(([^()\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, the line its fence is on, the language behind the fence, and the text inside."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def prose_of(page: str) -> str:
    """Give a page without its blocks."""
    return _FENCE.sub("", text_of(page))


def blocks(language: str | None = None) -> list[Block]:
    """Give the blocks of all pages, or those of one language."""
    found = [
        Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])
        for page in PAGES
        for text in [text_of(page)]
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def spans(page: str) -> list[str]:
    """Give the inline code of a page; a table's `\\|` is a plain bar, a line break inside of it a blank."""
    return [re.sub(r"\s+", " ", span).replace("\\|", "|") for span in _SPAN.findall(prose_of(page))]


def own_spans(page: str) -> list[str]:
    """Give the inline code of a page that speaks of this project."""
    if page not in FOREIGN:
        return spans(page)
    cells = [cell for line in text_of(page).splitlines() if line.startswith("| ") for cell in line.split("|")[2:]]
    return [span for cell in cells for span in _SPAN.findall(cell)]


def links(page: str) -> list[str]:
    """Give the targets of a page's links and pictures."""
    return _LINK.findall(prose_of(page))


def anchors(page: str) -> set[str]:
    """Give the anchors that a page's headings have where it is shown."""
    plain = [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(prose_of(page))]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def rows(page: str, heading: str) -> Iterator[list[str]]:
    """Give the cells of the table below a heading, without the first two lines; empty if there is none."""
    _, _, below = text_of(page).partition(f"# {heading}\n")
    lines = [line for line in re.split(r"^#", below, flags=re.MULTILINE)[0].splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
