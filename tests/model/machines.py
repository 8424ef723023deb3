"""The services of the protocol model that clients, queue and text belong to: api, tokenizer, detokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from shared.broker import control, replies, streams
from shared.broker.append import Flushes, Item, Terminal
from shared.broker.call import Call
from shared.broker.control import Observer
from shared.broker.log_id import NO_LOG, LogId, is_end, make_end_id, make_log_id, split_log_id
from shared.broker.replies import EndEntry, FenceEntry, OpenEntry, TokensEntry
from shared.broker.streams import Choice
from shared.ids import shard_of
from shared.keys import Role
from shared.messages import (
    Delta,
    ErrorBody,
    FenceHeader,
    FinishReason,
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
from tests.model.world import (
    LEASES,
    LOOK_S,
    MODEL,
    NUM_SHARDS,
    SAMPLES,
    Client,
    Violation,
    World,
    context,
    is_stop,
    text_of,
)

LOST_DATA = "broker_lost_data"
MAX_CLIENTS = 10
NOBODY_AFTER = 30
"""Sweeps without news after which an api asks whether anybody holds the request."""


def fault(code: str) -> Delta:
    """Make an error terminal."""
    return Delta(0, [], "", error=ErrorBody(500, code, "server_error", code))


class Machine:
    """One instance of a service: it does one random action per turn, beats, and watches who lives."""

    role: ClassVar[Role]
    actions: ClassVar[tuple[str, ...]]

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys = world.keys
        self.id = world.name(f"{self.role}-")
        self.paused = 0
        self._restarts = world.restarts
        self._now_s = 0.0
        self._beats = 0
        self.observer = Observer(self.id, leases=LEASES, interval_s=LOOK_S, clock=lambda: self._now_s)
        self.world.broker.run(self._beat_call())

    def act(self) -> None:
        """Do one action; after a lost connection, what it asks for first."""
        if self._restarts != self.world.restarts:
            self._restarts = self.world.restarts
            self.observer.lost()
            self.lost_connection()
        action: Callable[[], None] = getattr(self, self.world.rng.choice(self.actions))
        action()

    def beat(self) -> None:
        """Beat and look; time passes for this observer."""
        self._now_s += LOOK_S
        self.observer.note(self.world.run(self._beat_call()))

    def _beat_call(self) -> Call[control.Look]:
        self._beats += 1
        heartbeat = Heartbeat(self._beats, self.id)
        return control.beat_and_look(self.keys, self.role, self.id, heartbeat, ("api", "tokenizer", "scheduler"))

    def died(self) -> None:
        """Leave behind what a dead process leaves."""

    def lost_connection(self) -> None:
        """Doubt what was read before."""


class Api(Machine):
    """Opens requests, says what comes back, and alone repairs what was lost."""

    role: ClassVar[Role] = "api"
    actions = ("beat", "beat", "open", "inbox", "inbox", "inbox", "sweep", "leave")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.position = streams.FIRST
        self.open_clients: dict[str, Client] = {}

    def died(self) -> None:
        for client in self.open_clients.values():
            client.gone = True

    def lost_connection(self) -> None:
        self.position = streams.FIRST

    def open(self) -> None:
        world = self.world
        if world.calm or len(world.clients) >= MAX_CLIENTS:
            return
        clients = [Client(world.name("u"), world.rng.randrange(1, 9)) for _ in range(world.rng.randrange(1, 3))]
        for client in clients:
            world.clients[client.key] = self.open_clients[client.key] = client
            if world.with_poison and world.rng.random() < 0.25:
                world.poison.add(client.uid)
        self._open(clients)

    def _open(self, clients: list[Client]) -> None:
        """Open new requests, or one that is repaired; whatever it finds instead is read."""
        request = TokenizeRequest(
            uids=[c.uid for c in clients],
            prompts=[Prompt(text="")],
            n=len(clients),
            seeds=[c.length for c in clients],  # the model's engine is told the length by the seed
            params=SamplingParams(),
            model=MODEL,
        )
        choices = [
            Choice(c.uid, self.header(), c.last, c.seen, Said(c.token_ids, c.text) if c.token_ids else None)
            for c in clients
        ]
        opened = self.world.run(streams.open_request(self.keys, request, choices, cap=None))
        if opened.outcome == "CHANGED":  # the first answer was lost
            for client in clients:
                self.read(client)
            return
        for client, log_id in zip(clients, opened.log_ids, strict=True):
            client.entry, client.last, client.seen, client.idle = opened.entry, log_id, split_log_id(log_id)[0], 0

    def inbox(self) -> None:
        answer = self.world.run(replies.read_inbox(self.keys, self.id, after=self.position, count=2, block_ms=0))
        if not answer.rings and self.world.rng.random() < 0.1:
            self.position = streams.FIRST  # a second of silence
            return
        self.position = answer.position
        for ring in answer.rings:
            client = self.open_clients.get(ring.uid)
            if client is None:
                self.stranger(ring.uid)
            elif ring.prev == client.last:
                self.say(client, ring.log_id, decode(Delta, ring.blob))
            elif split_log_id(ring.log_id) > split_log_id(client.last):
                self.read(client)

    def header(self) -> ReplyHeader:
        """Write the head of a log."""
        return ReplyHeader(self.id)

    def stranger(self, uid: str) -> None:
        """End what was finished here, and yet somebody works on: lost data has revived it."""
        self.end(uid)
        self.forget_log(uid)

    def forget_log(self, uid: str) -> None:
        """Delete a log that nobody reads any more."""
        self.world.run(replies.delete_logs(self.keys, [uid]))

    def say(self, client: Client, log_id: LogId, delta: Delta) -> None:
        """Tell the client; here the promise is checked."""
        client.idle = 0
        if client.end is not None:
            raise Violation(f"{client.uid}: something after its terminal")
        if delta.token_ids and delta.first != len(client.token_ids) + 1:
            raise Violation(f"{client.uid}: index {delta.first} after {len(client.token_ids)} tokens")
        for token in delta.token_ids:
            if token // SAMPLES != context(client.token_ids):
                raise Violation(f"{client.uid}: spliced at {len(client.token_ids) + 1}")
            client.token_ids.append(token)
        client.text += delta.text
        client.last = log_id
        if not is_end(log_id):
            client.seen = max(client.seen, split_log_id(log_id)[0])
        if delta.ends:
            self._finish(client, delta, split_log_id(log_id)[1])

    def _finish(self, client: Client, delta: Delta, said: int) -> None:
        client.end = delta.finish or (delta.error.message if delta.error else "")
        self.open_clients.pop(client.key, None)
        if delta.finish is not None:
            if client.text != text_of(client.token_ids) or said != len(client.token_ids):
                raise Violation(f"{client.uid}: text or usage is not that of its tokens")
            if delta.finish == "length" and said != client.length:
                raise Violation(f"{client.uid}: {said} tokens of {client.length}")
        self.forget_log(client.uid)

    def read(self, client: Client) -> None:
        """Go on from the log if it begins with what was said; else open it again with that."""
        entries = self.world.run(replies.read_log(self.keys, client.uid))
        if not entries:
            return self.repair(client, NO_LOG)
        logged: list[int] = []
        for entry in entries:
            match entry:
                case OpenEntry():
                    client.entry = entry.tokenize_id
                    logged += entry.said.token_ids if entry.said else []
                case TokensEntry() | EndEntry():
                    logged += entry.delta.token_ids
        end = entries[-1] if isinstance(entries[-1], EndEntry) else None
        if logged[: len(client.token_ids)] != client.token_ids:
            if end is None:
                return self.repair(client, entries[-1].log_id)
            self.world.events["diverged"] += 1
            client.end = LOST_DATA if end.delta.finish or not end.delta.error else end.delta.error.message
            self.open_clients.pop(client.key, None)
            self.forget_log(client.uid)
            return None
        self._catch_up(client, entries)
        return None

    def _catch_up(self, client: Client, entries: list[replies.LogEntry]) -> None:
        at = 0
        for entry in entries:
            match entry:
                case TokensEntry() | EndEntry():
                    before, at = at, at + len(entry.delta.token_ids)
                    if at <= len(client.token_ids) and isinstance(entry, TokensEntry):
                        client.last = entry.log_id
                    elif before != len(client.token_ids) and entry.delta.token_ids:
                        return self.repair(client, entries[-1].log_id)  # it straddles what was said
                    else:
                        self.say(client, entry.log_id, entry.delta)
                        if client.end is not None:
                            return None
                case OpenEntry(said=Said() as said):
                    at = len(said.token_ids)
                    if at > len(client.token_ids):  # others who read it were told more
                        first = len(client.token_ids)
                        rest = Delta(first + 1, said.token_ids[first:], said.text[len(client.text) :])
                        self.say(client, entry.log_id, rest)
                    client.last = entry.log_id
                case _:
                    client.last = entry.log_id
            client.seen = max(client.seen, split_log_id(client.last)[0])
        return None

    def repair(self, client: Client, expect: LogId) -> None:
        """Open again with what the client was told."""
        client.reopens += 1
        self.world.events["opened again"] += 1
        if client.reopens > 40:
            raise Violation(f"{client.uid}: opened again without end")
        client.last = expect
        self._open([client])

    def sweep(self) -> None:
        if not self.open_clients:
            return
        client = self.open_clients[self.world.rng.choice(sorted(self.open_clients))]
        client.idle += 1
        if client.idle < 3:
            return
        if client.idle < NOBODY_AFTER or not self.world.forgetful:
            last = self.world.run(replies.last_id(self.keys, client.uid))
            if last == NO_LOG:
                self.repair(client, NO_LOG)
            elif last != client.last:
                self.read(client)
            return
        ((last, held),) = self.world.run(replies.sweep(self.keys, [client.uid]))
        if held:
            client.idle = 3
        elif last == client.last and self.observer.living("scheduler") and not self._is_queued(client):
            self.world.events["nobody held it"] += 1
            self.repair(client, last)
        else:
            client.idle = 3

    def _is_queued(self, client: Client) -> bool:
        return bool(client.entry) and self.world.run(streams.is_queued(self.keys, MODEL, client.entry))

    def leave(self) -> None:
        """A client disconnects."""
        if self.world.calm or not self.open_clients or self.world.rng.random() > 0.06:
            return
        client = self.open_clients.pop(self.world.rng.choice(sorted(self.open_clients)))
        client.left = True
        self.end(client.uid)
        self.forget_log(client.uid)

    def end(self, uid: str) -> None:
        self.world.run(replies.end(self.keys, uid, fault("abort")))


class Tokenizer(Machine):
    """Moves requests to engines."""

    role: ClassVar[Role] = "tokenizer"
    actions = ("beat", "read", "read", "claim")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.job: streams.QueueEntry | None = None
        self.lost_sight = True

    def lost_connection(self) -> None:
        self.lost_sight = True

    def read(self) -> None:
        if self.job is not None:
            return self._work(self.job)
        if self.lost_sight:
            found = self.world.run(streams.read_own(self.keys, MODEL, self.id, count=1))
            self.lost_sight = bool(found)
        else:
            found = self.world.broker.run(streams.read_queue(self.keys, MODEL, self.id, count=1))
            if self.world.chance(0.03):  # the answer is lost: the entry is pending, and this consumer lives on
                self.lost_sight = True
                return None
        if found:
            self.job = found[0]
        return None

    def claim(self) -> None:
        dead, known = self.observer.dead("tokenizer"), self.observer.standings("tokenizer")
        for consumer in self.world.run(streams.list_consumers(self.keys, MODEL)) if self.job is None else ():
            if consumer in dead or consumer not in known:
                self.job = self.world.broker.run(streams.claim_one(self.keys, MODEL, consumer, self.id))
                if self.job is not None:
                    if self.world.chance(0.03):  # the answer is lost here too
                        self.job, self.lost_sight = None, True
                    return
                self.world.run(streams.forget_consumer(self.keys, MODEL, consumer))
        for incarnation, beat in dead.items():
            self.world.run(control.retire(self.keys, "tokenizer", incarnation, beat))

    def _work(self, job: streams.QueueEntry) -> None:
        engines = sorted(self.world.run(control.look(self.keys, "scheduler")))
        if not engines:
            self.job, self.lost_sight = None, True
            return
        engine = self.world.rng.choice(engines)
        request = decode(TokenizeRequest, job.payload)
        ready = [
            GenerateRequest(uid, [1], SamplingParams(max_tokens=length))
            for uid, length in zip(request.uids, request.seeds, strict=True)
        ]
        if self.world.run(streams.move(self.keys, MODEL, job.entry_id, engine, ready)) != "NOENGINE":
            self.job = None


@dataclass
class _Text:
    """What a detokenizer knows of one uid, all of it from its log."""

    last: LogId
    token_ids: list[int]
    said_len: int
    replica: str
    fence: FenceHeader | None
    chain: int = 0


@dataclass
class _Row:
    """Tokens of one uid in what was read."""

    uid: str
    attempt: int
    first: int
    token_ids: list[int]
    finish: FinishReason | None


@dataclass
class _Flush:
    entries: dict[int, list[bytes]]
    rows: list[_Row] = field(default_factory=list)


class Detokenizer(Machine):
    """Says tokens to logs; its memory is only a copy of them."""

    role: ClassVar[Role] = "detokenizer"
    actions = ("beat", "read", "read", "read", "read", "join")

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.positions = dict.fromkeys(range(NUM_SHARDS), streams.FIRST)
        self.texts: dict[str, _Text] = {}
        self.flushes = Flushes(self.keys)
        self.owner = True
        self.flush: _Flush | None = None

    def lost_connection(self) -> None:
        self.positions = dict.fromkeys(range(NUM_SHARDS), streams.FIRST)

    def join(self) -> None:
        """Views of who owns a shard differ for a while: both owners work, or none."""
        self.owner = self.world.calm or self.world.rng.random() < 0.7

    def read(self) -> None:
        if not self.owner:
            return
        if self.flush is None:
            self._next_flush()
        elif self.flush.rows:
            self.flush.rows = self._say(self.flush.rows)
        else:
            for shard, ids in self.flush.entries.items():
                self.world.run(streams.drop_tokens(self.keys, MODEL, shard, ids))
            self.flush = None

    def _next_flush(self) -> None:
        count = self.world.rng.randrange(1, 4)
        found = self.world.run(streams.read_tokens(self.keys, MODEL, self.positions, count=count))
        if not found:
            self.positions = dict.fromkeys(range(NUM_SHARDS), streams.FIRST)  # a second of silence
            return
        self.flush = _Flush({})
        latest: dict[str, _Row] = {}
        for entry in found:
            self.positions[entry.shard] = entry.entry_id
            self.flush.entries.setdefault(entry.shard, []).append(entry.entry_id)
            for row in _rows(decode(StepChunk, entry.payload)):
                before = latest.get(row.uid)
                follows = before is not None and before.attempt == row.attempt and before.finish is None
                if before is not None and follows and row.first == before.first + len(before.token_ids):
                    before.token_ids += row.token_ids
                    before.finish = row.finish
                else:
                    latest[row.uid] = row
                    self.flush.rows.append(row)

    def _say(self, rows: list[_Row]) -> list[_Row]:
        """One item per uid in one call; give what is left to do."""
        items: dict[str, tuple[_Row, _Text, Item]] = {}
        left: list[_Row] = []
        for row in rows:
            if row.uid in items:
                left.append(row)
                continue
            text = self.texts.get(row.uid)
            if text is None or row.attempt != split_log_id(text.last)[0] or row.first > len(text.token_ids) + 1:
                text = self._rebuild(row.uid)
            if text is None or row.attempt != split_log_id(text.last)[0]:
                continue  # gone, ended or fenced
            if row.first > len(text.token_ids) + 1:
                self.world.events["gap"] += 1  # data was lost: engine and api repair it
                continue
            new = row.token_ids[len(text.token_ids) + 1 - row.first :]
            if new or row.finish:
                items[row.uid] = (row, text, self._item(row, text, new))
        if not items:
            return left
        chain = self.flushes.chain
        answers = self.world.run(self.flushes.append([item for _, _, item in items.values()]))
        for (row, text, item), answer in zip(items.values(), answers, strict=True):
            if answer != item.log_id:
                self.texts.pop(row.uid, None)  # any other answer: forget, rebuild, look again
                left.insert(0, row)
            elif item.terminal is not None:
                self.texts.pop(row.uid, None)
            else:
                delta = decode(Delta, item.blob)
                text.token_ids += delta.token_ids
                text.last, text.said_len = item.log_id, text.said_len + len(delta.text)
                text.chain = chain
        return left

    def _item(self, row: _Row, text: _Text, new: list[int]) -> Item:
        finish = row.finish
        for place, token in enumerate(new):
            if is_stop(token):
                new, finish = new[: place + 1], "stop"
                break
        token_ids = text.token_ids + new
        full = text_of(token_ids)
        held = 0 if finish or not token_ids or token_ids[-1] % 2 == 0 else len(text_of(token_ids[-1:]))
        shown = full[text.said_len : max(text.said_len, len(full) - held)]
        delta = Delta(len(text.token_ids) + 1, new, shown, finish=finish)
        if not finish:
            log_id = make_log_id(row.attempt, len(token_ids))
            return Item(row.uid, text.last, log_id, encode(delta), text.replica, None, text.chain)
        assert text.fence is not None
        terminal = Terminal(text.fence.engine, text.fence.entry.encode(), 60_000)
        return Item(row.uid, text.last, make_end_id(len(token_ids)), encode(delta), text.replica, terminal)

    def _rebuild(self, uid: str) -> _Text | None:
        self.texts.pop(uid, None)
        entries = self.world.run(replies.read_log(self.keys, uid))
        if not entries or isinstance(entries[-1], EndEntry):
            return None
        text = _Text(entries[-1].log_id, [], 0, "", None)
        for entry in entries:
            match entry:
                case OpenEntry():
                    text.replica = entry.header.replica
                    if entry.said:
                        text.token_ids, text.said_len = list(entry.said.token_ids), len(entry.said.text)
                case FenceEntry():
                    text.fence = entry.header
                case TokensEntry():
                    text.token_ids += entry.delta.token_ids
                    text.said_len += len(entry.delta.text)
        if len(text.token_ids) != split_log_id(text.last)[1]:
            return None
        self.texts[uid] = text
        return text


def _rows(chunk: StepChunk) -> list[_Row]:
    counts = chunk.counts or [1] * len(chunk.uids)
    found, at = [], 0
    for place, uid in enumerate(chunk.uids):
        token_ids = chunk.tokens[at : at + counts[place]]
        at += counts[place]
        found.append(_Row(uid, chunk.attempts[place], chunk.firsts[place], token_ids, chunk.finishes.get(place)))
    return found


def shard_for(uid: str) -> int:
    """Give the shard of a uid."""
    return shard_of(uid, NUM_SHARDS)
