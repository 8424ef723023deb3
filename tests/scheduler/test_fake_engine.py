import time

import numpy as np
import pytest

from services.scheduler.core.batch import FROM_DEVICE, Batch, SlotSetup
from services.scheduler.core.ports import EngineFault
from services.scheduler.fake_engine import FakeEngine
from services.scheduler.fake_kv import Corruption
from shared.sampling import SamplingParams
from tests.fakes.link import arrival
from tests.scheduler.driver import Driver, engine_config, solo

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def _setup(slot: int, prompt: list[int], params: SamplingParams = GREEDY) -> SlotSetup:
    return SlotSetup(slot, params, _ids(*prompt), _ids())


def _batch(step: int, rows: list[dict], *setups: SlotSetup, decode: int = 0) -> Batch:
    """Rows of slot, start, input ids, pages and, when a token is drawn, its index."""
    width = max(len(row["pages"]) for row in rows)
    table = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row["pages"])] = row["pages"]
    return Batch(
        step=step,
        num_decode=decode,
        slots=_ids(*(row["slot"] for row in rows)),
        starts=_ids(*(row["start"] for row in rows)),
        lengths=_ids(*(len(row["ids"]) for row in rows)),
        input_ids=_ids(*(i for row in rows for i in row["ids"])),
        page_table=table,
        sample=np.array(["index" in row for row in rows]),
        out_index=_ids(*(row.get("index", 0) for row in rows)),
        setups=setups,
    )


def _prompt(**changes) -> dict:
    return {"slot": 0, "start": 0, "ids": [65, 66, 67, 68, 69], "pages": [3, 9], "index": 1, **changes}


def _run(engine: FakeEngine, batch: Batch):
    return engine.wait(engine.launch(batch))


def _begun() -> FakeEngine:
    engine = FakeEngine(engine_config())
    _run(engine, _batch(0, [_prompt()], _setup(0, [65, 66, 67, 68, 69])))
    return engine


def test_tokens_are_printable_and_the_same_every_time():
    texts = []
    for _ in range(2):
        driver = Driver(engine_config())
        driver.add(arrival("a", b"hello", max_tokens=100))
        driver.run()
        texts.append(bytes(driver.tokens("a")).decode())
    assert texts[0] == texts[1] and texts[0].isprintable() and len(set(texts[0].split())) > 3


def test_a_token_depends_on_every_token_before_it():
    answers = {bytes(solo(arrival("a", prompt, max_tokens=8))[0]) for prompt in (b"hello", b"jello", b"helol", b"ello")}
    assert len(answers) == 4


def test_seed_counts_only_when_sampled():
    def say(**params):
        return tuple(solo(arrival("a", b"hello", max_tokens=16, **params))[0])

    assert say(seed=1) == say(seed=2)
    assert say(seed=1, temperature=1.0) == say(seed=1, temperature=0.5) != say(seed=2, temperature=1.0)
    assert len({say(seed=seed, temperature=1.0) for seed in (-(2**63), -1, 0, 1, 2**63 - 1)}) == 5


def test_logit_bias_forces_and_forbids():
    assert solo(arrival("a", b"hello", logit_bias={90: 100.0}))[0] == [90] * 8
    free = solo(arrival("a", b"hello", max_tokens=50))[0]
    kept = solo(arrival("a", b"hello", max_tokens=50, logit_bias={101: -100.0, 116: -100.0}))[0]
    assert {101, 116} & set(free) and not {101, 116} & set(kept)


def test_end_tokens_come_as_often_as_told():
    lengths = [len(solo(arrival("a", [i, 1, 2], max_tokens=500), eos_every=20)[0]) for i in range(60)]
    assert 8 < sum(lengths) / 60 < 40 and max(lengths) < 500


def test_other_vocabularies_and_texts():
    driver = Driver(engine_config(vocab_size=50_000, text_ids=(1000, 2000, 49_999), eos_token_ids=(2,)))
    driver.add(arrival("a", [40_000, 3], max_tokens=50))
    driver.run()
    assert set(driver.tokens("a")) == {1000, 2000, 49_999}


