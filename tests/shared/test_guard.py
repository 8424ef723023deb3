import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.guard import EXIT_FAULT, EXIT_STUCK, Guard, Interrupted
from shared.health import Pulse
from tests.waiting import eventually


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Process:
    """What a guard watches, with its ends written down instead of done."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.pulse = Pulse(self.clock)
        self.left_s = float("inf")
        self.drains = 0
        self.drained = threading.Event()
        self.codes: list[int] = []
        self.killed = threading.Event()
        self.looked = threading.Event()
        self.guard = Guard(
            self.pulse,
            stuck_after_s=options.get("stuck_after_s", 60.0),
            drain=self.drain,
            drain_left_s=lambda: self.left_s,
            kill=self.kill,
            look=self.looked.set,
        )

    def drain(self) -> None:
        self.drains += 1
        self.left_s = 30.0
        self.drained.set()

    def kill(self, code: int) -> None:
        self.codes.append(code)
        self.killed.set()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(**options: Any) -> Process:
        process = Process(**options)
        process.guard.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.guard.stop()


def test_a_death_elsewhere_is_looked_at_and_ends_nothing(start: Callable[..., Process]) -> None:
    process = start()
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    }
    try:
        process.guard.connect_signals()
        signal.raise_signal(signal.SIGUSR2)
        assert process.looked.wait(20)
    finally:
        process.guard.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not process.drains and not process.codes


def test_the_first_signal_drains_and_the_same_again_ends(start: Callable[..., Process]) -> None:
    process = start()
    process.guard.may_interrupt = False
    process.guard._on_signal(signal.SIGTERM, None)
    assert process.drained.wait(20)
    assert process.codes == []
    process.guard._on_signal(signal.SIGTERM, None)
    assert process.killed.wait(20)
    assert (process.codes, process.drains) == ([128 + signal.SIGTERM], 1)


def test_where_nothing_is_in_hand_a_signal_interrupts(start: Callable[..., Process]) -> None:
    process = start()
    with pytest.raises(Interrupted):
        process.guard._on_signal(signal.SIGINT, None)
    assert process.drained.wait(20)


def test_signals_before_the_start_are_heeded() -> None:
    process = Process()
    process.guard.may_interrupt = False
    process.guard._on_signal(signal.SIGTERM, None)
    process.guard.start()
    assert process.drained.wait(20)
    process.guard.stop()


def test_a_stuck_loop_is_ended(start: Callable[..., Process], capfd: pytest.CaptureFixture[str]) -> None:
    process = start(stuck_after_s=5.0)
    process.clock.now += 1000
    assert not process.guard.is_stuck()
    process.pulse.beat()
    process.clock.now += 3
    assert process.guard.is_stuck(0.5)
    assert not process.guard.is_stuck()
    process.clock.now += 3
    assert process.killed.wait(20)
    assert process.codes == [EXIT_STUCK]
    eventually(lambda: "in _run" in capfd.readouterr().err, "the stacks are printed")


def test_a_loop_may_be_left_unwatched(start: Callable[..., Process]) -> None:
    process = start(stuck_after_s=0)
    process.pulse.beat()
    process.clock.now += 1e6
    assert not process.guard.is_stuck()


def test_a_drain_that_takes_too_long_is_ended(start: Callable[..., Process]) -> None:
    process = start()
    process.left_s = 0.0
    assert process.killed.wait(20)
    assert process.codes == [EXIT_FAULT]
