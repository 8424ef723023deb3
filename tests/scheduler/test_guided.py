"""Answers that follow grammars, from arrival to end: overlap, chunks, retraction, takeover, hostile grammars."""

import json
import threading
from collections.abc import Iterator

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fake_engine import FakeEngine
from services.scheduler.fake_kv import Corruption
from services.scheduler.loop import StepLoop
from shared.sampling import Grammar
from tests.fakes.link import ScriptedLink, arrival
from tests.scheduler.driver import Driver, engine_config, is_idle
from tests.scheduler.grammar.compiling import EOS, AtOnce, byte_compiler

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["mill", "race"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "ok": {"type": "boolean"},
    },
    "required": ["kind", "size", "ok"],
    "additionalProperties": False,
}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))
WORD = Grammar("regex", "[a-f]{30}")
OPEN = Grammar("regex", "[a-z]+")
MAX = {"max_tokens": 200}


@pytest.fixture(scope="module")
def grammars() -> Iterator[AtOnce]:
    compiler = byte_compiler()
    yield AtOnce(compiler)
    compiler.close()


def drive(grammars: AtOnce, *arrivals, depth: int = 1, config: SchedulerConfig | None = None, **engine) -> Driver:
    driver = Driver(engine_config(**engine), config, depth, grammars)
    driver.add(*arrivals)
    driver.run()
    return driver


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_answers_follow_their_grammar_whatever_runs_beside_them(grammars: AtOnce, depth: int, chunk: int) -> None:
    alone = {}
    items = [arrival(f"g{i}", b"make one" * i, grammar=OBJECT, seed=i, temperature=1.0, **MAX) for i in range(1, 4)]
    for item in items:
        alone[item.request.uid] = drive(grammars, item, depth=0).tokens(item.request.uid)
    plain = arrival("p", b"something else", max_tokens=40)
    driver = drive(grammars, *items, plain, depth=depth, config=SchedulerConfig(max_prefill_tokens=chunk))
    for item in items:
        heard = driver.ledger.heard[item.request.uid]
        value = json.loads(bytes(heard.tokens))
        assert set(value) == {"kind", "size", "ok"} and 0 <= value["size"] <= 9999
        assert heard.finish == "stop" and heard.complete
        assert heard.tokens == alone[item.request.uid]
    assert driver.tokens("p") == drive(grammars, plain).tokens("p")
    assert not driver.ledger.heard["p"].complete


def test_batches_without_grammar_have_no_guided_rows(grammars: AtOnce) -> None:
    driver = drive(grammars, arrival("a", b"hello"))
    assert all(not len(batch.guided) for batch in driver.batches)


def test_an_end_token_ends_an_open_answer_and_is_no_part_of_it(grammars: AtOnce) -> None:
    driver = drive(grammars, arrival("a", b"hello", grammar=OPEN, logit_bias={EOS: 100.0}, **MAX))
    heard = driver.ledger.heard["a"]
    assert heard.finish == "stop" and not heard.complete
    assert heard.tokens[-1] == EOS and len(heard.tokens) == 2, "the first token cannot be an end"


def test_ignore_eos_goes_on_to_the_limit_and_a_whole_answer_still_stops(grammars: AtOnce) -> None:
    driver = drive(
        grammars,
        arrival("open", b"hello", grammar=OPEN, ignore_eos=True, logit_bias={EOS: 100.0}, max_tokens=20),
        arrival("whole", b"hello", grammar=WORD, ignore_eos=True, min_tokens=100, **MAX),
    )
    assert driver.ledger.heard["open"].finish == "length" and len(driver.tokens("open")) == 20
    assert driver.ledger.heard["whole"].finish == "stop" and len(driver.tokens("whole")) == 30


def test_stop_wins_over_length_when_both_come_with_one_token(grammars: AtOnce) -> None:
    heard = drive(grammars, arrival("a", b"x", grammar=WORD, max_tokens=30)).ledger.heard["a"]
    assert (len(heard.tokens), heard.finish, heard.complete) == (30, "stop", True)


def test_retraction_keeps_the_place_in_the_grammar(grammars: AtOnce) -> None:
    items = [arrival(f"u{i}", bytes([65 + i]) * 20, grammar=OBJECT, **MAX) for i in range(4)]
    alone = [drive(grammars, item).tokens(item.request.uid) for item in items]
    driver = drive(grammars, *items, num_pages=30, page_size=4, max_seq_len=120)
    assert driver.scheduler.stats.retractions > 0
    assert [driver.tokens(item.request.uid) for item in items] == alone


@pytest.mark.parametrize("cut", [0, 1, 9, -1])
def test_a_takeover_replays_what_was_said(grammars: AtOnce, cut: int) -> None:
    whole = drive(grammars, arrival("a", b"make one", grammar=OBJECT, **MAX)).tokens("a")
    said = whole[: len(whole) + cut if cut < 0 else cut]
    driver = drive(grammars, arrival("a", b"make one", grammar=OBJECT, attempt=2, said=said, **MAX))
    assert driver.tokens("a") == whole and driver.ledger.heard["a"].complete


