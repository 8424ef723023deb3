"""Everybody around a detokenizer, on a real broker: the api that opens and reads, the engine that publishes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.detokenizer.metrics import DetokenizerMetrics
from services.detokenizer.speaker import Speaker
from services.detokenizer.state import Texts
from shared.broker.connection import Broker
from shared.broker.control import beat_and_look
from shared.broker.log_id import LogId, split_log_id
from shared.broker.replies import EndEntry, OpenEntry, TokensEntry, fence, read_inbox, read_log
from shared.broker.streams import Choice, move, open_request, publish_tokens, read_generate
from shared.ids import new_uid, shard_of
from shared.keys import NUM_SHARDS
from shared.messages import (
    Delta,
    FenceHeader,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    LogprobEntry,
    Prompt,
    ReplyHeader,
    Said,
    StepChunk,
    TokenizeRequest,
)
from shared.metrics import Metrics
from shared.sampling import SamplingParams
from shared.vocab import Vocabulary, byte_vocabulary

ENGINE = "engine-1"
REPLICA = "api-1"
MODEL = "bytes"
VOCABULARY = byte_vocabulary()
END_ID = VOCABULARY.eos_ids[0]


def ids_of(text: str) -> list[int]:
    """Encode text in the byte vocabulary."""
    return list(text.encode())


def new_metrics() -> Metrics:
    return Metrics("detokenizer", "detokenizer-t", MODEL, "0")


def new_speaker(broker: Broker, metrics: Metrics | None = None, vocabulary: Vocabulary = VOCABULARY) -> Speaker:
    """Make a speaker on its own, without a service around it."""
    made = DetokenizerMetrics(metrics or new_metrics())
    return Speaker(broker, Texts(vocabulary), made, max_replies=1000, idle_s=60.0)


@dataclass
class Reply:
    """What a log says."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    end: Delta | None = None
    last: LogId = LogId(b"")

    @property
    def said(self) -> int:
        return split_log_id(self.last)[1]


class Stage:
    """Opens replies, fences them, publishes steps, reads logs."""

    def __init__(self, broker: Broker, model: str = MODEL) -> None:
        self.broker = broker
        self.keys = broker.keys
        self.model = model
        self.attempts: dict[str, int] = {}
        self.entries: dict[str, bytes] = {}
        self.fences = 0
        broker.run(beat_and_look(self.keys, "scheduler", ENGINE, Heartbeat(1, ENGINE), ()))

    def open(
        self,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        prompt: Sequence[int] = (65,),
        said: Said | None = None,
        fenced: bool = True,
        uid: str = "",
    ) -> str:
        """Bring a request to where an engine is about to publish its first token."""
        uid = uid or new_uid()
        header = ReplyHeader(REPLICA, list(stop), include_stop, skip_special)
        request = TokenizeRequest([uid], [Prompt(text="x")], 1, [0], SamplingParams(), self.model)
        opened = self.broker.run(open_request(self.keys, request, [Choice(uid, header, said=said)], cap=None))
        assert opened.outcome == "OK"
        generate = GenerateRequest(uid, list(prompt), SamplingParams(max_tokens=10_000))
        assert self.broker.run(move(self.keys, self.model, opened.entry, ENGINE, [generate])) == "OK"
        held = self.broker.run(read_generate(self.keys, ENGINE, count=10_000))
        self.entries[uid] = next(entry.entry_id for entry in held if entry.uid == uid)
        if fenced:
            self.fence(uid, prompt)
        return uid

    def fence(self, uid: str, prompt: Sequence[int] = (65,)) -> int:
        """Let a new attempt speak for a uid; gives its number."""
        self.fences += 1
        entry_id = self.entries[uid]
        header = FenceHeader(ENGINE, entry_id.decode(), len(prompt), list(prompt)[-8:])
        nonce = f"{uid}-{self.fences}"
        fenced = self.broker.run(fence(self.keys, uid, ENGINE, entry_id, nonce, "drain", header, solo=True))
        assert fenced.outcome == "OK"
        self.attempts[uid] = fenced.attempt
        return fenced.attempt

    def chunk(
        self,
        said: Mapping[str, tuple[int, Sequence[int]]],
        *,
        finishes: Mapping[str, FinishReason] | None = None,
        starts: Mapping[str, tuple[int, int]] | None = None,
        logprobs: Mapping[str, list[LogprobEntry]] | None = None,
        attempts: Mapping[str, int] | None = None,
    ) -> StepChunk:
        """Make a step from uid -> (first index, tokens)."""
        uids = list(said)
        place = {uid: i for i, uid in enumerate(uids)}
        counts = [len(ids) for _, ids in said.values()]
        return StepChunk(
            ENGINE,
            1,
            uids,
            [(attempts or {}).get(uid, self.attempts.get(uid, 0)) for uid in uids],
            [first for first, _ in said.values()],
            [token_id for _, ids in said.values() for token_id in ids],
            [] if all(n == 1 for n in counts) else counts,
            {place[uid]: finish for uid, finish in (finishes or {}).items()},
            {place[uid]: start for uid, start in (starts or {}).items()},
            {place[uid]: entries for uid, entries in (logprobs or {}).items()},
        )

    def publish(self, chunk: StepChunk) -> None:
        """Publish a step as an engine does: one entry per shard that has a uid in it."""
        places: dict[int, list[int]] = {}
        for place, uid in enumerate(chunk.uids):
            places.setdefault(shard_of(uid, NUM_SHARDS), []).append(place)
        offsets = [sum(chunk.counts[:place]) for place in range(len(chunk.uids))]
        calls = []
        for shard, mine in places.items():
            tokens: list[int] = []
            for place in mine:
                at, count = (offsets[place], chunk.counts[place]) if chunk.counts else (place, 1)
                tokens += chunk.tokens[at : at + count]
            part = StepChunk(
                chunk.engine,
                chunk.stamp_ns,
                [chunk.uids[p] for p in mine],
                [chunk.attempts[p] for p in mine],
                [chunk.firsts[p] for p in mine],
                tokens,
                [chunk.counts[p] for p in mine] if chunk.counts else [],
                {i: chunk.finishes[p] for i, p in enumerate(mine) if p in chunk.finishes},
                {i: chunk.starts[p] for i, p in enumerate(mine) if p in chunk.starts},
                {i: chunk.logprobs[p] for i, p in enumerate(mine) if p in chunk.logprobs},
            )
            calls.append(publish_tokens(self.keys, self.model, shard, part))
        self.broker.run_many(calls)

    def read(self, uid: str) -> Reply:
        """Read what a log says, and check that its indices follow each other without gap or double."""
        reply = Reply()
        for entry in self.broker.run(read_log(self.keys, uid)):
            reply.last = entry.log_id
            if isinstance(entry, OpenEntry) and entry.said:
                reply.ids += entry.said.token_ids
                reply.text += entry.said.text
            if isinstance(entry, TokensEntry | EndEntry):
                assert not entry.delta.token_ids or entry.delta.first == len(reply.ids) + 1
                reply.ids += entry.delta.token_ids
                reply.text += entry.delta.text
                reply.deltas.append(entry.delta)
                assert split_log_id(entry.log_id)[1] == len(reply.ids)
                assert reply.end is None
            if isinstance(entry, EndEntry):
                reply.end = entry.delta
        return reply

    def rings(self) -> list[tuple[str, LogId, LogId]]:
        """Read the inbox: (uid, prev, id) of everything that rang."""
        rings = self.broker.run(read_inbox(self.keys, REPLICA, count=10_000, block_ms=0)).rings
        return [(ring.uid, ring.prev, ring.log_id) for ring in rings]
