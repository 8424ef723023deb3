import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.detokenizer.pieces import sort_by_reply
from services.detokenizer.settings import DetokenizerSettings
from shared.broker.connection import Broker
from shared.broker.replies import end
from shared.messages import Delta, ErrorBody, FinishReason, LogprobEntry, Said
from tests.detokenizer.stage import END_ID, ENGINE, Stage, ids_of, new_metrics, new_speaker
from tests.redis_keys import command


@pytest.fixture
def stage(broker: Broker) -> Stage:
    return Stage(broker)


def test_tokens_of_a_step_reach_log_and_inbox(broker: Broker, stage: Stage) -> None:
    one, two = stage.open(), stage.open()
    speaker = new_speaker(broker)
    speaker.say(sort_by_reply([stage.chunk({one: (1, ids_of("H")), two: (1, ids_of("J"))}, starts={one: (7, 3)})]))
    speaker.say(sort_by_reply([stage.chunk({one: (2, ids_of("i")), two: (2, ids_of("a"))})]))
    assert (stage.read(one).text, stage.read(two).text) == ("Hi", "Ja")
    first = stage.read(one).deltas[0]
    assert (first.prompt_tokens, first.cached_tokens, first.stamp_ns) == (7, 3, 1)
    rung = [(prev, last) for uid, prev, last in stage.rings() if uid == one]
    assert len(rung) == 2
    assert rung[0][1] == rung[1][0]
    assert rung[1][1] == stage.read(one).last