def test_a_takeover_of_a_whole_answer_ends_it_without_a_token(grammars: AtOnce) -> None:
    whole = drive(grammars, arrival("a", b"make one", grammar=OBJECT, **MAX)).tokens("a")
    driver = drive(grammars, arrival("a", b"make one", grammar=OBJECT, attempt=2, said=whole, **MAX))
    heard = driver.ledger.heard["a"]
    assert heard.tokens == whole and heard.finish == "stop" and not driver.batches


def test_what_was_said_against_the_grammar_fails_alone(grammars: AtOnce) -> None:
    driver = drive(
        grammars,
        arrival("bad", b"x", grammar=WORD, attempt=2, said=list(b"zz"), **MAX),
        arrival("good", b"x", grammar=WORD, **MAX),
    )
    assert driver.ledger.heard["bad"].error.code == "grammar_mismatch"
    assert driver.ledger.heard["good"].finish == "stop"


def test_a_refused_grammar_ends_its_request_before_a_token(grammars: AtOnce) -> None:
    driver = drive(grammars, arrival("a", b"x", grammar=Grammar("regex", "(", field="regex")))
    heard = driver.ledger.heard["a"]
    assert heard.error.status == 400 and heard.error.param == "regex" and not heard.tokens and not driver.batches
    assert driver.scheduler.stats.refused == 1


def test_without_grammars_a_guided_request_is_refused() -> None:
    driver = Driver(engine_config())
    driver.add(arrival("a", b"x", grammar=WORD))
    driver.run()
    assert driver.ledger.heard["a"].error.param == "response_format"


class _Weak:
    """A matcher that can be followed for a while only."""

    complete = False

    def __init__(self, fills: int, accepts: int) -> None:
        self.fills, self.accepts = fills, accepts

    def accept(self, token_id: int) -> bool:
        self.accepts -= 1
        return self.accepts >= 0

    def fill(self, mask) -> bool:
        mask[:] = -1
        self.fills -= 1
        return self.fills >= 0


class _Given:
    def __init__(self, outcome) -> None:
        self.outcome = outcome

    def begin(self, grammar, said_ids, *, ignore_eos):
        return self

    def poll(self):
        return self.outcome


@pytest.mark.parametrize(("fills", "accepts"), [(0, 9), (3, 9), (9, 0), (9, 3)])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_becomes_too_hard_ends_its_request_alone(fills: int, accepts: int, depth: int) -> None:
    driver = Driver(engine_config(), None, depth, _Given(_Weak(fills, accepts)))
    plain = arrival("p", b"hello", max_tokens=30)
    driver.add(arrival("a", b"x", grammar=WORD, **MAX), plain)
    driver.run()
    assert driver.ledger.heard["a"].error.code == "grammar_too_complex"
    assert len(driver.tokens("a")) == min(fills, accepts)
    assert len(driver.tokens("p")) == 30
    assert driver.scheduler.load().free_slots == 4


def test_a_request_may_be_forgotten_while_its_grammar_is_compiled() -> None:
    waiting = _Given(None)
    driver = Driver(engine_config(), None, 1, waiting)
    driver.add(arrival("a", b"x", grammar=WORD, **MAX))
    assert driver.scheduler.load().num_ready == 1 and not is_idle(driver.scheduler)
    assert driver.forget("a")
    assert is_idle(driver.scheduler) and driver.scheduler.load().num_ready == 0
    waiting.outcome = _Weak(9, 9)
    assert not driver.turn()


def test_a_forgotten_request_in_flight_may_draw_anything(grammars: AtOnce) -> None:
    driver = Driver(engine_config(), None, 1, grammars)
    driver.add(arrival("a", b"x", grammar=WORD, **MAX), arrival("b", b"y", grammar=WORD, **MAX))
    for _ in range(6):
        driver.turn()
    driver.forget("a")
    driver.run()
    assert driver.ledger.heard["b"].finish == "stop"


def test_a_step_that_is_not_guided_ends_the_fake_engine(grammars: AtOnce) -> None:
    driver = Driver(engine_config(), None, 0, grammars)
    driver.add(arrival("a", b"x", grammar=WORD, **MAX))
    driver.scheduler.take_compiled()
    step = driver.engine.launch(driver.scheduler.plan())
    with pytest.raises(Corruption, match="not guided"):
        driver.engine.wait(step)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_loop_guides_and_wakes_for_a_compiled_grammar(grammars: AtOnce, overlap: bool) -> None:
    compiler = byte_compiler()
    engine, link = FakeEngine(engine_config()), ScriptedLink()
    loop = StepLoop(engine, link, Scheduler(engine.limits, None, compiler), overlap=overlap)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        items = [arrival(f"u{i}", b"make one", grammar=OBJECT, seed=i, temperature=1.0, **MAX) for i in range(3)]
        link.put(*items, arrival("bad", b"x", grammar=Grammar("regex", "(")), arrival("p", b"hello", max_tokens=50))
        heard = link.ledger.heard
        link.wait_for(lambda: all(h.ended for h in heard.values()))
    finally:
        loop.stop()
        thread.join(30)
        compiler.close()
    for item in items:
        uid = item.request.uid
        assert heard[uid].tokens == drive(grammars, item).tokens(uid)
    assert heard["bad"].error.status == 400 and heard["p"].finish == "length"
