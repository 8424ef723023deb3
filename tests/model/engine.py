"""The engine of the protocol model: fences, samples tokens, audits, takes over, drains."""

from dataclasses import dataclass
from typing import ClassVar

from shared.broker import control, replies, streams
from shared.broker.log_id import NO_LOG, is_end, split_log_id
from shared.broker.replies import EndEntry, OpenEntry, TokensEntry
from shared.broker.streams import Why
from shared.keys import Role
from shared.messages import FenceHeader, FinishReason, GenerateRequest, StepChunk, decode
from tests.model.machines import Machine, fault, shard_for
from tests.model.world import MODEL, Crash, World, draw_token


@dataclass
class _Waiting:
    uid: str
    why: Why
    length: int


@dataclass
class _Running:
    """A fenced request. `base` tokens were in its log at the fence, `logged` are known to be there now."""

    uid: str
    entry: bytes
    attempt: int
    token_ids: list[int]
    base: int
    logged: int
    sent: int
    launches: int
    length: int
    replica: str
    finished: bool = False
    restarting: bool = False
    sent_entry: bytes = b""


@dataclass
class _Output:
    uid: str
    attempt: int
    first: int
    token_ids: list[int]
    finish: FinishReason | None


class Engine(Machine):
    """Computes. Its memory is worth nothing without the entries in its stream and the logs."""

    role: ClassVar[Role] = "scheduler"
    actions = (
        *("beat", "beat", "read", "read", "admit", "admit", "step", "step", "step"),
        *("flush", "flush", "flush", "abort", "audit", "reap", "orphans"),
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.waiting: dict[bytes, _Waiting] = {}
        self.running: dict[str, _Running] = {}
        self.output: list[_Output] = []

    def read(self) -> None:
        held = {request.entry for request in self.running.values()}
        for entry in self.world.run(streams.read_generate(self.keys, self.id)):
            if entry.entry_id not in self.waiting and entry.entry_id not in held:
                request = decode(GenerateRequest, entry.payload)
                self.waiting[entry.entry_id] = _Waiting(entry.uid, entry.why, request.params.max_tokens or 0)

    def admit(self) -> None:
        if not self.waiting:
            return
        entry_id = self.world.rng.choice(sorted(self.waiting))
        waiting = self.waiting[entry_id]
        uid, known = waiting.uid, self.running.get(waiting.uid)
        unproven = [r for r in self.running.values() if not r.finished and (r.logged <= r.base)]
        if any(r.launches > 1 for r in unproven):
            return  # a suspect is in its first launch: nobody joins
        if known is not None and not known.restarting:
            if known.entry != entry_id:
                del self.waiting[entry_id]
                self.drop_entry(entry_id)
            return
        header = FenceHeader(self.id, entry_id.decode(), 1)
        nonce = self.world.name("nonce")
        fenced = self.world.run(
            replies.fence(self.keys, uid, self.id, entry_id, nonce, waiting.why, header, solo=not unproven)
        )
        self.world.events[f"fence {fenced.outcome}"] += 1
        if fenced.outcome == "SUSPECT":
            return
        if fenced.outcome == "POISON":
            self.world.run(replies.end(self.keys, uid, fault("poison")))
            self.drop_entry(entry_id)
        del self.waiting[entry_id]
        self.running.pop(uid, None)
        if fenced.outcome == "OK":
            self._replay(entry_id, waiting, fenced)

    def _replay(self, entry_id: bytes, waiting: _Waiting, fenced: replies.Fenced) -> None:
        token_ids: list[int] = []
        replica = ""
        for entry in self.world.run(replies.read_log(self.keys, waiting.uid)):
            match entry:
                case OpenEntry():
                    replica = "" if entry.header.resumable_ms else entry.header.replica
                    token_ids = list(entry.said.token_ids) if entry.said else []
                case TokensEntry() | EndEntry():
                    token_ids += entry.delta.token_ids
        if len(token_ids) < fenced.said:  # only lost data makes a log shorter: leave it to its api
            self.drop_entry(entry_id)
            return
        said = fenced.said
        self.running[waiting.uid] = _Running(
            waiting.uid,
            entry_id,
            fenced.attempt,
            token_ids[:said],
            base=said,
            logged=said,
            sent=said,
            launches=fenced.launches,
            length=waiting.length,
            replica=replica,
        )

    def step(self) -> None:
        for uid, request in sorted(self.running.items()):
            if request.finished or request.restarting:
                continue
            if uid in self.world.poison:
                self.world.launches[uid] += 1
                raise Crash
            first = len(request.token_ids) + 1
            new = [draw_token(request.token_ids, self.world.rng)] if first <= request.length else []
            request.token_ids += new
            request.finished = len(request.token_ids) >= request.length
            finish: FinishReason | None = "length" if request.finished else None
            self.output.append(_Output(uid, request.attempt, first, new, finish))

    def flush(self) -> None:
        """Publish what some steps have produced, in order."""
        count = 4 * self.world.rng.randrange(1, 3)
        while self.output and count > 0:
            shard = shard_for(self.output[0].uid)
            batch = [o for o in self.output[:count] if shard_for(o.uid) == shard]
            chunk = StepChunk(
                self.id,
                0,
                [o.uid for o in batch],
                [o.attempt for o in batch],
                [o.first for o in batch],
                [token for o in batch for token in o.token_ids],
                [len(o.token_ids) for o in batch],
                {place: o.finish for place, o in enumerate(batch) if o.finish},
            )
            entry = self.world.run(streams.publish_tokens(self.keys, MODEL, shard, chunk))
            self.output = [o for o in self.output if o not in batch]
            count -= len(batch)
            for o in batch:
                request = self.running.get(o.uid)
                if request is not None and request.attempt == o.attempt:
                    request.sent, request.sent_entry = o.first + len(o.token_ids) - 1, entry

    def abort(self) -> None:
        for uid in self.world.run(control.aborted(self.keys, sorted(self.running))):
            self.forget(uid)

    def audit(self) -> None:
        uids = sorted(self.running)
        for uid, last in zip(uids, self.world.run(replies.audit(self.keys, uids)) if uids else [], strict=True):
            request = self.running[uid]
            attempt, said = split_log_id(last)
            if last == NO_LOG or is_end(last) or attempt > request.attempt:
                self.forget(uid)
                continue
            if attempt == request.attempt:
                request.logged = said
            if attempt < request.attempt or self._was_lost(request, said):
                again = self.world.run(replies.last_id(self.keys, uid))  # it may have landed between the two looks
                if attempt < request.attempt or again == last:
                    self.world.events["restarted from its log"] += 1
                    request.restarting = True
                    self.output = [o for o in self.output if o.uid != uid]
                    self.waiting[request.entry] = _Waiting(uid, "self", request.length)
        self._audit_waiting()

    def _was_lost(self, request: _Running, said: int) -> bool:
        """Whether something was sent, is not in the log, and is not under way either."""
        if not request.sent_entry or not (said < request.sent or request.finished):
            return False
        if any(o.uid == request.uid for o in self.output):
            return False
        until = streams.has_tokens_until(self.keys, MODEL, shard_for(request.uid), request.sent_entry)
        return not self.world.run(until)

    def _audit_waiting(self) -> None:
        held = dict(self.world.run(streams.list_held(self.keys, self.id)))
        ids = sorted(self.waiting)
        lasts = self.world.run(replies.audit(self.keys, [self.waiting[i].uid for i in ids])) if ids else []
        for entry_id, last in zip(ids, lasts, strict=True):
            if last == NO_LOG or is_end(last):
                self._forget_waiting(entry_id)
                self.drop_entry(entry_id)
            elif entry_id not in held:
                self._forget_waiting(entry_id)

    def _forget_waiting(self, entry_id: bytes) -> None:
        uid = self.waiting.pop(entry_id).uid
        if uid in self.running and self.running[uid].restarting:
            del self.running[uid]

    def reap(self) -> None:
        for dead, beat in list(self.observer.dead("scheduler").items())[:1]:
            entries = self.world.run(streams.read_generate(self.keys, dead, count=1))
            if not entries:
                self.world.run(control.retire(self.keys, "scheduler", dead, beat))
                return
            (entry,) = entries
            taken = self.world.run(streams.take(self.keys, dead, entry.entry_id, entry.uid, self.id, "crash"))
            self.world.events[f"take {taken}"] += 1

    def orphans(self) -> None:
        """End one plain request of an api that is dead."""
        for uid, request in sorted(self.running.items()):
            if not request.finished and request.replica in self.observer.dead("api"):
                self.world.events["orphan ended"] += 1
                self.world.run(replies.end(self.keys, uid, fault("replica_lost"), attempt=request.attempt))
                self.forget(uid)
                return

    def drain(self) -> None:
        """Hand everything over, then leave."""
        while self.output:
            self.flush()
        living = sorted(self.world.run(control.look(self.keys, "scheduler")))
        others = [engine for engine in living if engine != self.id]
        for entry in self.world.run(streams.read_generate(self.keys, self.id)) if others else []:
            target = self.world.rng.choice(others)
            self.world.run(streams.take(self.keys, self.id, entry.entry_id, entry.uid, target, "drain"))
        beat = self.world.run(control.look(self.keys, "scheduler")).get(self.id, b"")
        self.world.run(control.retire(self.keys, "scheduler", self.id, beat))

    def forget(self, uid: str) -> None:
        self.drop_entry(self.running.pop(uid).entry)

    def drop_entry(self, entry_id: bytes) -> None:
        self.world.run(streams.drop_generate(self.keys, self.id, [entry_id]))
