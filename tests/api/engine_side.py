"""The other side of the broker for tests of the api: tokenizer, engine and detokenizer in one scripted thread.

It speaks through the real calls and scripts (queue, move, fence, append, end), so the api under test meets the
real protocol. What is said to a request is decided by a script; `pause` holds everything back.
"""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shared.broker import streams
from shared.broker.append import Item, Terminal, append
from shared.broker.connection import Broker
from shared.broker.control import beat_and_look, look
from shared.broker.log_id import LogId, make_end_id, make_log_id
from shared.broker.replies import Fenced, OpenEntry, audit, end, fence, read_log
from shared.dialect import Dialect
from shared.errors import BrokerDown
from shared.keys import Role
from shared.messages import (
    Delta,
    ErrorBody,
    FenceHeader,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    LogprobEntry,
    Prompt,
    TokenizeRequest,
    decode,
    encode,
)
from shared.settings import RedisSettings
from tests.waiting import eventually

MODEL = "tiny/model-1"
TOO_LONG = ErrorBody(400, "too long", "invalid_request_error", "context_length_exceeded", "messages")


@dataclass
class Answer:
    """What a request is told: pieces of text (one token each), then a finish or an error."""

    pieces: list[str]
    finish: FinishReason | None = "length"
    error: ErrorBody | None = None
    logprobs: bool = False
    prompt: tuple[LogprobEntry, ...] = ()


Script = Callable[[GenerateRequest], Answer]


def words(request: GenerateRequest) -> Answer:
    """Say ` w1 w2 ...` up to the limit."""
    count = 8 if request.params.max_tokens is None else request.params.max_tokens
    logprobs = request.params.logprobs is not None
    return Answer([f" w{i}" for i in range(1, count + 1)], logprobs=logprobs)


@dataclass
class Running:
    request: GenerateRequest
    answer: Answer
    replica: str
    entry: bytes
    attempt: int
    last: LogId
    said: int = 0
    started: bool = False


