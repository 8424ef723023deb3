"""The steps that an engine on a GPU computes before it serves, so that no request waits for a kernel to be compiled.

Whatever a request can ask for that takes another kernel, or the same one with other types, is in one of these steps;
graphs have their own way of computing everything once. `launcher warmup` compiles by the same steps. Knows batches
and limits; what computes them is the engine's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.scheduler.core.batch import Batch, ScoreRow, SlotSetup, mask_words
from services.scheduler.core.ports import Engine, EngineLimits
from shared.sampling import SamplingParams

_FILTERED: Final = SamplingParams(temperature=1.0, top_k=5, top_p=0.9)
"""Several ranks draw so from all logits, each for itself."""
_TOLD: Final = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, logprobs=1)
"""Rank 0 alone draws so."""
_PENALISED: Final = SamplingParams(
    temperature=1.0, repetition_penalty=1.1, logit_bias={0: 1.0}, top_p=0.9, min_tokens=2
)
_GREEDY: Final = SamplingParams(temperature=0.0)
_ROWS: Final = (1, 2, 3, 4, 8, 32, 160)
"""Rows of steps of single tokens: kernels are cut in another way for few, some and many of them."""
_PROMPTS: Final = (1, 2, 3, 24, 256, 512, 1100)
"""Tokens of prompts, likewise; experts have the most ways."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: tokens of each row, and what all rows ask for."""

    lengths: tuple[int, ...]
    params: SamplingParams = _GREEDY
    guided: bool = False
    scored: bool = False


def warm_up(engine: Engine) -> None:
    """Compute every kind of step once. It writes to the first pages and slots, before anybody owns them."""
    for step in _steps(engine.limits):
        batch = _batch(engine.limits, step)
        launched = engine.launch(batch)
        if step.guided:
            masks = np.full((len(batch.guided), mask_words(engine.limits.vocab_size)), -1, dtype=np.int32)
            engine.guide(launched, masks)
        engine.wait(launched)


def _steps(limits: EngineLimits) -> Iterator[_Step]:
    pages = limits.num_pages * limits.page_size
    most = min(pages, limits.max_seq_len - 1, limits.max_step_tokens - 1)
    chunk = min(most, _PROMPTS[-3])
    for rows in _ROWS:
        if rows <= min(limits.max_running, limits.max_step_tokens):
            yield _Step((1,) * rows)
    for tokens in sorted({min(tokens, most) for tokens in _PROMPTS}):
        yield _Step((tokens,))
        if limits.max_running > 1 and tokens > 1:
            yield _Step((1, tokens - 1))
    yield _Step((1,), _FILTERED)
    for params in (_TOLD, _PENALISED):
        yield _Step((chunk,), params)
        yield _Step((1,), params)
    yield _Step((1,), guided=True)
    yield _Step((1,), _TOLD, guided=True)
    yield _Step((chunk,), scored=True)


def _batch(limits: EngineLimits, step: _Step) -> Batch:
    """Write a step down; all rows share the first pages."""
    rows, ids = len(step.lengths), np.zeros(sum(step.lengths), dtype=np.int32)
    columns = -(-max(step.lengths) // limits.page_size)
    targets = ids[: step.lengths[0] - 1]
    return Batch(
        step=0,
        num_decode=rows if max(step.lengths) == 1 else rows - 1,
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, dtype=np.int32),
        lengths=np.array(step.lengths, dtype=np.int32),
        input_ids=ids,
        page_table=np.repeat(np.arange(columns, dtype=np.int32)[None], rows, 0),
        sample=np.ones(rows, dtype=np.bool_),
        out_index=np.ones(rows, dtype=np.int32),
        setups=tuple(SlotSetup(slot, step.params, ids[:1], ids[:0]) for slot in range(rows)),
        scores=(ScoreRow(0, targets, 1),) if step.scored and len(targets) else (),
        guided=np.arange(rows if step.guided else 0, dtype=np.int32),
    )
