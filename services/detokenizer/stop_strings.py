"""Finds stop strings in text that grows, and holds back only what may still become one.

Owns the matching; knows nothing of tokens. The match that ends first wins, whatever the order of the strings;
of those that end together the longest, so that no part of it was said. Text before a match is never held back
longer than until it cannot be part of one any more.

Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977); one automaton per string.
"""

import re
from collections.abc import Iterable
from functools import lru_cache


class StopStrings:
    """The stop strings of a request, prepared for matching. Immutable; shared by all choices that have the same.

    Args:
        strings: what to stop at; empty ones never match.
        include: the matched string is part of the reply.
    """

    __slots__ = ("begin", "failures", "include", "strings")

    def __init__(self, strings: Iterable[str], *, include: bool) -> None:
        self.strings = tuple(s for s in dict.fromkeys(strings) if s)
        self.include = include
        self.failures = tuple(_failures(s) for s in self.strings)
        self.begin = re.compile("[" + "".join(re.escape(s[0]) for s in self.strings) + "]") if self.strings else None


@lru_cache(maxsize=512)
def stop_strings(strings: tuple[str, ...], include: bool) -> StopStrings:
    """Give the prepared form, made once for requests that have the same."""
    return StopStrings(strings, include=include)


class StopMatcher:
    """Looks for the stop strings in the text of one reply."""

    __slots__ = ("_matched", "_stops", "held")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.strings)
        self.held = ""
        """Text that is not said yet: the longest tail that a stop string begins with."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take text; give what can be said of all so far, and whether a stop string ended it.

        After a match the rest of the text is dropped, and nothing more may be fed.
        """
        begin = self._stops.begin
        if begin is None or (not self.held and begin.search(text) is None):
            return text, False
        window = self.held + text
        i = len(self.held)
        depth = max(self._matched)
        while i < len(window):
            if depth == 0:
                at = begin.search(window, i)
                if at is None:
                    break
                i = at.start()
            depth, complete = self._step(window[i])
            i += 1
            if complete:
                self.held = ""
                return window[: i if self._stops.include else max(0, i - complete)], True
        cut = max(0, len(window) - depth)
        self.held = window[cut:]
        return window[:cut], False

    def release(self) -> str:
        """Give what is held back, at the end of a reply that no stop string ended."""
        text, self.held = self.held, ""
        self._matched = [0] * len(self._matched)
        return text

    def correct(self, held: str) -> None:
        """Set what is held back, after a replay of text of which all else was said."""
        self.held = held

    def _step(self, char: str) -> tuple[int, int]:
        """Move every automaton by one character; give the deepest, and the length of the longest match."""
        matched = self._matched
        deepest = complete = 0
        for j, string in enumerate(self._stops.strings):
            depth = matched[j]
            failures = self._stops.failures[j]
            while depth and string[depth] != char:
                depth = failures[depth - 1]
            if string[depth] == char:
                depth += 1
            if depth == len(string):
                complete = max(complete, depth)
                depth = 0
            matched[j] = depth
            deepest = max(deepest, depth)
        return deepest, complete


def _failures(string: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    failures = [0]
    for char in string[1:]:
        depth = failures[-1]
        while depth and string[depth] != char:
            depth = failures[depth - 1]
        failures.append(depth + 1 if string[depth] == char else 0)
    return tuple(failures)
