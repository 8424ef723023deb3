import numpy as np
import pytest

from services.scheduler.core.finish import FinishRules
from services.scheduler.core.req import make_req
from services.scheduler.core.slots import SlotTable
from tests.fakes.link import arrival
from tests.scheduler.driver import limits

EOS = 258
CASES = [
    ([65], {}, None),
    ([65, EOS], {}, "stop"),
    ([65, EOS], {"ignore_eos": True}, None),
    ([65, EOS], {"min_tokens": 1}, "stop"),
    ([65, EOS], {"min_tokens": 2}, None),
    ([65, 66], {"stop_token_ids": [66]}, "stop"),
    ([65, 66], {"stop_token_ids": [66], "min_tokens": 2}, None),
    ([66, 65], {"stop_token_ids": [66]}, None),
    ([65, 66], {"stop_token_ids": [66], "ignore_eos": True}, "stop"),
    ([65, 65, 65], {"max_tokens": 3}, "length"),
    ([65, 65, EOS], {"max_tokens": 3}, "stop"),
    ([65, 65, EOS], {"max_tokens": 3, "min_tokens": 3}, "length"),
]


@pytest.mark.parametrize(("said", "params", "finish"), CASES)
def test_rules_by_request_and_by_row_agree(said, params, finish):
    rules, table = FinishRules(limits()), SlotTable(limits())
    req = make_req(arrival("a", b"hello", said=said, **params), limits(), 1)
    assert rules.of(req) == finish
    slot = table.give(req, 0)
    rows = [np.array([value], np.int32) for value in (slot, said[-1], 5 + len(said))]
    assert rules.of_rows(table, *rows) == ({} if finish is None else {0: finish})


def test_rows_are_judged_one_by_one():
    rules, table = FinishRules(limits()), SlotTable(limits())
    slots = [
        table.give(make_req(arrival(str(i), b"hello", said=said, **params), limits(), i), 0)
        for i, (said, params, _) in enumerate(CASES[:4])
    ]
    ids = np.array([said[-1] for said, _, _ in CASES[:4]], np.int32)
    lengths = np.array([5 + len(said) for said, _, _ in CASES[:4]], np.int32)
    assert rules.of_rows(table, np.array(slots, np.int32), ids, lengths) == {1: "stop", 3: "stop"}


def test_an_end_token_that_only_ends_the_prompt_ends_nothing():
    assert FinishRules(limits()).of(make_req(arrival("a", [65, EOS]), limits(), 1)) is None
