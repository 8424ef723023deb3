"""A Link without a broker: arrivals and endings are put in by the test, and everything said is written down.

It keeps what a client would see of each uid and refuses, at once, what the log would refuse: an index out of order, a
second end, a word after the end.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

from services.scheduler.core.batch import RowLogprobs
from services.scheduler.core.link import Arrival, Load, PromptEcho, StepOutput
from shared.messages import ErrorBody, FinishReason, GenerateRequest
from shared.sampling import SamplingParams


@dataclass
class Heard:
    """What was said of one uid."""

    tokens: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: ErrorBody | None = None
    starts: list[tuple[int, int]] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompts: list[PromptEcho] = field(default_factory=list)
    complete: bool = False
    forgotten: bool = False

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None


class Ledger:
    """What was said of every uid."""

    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}

    def expect(self, arrival: Arrival) -> None:
        heard = self.heard.setdefault(arrival.request.uid, Heard())
        heard.tokens = list(arrival.said_ids)
        heard.forgotten = False

    def note(self, output: StepOutput) -> None:
        assert len(set(output.uids)) == len(output.uids)
        for place, uid in enumerate(output.uids):
            heard = self.heard[uid]
            assert not heard.ended, f"{uid} speaks after its end"
            assert not heard.forgotten, f"{uid} speaks after it was forgotten"
            assert output.firsts[place] == len(heard.tokens) + 1, f"{uid}: index {output.firsts[place]}"
            if not heard.attempts or heard.attempts[-1] != output.attempts[place]:
                assert place in output.starts, f"{uid}: an attempt without its start"
            else:
                assert place not in output.starts, f"{uid}: a second start"
            heard.attempts.append(output.attempts[place])
            if place in output.starts:
                heard.starts.append(output.starts[place])
            if output.tokens[place] >= 0:
                heard.tokens.append(output.tokens[place])
            else:
                assert place in output.finishes
            if place in output.logprobs:
                heard.logprobs.append(output.logprobs[place])
            heard.finish = output.finishes.get(place)
            heard.complete = place in output.complete
            if place in output.prompts:
                heard.prompts.append(output.prompts[place])

    def fail(self, uid: str, error: ErrorBody) -> None:
        assert not self.heard[uid].ended, f"{uid} fails after its end"
        self.heard[uid].error = error


class ScriptedLink:
    """See the module. Safe to use from the test's thread while a loop runs in another."""

    def __init__(self) -> None:
        self.paused = False
        self.ledger = Ledger()
        self.loads: deque[Load] = deque(maxlen=1000)
        self.num_idles = 0
        self._news = threading.Condition()
        self._arrivals: list[Arrival] = []
        self._endings: list[tuple[str, int]] = []

    def put(self, *arrivals: Arrival) -> None:
        with self._news:
            self._arrivals.extend(arrivals)
            for arrival in arrivals:
                self.ledger.expect(arrival)
            self._news.notify_all()

    def end(self, uid: str, attempt: int) -> None:
        with self._news:
            self._endings.append((uid, attempt))
            self._news.notify_all()

    def wait_for(self, condition, timeout_s: float = 30.0) -> None:
        """Wait until a condition on this link holds; it is looked at after everything that is said."""
        with self._news:
            assert self._news.wait_for(condition, timeout_s), "timed out"

    def arrivals(self) -> list[Arrival]:
        with self._news:
            taken, self._arrivals = self._arrivals, []
            return taken

    def endings(self) -> list[tuple[str, int]]:
        with self._news:
            taken, self._endings = self._endings, []
            for uid, _ in taken:
                self.ledger.heard[uid].forgotten = True
            return taken

    def await_look(self) -> float:
        return 0.0

    def planned(self) -> None:
        pass

    def publish(self, output: StepOutput) -> None:
        with self._news:
            self.ledger.note(output)
            self._news.notify_all()

    def fail(self, uid: str, attempt: int, error: ErrorBody) -> None:
        with self._news:
            self.ledger.fail(uid, error)
            self._news.notify_all()

    def report(self, load: Load) -> None:
        with self._news:
            self.loads.append(load)
            self._news.notify_all()

    def idle(self, timeout_s: float) -> None:
        with self._news:
            self.num_idles += 1
            self._news.notify_all()
            self._news.wait_for(lambda: bool(self._arrivals or self._endings), timeout_s)


def arrival(
    uid: str,
    prompt: bytes | list[int],
    *,
    attempt: int = 1,
    said: list[int] | None = None,
    salt: str = "",
    priority: int = 0,
    tenant: str = "",
    **params,
) -> Arrival:
    """Make an arrival; bytes are ids of the byte vocabulary, and the answer has 8 tokens unless told."""
    params.setdefault("max_tokens", 8)
    params.setdefault("temperature", 0.0)
    request = GenerateRequest(
        uid=uid,
        prompt_ids=list(prompt),
        params=SamplingParams(**params),
        cache_salt=salt,
        priority=priority,
        tenant=tenant,
    )
    return Arrival(request, attempt, tuple(said or ()))
