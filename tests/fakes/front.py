"""Everything around an engine, in one object: api, tokenizer and detokenizer of a test, on the real scripts.

It opens requests, moves them to an engine, says what the token streams bring into the logs, and shows what
stands in a log. It checks what no client may see: an index out of order, or a word after the end.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.broker import control, replies, streams
from shared.broker.append import Item, Terminal, append
from shared.broker.connection import Broker
from shared.broker.log_id import NO_LOG, LogId, is_end, make_end_id, make_log_id, split_log_id
from shared.broker.replies import EndEntry, FenceEntry, OpenEntry
from shared.broker.streams import FIRST, Choice
from shared.ids import new_uid
from shared.messages import (
    Delta,
    ErrorBody,
    GenerateRequest,
    Heartbeat,
    Prompt,
    ReplyHeader,
    Said,
    StepChunk,
    TokenizeRequest,
    decode,
    encode,
)
from shared.sampling import SamplingParams
from tests.redis_keys import command

REPLICA = "api-test"
SHARDS = 4


@dataclass
class Reply:
    """What stands in the log of one uid."""

    last: LogId
    replica: str = ""
    engine: str = ""
    entry_id: bytes = b""
    attempts: list[int] = field(default_factory=list)
    tries: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: ErrorBody | None = None

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.error is not None


class Front:
    """Opens requests and reads their tokens. One thread uses it."""

    def __init__(self, broker: Broker, model: str = "tiny") -> None:
        self.broker = broker
        self.keys = broker.keys
        self.model = model
        self.chunks: list[StepChunk] = []
        self.refused = 0
        self._positions = dict.fromkeys(range(SHARDS), FIRST)
        self._states: dict[str, Reply] = {}

    # --- api and tokenizer

    def engines(self) -> list[str]:
        found = self.broker.run(control.look(self.keys, "scheduler"))
        return sorted(name for name, beat in found.items() if not decode(Heartbeat, beat).draining)

    def beats(self) -> dict[str, Heartbeat]:
        found = self.broker.run(control.look(self.keys, "scheduler"))
        return {name: decode(Heartbeat, beat) for name, beat in found.items()}

    def open(
        self,
        engine: str | None = None,
        *,
        prompt_ids: Sequence[int] = (1, 2, 3),
        max_tokens: int = 8,
        replica: str = REPLICA,
        resumable_ms: int = 0,
        seed: int = 0,
        temperature: float = 1.0,
        priority: int = 0,
    ) -> str:
        """Open one request, and move it to an engine unless that is None."""
        uid = new_uid()
        params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
        tokenize = TokenizeRequest([uid], [Prompt(token_ids=list(prompt_ids))], 1, [seed], params, self.model)
        header = ReplyHeader(replica=replica, resumable_ms=resumable_ms)
        opened = self.broker.run(
            streams.open_request(self.keys, tokenize, [Choice(uid, header, NO_LOG, 0, None)], cap=None)
        )
        assert opened.outcome == "OK"
        if engine is not None:
            self.move(engine, GenerateRequest(uid, list(prompt_ids), params, priority=priority, arrival_ms=_now_ms()))
        return uid

    def move(self, engine: str, request: GenerateRequest) -> None:
        """Hand the one request that is queued to an engine."""
        (entry,) = self.broker.run(streams.read_queue(self.keys, self.model, "t1", count=1))
        assert self.broker.run(streams.move(self.keys, self.model, entry.entry_id, engine, [request])) == "OK"

    def drop_queue(self) -> None:
        """Lose what is queued for the tokenizers."""
        self.broker.run(command("DEL", self.keys.tokenize(self.model)))

    def end(self, uid: str) -> str:
        """End a request, as a client that hangs up does."""
        error = ErrorBody(499, "gone", "aborted")
        return self.broker.run(replies.end(self.keys, uid, Delta(0, [], "", error=error)))

    def end_without_doorbell(self, uid: str) -> None:
        """End a request, and delete the abort key before any engine can have seen it."""
        blob = encode(Delta(0, [], "", error=ErrorBody(499, "gone", "aborted")))
        said = split_log_id(self.last_ids([uid])[0])[1]
        self.broker.run(command("XADD", self.keys.reply(uid), make_end_id(said), "k", "e", "t", blob))

    def open_again(self, uid: str, engine: str, said: list[int], *, max_tokens: int) -> None:
        """Repair a request, as its api does after the broker lost data: with what the client was told."""
        params = SamplingParams(max_tokens=max_tokens)
        tokenize = TokenizeRequest([uid], [Prompt(token_ids=[1, 2, 3])], 1, [0], params, self.model)
        while True:
            (last,) = self.last_ids([uid])
            choice = Choice(uid, ReplyHeader(REPLICA), last, 0, Said(said, ""))
            if self.broker.run(streams.open_request(self.keys, tokenize, [choice], cap=None)).outcome == "OK":
                break
        self.move(engine, GenerateRequest(uid, [1, 2, 3], params))

    def forget(self, uid: str) -> None:
        """Forget what was known of a uid, as a detokenizer that starts anew."""
        self._states.pop(uid, None)

    def entries(self, engine: str) -> list[str]:
        """Give the uids in an engine's stream."""
        return [uid for _, uid in self.broker.run(streams.list_held(self.keys, engine))]

    # --- detokenizer

    def pump(self, block_ms: int = 20) -> None:
        """Say what has come: append to the logs as a detokenizer does, and delete what is said."""
        found = self.broker.run(
            streams.read_tokens(self.keys, self.model, self._positions, count=64, block_ms=block_ms)
        )
        if not found:
            self._positions = dict.fromkeys(self._positions, FIRST)
        for entry in found:
            self._positions[entry.shard] = entry.entry_id
            chunk = decode(StepChunk, entry.payload)
            self.chunks.append(chunk)
            self._say(chunk)
            self.broker.run(streams.drop_tokens(self.keys, self.model, entry.shard, [entry.entry_id]))

    def unsaid(self) -> list[StepChunk]:
        """Look at what waits in the token streams, without saying it."""
        call = streams.read_tokens(self.keys, self.model, dict.fromkeys(self._positions, FIRST), count=10_000)
        return [decode(StepChunk, entry.payload) for entry in self.broker.run(call)]

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        """Pump until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {what}"
            self.pump()

    def finish(self, *uids: str, timeout_s: float = 30.0) -> list[Reply]:
        """Pump until all of these have ended, and give their logs."""
        self.until(lambda: all(map(is_end, self.last_ids(uids))), f"{len(uids)} ends", timeout_s)
        return [self.reply(uid) for uid in uids]

    def last_ids(self, uids: Sequence[str]) -> list[LogId]:
        return self.broker.run_many([replies.last_id(self.keys, uid) for uid in uids])

    def said(self, *uids: str) -> int:
        """Give the fewest tokens in any of these logs."""
        return min(split_log_id(last)[1] for last in self.last_ids(uids))

    def reply(self, uid: str) -> Reply:
        """Read a log, and check its order."""
        entries = self.broker.run(replies.read_log(self.keys, uid))
        found = Reply(entries[-1].log_id if entries else NO_LOG)
        for entry in entries:
            assert not found.ended, "a word after the end"
            attempt, said = split_log_id(entry.log_id)
            match entry:
                case OpenEntry():
                    found.replica = entry.header.replica
                    found.tokens = list(entry.said.token_ids) if entry.said else []
                case FenceEntry():
                    found.engine, found.entry_id = entry.header.engine, entry.header.entry.encode()
                    found.attempts.append(attempt)
                    found.tries.append(entry.tries)
                case _:
                    found.tokens += entry.delta.token_ids
                    if isinstance(entry, EndEntry):
                        found.finish, found.error = entry.delta.finish, entry.delta.error
            assert said == len(found.tokens), "the log's id does not count its tokens"
        return found

    def _say(self, chunk: StepChunk) -> None:
        at = 0
        for place, uid in enumerate(chunk.uids):
            count = chunk.counts[place] if chunk.counts else 1
            tokens = chunk.tokens[at : at + count]
            at += count
            self._append(uid, chunk.attempts[place], chunk.firsts[place], tokens, chunk, place)

    def _append(self, uid: str, attempt: int, first: int, tokens: list[int], chunk: StepChunk, place: int) -> None:
        state = self._states.get(uid)
        if state is None or split_log_id(state.last)[0] != attempt or first > len(state.tokens) + 1:
            state = self._states[uid] = self.reply(uid)
        if not state.last or state.ended or split_log_id(state.last)[0] != attempt or first > len(state.tokens) + 1:
            self.refused += 1
            return
        new = tokens[len(state.tokens) + 1 - first :]
        finish = chunk.finishes.get(place)
        if not new and finish is None:
            return
        said = len(state.tokens) + len(new)
        delta = Delta(len(state.tokens) + 1, new, "", finish=finish)
        log_id = make_end_id(said) if finish else make_log_id(attempt, said)
        terminal = Terminal(state.engine, state.entry_id, 60_000) if finish else None
        item = Item(uid, state.last, log_id, encode(delta), state.replica, terminal)
        (last,) = self.broker.run(append(self.keys, [item]))
        if last != log_id:
            self.refused += 1
            del self._states[uid]
        else:
            state.last, state.finish = log_id, finish
            state.tokens += new


class FrontThread:
    """Pumps a front of its own while a test does something else."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def __enter__(self) -> "FrontThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._front.pump()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
