"""Who gets in: the bounds on what may wait, and the answer to those who must come back later.

Owns the count of what this replica has in flight and the measured drain rate behind `Retry-After`. Knows
neither HTTP nor the broker; the tokenize queue has a bound of its own that `open` checks.
"""

import math
import time
from collections import deque
from typing import Final

from services.api.fleet import NAMES, NEVER, WORKERS, Fleet
from services.api.job import Job
from services.api.settings import ApiSettings
from shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, RateLimited, Unavailable
from shared.keys import BEAT_S, Role

MAX_READERS: Final = 2_000
"""Streams that clients come back to, read at once by one replica."""
_WINDOW_S: Final = 30.0
_MAX_WAIT_S: Final = 60.0
_MAX_NAMED: Final = 5
"""Models that the refusal of an unknown one names."""
MAX_ASKED: Final = 64
"""Requests that only ask for ids or text, at once: few enough to leave the queue to those that generate."""


class DrainRate:
    """Choices finished per second, over the last half minute."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=4096)

    def note(self, count: int) -> None:
        """Count choices that have just ended."""
        self._ends.extend([time.monotonic()] * count)

    def wait_s(self, places: int) -> float:
        """Estimate when so many places will be free, from 1 s to a minute."""
        since = time.monotonic() - _WINDOW_S
        while self._ends and self._ends[0] < since:
            self._ends.popleft()
        if not self._ends:
            return _MAX_WAIT_S / 6
        span = max(1.0, time.monotonic() - self._ends[0])
        return min(_MAX_WAIT_S, max(1.0, math.ceil(places * span / len(self._ends))))


class Admission:
    """The door of one replica.

    Attributes:
        num_choices: in flight here.
        num_asked: requests in flight here that only a tokenizer answers.
        num_bytes: bodies of the requests in flight here.
        draining: nobody gets in any more.
    """

    def __init__(self, settings: ApiSettings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._rate = DrainRate()
        self.num_choices = 0
        self.num_asked = 0
        self.num_bytes = 0
        self.draining = False

    def check(self, job: Job) -> None:
        """Judge a job before anything is done for it.

        Raises:
            ModelNotFound: nobody serves that model.
            InvalidRequest: too many choices, or more than the context of any engine holds.
            RateLimited: too much waits already.
            Unavailable: draining, or a service that the request needs is away.
        """
        self._check_open()
        if job.model not in self._fleet.models:
            raise no_such_model(self._fleet, job.model)
        if job.num_choices > self._settings.max_choices:
            limit = self._settings.max_choices
            raise InvalidRequest.of_field("n", f"prompts times n must not be more than {limit}")
        if job.timeout_s is not None and job.timeout_s > self._settings.max_timeout:
            limit_s = self._settings.max_timeout
            raise InvalidRequest.of_field("timeout", f"at most {limit_s:g} seconds")
        self._check_services(job)
        if job.purpose == "generate":
            self._check_context(job)
        self._check_room(job)

    def check_reader(self, num_readers: int) -> None:
        """Judge whether one more may come back to a stream here, where so many do already.

        Raises:
            RateLimited: too many. Unavailable: draining.
        """
        self._check_open()
        if num_readers >= MAX_READERS:
            raise RateLimited("too many streams are being resumed at this server", retry_after_s=1)

    def enter(self, job: Job) -> None:
        """Count a job in. Every `enter` is followed by one `leave`, whatever happens."""
        if job.purpose == "generate":
            self.num_choices += job.num_choices
        else:
            self.num_asked += 1
        self.num_bytes += job.cost_bytes

    def leave(self, job: Job, finished: int) -> None:
        """Count a job out, with the number of its choices that had an answer."""
        self.num_bytes -= job.cost_bytes
        if job.purpose != "generate":
            self.num_asked -= 1
            return
        self.num_choices -= job.num_choices
        self._rate.note(finished)

    def capacity(self, model: str) -> int:
        """Give the choices that may run and wait for a model, over all replicas."""
        return self._fleet.load(model).max_running + self._settings.max_queued_requests

    def full(self, message: str, places: int) -> RateLimited:
        """Make the refusal of a full queue, with the measured wait."""
        return RateLimited(message, retry_after_s=self._rate.wait_s(places))

    def _check_open(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down", code="shutting_down", retry_after_s=5)

    def _check_services(self, job: Job) -> None:
        """A service that was here a moment ago is waited for; one that is away for longer, or never was, is not."""
        if not self._fleet.connected:
            raise Unavailable("the message broker is not reachable; try again", code="broker_unavailable")
        if "broker memory" in self._fleet.missing(job.model):
            raise Unavailable("the message broker is short of memory; try again", code="broker_full")
        for role in roles_of(job):
            if self._fleet.away_s(role, job.model) > self._settings.missing_grace:
                raise service_away(NAMES[role])

    def _check_context(self, job: Job) -> None:
        limit = self._fleet.load(job.model).max_seq_len
        if not limit:
            return
        longest = max(len(p.token_ids or ()) for p in job.prompts)
        if longest + (job.params.max_tokens or 0) > limit:
            raise ContextLengthExceeded(
                f"this model's context holds {limit} tokens; at least {longest + (job.params.max_tokens or 0)} were "
                "asked for (prompt and answer)",
                param="max_tokens" if longest <= limit else "prompt",
            )

    def _check_room(self, job: Job) -> None:
        load = self._fleet.load(job.model)
        settings = self._settings
        capacity = self.capacity(job.model)
        inside = self.num_choices + self._fleet.num_open_elsewhere
        if job.purpose != "generate":
            if self.num_asked >= MAX_ASKED:
                raise RateLimited("too much is being tokenized at this server", retry_after_s=1)
        elif inside and inside + job.num_choices > capacity:
            raise self.full("too many requests are waiting for this model", inside + job.num_choices - capacity)
        if load.queued_tokens > settings.max_queued_tokens:
            raise self.full("too many prompt tokens are waiting for this model", max(1, load.waiting // 2))
        if self.num_bytes and self.num_bytes + job.cost_bytes > settings.max_inflight_bytes:
            raise self.full("too much is in flight at this server", 1)


def roles_of(job: Job) -> tuple[Role, ...]:
    """Name the services that a job needs."""
    return WORKERS if job.purpose == "generate" else ("tokenizer",)


def no_such_model(fleet: Fleet, name: str) -> ModelNotFound:
    """Make the refusal of a model that nobody serves; it names some that are."""
    served = sorted(fleet.models)
    more = ", ..." if len(served) > _MAX_NAMED else ""
    there = f"; there is: {', '.join(served[:_MAX_NAMED])}{more}" if served else ""
    return ModelNotFound(f"the model `{name[:256]}` does not exist{there}", param="model")


def service_away(name: str) -> Unavailable:
    """Make the error of a request that lacks a service."""
    return Unavailable(f"no {name} is available for this model; try again", code=f"no_{name}", retry_after_s=5)


def opened_in_vain(fleet: Fleet, role: Role, opened_at: float, model: str, grace_s: float) -> bool:
    """Whether a request was accepted from a service that was dead already, though its lease was not yet over.

    Such a request has nobody who knows of it, so it ends as soon as the grace is over; one that was accepted
    before, or within a beat of the last one heard, waits for the takeover: somebody may have begun with it.
    """
    last = fleet.last_beat(role, model)
    return last != NEVER and opened_at > last + BEAT_S and fleet.away_s(role, model) > grace_s
