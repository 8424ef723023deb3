"""One round trip of the I/O thread: calls with what to do about their answers.

Knows nothing of what the calls are for. Whoever adds one keeps its own reason for it until the answer is there,
because a round trip that fails is forgotten and planned anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.errors import WireError

T = TypeVar("T")


class Agenda:
    """Calls that go to the broker together, in order."""

    def __init__(self) -> None:
        self._calls: list[Call[Any]] = []
        self._then: list[Callable[[Any], None]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call[T], then: Callable[[T], None]) -> None:
        """Add a call and what to do with its answer."""
        self._calls.append(call)
        self._then.append(then)

    def add_wary(self, call: Call[T], then: Callable[[T | None], None]) -> None:
        """Add a call whose answer may hold bytes of a stranger: None stands for what cannot be understood."""

        def parse(answer: Any) -> T | None:
            try:
                return call.parse(answer)
            except WireError:
                return None

        self.add(Call(call.command, parse, call.script, call.group, call.blocks), then)

    def run(self, broker: Broker) -> None:
        """Make the round trip, then tell the answers in order.

        Raises:
            BrokerDown: any of the calls may or may not have happened; nobody was told.
        """
        for then, answer in zip(self._then, broker.run_many(self._calls), strict=True):
            then(answer)
