"""The counter between the threads: room, order, and who is woken."""

import threading
from typing import Any

import pytest

from services.scheduler import desk as desk_module
from services.scheduler.core.link import Arrival, Load
from services.scheduler.desk import AHEAD, MAX_READY, Desk, Failed
from shared.messages import ErrorBody, GenerateRequest
from shared.sampling import SamplingParams


def arrival(uid: str, attempt: int = 1) -> Arrival:
    return Arrival(GenerateRequest(uid, [1], SamplingParams(max_tokens=1)), attempt)


def load(**values: Any) -> Load:
    return Load(**{"num_running": 0, "num_ready": 0, "free_slots": 0, "free_pages": 0, **values})


def test_room_is_what_is_free_less_what_was_handed_over_since_the_report() -> None:
    desk = Desk()
    desk.report(load(free_slots=8))
    assert desk.room() == 8
    for i in range(3):
        desk.arrive(arrival(str(i)))
    assert desk.room() == 5
    assert len(desk.take_arrivals()) == 3
    assert desk.room() == 5, "taken, but the load does not count them yet"
    desk.report(load(free_slots=5, num_running=3))
    assert desk.room() == 5


def test_a_few_are_fenced_ahead_of_a_full_engine_and_none_beside_a_crowd() -> None:
    desk = Desk()
    desk.report(load(num_running=4))
    assert desk.room() == AHEAD
    desk.report(load(free_slots=100, num_ready=MAX_READY))
    assert desk.room() == 0


def test_an_ending_takes_back_an_arrival_that_nobody_has_taken() -> None:
    desk = Desk()
    desk.report(load(free_slots=2))
    desk.arrive(arrival("a"))
    desk.end("a", 1)
    assert desk.take_arrivals() == [] and desk.take_endings() == []
    assert desk.room() == 2
    desk.arrive(arrival("b"))
    desk.take_arrivals()
    desk.end("b", 1)
    assert desk.take_endings() == [("b", 1)]


def test_a_sleeping_loop_is_woken_by_an_arrival() -> None:
    desk = Desk()
    woken = threading.Event()

    def sleep() -> None:
        desk.sleep(30.0)
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    desk.arrive(arrival("a"))
    assert woken.wait(10.0)
    desk.sleep(30.0)  # does not sleep: the arrival is still there


def test_mail_is_taken_all_at_once_in_its_order() -> None:
    desk = Desk()
    failed = [Failed(str(i), 1, ErrorBody(500, "", "")) for i in range(3)]
    for one in failed:
        desk.post(one)
    assert desk.next_mail(30.0) == failed
    assert desk.next_mail(0.0) == []


def test_a_step_waits_for_a_look_that_is_not_older_than_the_last_step_but_one() -> None:
    desk = Desk()
    desk.planned()
    assert desk.await_look() == 0.0, "the first step but one needs none"
    desk.planned()
    waiting, over = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        desk.await_look()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(10.0)
    desk.looked(0)
    assert not over.is_set()
    desk.looked(1)
    assert over.wait(10.0)


def test_a_broker_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "PATIENCE_S", 0.01)
    desk = Desk()
    for _ in range(3):
        desk.planned()
    assert desk.await_look() > 0.0
    desk.planned()
    assert desk.await_look() == 0.0
    desk.looked(3)
    desk.planned()
    assert desk.await_look() > 0.0, "it had answered meanwhile"