def test_a_finish_ends_the_log_frees_the_entry_and_rings_the_engine(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    speaker = new_speaker(broker)
    speaker.say(sort_by_reply([stage.chunk({uid: (1, ids_of("ab"))}, finishes={uid: "length"})]))
    reply = stage.read(uid)
    assert reply.end is not None
    assert (reply.end.finish, reply.text, reply.said) == ("length", "ab", 2)
    assert broker.run(command("XLEN", stage.keys.generate(ENGINE))) == 0
    assert broker.run(command("EXISTS", stage.keys.abort(uid))) == 1
    assert 0 < int(str(broker.run(command("PTTL", stage.keys.reply(uid))))) <= 60_000
    assert len(speaker) == 0


def test_the_token_that_ends_a_reply_is_counted_but_not_printed(broker: Broker, stage: Stage) -> None:
    uids = [stage.open(), stage.open(skip_special=False), stage.open(skip_special=False, include_stop=True)]
    chunk = stage.chunk(dict.fromkeys(uids, (1, [*ids_of("a"), END_ID])), finishes=dict.fromkeys(uids, "stop"))
    new_speaker(broker).say(sort_by_reply([chunk]))
    assert [stage.read(uid).text for uid in uids] == ["a", "a", "a<|im_end|>"]
    assert [stage.read(uid).said for uid in uids] == [2, 2, 2]


def test_an_ordinary_stop_token_is_not_printed_either(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    new_speaker(broker).say(sort_by_reply([stage.chunk({uid: (1, ids_of("ab."))}, finishes={uid: "stop"})]))
    assert stage.read(uid).text == "ab"


def test_a_finish_without_a_token_ends_the_log(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    speaker = new_speaker(broker)
    speaker.say(sort_by_reply([stage.chunk({uid: (1, [0xC3])})]))
    speaker.say(sort_by_reply([stage.chunk({uid: (2, [])}, finishes={uid: "length"})]))
    reply = stage.read(uid)
    assert reply.end is not None
    assert (reply.text, reply.said, reply.end.finish) == ("\ufffd", 1, "length")


def test_a_stop_string_ends_the_reply_where_it_matched(broker: Broker, stage: Stage) -> None:
    uid, included = stage.open(stop=["oHe"]), stage.open(stop=["oHe"], include_stop=True)
    speaker = new_speaker(broker)
    text = ids_of("HelloHello")
    for i in range(len(text)):
        speaker.say(sort_by_reply([stage.chunk(dict.fromkeys((uid, included), (i + 1, text[i : i + 1])))]))
    for name, said in ((uid, "Hell"), (included, "HelloHe")):
        reply = stage.read(name)
        assert reply.end is not None
        assert (reply.text, reply.said, reply.end.finish) == (said, 7, "stop")
        assert broker.run(command("EXISTS", stage.keys.abort(name))) == 1


def test_tokens_behind_a_stop_match_are_trimmed_with_their_logprobs(broker: Broker, stage: Stage) -> None:
    uid = stage.open(stop=["b"])
    ids = ids_of("abcd")
    logprobs = {uid: [LogprobEntry(i, -0.5, top=[(i, -0.5, b""), (END_ID, -1.0, b"")]) for i in ids]}
    new_speaker(broker).say(sort_by_reply([stage.chunk({uid: (1, ids)}, finishes={uid: "length"}, logprobs=logprobs)]))
    reply = stage.read(uid)
    assert reply.end is not None
    assert (reply.text, reply.ids, reply.end.finish) == ("a", ids_of("ab"), "stop")
    assert [entry.token for entry in reply.end.logprobs] == [b"a", b"b"]
    assert reply.end.logprobs[0].top == [(97, -0.5, b"a"), (END_ID, -1.0, b"<|im_end|>")]


def test_held_back_text_is_said_when_the_reply_ends_otherwise(broker: Broker, stage: Stage) -> None:
    uid = stage.open(stop=["loX"])
    speaker = new_speaker(broker)
    speaker.say(sort_by_reply([stage.chunk({uid: (1, ids_of("Hello"))})]))
    assert stage.read(uid).text == "Hel"
    speaker.say(sort_by_reply([stage.chunk({uid: (6, [END_ID])}, finishes={uid: "stop"})]))
    assert stage.read(uid).text == "Hello"


def test_steps_that_wait_become_one_entry_per_reply(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    chunks = [stage.chunk({uid: (i + 1, [97 + i])}) for i in range(20)]
    new_speaker(broker).say(sort_by_reply(chunks))
    assert [delta.text for delta in stage.read(uid).deltas] == ["abcdefghijklmnopqrst"]


def test_what_is_in_the_log_is_not_said_again(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    chunks = [stage.chunk({uid: (i + 1, [97 + i])}, finishes={uid: "length"} if i == 3 else {}) for i in range(4)]
    new_speaker(broker).say(sort_by_reply(chunks[:2]))
    again = new_speaker(broker)
    again.say(sort_by_reply(chunks))
    again.say(sort_by_reply(chunks))
    reply = stage.read(uid)
    assert (reply.text, [delta.text for delta in reply.deltas]) == ("abcd", ["ab", "cd"])


def test_a_rebuilt_state_goes_on_inside_a_character_and_a_stop_string(broker: Broker, stage: Stage) -> None:
    uid = stage.open(stop=["xyz"])
    ids = ids_of("a\U0001f642xyq\u65e5")
    for i, token_id in enumerate(ids):
        new_speaker(broker).say(sort_by_reply([stage.chunk({uid: (i + 1, [token_id])})]))
    assert stage.read(uid).text == "a\U0001f642xyq\u65e5"


def test_a_log_opened_again_goes_on_behind_what_the_client_was_told(broker: Broker, stage: Stage) -> None:
    uid = stage.open(stop=["cde"], said=Said(ids_of("abc"), "ab"))
    new_speaker(broker).say(sort_by_reply([stage.chunk({uid: (4, ids_of("dx"))})]))
    reply = stage.read(uid)
    assert (reply.text, reply.said) == ("abcdx", 5)


def test_another_attempt_is_not_listened_to(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    metrics = new_metrics()
    speaker = new_speaker(broker, metrics)
    old = stage.attempts[uid]
    speaker.say(sort_by_reply([stage.chunk({uid: (1, ids_of("a"))})]))
    stage.fence(uid)
    speaker.say(
        sort_by_reply([stage.chunk({uid: (2, ids_of("X"))}, attempts={uid: old}), stage.chunk({uid: (2, ids_of("b"))})])
    )
    assert stage.read(uid).text == "ab"
    assert b'millrace_detokenizer_dropped_total{reason="fenced"} 1.0' in metrics.render()


def test_a_gap_is_judged_on_the_log_and_never_written(broker: Broker, stage: Stage) -> None:
    uid = stage.open()
    speaker, sibling = new_speaker(broker), new_speaker(broker)
    speaker.say(sort_by_reply([stage.chunk({uid: (1, ids_of("a"))})]))
    sibling.say(sort_by_reply([stage.chunk({uid: (2, ids_of("b"))})]))
    speaker.say(sort_by_reply([stage.chunk({uid: (3, ids_of("c"))})]))
    assert stage.read(uid).text == "abc"
    speaker.say(sort_by_reply([stage.chunk({uid: (9, ids_of("z"))})]))
    assert stage.read(uid).text == "abc"


def test_replies_that_are_over_or_unknown_are_dropped(broker: Broker, stage: Stage) -> None:
    ended, gone, unfenced = stage.open(), stage.open(), stage.open(fenced=False)
    body = ErrorBody(504, "too late", "timeout_error")
    speaker = new_speaker(broker)
    speaker.say(sort_by_reply([stage.chunk({ended: (1, ids_of("a")), gone: (1, ids_of("a"))})]))
    broker.run(end(stage.keys, ended, Delta(0, [], "", error=body)))
    broker.run(command("DEL", stage.keys.reply(gone)))
    speaker.say(sort_by_reply([stage.chunk({uid: (2, ids_of("b")) for uid in (ended, gone, unfenced, "nobody")})]))
    assert stage.read(ended).text == "a"
    assert broker.run(command("EXISTS", stage.keys.reply(gone), stage.keys.reply("nobody"))) == 0
    assert stage.read(unfenced).deltas == []
    assert len(speaker) == 0


def test_a_log_that_cannot_be_read_spoils_no_other(broker: Broker, stage: Stage) -> None:
    good, bad, headless = stage.open(), stage.open(), stage.open()
    broker.run(command("DEL", stage.keys.reply(bad), stage.keys.reply(headless)))
    broker.run(command("XADD", stage.keys.reply(bad), "5-0", "k", "t", "t", b"\xff\xff"))
    broker.run(command("XADD", stage.keys.reply(headless), "5-0", "k", "f", "h", b"", "n", 1, "e", "x"))
    chunk = stage.chunk({uid: (1, ids_of("a")) for uid in (bad, good, headless)})
    new_speaker(broker).say(sort_by_reply([chunk]))
    assert stage.read(good).text == "a"


def test_more_replies_than_one_script_may_touch(broker: Broker, stage: Stage) -> None:
    uids = [stage.open() for _ in range(300)]
    new_speaker(broker).say(sort_by_reply([stage.chunk({uid: (1, ids_of("a")) for uid in uids})]))
    assert [stage.read(uid).text for uid in uids] == ["a"] * 300


def test_states_are_bounded_in_number(broker: Broker, stage: Stage) -> None:
    uids = [stage.open() for _ in range(5)]
    speaker = new_speaker(broker)
    speaker._max_replies = 3
    speaker.say(sort_by_reply([stage.chunk({uid: (1, ids_of("a")) for uid in uids})]))
    speaker.forget_idle()
    assert len(speaker) == 3
    speaker.say(sort_by_reply([stage.chunk({uid: (2, ids_of("b")) for uid in uids})]))
    assert {stage.read(uid).text for uid in uids} == {"ab"}
    assert DetokenizerSettings().max_replies > 1000


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(ids_of("ab\u00e9\U0001f642")), min_size=1, max_size=12),
    st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=3), max_size=2),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(0, 2)), max_size=12),
)
def test_any_order_of_any_siblings_says_the_same(
    broker: Broker, stage: Stage, ids: list[int], stop: list[str], looks: list[tuple[int, int, int]]
) -> None:
    """Three detokenizers see overlapping windows of one reply; the log is as if one had seen it token by token."""
    uid, alone = stage.open(stop=stop), stage.open(stop=stop)
    speakers = [new_speaker(broker) for _ in range(3)]

    def window(who: int, name: str, begin: int, end: int) -> None:
        part = ids[begin:end]
        finishes: dict[str, FinishReason] = {name: "length"} if end >= len(ids) else {}
        if part:
            chunk = stage.chunk({name: (begin + 1, part)}, finishes=finishes)
            speakers[who].say(sort_by_reply([chunk]))

    for begin, length, who in looks:
        window(who, uid, begin, begin + length)
    window(0, uid, 0, len(ids))
    for i in range(len(ids)):
        window(1, alone, i, i + 1)
    mine, other = stage.read(uid), stage.read(alone)
    assert mine.end is not None
    assert other.end is not None
    assert (mine.text, mine.ids, mine.end.finish) == (other.text, other.ids, other.end.finish)
