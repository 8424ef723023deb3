"""A replica without HTTP: one request at a time, opened, followed and ended by the rules of the api.

It beats like an api replica, so that engines know whether its client lives. The reply log is the truth; the inbox
rings for what is new in it. Knows nothing of terminals. Protocol: docs/protocol.md, the rules of the api.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from services.api import log_reading
from shared.broker.backoff import Backoff
from shared.broker.connection import Broker
from shared.broker.log_id import NO_LOG, LogId, split_log_id
from shared.broker.replies import delete_logs, end, read_inbox, read_log, trim_inbox
from shared.broker.streams import FIRST, Choice, open_request
from shared.errors import BrokerDown, MillraceError, RateLimited, RequestError, Unavailable
from shared.heart import Heart
from shared.ids import new_incarnation, new_uid
from shared.keys import Role
from shared.messages import Delta, ErrorBody, Heartbeat, Prompt, ReplyHeader, Said, TokenizeRequest, decode
from shared.metrics import Metrics
from shared.sampling import SamplingParams
from shared.settings import ServiceSettings
from shared.version import VERSION

WORKERS: Final[tuple[Role, ...]] = ("tokenizer", "scheduler", "detokenizer")
_QUEUE_CAP: Final = 64
_STRANGER_S: Final = 1.5
"""Services that serve other models only, for so long after the broker answered, will not serve ours later."""
_LOOK_MS: Final = 100
"""A wish to stop is noticed within this time."""
_SILENCE_S: Final = 1.0
_BEGINNING: Final = LogId(FIRST)
_STOPPED: Final = ErrorBody(499, "the answer was stopped", "client_closed", "client_closed")


class AnswerFailed(RequestError):
    """The request ended with an error; its text says why."""


class Replica:
    """One replica of an installation. Used by one thread.

    Args:
        settings: which installation, and which model.
        any_model: take the one model that is served, where there is one, whatever it is called.

    Attributes:
        model: that answers; settled by `start`.
    """

    def __init__(self, settings: ServiceSettings, *, any_model: bool = False) -> None:
        self.model = settings.served_model_name
        self._any_model = any_model
        self._name = settings.instance_name("api").replace("api", "shell", 1)
        self._me = new_incarnation(self._name)
        self._broker = Broker(settings, name=self._name)
        self._num_open = 0
        self._beat = 0
        self._fault: MillraceError | None = None
        self._heart = Heart(
            self._broker,
            "api",
            self._me,
            self._describe,
            Metrics("shell", self._name, self.model, VERSION),
            watch=WORKERS,
            on_fatal=self._on_fatal,
        )

    @property
    def url(self) -> str:
        """Where the broker is, without its secrets."""
        return self._broker.url

    def start(self, timeout_s: float) -> None:
        """Join the installation, and wait until somebody of each service serves the model.

        Raises:
            Unavailable: within that time a service, or the broker, was not there; names it. Also, and soon, when
                there are only other models; names these.
        """
        self._heart.start()
        until = time.monotonic() + timeout_s
        if not self._heart.wait_up(timeout_s):
            raise Unavailable(f"the broker at {self._broker.url} does not answer")
        self._heart.announce()
        stranger_until = time.monotonic() + _STRANGER_S
        while missing := self._missing():
            if time.monotonic() > stranger_until and (others := self._others()):
                raise Unavailable(f"no service here serves `{self.model}`; there is: {', '.join(others)}")
            if time.monotonic() > until:
                raise Unavailable(f"no {missing[0]} serves the model {self.model!r}")
            if self._fault is not None:
                raise self._fault
            time.sleep(_LOOK_MS / 1e3)

    def close(self) -> None:
        """Leave the installation."""
        self._heart.stop(leave=True)
        self._broker.close()

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        wants_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Delta]:
        """Answer a conversation, piece by piece. The last piece has `finish` set, unless the answer was stopped.

        Args:
            messages: OpenAI's, with text content.
            params: how to draw.
            stop: texts that end the answer.
            wants_stop: looked at often; once it says yes the request is ended and its slot given back.

        Raises:
            AnswerFailed: the request ended with an error.
            RateLimited: too many requests wait.
        """
        uid, seed = new_uid(), secrets.randbits(62)
        request = TokenizeRequest(
            uids=[uid],
            prompts=[Prompt(messages=[dict(message) for message in messages])],
            n=1,
            seeds=[seed],
            params=params,
            model=self.model,
            arrival_ms=time.time_ns() // 1_000_000,
        )
        answer = _Following(self._broker, request, ReplyHeader(self._me, list(stop)))
        self._num_open = 1
        try:
            yield from answer.run(wants_stop)
        finally:
            self._num_open = 0
            answer.close()

    def _missing(self) -> list[Role]:
        """Name the services that nobody gives for the model; settle the model first, if any will do."""
        served = {role: self._models(role) for role in WORKERS}
        whole = set.intersection(*served.values())
        if self._any_model and self.model not in whole and len(whole) == 1:
            (self.model,) = whole
        return [role for role, models in served.items() if self.model not in models]

    def _others(self) -> list[str]:
        """Name what is served when nobody at all serves the model."""
        models = set().union(*(self._models(role) for role in WORKERS))
        return [] if self.model in models else sorted(models)

    def _models(self, role: Role) -> set[str]:
        return {beat.model for beat in self._heart.living(role).values() if not beat.draining}

    def _on_fatal(self, error: MillraceError) -> None:
        self._fault = error

    def _describe(self) -> Heartbeat:
        self._beat += 1
        return Heartbeat(self._beat, self._name, VERSION, self.model, num_running=self._num_open)


class _Following:
    """One request, followed to its end."""

    def __init__(self, broker: Broker, request: TokenizeRequest, header: ReplyHeader) -> None:
        self._broker = broker
        self._request = request
        self._header = header
        self._uid = request.uids[0]
        self._last = NO_LOG
        self._over = NO_LOG
        self._attempt = 0
        self._ids: list[int] = []
        self._text: list[str] = []
        self._ended = False
        self._opened = False
        self._position = FIRST

    def run(self, wants_stop: Callable[[], bool]) -> Iterator[Delta]:
        """Open it and give what is said, until it ends or nobody wants it any more."""
        backoff, heard_s = Backoff(), time.monotonic()
        while not self._ended and not wants_stop():
            try:
                if self._last == NO_LOG:
                    self._open()
                    heard_s = time.monotonic()
                rings = self._broker.run(
                    read_inbox(self._broker.keys, self._header.replica, after=self._position, block_ms=_LOOK_MS)
                )
                self._position = rings.position
                mine = [ring for ring in rings.rings if ring.uid == self._uid]
                if mine:
                    heard_s = time.monotonic()
                    # Mostly what rings follows on what was said; the log settles everything else.
                    for _, prev, log_id, blob in mine:
                        if prev == self._last:
                            yield from self._say(log_id, decode(Delta, blob))
                    if split_log_id(mine[-1].log_id) > split_log_id(self._last):
                        yield from self._read()
                elif time.monotonic() - heard_s > _SILENCE_S:
                    heard_s, self._position = time.monotonic(), FIRST
                    yield from self._read()
                backoff.reset()
            except BrokerDown:
                self._position = FIRST
                time.sleep(backoff.next_s())

    def close(self) -> None:
        """End it if it still runs, which frees its slot, and drop its log."""
        if not self._opened:
            return
        keys = self._broker.keys
        try:
            if not self._ended:
                self._broker.run(end(keys, self._uid, Delta(0, [], "", error=_STOPPED)))
            self._broker.run(delete_logs(keys, [self._uid]))
            if self._position != FIRST:
                self._broker.run(trim_inbox(keys, self._header.replica, self._position))
        except BrokerDown:
            return  # its lease, or the life of its log, ends it

    def _open(self) -> None:
        """Queue it; also again, with what was said, after a broker that lost its data."""
        said = Said(self._ids, "".join(self._text)) if self._ids else None
        choice = Choice(self._uid, self._header, self._over, self._attempt, said)
        cap = None if self._opened else _QUEUE_CAP
        opened = self._broker.run(open_request(self._broker.keys, self._request, [choice], cap=cap))
        if opened.outcome == "FULL":
            raise RateLimited("the queue of this model is full; try again later")
        self._opened = True
        # CHANGED: an earlier try of this call went through and its answer was lost; the log tells all.
        self._last = opened.log_ids[0] if opened.outcome == "OK" else _BEGINNING
        self._attempt = max(self._attempt, split_log_id(self._last)[0])

    def _read(self) -> Iterator[Delta]:
        """Say what the log has beyond what was said; one that has lost some of that is opened again over what it has.

        Its tokens are compared, not its ids: after lost data the same ids may stand behind other tokens.
        """
        entries = self._broker.run(read_log(self._broker.keys, self._uid))
        reading = log_reading.read(entries, self._ids)
        self._attempt = max(self._attempt, reading.attempt)
        match reading.verdict:
            case "lost":
                raise AnswerFailed("the message broker lost part of this answer", code="broker_lost_data")
            case "reopen":
                self._last, self._over = NO_LOG, reading.last
            case "continue":
                self._last = reading.last or self._last
                for log_id, delta in reading.fresh:
                    yield from self._say(log_id, delta)

    def _move(self, log_id: LogId) -> None:
        self._last = log_id
        if not self._ended:
            self._attempt = max(self._attempt, split_log_id(log_id)[0])

    def _say(self, log_id: LogId, delta: Delta) -> Iterator[Delta]:
        self._ended = delta.ends
        self._move(log_id)
        if delta.error is not None:
            raise AnswerFailed(delta.error.message, code=delta.error.code)
        self._ids += delta.token_ids
        self._text.append(delta.text)
        yield delta