def test_step_time_is_kept_and_told():
    engine = FakeEngine(engine_config(base_ms=20.0, row_us=1000.0, token_us=2000.0))
    began = time.monotonic()
    result = _run(engine, _batch(0, [_prompt()], _setup(0, [65, 66, 67, 68, 69])))
    assert result.forward_ms == pytest.approx(30.0) and time.monotonic() - began >= 0.03


def test_crash_marker_ends_the_process_at_launch():
    ends = []
    engine = FakeEngine(engine_config(crash_marker=(66, 67)), crash=lambda: ends.append(True))
    engine.launch(_batch(0, [_prompt(ids=[65, 67, 66, 68, 69])], _setup(0, [65, 67, 66, 68, 69])))
    assert not ends
    engine.launch(_batch(1, [_prompt(slot=1, pages=[1, 2])], _setup(1, [65, 66, 67, 68, 69])))
    assert ends


def test_steps_are_waited_for_in_order():
    engine = FakeEngine(engine_config())
    engine.launch(_batch(0, [_prompt()], _setup(0, [65, 66, 67, 68, 69])))
    second = engine.launch(_batch(1, [_prompt(slot=1, pages=[1, 2])], _setup(1, [65, 66, 67, 68, 69])))
    with pytest.raises(EngineFault, match="order"):
        engine.wait(second)


def test_a_decode_row_may_read_its_input_from_the_device():
    engine = _begun()
    result = _run(
        engine, _batch(1, [{"slot": 0, "start": 5, "ids": [FROM_DEVICE], "pages": [3, 9], "index": 2}], decode=1)
    )
    assert result.token_ids[0] >= 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pages": [9, 3]}, "KV of position 0"),
        ({"pages": [3, 4]}, "KV of position 4"),
        ({"ids": [1]}, "other input ids"),
        ({"start": 4}, "draws from the middle"),
        ({"start": 6, "pages": [3, 9]}, "only 6 are known"),
        ({"index": 3}, "index 3"),
        ({"pages": [3, 64]}, "page out of range"),
        ({"slot": 4}, "slot out of range"),
    ],
)
def test_a_row_that_is_not_its_own_is_found(changes, what):
    row = {"slot": 0, "start": 5, "ids": [FROM_DEVICE], "pages": [3, 9], "index": 2, **changes}
    engine = _begun()
    with pytest.raises(Corruption, match=what):
        _run(engine, _batch(1, [row], decode=1))


def test_a_page_written_by_one_and_used_by_another_in_flight_is_found():
    engine = _begun()
    engine.launch(_batch(1, [{"slot": 0, "start": 5, "ids": [FROM_DEVICE], "pages": [3, 9], "index": 2}], decode=1))
    with pytest.raises(Corruption, match="page 9 is written by slot 1"):
        engine.launch(_batch(2, [_prompt(slot=1, pages=[5, 9])], _setup(1, [65, 66, 67, 68, 69])))


def test_a_slot_that_changes_hands_in_flight_is_found():
    engine = _begun()
    engine.launch(_batch(1, [{"slot": 0, "start": 5, "ids": [FROM_DEVICE], "pages": [3, 9], "index": 2}], decode=1))
    with pytest.raises(Corruption, match="change hands"):
        engine.launch(_batch(2, [_prompt(pages=[5, 6])], _setup(0, [65, 66, 67, 68, 69])))


def test_pages_of_another_prefix_with_the_same_tokens_are_found():
    engine = FakeEngine(engine_config())
    first, other = [1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 2, 3, 4, 5, 6, 7, 8, 9]
    _run(engine, _batch(0, [_prompt(ids=first, pages=[0, 1, 2])], _setup(0, first)))
    chunk = {"slot": 1, "start": 0, "ids": other[:4], "pages": [5]}
    _run(engine, _batch(1, [chunk], _setup(1, other)))
    with pytest.raises(Corruption, match="KV of position 4"):
        _run(engine, _batch(2, [_prompt(slot=1, start=8, ids=[9], pages=[5, 1, 6])]))


def test_without_check_nothing_is_looked_at():
    engine = FakeEngine(engine_config(check=False))
    _run(engine, _batch(0, [_prompt()], _setup(0, [65, 66, 67, 68, 69])))
    _run(engine, _batch(1, [{"slot": 0, "start": 5, "ids": [7], "pages": [8, 8], "index": 2}], decode=1))
