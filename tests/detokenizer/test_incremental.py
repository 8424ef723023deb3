import dataclasses
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.incremental import Incremental, TokenTexts
from services.detokenizer.state import Texts
from shared.dialect import Outline, Thoughts
from shared.messages import ReplyHeader
from shared.model_files import locate
from shared.vocab import Vocabulary, byte_vocabulary, load_vocabulary

PIECES = [
    b" Hello",
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xe6\x97",
    b"\xa5",
    b"e",
    b"\xcc\x81",
    b"\xff",
    b"\xc3",
    b"<|end|>",
    b" ",
    b"\n",
]
VOCABULARY = Vocabulary(
    encoder=byte_vocabulary().encoder, tokens=[*PIECES, None], special_ids=frozenset({9}), strips_leading_space=True
)
HOLE, BEYOND, NEGATIVE = len(PIECES), 10_000, -1
IDS = st.lists(st.sampled_from([*range(len(PIECES)), HOLE, BEYOND, NEGATIVE]), max_size=40)
TEXTS = TokenTexts(VOCABULARY, skip_special=True)


def grouped(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut a list at some places."""
    places = sorted({min(c, len(ids)) for c in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in pairwise(places)]


@given(IDS, st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_any_grouping_gives_the_text_of_the_whole(ids: list[int], cuts: list[int], strip: bool) -> None:
    text = Incremental(TEXTS, strip_start=strip)
    said = "".join(text.push_all(group) for group in grouped(ids, cuts)) + text.flush()
    whole = VOCABULARY.decode_bytes(ids).decode("utf-8", "replace")
    assert said == (whole.removeprefix(" ") if strip else whole)


@given(IDS)
def test_what_is_said_is_never_taken_back(ids: list[int]) -> None:
    text = Incremental(TEXTS)
    said = ""
    for i, token_id in enumerate(ids):
        said += text.push(token_id)
        assert VOCABULARY.decode_bytes(ids[: i + 1]).decode("utf-8", "replace").startswith(said)
        again = Incremental(TEXTS)
        assert again.push_all(ids[: i + 1]) == said


def test_a_character_waits_for_its_last_byte() -> None:
    text = Incremental(TEXTS)
    assert [text.push(i) for i in (1, 2, 3, 4)] == ["", "\U0001f642", "", "\u65e5"]
    assert text.flush() == ""


def test_a_broken_character_is_replaced_at_once_or_at_the_end() -> None:
    text = Incremental(TEXTS)
    assert text.push_all([1, 1]) == "\ufffd"
    assert text.flush() == "\ufffd"
    assert text.flush() == ""


def test_special_tokens_print_only_when_asked_for() -> None:
    assert Incremental(TEXTS).push_all([0, 9, 0]) == " Hello Hello"
    shown = TokenTexts(VOCABULARY, skip_special=False)
    assert Incremental(shown).push_all([0, 9]) == " Hello<|end|>"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    assert Incremental(TEXTS).push_all([1, 9, 2]) == "\U0001f642"


def test_leading_blanks_stay_in_a_continuation() -> None:
    assert Incremental(TEXTS).push_all([0, 10, 11]) == " Hello \n"
    assert Incremental(TEXTS, strip_start=True).push_all([9, 10, 10, 0]) == "  Hello"


def test_the_embedded_models_own_tokens_give_back_every_text() -> None:
    vocabulary = load_vocabulary(locate(""))
    texts = TokenTexts(vocabulary, skip_special=True)
    whole = " Hello \U0001f642\U0001f600, e\u0301\u00e9 \u65e5\u672c\u8a9e \uc548\ub155\ud558\uc138\uc694"
    whole += "\n\n  def f(x):\treturn x"
    ids = vocabulary.encode(whole)
    assert len(ids) > len(whole) / 3
    text = Incremental(texts)
    said = [text.push(token_id) for token_id in ids]
    assert "".join(said) + text.flush() == whole
    assert not any("\ufffd" in part for part in said)


def test_marks_of_an_outline_print_although_they_are_control_tokens() -> None:
    plain = byte_vocabulary()
    control = {plain.num_ids: b"[TOOL_CALLS]", plain.num_ids + 1: b"</think>"}
    vocabulary = dataclasses.replace(
        plain, tokens=[*plain.tokens, *control.values()], special_ids=plain.special_ids | set(control)
    )
    texts = Texts(vocabulary)
    ids = [*control, plain.eos_ids[0]]

    def printed(header: ReplyHeader) -> str:
        return Incremental(texts.of(header)).push_all(ids)

    assert printed(ReplyHeader("api")) == ""
    assert printed(ReplyHeader("api", outline=Outline("mistral"))) == "[TOOL_CALLS]"
    thoughts = Thoughts("<think>", "</think>")
    assert printed(ReplyHeader("api", outline=Outline("hermes", thoughts=thoughts))) == "</think>"
    assert texts.of(ReplyHeader("api", outline=Outline("hermes"))) is texts.without_special
    assert texts.of(ReplyHeader("api", skip_special=False)) is texts.with_special
