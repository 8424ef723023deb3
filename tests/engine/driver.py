"""Drives an engine as the scheduler would, with pages in no particular order: what engine tests are written in."""

from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.batch import FROM_DEVICE, Batch, ScoreRow, SlotSetup, StepResult, mask_words
from services.scheduler.core.ports import Engine, Step
from services.scheduler.engine.engine import EngineConfig
from shared.sampling import SamplingParams

TINY = EngineConfig(dtype="float32", num_pages=64, page_size=16, max_running=8, max_step_tokens=256, threads=1)
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


def ints(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def pack_mask(allowed: set[int], vocab_size: int) -> np.ndarray:
    """One row of a MaskArray."""
    words = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


@dataclass
class Seq:
    """One request: what is known of it, and where its KV is."""

    prompt: list[int]
    params: SamplingParams
    slot: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    drawn: int = 0
    said: int = 0
    fresh: bool = True
    bad: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


def _score(row: int, seq: Seq, count: int, num_top: int) -> ScoreRow:
    """Score what a chunk of a prompt says of the tokens behind it; seq has been moved on by the chunk already."""
    return ScoreRow(row, ints(seq.prompt[seq.computed - count + 1 : seq.computed + 1]), num_top)


class Driver:
    """Owns slots and pages for an engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.limits = engine.limits
        order = np.random.default_rng(seed).permutation(self.limits.num_pages)
        self.free_pages = order.tolist()
        self.free_slots = list(range(self.limits.max_running))
        self.num_steps = 0

    def add(self, prompt: list[int], params: SamplingParams = GREEDY, said: list[int] | None = None) -> Seq:
        seq = Seq(list(prompt), params, self.free_slots.pop(), output=list(said or []))
        seq.drawn = seq.said = len(seq.output)
        return seq

    def share(self, seq: Seq, other: Seq, num_tokens: int) -> None:
        """Let seq begin with the pages of another's first tokens; whole pages only."""
        assert num_tokens % self.limits.page_size == 0
        seq.pages = other.pages[: num_tokens // self.limits.page_size]
        seq.computed = num_tokens

    def release(self, seq: Seq, keep_pages: int = 0) -> None:
        self.free_pages.extend(seq.pages[keep_pages:])
        self.free_slots.append(seq.slot)

    def launch(
        self, rows: list[tuple[Seq, int]], masks: dict[int, np.ndarray] | None = None, num_top: int | None = None
    ) -> tuple[Step, list[Seq]]:
        """Launch a step that computes so many tokens of each; decode rows are those whose prompt is done.

        Args:
            rows: requests and tokens of each.
            masks: slot -> what its row may draw; given to the engine after the launch.
            num_top: score every prompt, with so many alternatives.
        """
        rows = sorted(rows, key=lambda row: row[0].computed < len(row[0].prompt))
        num_decode = sum(seq.computed >= len(seq.prompt) for seq, _ in rows)
        ids: list[int] = []
        sample, setups = [], []
        starts = [seq.computed for seq, _ in rows]
        for seq, count in rows:
            known = seq.ids
            last = seq.computed + count
            ids += [known[i] if i < len(known) else FROM_DEVICE for i in range(seq.computed, last)]
            while len(seq.pages) * self.limits.page_size < last:
                seq.pages.append(self.free_pages.pop())
            if seq.fresh:
                setups.append(SlotSetup(seq.slot, seq.params, ints(seq.prompt), ints(seq.output[: seq.said])))
                seq.fresh = False
            draws = last >= len(seq.prompt) + seq.drawn
            seq.drawn += draws
            sample.append(draws)
            seq.computed = last
        width = max(len(seq.pages) for seq, _ in rows)
        table = np.zeros((len(rows), width), dtype=np.int32)
        for row, (seq, _) in enumerate(rows):
            table[row, : len(seq.pages)] = seq.pages
        batch = Batch(
            step=self.num_steps,
            num_decode=num_decode,
            slots=ints([seq.slot for seq, _ in rows]),
            starts=ints(starts),
            lengths=ints([count for _, count in rows]),
            input_ids=ints(ids),
            page_table=table,
            sample=np.array(sample),
            out_index=ints([seq.drawn if draws else 0 for (seq, _), draws in zip(rows, sample, strict=True)]),
            setups=tuple(setups),
            scores=() if num_top is None else tuple(_score(row, *each, num_top) for row, each in enumerate(rows)),
            guided=ints([row for row, (seq, _) in enumerate(rows) if masks and seq.slot in masks]),
        )
        self.num_steps += 1
        step = self.engine.launch(batch)
        if masks:
            self.engine.guide(step, np.stack([masks[int(batch.slots[row])] for row in batch.guided]))
        return step, [seq for seq, _ in rows]

    def settle(self, launched: tuple[Step, list[Seq]]) -> StepResult:
        step, seqs = launched
        result = self.engine.wait(step)
        for row, seq in enumerate(seqs):
            if not step.batch.sample[row]:
                assert result.token_ids[row] == -1
                continue
            seq.bad |= bool(result.bad[row])
            seq.output.append(int(result.token_ids[row]))
            if row in result.logprobs:
                found = result.logprobs[row]
                seq.logprobs.append(found.logprob)
                seq.tops.append(dict(zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)))
        return result

    def step(self, rows: list[tuple[Seq, int]]) -> StepResult:
        return self.settle(self.launch(rows))

    def prefill(self, seqs: list[Seq], chunk: int | None = None, beside: list[Seq] | None = None) -> None:
        """Compute prompts in chunks (all seqs in each step); `beside` decodes meanwhile."""
        while rows := [
            (seq, min(chunk or left, left)) for seq in seqs if (left := len(seq.prompt) + seq.said - seq.computed) > 0
        ]:
            self.step(rows + [(seq, 1) for seq in beside or []])

    def decode(self, seqs: list[Seq], steps: int, *, overlap: bool = True) -> None:
        """Draw tokens; with overlap two steps are in flight and inputs are left to the engine."""
        ahead = None
        for _ in range(steps):
            launched = self.launch([(s, 1) for s in seqs])
            if not overlap:
                self.settle(launched)
                continue
            if ahead is not None:
                self.settle(ahead)
            ahead = launched
        if ahead is not None:
            self.settle(ahead)

    def run(
        self, prompts: list[list[int]], tokens: int, params: SamplingParams = GREEDY, chunk: int | None = None
    ) -> list[Seq]:
        """Prefill and decode prompts together; slots and pages are given back."""
        seqs = [self.add(prompt, params) for prompt in prompts]
        self.prefill(seqs, chunk)
        self.decode(seqs, tokens - 1)
        for seq in seqs:
            self.release(seq)
        return seqs
