"""The fake engine, `--engine fake`: scripted, torch-free, and strict about what it is asked to do.

Every token is a hash of all tokens before it (and of seed and index, when it is sampled), so a splice, a lost token
or a wrong order changes everything behind it. With `check` on it also keeps a KV model: for each place of each
page the token, its position and the hash of its prefix. A row that reads a place which does not hold its own past, or
writes a page that anyone else in flight refers to, ends the engine.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.batch import (
    Batch,
    BoolArray,
    IntArray,
    MaskArray,
    PositionLogprobs,
    RowLogprobs,
    ScoreRow,
    SlotSetup,
    StepResult,
    mask_words,
)
from services.scheduler.core.ports import EngineFault, EngineLimits, Step
from services.scheduler.fake_kv import HashArray, KvModel, prefix_hashes, require
from services.scheduler.fake_stamps import StampWriter
from shared.sampling import SamplingParams

CRASH_STATUS = 70
_K = np.uint64(0x9E3779B97F4A7C15)
_TEXT = b"etaoin shrdlu etaoins hrdlcu mfwyp vbgk jqxz etaoin shrdlu etaoi"
"""What is drawn from by default: lower-case letters and blanks, 64 of them."""


@dataclass(frozen=True, slots=True)
class FakeEngineConfig:
    """Script and size of a fake engine.

    Attributes:
        vocab_size: ids run below it.
        eos_token_ids: end tokens; the first is drawn as often as `eos_every` says.
        text_ids: what else is drawn, by default letters and blanks of the byte vocabulary.
        eos_every: on average one token in so many is an end token; 0 for never.
        base_ms: time of a step, before what its rows add.
        row_us: added per decode row.
        token_us: added per prompt token.
        check: keep a KV model and verify every batch; off for speed.
        stamps: tokens spell the clock instead of being drawn, see `fake_stamps`.
        crash_marker: a prompt that holds these ids in a row ends the process, as a poison request would.
        stall_marker: a step with a prompt that holds these ids in a row never ends.
        nan_marker: a prompt that holds these ids in a row yields bad logits.
    """

    vocab_size: int = 259
    eos_token_ids: tuple[int, ...] = (258,)
    text_ids: tuple[int, ...] = ()
    num_pages: int = 4096
    page_size: int = 16
    max_running: int = 64
    max_seq_len: int = 8192
    max_step_tokens: int = 8192
    eos_every: int = 0
    base_ms: float = 1.0
    row_us: float = 0.0
    token_us: float = 0.0
    check: bool = True
    stamps: bool = False
    crash_marker: tuple[int, ...] = ()
    stall_marker: tuple[int, ...] = ()
    nan_marker: tuple[int, ...] = ()
    fingerprint: str = "fake"


@dataclass(frozen=True, slots=True, eq=False)
class FakeStep:
    """A launched batch, and when it is over."""

    batch: Batch
    ready_at: float
    forward_ms: float
    masks: list[MaskArray]


class FakeEngine:
    """An Engine without a model. Steps are computed when they are waited for, in the order of their launch."""

    def __init__(self, config: FakeEngineConfig | None = None, *, crash: Callable[[], None] | None = None) -> None:
        self.config = config = config or FakeEngineConfig()
        self._crash = crash or _end_process
        self._script = _Script(config)
        self._kv = KvModel(self.limits) if config.check else None
        self._launched: deque[FakeStep] = deque()
        self._free_at = 0.0

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        config = self.config
        return EngineLimits(
            fingerprint=config.fingerprint,
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(config.eos_token_ids),
            max_seq_len=config.max_seq_len,
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
        )

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched."""
        config = self.config
        if any(_holds(setup.prompt_ids, config.crash_marker) for setup in batch.setups):
            self._crash()
        if any(_holds(setup.prompt_ids, config.stall_marker) for setup in batch.setups):
            threading.Event().wait()
        if self._kv is not None:
            self._kv.admit(batch, [step.batch for step in self._launched])
        num_prompt = int(batch.lengths[batch.num_decode :].sum())
        forward_ms = config.base_ms + (config.row_us * batch.num_decode + config.token_us * num_prompt) / 1e3
        self._free_at = max(time.monotonic(), self._free_at) + forward_ms / 1e3
        step = FakeStep(batch, self._free_at, forward_ms, [])
        self._launched.append(step)
        return step

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Say what the guided rows of a step may draw.

        Raises:
            Corruption: not the oldest step, nothing to guide, a second time, or masks of another shape.
        """
        assert isinstance(step, FakeStep)
        require(bool(self._launched) and self._launched[0] is step, "a step is guided before its turn")
        words = mask_words(self.config.vocab_size)
        require(masks.shape == (len(step.batch.guided), words) and len(masks) > 0, f"masks of shape {masks.shape}")
        require(not step.masks, "a step is guided twice")
        step.masks.append(masks)

    def wait(self, step: Step) -> StepResult:
        """Block until the step's time is over.

        Raises:
            Corruption: the batch reads or writes what is not its own.
        """
        oldest = self._launched.popleft()
        if oldest is not step:
            raise EngineFault("steps are waited for in the order of their launch")
        left = oldest.ready_at - time.monotonic()
        if left > 0:
            time.sleep(left)
        guided = len(oldest.batch.guided) > 0
        require(len(oldest.masks) == guided, f"step {oldest.batch.step} is waited for and was not guided")
        return self._script.run(oldest.batch, self._kv, oldest.forward_ms, oldest.masks[0] if guided else None)

    def check(self) -> None:
        """It has no device to lose."""

    def close(self) -> None:
        """Forget what is in flight."""
        self._launched.clear()


class _Script:
    """What each slot has said, and what it says next."""

    def __init__(self, config: FakeEngineConfig) -> None:
        num, self._config = config.max_running, config
        text = config.text_ids or tuple(i for i in _TEXT if i < config.vocab_size) or tuple(range(config.vocab_size))
        self._text: IntArray = np.array(text, np.int32)
        self._eos: IntArray = np.array(config.eos_token_ids, np.int32)
        with np.errstate(over="ignore"):
            powers = np.cumprod(np.full(config.max_seq_len + 1, _K, np.uint64))
        self._powers: HashArray = np.concatenate([np.ones(1, np.uint64), powers])
        self._tokens: IntArray = np.zeros((num, config.max_seq_len + 2), np.int32)
        self._length: IntArray = np.zeros(num, np.int32)
        self._prompt_len: IntArray = np.zeros(num, np.int32)
        self._hash: HashArray = np.zeros(num, np.uint64)
        self._seed: HashArray = np.zeros(num, np.uint64)
        self._sampled: BoolArray = np.zeros(num, np.bool_)
        self._bad: BoolArray = np.zeros(num, np.bool_)
        self._special: BoolArray = np.zeros(num, np.bool_)
        self._params = [SamplingParams()] * num
        self._stamps = StampWriter(num) if config.stamps else None

    def run(self, batch: Batch, kv: KvModel | None, forward_ms: float, masks: MaskArray | None) -> StepResult:
        """Compute a step; `masks` are of its guided rows."""
        for setup in batch.setups:
            self._set_up(setup)
        if kv is not None:
            kv.compute(batch, self._tokens, self._length, self._prompt_len, self._powers)
        rows = np.flatnonzero(batch.sample)
        slots = batch.slots[rows]
        token_ids = np.full(batch.num_rows, -1, np.int32)
        drawn = self._draw(slots, batch.out_index[rows])
        if masks is not None:
            self._obey(drawn, np.searchsorted(rows, batch.guided).tolist(), masks, slots)
        token_ids[rows] = drawn
        length = self._length[slots]
        self._tokens[slots, length] = drawn
        self._hash[slots] += (drawn.astype(np.int64).astype(np.uint64) + np.uint64(1)) * self._powers[length]
        self._length[slots] = length + 1
        bad = np.zeros(batch.num_rows, np.bool_)
        bad[rows] = self._bad[slots] | (drawn < 0)
        logprobs = {}
        for row in rows[self._special[slots]].tolist():
            top = self._params[batch.slots[row]].logprobs
            if top is not None:
                logprobs[row] = self._logprobs(int(token_ids[row]), top)
        scores = {score.row: _score(score) for score in batch.scores}
        scored = np.array(list(scores), np.intp)
        bad[scored] |= self._bad[batch.slots[scored]]
        return StepResult(token_ids, bad, logprobs, forward_ms, scores)

    def _set_up(self, setup: SlotSetup) -> None:
        slot, params = setup.slot, setup.params
        ids = np.concatenate([setup.prompt_ids, setup.output_ids])
        self._tokens[slot, : len(ids)] = ids
        self._length[slot], self._prompt_len[slot] = len(ids), len(setup.prompt_ids)
        self._hash[slot] = prefix_hashes(ids, self._powers)[-1]
        self._seed[slot] = np.uint64(params.seed % 2**64)
        self._sampled[slot] = not params.is_greedy
        self._bad[slot] = _holds(setup.prompt_ids, self._config.nan_marker)
        self._special[slot] = bool(params.logit_bias) or params.min_tokens > 0 or params.logprobs is not None
        self._params[slot] = params

    def _draw(self, slots: IntArray, index: IntArray) -> IntArray:
        """Draw one token per slot from the hash of its tokens and, when it is sampled, of its seed and the index."""
        if self._stamps is not None:
            return self._stamps.draw(slots, index)
        chance = _mix(self._seed[slots] + _mix(index.astype(np.uint64)))
        bits = _mix(self._hash[slots] ^ np.where(self._sampled[slots], chance, np.uint64(0)))
        drawn = self._pick(bits)
        for i in np.flatnonzero(self._special[slots]).tolist():
            drawn[i] = self._steer(int(drawn[i]), bits[i : i + 1], self._params[slots[i]], int(index[i]))
        return drawn

    def _obey(self, drawn: IntArray, guided: list[int], masks: MaskArray, slots: IntArray) -> None:
        """Replace tokens that a mask does not allow by some that it does; -1 where it allows none."""
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        for place, row in zip(guided, bits, strict=True):
            allowed = np.flatnonzero(row[: self._config.vocab_size])
            if not len(allowed):
                drawn[place] = -1
            elif not row[drawn[place]]:
                chance = int(_mix(self._hash[slots[place : place + 1]])[0])
                drawn[place] = allowed[chance % len(allowed)]

    def _pick(self, bits: HashArray) -> IntArray:
        """Turn bits into tokens."""
        picked = self._text[(bits % np.uint64(len(self._text))).astype(np.intp)]
        if self._config.eos_every > 0 and len(self._eos):
            ends = (bits >> np.uint64(32)) % np.uint64(self._config.eos_every) == 0
            picked = np.where(ends, self._eos[0], picked)
        return picked

    def _steer(self, drawn: int, bits: HashArray, params: SamplingParams, index: int) -> int:
        """Apply logit bias (strong ones force or forbid, weak ones do nothing) and min_tokens."""
        forbidden = {i for i, bias in params.logit_bias.items() if bias <= -50}
        if index <= params.min_tokens:
            forbidden |= {*self._eos.tolist(), *params.stop_token_ids}
        forced: list[tuple[float, int]] = [
            (-bias, i) for i, bias in params.logit_bias.items() if bias >= 50 and i not in forbidden
        ]
        if forced:
            forced.sort()
            return forced[0][1]
        if drawn in forbidden:
            allowed = sorted({*self._text.tolist()} - forbidden) or [
                i for i in range(self._config.vocab_size) if i not in forbidden
            ]
            return int(allowed[int(bits[0]) % len(allowed)])
        return drawn

    def _logprobs(self, drawn: int, top: int) -> RowLogprobs:
        others = [i for i in range(min(top + 1, self._config.vocab_size)) if i != drawn]
        ids = np.array([drawn, *others][:top], np.int32)
        return RowLogprobs(-0.125, ids, -0.125 * np.arange(1, len(ids) + 1, dtype=np.float32))


def _score(score: ScoreRow) -> PositionLogprobs:
    num, top = len(score.targets), score.num_top
    ids = np.concatenate([score.targets[:, None], np.tile(np.arange(top, dtype=np.int32), (num, 1))], 1)[:, :top]
    values = np.tile(-0.25 * np.arange(1, top + 1, dtype=np.float32), (num, 1))
    return PositionLogprobs(np.full(num, -0.25, np.float32), ids.astype(np.int32), values)


def _mix(x: HashArray) -> HashArray:
    """Spread the bits. Source: the finaliser of splitmix64 (Sebastiano Vigna, public domain)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _holds(ids: IntArray, marker: tuple[int, ...]) -> bool:
    """Whether the marker occurs in the ids; an empty one never does."""
    if not marker or len(ids) < len(marker):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(marker))
    return bool((windows == np.array(marker)).all(axis=1).any())


def _end_process() -> None:
    """Die at once, without a word, as a segmentation fault would."""
    os._exit(CRASH_STATUS)