class EngineSide:
    """Runs in a thread between `start` and `stop`."""

    def __init__(self, settings: RedisSettings, *, model: str = MODEL, max_running: int = 64) -> None:
        self.broker_settings = settings
        self.broker = Broker(settings, name="engine-side")
        self.model = model
        self.name = f"engine-{secrets.token_hex(4)}"
        self.max_running = max_running
        self.script: Script = words
        self.dialect: Dialect | None = Dialect("hermes")
        self.reject: Callable[[TokenizeRequest], ErrorBody | None] = lambda request: None
        self.tell: Callable[[TokenizeRequest], Delta | None] = lambda request: None
        self.queued: list[TokenizeRequest] = []
        self.running: dict[str, Running] = {}
        self.ended: dict[str, str] = {}
        self.roles: set[Role] = {"tokenizer", "scheduler", "detokenizer"}
        self.go = threading.Event()
        self.go.set()
        self.reading = threading.Event()
        self.reading.set()
        self.steps = 0
        self.step_limit: int | None = None
        self.tick_s = 0.002
        self.failure: BaseException | None = None
        self._beat = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._guard, args=(f,)) for f in (self._beats, self._work)]

    def start(self) -> "EngineSide":
        for thread in self._threads:
            thread.start()
        return self

    def reset(self) -> None:
        """Be as new for the next test."""
        self.script, self.reject, self.tell = words, lambda request: None, lambda request: None
        self.step_limit, self.tick_s = None, 0.002
        self.queued.clear()
        self.ended.clear()
        self.reading.set()
        self.release()

    def hold(self) -> None:
        """Say nothing from now on."""
        self.go.clear()

    def step_once(self) -> None:
        """While held: say one piece to everybody who runs."""
        before = self.steps
        self.step_limit = before + 1
        self.go.set()
        eventually(lambda: self.steps > before, "a step was made")
        self.go.clear()
        self.step_limit = None

    def replicas(self) -> list[str]:
        """Name the api replicas of the registry."""
        return sorted(self.broker.run(look(self.broker.keys, "api")))

    def fence_again(self) -> None:
        """While held: become a new attempt of everything that runs, as another engine would."""
        for uid, running in self.running.items():
            fenced = self._fence(uid, running.entry, running.request)
            running.attempt, running.last = fenced.attempt, make_log_id(fenced.attempt, fenced.said)

    def forget(self) -> None:
        """While held: lose everything that runs, its entries too."""
        for running in self.running.values():
            self.broker.run(streams.drop_generate(self.broker.keys, self.name, [running.entry]))
        self.running.clear()

    def say_past_the_inbox(self) -> None:
        """While held: say the rest of everything to an inbox that nobody reads."""
        for running in self.running.values():
            running.replica = "nobody"
        self.release()

    def wait_for_beats(self, count: int = 3) -> None:
        """Wait until so many rounds of heartbeats are over."""
        before = self._beat
        eventually(lambda: self._beat >= before + count, "heartbeats")

    def release(self) -> None:
        """Go on by itself."""
        self.go.set()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.broker.close()
        if self.failure is not None:
            raise self.failure

    def _guard(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                work()
            except BrokerDown:
                self._stop.wait(0.05)
            except BaseException as e:
                self.failure = e
                return

    def _beats(self) -> None:
        while not self._stop.wait(0.1):
            self._beat += 1
            for role in list(self.roles):
                beat = Heartbeat(self._beat, f"{role}-0", model=self.model, max_running=self.max_running,
                                 max_seq_len=1_000_000, num_running=len(self.running),
                                 dialect=self.dialect if role == "tokenizer" else None)  # fmt: skip
                self.broker.run(beat_and_look(self.broker.keys, role, self.name, beat, (role,)))

    def _work(self) -> None:
        while not self._stop.wait(self.tick_s):
            if self.reading.is_set() and "scheduler" in self.roles:
                self._tokenize()
                self._admit()
            if self.go.is_set() and (self.step_limit is None or self.steps < self.step_limit):
                self._step()

    def _tokenize(self) -> None:
        keys = self.broker.keys
        for entry in self.broker.run(streams.read_queue(keys, self.model, self.name, count=64)):
            request = decode(TokenizeRequest, entry.payload)
            self.queued.append(request)
            refusal, told = self.reject(request), self.tell(request)
            if refusal is not None or told is not None:
                for uid in request.uids:
                    self.broker.run(end(keys, uid, told or Delta(0, [], "", error=refusal)))
                self.broker.run(streams.discard(keys, self.model, entry.entry_id))
                continue
            ready = [
                GenerateRequest(uid, prompt_ids(request.prompts[i // request.n]), request.params)
                for i, uid in enumerate(request.uids)
            ]
            self.broker.run(streams.move(keys, self.model, entry.entry_id, self.name, ready))

    def _admit(self) -> None:
        keys = self.broker.keys
        for entry in self.broker.run(streams.read_generate(keys, self.name, count=1000)):
            if entry.uid in self.running:
                continue
            request = decode(GenerateRequest, entry.payload)
            fenced = self._fence(entry.uid, entry.entry_id, request)
            if fenced.outcome != "OK":
                self.ended[entry.uid] = fenced.outcome
                continue
            last = make_log_id(fenced.attempt, fenced.said)
            log = self.broker.run(read_log(keys, entry.uid, count=1))
            if not log:  # its client has left since, and the api removed it
                self.ended[entry.uid] = "refused"
                self.broker.run(streams.drop_generate(keys, self.name, [entry.entry_id]))
                continue
            head = log[0]
            assert isinstance(head, OpenEntry)
            running = Running(
                request, self.script(request), head.header.replica, entry.entry_id, fenced.attempt, last, fenced.said
            )
            self.running[entry.uid] = running

    def _fence(self, uid: str, entry_id: bytes, request: GenerateRequest) -> Fenced:
        header = FenceHeader(self.name, entry_id.decode(), len(request.prompt_ids))
        nonce = secrets.token_hex(4)
        return self.broker.run(fence(self.broker.keys, uid, self.name, entry_id, nonce, "new", header, solo=True))

    def _step(self) -> None:
        items: list[Item] = []
        for uid, running in self.running.items():
            if len(items) < 100:
                items.append(self._item(uid, running))
        if not items:
            return
        self.steps += 1
        for item, last in zip(items, self.broker.run(append(self.broker.keys, items)), strict=True):
            running = self.running[item.uid]
            if last != item.log_id:
                self.ended[item.uid] = "refused"
                self.broker.run(streams.drop_generate(self.broker.keys, self.name, [running.entry]))
                del self.running[item.uid]
            elif item.terminal is not None:
                self.ended[item.uid] = "said"
                del self.running[item.uid]
            else:
                running.last, running.started = last, True
                running.said += len(decode(Delta, item.blob).token_ids)
        self.broker.run(audit(self.broker.keys, list(self.running) or ["nobody"]))

    def _item(self, uid: str, running: Running) -> Item:
        answer, said = running.answer, running.said
        final = said + 1 >= len(answer.pieces)
        ids = [said + 1] if said < len(answer.pieces) else []
        text = answer.pieces[said] if ids else ""
        prompt = len(running.request.prompt_ids)
        logprobs = []
        if answer.logprobs and ids:
            top = running.request.params.logprobs or 0
            token = text.encode()
            tops = [(100 + i, -0.5 - i, b"t%d" % i) for i in range(top)]
            logprobs = [LogprobEntry(ids[0], -0.5, token, tops)]
        delta = Delta(
            said + 1,
            ids,
            text,
            logprobs,
            finish=answer.finish if final and answer.error is None else None,
            error=answer.error if final else None,
            prompt_tokens=0 if running.started else prompt,
            cached_tokens=0 if running.started else min(2, prompt),
            prompt=[] if said else list(answer.prompt),
        )
        if delta.ends:
            log_id = make_end_id(said + len(ids))
            terminal = Terminal(self.name, running.entry, 60_000)
            return Item(uid, running.last, log_id, encode(delta), running.replica, terminal)
        return Item(uid, running.last, make_log_id(running.attempt, said + 1), encode(delta), running.replica)


def prompt_ids(prompt: Prompt) -> list[int]:
    """Make one token per word, so that tests can count."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    text = prompt.text if prompt.text is not None else " ".join(m["content"] for m in prompt.messages or [])
    return [7] * max(1, len(text.split()))
