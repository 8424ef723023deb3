"""Worlds for soaks: an engine, a policy and the lives of many requests, all drawn from one seed.

Everything may be of an awkward size: steps with as many tokens as rows, pools that hold one request, contexts of two
tokens. What a request must say is found without a scheduler, by asking the script of the fake engine one token at a
time. The driver under it checks the books after every move; the world checks every batch.
"""

import dataclasses
import random
from collections import Counter

import numpy as np

from services.scheduler.core.batch import Batch, SlotSetup
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import MIN_CHUNK_TOKENS
from services.scheduler.core.link import Arrival
from services.scheduler.fake_engine import FakeEngine, FakeEngineConfig
from shared.errors import InvalidRequest
from shared.sampling import Grammar
from tests.fakes.link import Heard, arrival
from tests.scheduler.driver import Driver, engine_config, is_idle

NAN_MARKER = (7, 7)
BAD_ID = 259
LONG_DELAY = 40


@dataclasses.dataclass
class Words:
    """A matcher of `length` lower-case letters, or of at least so many; at `breaks` it fails in the way of `how`."""

    length: int
    is_open: bool
    breaks: int
    how: str
    seen: int = 0

    @property
    def complete(self) -> bool:
        return not self.is_open and self.seen >= self.length

    def accept(self, token_id: int) -> bool:
        if self.how == "accept" and self.seen == self.breaks:
            return False
        self.seen += 1
        return True

    def fill(self, mask) -> bool:
        if self.seen == self.breaks and self.how == "fill":
            return False
        if self.seen == self.breaks and self.how == "nothing":
            return True
        allowed = [*range(97, 123)] if self.is_open or self.seen < self.length else []
        if self.seen >= self.length:
            allowed.append(258)
        for token_id in allowed:
            mask[token_id // 32] |= np.uint32(1 << (token_id % 32)).view(np.int32)
        return True


def make_words(grammar: Grammar, said: int = 0) -> Words:
    length, is_open, breaks, how, _ = grammar.text.split()
    return Words(int(length), is_open == "open", int(breaks), how, said)


class WordGrammars:
    """Compiles `Words` after as many looks as their text says; some never can be."""

    def begin(self, grammar, said_ids, *, ignore_eos):
        return _Later(grammar, len(said_ids))


class _Later:
    def __init__(self, grammar: Grammar, said: int) -> None:
        self._grammar, self._said = grammar, said
        self._looks = int(grammar.text.split()[4])

    def poll(self):
        self._looks -= 1
        if self._looks >= 0:
            return None
        words = make_words(self._grammar, self._said)
        return InvalidRequest("No.", code="no_grammar") if words.how == "refused" else words


@dataclasses.dataclass
class Expected:
    """What a request says when nothing disturbs it: tokens, then a finish or the code of an error."""

    tokens: list[int]
    finish: str | None = None
    error: str | None = None
    complete: bool = False


def one_row(step: int, start: int, ids: list[int], index: int, setup: SlotSetup | None, guided: bool) -> Batch:
    def array(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    return Batch(
        step=step,
        num_decode=int(setup is None),
        slots=array(0),
        starts=array(start),
        lengths=array(len(ids)),
        input_ids=array(*ids),
        page_table=array(0)[None],
        sample=np.ones(1, np.bool_),
        out_index=array(index),
        setups=(setup,) if setup else (),
        guided=array(*([0] if guided else [])),
    )


def alone(item: Arrival, config: FakeEngineConfig) -> Expected:
    """Ask the script of an engine for a whole answer, and judge its end by the rules as they are written down."""
    prompt, params = list(item.request.prompt_ids), item.request.params
    room = min(config.max_seq_len, config.num_pages * config.page_size + 1)
    if not prompt or max(prompt) >= config.vocab_size:
        return Expected([], error="")
    if len(prompt) + 1 > room:
        return Expected([], error="context_length_exceeded")
    most = min(params.max_tokens, room - len(prompt))
    if most == 0 and params.prompt_logprobs is None:
        return Expected([], "length")
    words = make_words(params.grammar) if params.grammar and most else None
    if words and words.how == "refused":
        return Expected([], error="no_grammar")
    if any(tuple(prompt[i : i + 2]) == NAN_MARKER for i in range(len(prompt) - 1)):
        return Expected([], error="bad_logits")
    if most == 0:
        return Expected([], "length")
    engine = FakeEngine(dataclasses.replace(config, max_running=1, check=False))
    setup = SlotSetup(0, params, np.array(prompt, np.int32), np.empty(0, np.int32))
    said: list[int] = []
    while True:
        past = len(prompt) + len(said) - 1
        batch = one_row(len(said), past if said else 0, said[-1:] or prompt, len(said) + 1, setup, words is not None)
        step, setup = engine.launch(batch), None
        if words is not None:
            mask = np.zeros((1, (config.vocab_size + 31) // 32), np.int32)
            if not words.fill(mask[0]):
                return Expected(said, error="grammar_too_complex")
            engine.guide(step, mask)
        token_id = int(engine.wait(step).token_ids[0])
        if token_id < 0:
            return Expected(said, error="bad_logits")
        behind_min = len(said) + 1 > params.min_tokens
        ends = (token_id == 258 and not params.ignore_eos) or token_id in params.stop_token_ids
        if ends and behind_min:
            return Expected([*said, token_id], "stop")
        if words is not None and not words.accept(token_id):
            return Expected(said, error="grammar_too_complex")
        said.append(token_id)
        if words is not None and words.complete:
            return Expected(said, "stop", complete=True)
        if len(said) == most:
            return Expected(said, "length")


def draw_engine(rng: random.Random) -> FakeEngineConfig:
    max_running = rng.choice([1, 2, 3, rng.randint(4, 32), rng.randint(4, 32)])
    page_size = rng.choice([1, 2, 16, 64])
    max_seq_len = rng.choice([2, 5, 33, 144, 144, 400, 900])
    whole = -(-max_seq_len // page_size)
    num_pages = rng.choice([1, whole, whole + 1, whole * 3 // 2, whole * 2, whole * max_running, whole * max_running])
    return engine_config(
        max_running=max_running,
        max_step_tokens=max_running + rng.choice([0, 0, 1, 2, rng.randint(0, 40), 500]),
        page_size=page_size,
        num_pages=max(1, num_pages),
        max_seq_len=max_seq_len,
        eos_every=rng.choice([0, 0, 4, 40]),
        nan_marker=NAN_MARKER,
    )


def draw_policy(rng: random.Random) -> SchedulerConfig:
    return SchedulerConfig(
        cache=rng.choice(["radix", "radix", "naive"]),
        max_prefill_tokens=rng.choice([1, 2, 7, 33, rng.randint(1, 1000)]),
        max_gap_ratio=rng.choice([0.0, 1.01, 2.5]),
    )


class Clock:
    """Tells how long a step took: as the cost of its rows, with hiccups, or nothing of use."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._base_ms, self._row_ms, self._token_ms = rng.choice(
            [(0.2, 0.02, 0.002), (30.0, 1.0, 0.5), (0.0, 0.0, 0.0)]
        )
        self._noise = rng.choice([0.0, 0.3])

    def took_ms(self, batch: Batch) -> float:
        if self._rng.random() < 0.01:
            return self._rng.choice([0.0, -1.0, 1e9, float("nan"), float("inf")])
        tokens = int(batch.lengths[batch.num_decode :].sum())
        cost = self._base_ms + self._row_ms * batch.num_decode + self._token_ms * tokens
        return max(0.0, cost * self._rng.gauss(1.0, self._noise))


class Requests:
    """Draws requests that have much in common: beginnings, whole prompts, salts."""

    def __init__(self, rng: random.Random, config: FakeEngineConfig) -> None:
        self._rng, self._longest = rng, config.max_seq_len
        self._letters = rng.choice([b"a", b"ab", bytes(range(97, 123))])
        self._prefixes = [self._text(rng.randint(0, config.max_seq_len)) for _ in range(3)]
        self._count = 0

    def draw(self) -> list[dict]:
        """One request, or several choices of one."""
        rng = self._rng
        prompt, salt, priority = self._prompt(), rng.choice(["", "", "s"]), rng.choice([0, 0, 0, 1, -1, 7])
        params = self._params()
        several = rng.choice([2, 5]) if rng.random() < 0.1 else 1
        choices = []
        for i in range(several):
            self._count += 1
            choice = {"uid": f"u{self._count}", "prompt": prompt, "salt": salt, "priority": priority, **params}
            if several > 1:
                choice |= {"temperature": 1.0, "seed": i}
            choices.append(choice)
        return choices

    def _text(self, length: int) -> bytes:
        return bytes(self._rng.choices(self._letters, k=length))

    def _prompt(self) -> list[int]:
        rng = self._rng
        if rng.random() < 0.02:
            return rng.choice([[], [BAD_ID], [65, BAD_ID]])
        own = min(int(rng.paretovariate(0.6)), self._longest + 2)
        prefix = rng.choice([b"", *self._prefixes])
        prompt = [*prefix[: rng.choice([len(prefix), rng.randint(0, len(prefix))])], *self._text(own)]
        if rng.random() < 0.9:
            prompt = prompt[: max(1, self._longest - rng.randint(1, 20))]
        if rng.random() < 0.03:
            prompt[len(prompt) // 2 :] = [7, 7, 8]
        return prompt

    def _params(self) -> dict:
        rng = self._rng
        params: dict = {"max_tokens": rng.choice([0, 1, 2, 5, 30, 60, 200])}
        if rng.random() < 0.3:
            params |= {"temperature": 1.0, "seed": rng.randint(-(2**63), 2**63 - 1)}
        if rng.random() < 0.15:
            params["min_tokens"] = rng.choice([1, 5, 300])
        if rng.random() < 0.15:
            params["stop_token_ids"] = [101, 116]
        if rng.random() < 0.1:
            params["ignore_eos"] = True
        if rng.random() < 0.1:
            params["logprobs"] = rng.choice([0, 3])
        if rng.random() < 0.15:
            params["prompt_logprobs"] = rng.choice([0, 2])
        if rng.random() < 0.15:
            params["returns_prompt"] = True
        if rng.random() < 0.2:
            how = rng.choice(["never"] * 5 + ["fill", "accept", "nothing", "refused"])
            shape, delay = rng.choice(["open", "whole"]), rng.choice([0, 0, 1, 3, LONG_DELAY])
            breaks = rng.randint(int(how == "fill"), 6)
            params["grammar"] = Grammar("regex", f"{rng.randint(1, 12)} {shape} {breaks} {how} {delay}")
        return params


class World(Driver):
    """One world. `live` runs it to its end and compares what was said with what should have been."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.config, self.policy = draw_engine(rng), draw_policy(rng)
        super().__init__(self.config, self.policy, rng.choice([0, 1, 1]), WordGrammars())
        self.clock, self.requests = Clock(rng), Requests(rng, self.config)
        self.kept: dict[str, dict] = {}
        self.attempts: Counter[str] = Counter()
        self.spoilt: set[str] = set()
        self.turns = 0
        self.bad_rate = rng.choice([0.0, 0.0, 0.003])

    # --- what the world does to the scheduler

    def live(self, num_requests: int = 40) -> "World":
        rng = self.rng
        rate, trouble = rng.choice([0.05, 0.3, 1.0]), rng.choice([0.0, 0.02, 0.1])
        while len(self.kept) < num_requests or not is_idle(self.scheduler) or self.steps:
            move = rng.random()
            if move < rate and len(self.kept) < num_requests:
                for choice in self.requests.draw():
                    self.kept[choice["uid"]] = choice
                    self.arrive(choice["uid"])
            elif move > 1 - trouble and self.kept:
                self.disturb(rng.choice(list(self.kept)))
            else:
                self.step()
        self.judge()
        return self

    def arrive(self, uid: str) -> None:
        """A first arrival; now and then from an engine that has died in the middle of the answer."""
        item, said = self.item(uid), []
        if self.rng.random() < 0.1:
            said = self.sayable(uid)
        self.attempts[uid] += 1
        self.add(dataclasses.replace(item, attempt=self.attempts[uid], said_ids=tuple(said)))

    def disturb(self, uid: str) -> None:
        """Abort a request, take it over, or have an older engine say something of it."""
        heard, attempt = self.ledger.heard[uid], self.attempts[uid]
        if heard.ended:
            return
        what = self.rng.choice(["forget", "takeover", "takeover", "stale"])
        if what == "stale":
            assert not self.scheduler.forget(uid, attempt - 1)
            if not heard.forgotten:
                self.scheduler.add(dataclasses.replace(self.item(uid), attempt=attempt - self.rng.choice([0, 1])))
        elif what == "forget":
            assert self.forget(uid, attempt) or heard.forgotten
        else:
            said = heard.tokens[: max(0, len(heard.tokens) - self.rng.choice([0, 0, 1, 2]))]
            if not said:
                heard.prompts.clear()
            self.attempts[uid] += 1
            self.add(dataclasses.replace(self.item(uid), attempt=attempt + 1, said_ids=tuple(said)))
        self.scheduler.check()

    def step(self) -> None:
        """A turn of the loop, or a turn while the link is paused."""
        self.turns += 1
        if self.steps and self.rng.random() < 0.02:
            self.settle()
        elif not self.turn():
            idle = is_idle(self.scheduler) or self.scheduler.guides.num_compiling
            assert idle, "nothing runs, but not everything has ended"
        assert self.turns < 100_000, "no end"

    def item(self, uid: str) -> Arrival:
        return arrival(**self.kept[uid])

    def sayable(self, uid: str) -> list[int]:
        """Some of an answer, but not its last token: that is said together with the end."""
        tokens = self.expected(uid).tokens
        return tokens[: self.rng.randint(0, max(0, len(tokens) - 1))]

    def waits(self, num_requests: int, *, bursts: bool) -> list[tuple[int, int]]:
        """Run without troubles.

        Returns:
            For each request the turns from its arrival to its end, and the turns that it and all that were as urgent or
            there before it take one after the other, with the chunks that a full step leaves them.
        """
        ended: list[tuple[int, int]] = []
        owed: Counter[str] = Counter()
        cost: dict[str, int] = {}
        born: dict[str, int] = {}
        self.bad_rate = 0.0
        while len(self.kept) < num_requests or born:
            if len(self.kept) < num_requests and (bursts or self.rng.random() < 0.3):
                for choice in self.requests.draw():
                    choice.pop("grammar", None)
                    uid, urgency = choice["uid"], choice["priority"]
                    self.kept[uid] = choice
                    cost[uid] = self.cost(uid)
                    self.arrive(uid)
                    born[uid] = self.turns
                    owed[uid] = sum(cost[other] for other in born)
                    for other in born.keys() - {uid}:
                        owed[other] += cost[uid] if urgency < self.kept[other]["priority"] else 0
            self.turn()
            self.turns += 1
            done = [uid for uid in born if self.ledger.heard[uid].ended]
            ended += [(self.turns - born.pop(uid), owed[uid]) for uid in done]
            assert self.turns < 100_000, "no end"
        return ended

    def cost(self, uid: str) -> int:
        """Turns that a request takes at most when it runs alone among rows of others."""
        left = self.config.max_step_tokens - self.config.max_running + 1
        chunk = min(self.policy.max_prefill_tokens, left, MIN_CHUNK_TOKENS)
        return -(-len(self.kept[uid]["prompt"]) // chunk) + len(self.expected(uid).tokens) + 2

    # --- what it watches

    def turn(self) -> bool:
        before = len(self.batches)
        done = super().turn()
        for batch in self.batches[before:]:
            self.look(batch)
        self.batches.clear()
        return done

    def look(self, batch: Batch) -> None:
        decode, lengths = batch.num_decode, batch.lengths
        assert (lengths > 0).all() and lengths.sum() <= self.config.max_step_tokens
        assert lengths[decode:].sum() <= self.policy.max_prefill_tokens
        assert len(set(batch.slots.tolist())) == batch.num_rows <= self.config.max_running
        assert (np.diff(batch.starts[:decode]) <= 0).all(), "decode rows come longest first"
        assert batch.sample[:decode].all() and batch.sample[batch.guided].all()
        assert len(batch.input_ids) == lengths.sum() and (batch.input_ids[decode:] >= 0).all()
        table = self.scheduler.slots
        most = table.end_len[batch.slots] - table.prompt_len[batch.slots]
        assert (batch.out_index <= most).all(), "a step past the end of a choice"

    def settle(self) -> None:
        """As the driver, with a duration, and with rows that go bad."""
        step = self.steps.popleft()
        result = self.engine.wait(step)
        batch, bad = step.batch, result.bad.copy()
        rows = np.flatnonzero(batch.sample)
        if len(rows) and self.rng.random() < self.bad_rate:
            row = int(self.rng.choice(rows.tolist()))
            req = self.scheduler.slots.reqs[batch.slots[row]]
            bad[row] = True
            if req is not None:
                self.spoilt.add(req.uid)
        took_ms = self.clock.took_ms(batch)
        result = dataclasses.replace(result, bad=bad, forward_ms=took_ms)
        self._tell(self.scheduler.settle(batch, result, 1))
        self.guide()
        self.scheduler.check()
        self._tell(self.scheduler.take_endings(1))

    def _tell(self, output) -> None:
        for place, uid in enumerate(output.uids if output is not None else ()):
            wants = self.kept[uid].get("logprobs") is not None and output.tokens[place] >= 0
            assert (place in output.logprobs) == wants
            assert output.attempts[place] == self.attempts[uid], "an attempt that was replaced speaks"
        super()._tell(output)

    # --- the end

    def expected(self, uid: str) -> Expected:
        return alone(self.item(uid), self.config)

    def judge(self) -> None:
        assert not self.turn(), "idle, and yet there is something to do"
        for uid, request in self.kept.items():
            heard, expected = self.ledger.heard[uid], self.expected(uid)
            if heard.forgotten or uid in self.spoilt:
                assert heard.tokens == expected.tokens[: len(heard.tokens)], uid
                assert heard.forgotten or heard.error.code == "bad_logits"
                continue
            assert heard.tokens == expected.tokens, uid
            error = heard.error and (heard.error.code or "")
            assert (heard.finish, error, heard.complete) == (expected.finish, expected.error, expected.complete), uid
            self.judge_prompt(request, heard)
        scheduler = self.scheduler
        pool, cache = scheduler.pages.pool, scheduler.pages.cache
        assert pool.num_free + cache.num_evictable == pool.num_pages and not pool.num_quarantined
        assert scheduler.slots.num_free == scheduler.slots.num_slots
        assert not scheduler.prefill.running and not scheduler.prefill._twins and not len(scheduler.decode)
        load = scheduler.load()
        assert (load.num_running, load.num_ready, load.queued_tokens) == (0, 0, 0)
        assert load.free_slots == scheduler.slots.num_slots and load.free_pages == pool.num_pages

    @staticmethod
    def judge_prompt(request: dict, heard: Heard) -> None:
        """A prompt is reported once, whole, by whoever says the first token."""
        scored = request.get("prompt_logprobs") is not None
        for echo in heard.prompts:
            assert echo.token_ids.tolist() == list(request["prompt"])
            assert sum(len(piece.logprobs) for piece in echo.scores) == (len(echo.token_ids) - 1 if scored else 0)
        begun = heard.finish is not None or len(heard.tokens) > 0
        wanted = begun and (scored or request.get("returns_prompt", False))
        resumed = len(heard.attempts) < len(heard.tokens) or len(set(heard.attempts)) > 1
        assert len(heard.prompts) == int(wanted) or (wanted and resumed and len(heard.prompts) <= 1)
