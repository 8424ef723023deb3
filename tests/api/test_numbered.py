"""The events of a resumable stream without any server: from any cut, any reader gives exactly the rest."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.api.exchange import Exchange
from services.api.job import Job
from services.api.numbered import Numbered
from services.api.places import Place, parse_position
from shared.dialect import Outline, Thoughts
from shared.errors import InvalidRequest
from shared.messages import Delta, LogprobEntry, Prompt
from shared.sampling import SamplingParams
from tests.api.streams import Event, by_choice, events_of

Log = list[Delta]
PIECES = ["", " a", " stream", "\n\n", "x: y\n", "é", "日本", '"\\', " {", "}", "<", "think>", " data: [DONE]", "."]
THOUGHTS = '</think> so: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> done'


def job(kind: str, n: int, **more: Any) -> Job:
    made = Job(
        "chat" if kind == "chat" else "completion", "m", [Prompt(text="p")], n, SamplingParams(), 1, stream=True,
        uids=[f"uid{i}" for i in range(n)], resume_ms=1000, created=7, fingerprint="fp",
    )  # fmt: skip
    return replace(made, **more)


def grouped(tokens: Sequence[tuple[int, str]], sizes: Sequence[int], logprobs: bool, finish: bool) -> Log:
    """Write a choice as a log whose entries hold so many tokens; the finish comes with the last ones, or alone."""
    log: Log = []
    at, number = 0, 0
    while at < len(tokens):
        part = tokens[at : at + sizes[number % len(sizes)]]
        entries = [LogprobEntry(t, -0.5, text.encode()) for t, text in part] if logprobs else []
        start = (3, 1) if at == 0 else (0, 0)
        log.append(Delta(at + 1, [t for t, _ in part], "".join(s for _, s in part), entries,
                         prompt_tokens=start[0], cached_tokens=start[1]))  # fmt: skip
        at, number = at + len(part), number + 1
    if finish and log:
        log[-1] = msgspec.structs.replace(log[-1], finish="length")
    else:
        log.append(Delta(at + 1, [], "", finish="stop"))
    return log


def write(made: Job, logs: Sequence[Log], seed: int, last: str | None = None) -> list[Event]:
    """Write a stream as a reader does whose logs come in some order, from an id on."""
    exchange = Exchange(made, 0)
    form = Numbered(made, None if last is None else parse_position(last, made.num_choices), last or "begin.0")
    dice = random.Random(seed)
    left = [list(log) for log in logs]
    out = form.begin()
    while any(left):
        index = dice.choice([i for i, log in enumerate(left) if log])
        out += form.entries([(exchange.choices[index], left[index].pop(0))])
    out += form.end()
    assert not form.astray
    return list(events_of(iter(out.decode().split("\n")[:-1])))


SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CHOICE = st.lists(st.tuples(st.integers(0, 50_000), st.sampled_from(PIECES)), max_size=12)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
MORE = st.fixed_dictionaries(
    {"include_usage": st.booleans(), "returns_ids": st.booleans(), "logprobs": st.sampled_from([None, 0])}
)
OUTLINE = Outline("hermes", ["f"], True, Thoughts("<think>", "</think>", begun=True))


@settings(SLOWLY, max_examples=200)
@given(
    data=st.data(),
    kind=st.sampled_from(["chat", "completion", "tools"]),
    more=MORE,
    seeds=st.tuples(*[st.integers()] * 2),
)
def test_any_cut_gives_the_rest(data: st.DataObject, kind: str, more: dict[str, Any], seeds: tuple[int, int]) -> None:
    choices = data.draw(st.lists(CHOICE, min_size=1, max_size=3))
    if kind == "tools":
        more |= {"outline": OUTLINE, "returns_ids": False, "logprobs": None}
        choices = [[*tokens, *((7, piece) for piece in THOUGHTS)] for tokens in choices]
    finishes = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    scored = more["logprobs"] is not None
    logs = [grouped(c, data.draw(SIZES), scored, f) for c, f in zip(choices, finishes, strict=False)]
    made = job("completion" if kind == "completion" else "chat", len(choices), **more)
    whole = write(made, logs, seeds[0])
    cut = data.draw(st.integers(0, len(whole)))
    last = whole[cut - 1].id if cut else None
    later = write(made, logs, seeds[1], last)
    assert by_choice([*whole[:cut], *later]) == by_choice(whole)
    if len(choices) == 1:
        assert later == whole[cut:], "with one choice to the byte, ids included"


def content(events: Sequence[Event], index: int) -> tuple[str, list[int], list[str], list[Any]]:
    """Give all that a choice was told, however it was cut: text, token ids, tokens of the scores, finish."""
    text, ids, scored, finishes = "", [], [], []
    for choice in (c for event in events for c in event.choices if c["index"] == index):
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        ids += choice.get("token_ids") or []
        found = choice["logprobs"] or {}
        scored += found.get("tokens") or [entry["token"] for entry in found.get("content") or []]
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, ids, scored, finishes


@settings(SLOWLY, max_examples=200)
@given(data=st.data(), kind=st.sampled_from(["chat", "completion"]), more=MORE, seeds=st.tuples(*[st.integers()] * 2))
def test_the_borders_of_entries_do_not_matter(
    data: st.DataObject, kind: str, more: dict[str, Any], seeds: tuple[int, int]
) -> None:
    """A log that was opened again has other entries; the rest is the same in text and tokens."""
    choices = data.draw(st.lists(CHOICE, min_size=1, max_size=3))
    scored = more["logprobs"] is not None
    finishes = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    one, two = (
        [grouped(c, data.draw(SIZES), scored, f) for c, f in zip(choices, finishes, strict=False)] for _ in range(2)
    )
    made = job(kind, len(choices), **more)
    whole = write(made, one, seeds[0])
    cut = data.draw(st.integers(1, len(whole)))
    later = write(made, two, seeds[1], whole[cut - 1].id)
    for index in range(len(choices)):
        assert content([*whole[:cut], *later], index) == content(whole, index)
    assert later[-1:] == whole[-1:] or cut == len(whole)


def test_a_position_of_another_stream_is_seen() -> None:
    made = job("chat", 1)
    one = [grouped([(1, " a"), (2, " b")], [1], False, True)]
    other = [grouped([(3, " a"), (4, " b")], [1], False, True)]
    last = write(made, one, 0)[1].id
    form = Numbered(made, parse_position(last, 1), last)
    assert form.entries([(Exchange(made, 0).choices[0], delta) for delta in other[0]]) == b""
    assert form.astray


def test_a_position_beyond_the_end_is_seen() -> None:
    made = job("chat", 1)
    log = grouped([(1, " a"), (2, " b")], [1], False, True)
    ahead = Place()
    ahead.move([1, 2, 3], " a b c")
    form = Numbered(made, parse_position(ahead.text(), 1), ahead.text())
    assert form.entries([(Exchange(made, 0).choices[0], delta) for delta in log]) == b""
    assert form.astray


def test_an_end_that_came_elsewhere_is_seen() -> None:
    made = job("chat", 1)
    log = grouped([(1, " a"), (2, " b")], [1], False, True)
    early = Place(ended=True)
    early.move([1], " a")
    form = Numbered(made, parse_position(early.text(), 1), early.text())
    assert form.entries([(Exchange(made, 0).choices[0], delta) for delta in log]) == b""
    assert form.astray


@settings(SLOWLY)
@given(st.text(max_size=40), st.integers(1, 3))
def test_any_text_is_an_id_or_is_refused(text: str, num_choices: int) -> None:
    try:
        position = parse_position(text, num_choices)
    except InvalidRequest as e:
        assert e.param == "Last-Event-ID"
    else:
        assert position.stage != "body" or len(position.places) == num_choices


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_ids_stay_short(kind: str) -> None:
    """What is added to every event is some twenty bytes per choice."""
    made = job(kind, 8)
    logs = [grouped([(i, " w") for i in range(40)], [1], False, True) for _ in range(8)]
    events = write(made, logs, 3)
    assert max(len(event.id) for event in events) < 200
