import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stop_strings import StopMatcher, StopStrings, stop_strings

LETTERS = st.text(alphabet="ab\u00e9", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], texts: list[str], *, include: bool = False) -> tuple[str, bool]:
    """Feed texts; give all that is said, and whether a stop string ended it."""
    matcher = StopMatcher(StopStrings(stops, include=include))
    said = ""
    for text in texts:
        more, matched = matcher.feed(text)
        said += more
        if matched:
            return said, True
    return said + matcher.release(), False


def expected(stops: list[str], text: str, include: bool) -> tuple[str, bool]:
    """Look at the whole text: the match that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


@given(STOPS, st.lists(LETTERS, max_size=8), st.booleans())
def test_any_grouping_finds_what_the_whole_text_has(stops: list[str], texts: list[str], include: bool) -> None:
    assert run(stops, texts, include=include) == expected(stops, "".join(texts), include)


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_only_what_may_become_a_stop_string_is_held_back(stops: list[str], texts: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops, include=False))
    whole = said = ""
    for text in texts:
        whole += text
        more, matched = matcher.feed(text)
        said += more
        if matched:
            return
        tails = [whole[i:] for i in range(len(whole)) if any(s.startswith(whole[i:]) for s in stops)]
        held = max(tails, key=len, default="")
        assert (said, matcher.held) == (whole.removesuffix(held) if held else whole, held)


@pytest.mark.parametrize(
    ("stops", "texts", "said"),
    [
        (["oHe"], ["Hello", "Hello"], "Hell"),
        (["oHelloHelloHe"], ["Hello"] * 4, "Hell"),
        (["abcd", "bc"], ["abc", "d"], "a"),
        (["bc", "abc"], ["abc"], ""),
        (["aab"], ["a", "a", "a", "b"], "a"),
        (["]", "\\"], ["a\\b"], "a"),
        (["^a", "-"], ["b^", "a"], "b"),
    ],
)
def test_known_matches(stops: list[str], texts: list[str], said: str) -> None:
    assert run(stops, texts) == (said, True)


def test_what_was_held_back_is_said_at_the_end() -> None:
    assert run(["loX"], ["Hello"]) == ("Hello", False)
    assert run(["HelloHelloHello!"], ["Hello"] * 3) == ("HelloHelloHello", False)


def test_the_stop_string_is_included_on_request() -> None:
    assert run(["oHe"], ["Hello", "Hello"], include=True) == ("HelloHe", True)


def test_empty_strings_never_match() -> None:
    assert run([""], ["Hello"]) == ("Hello", False)
    assert run(["", "oHe"], ["Hello", "Hello"]) == ("Hell", True)


def test_equal_requests_share_the_prepared_form() -> None:
    assert stop_strings(("a", "b"), False) is stop_strings(("a", "b"), False)


def test_a_long_near_miss_takes_linear_time() -> None:
    stop = "a" * 5_000 + "b"
    matcher = StopMatcher(StopStrings([stop], include=False))
    for _ in range(40):
        matcher.feed("a" * 1_000)
    assert len(matcher.held) == 5_000
