"""What all readers of an answer share: the pieces they give, and text that may still become a mark."""

from typing import Final, Literal

Kind = Literal["content", "thought", "call", "arguments"]
Part = tuple[Kind, str]
"""A piece of an answer, in order: text for people, thoughts, the name that begins a call, more of its arguments."""
BLANK: Final = " \t\r\n"


def held(text: str, marks: tuple[str, ...]) -> int:
    """Count the characters at the end of a text that may be the beginning of one of the marks."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest


def find_first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Give the place and the text of the mark that comes first; -1 if there is none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


def may_become(text: str, mark: str) -> bool:
    """Whether a text is the beginning of a mark, or nothing yet."""
    return len(text) < len(mark) and mark.startswith(text)
