"""Puts what a step has drawn into the words of the link. Decides nothing."""

from collections.abc import Mapping, Sequence

import numpy as np

from services.scheduler.core.batch import Batch, IntArray, StepResult
from services.scheduler.core.link import PromptEcho, StepOutput
from services.scheduler.core.req import Req
from services.scheduler.core.scoring import echo_of
from services.scheduler.core.slots import SlotTable
from shared.messages import FinishReason


def unseen_output(endings: Sequence[tuple[Req, FinishReason]], stamp_ns: int) -> StepOutput | None:
    """Say that choices end without a token; None where none does."""
    if not endings:
        return None
    reqs = [req for req, _ in endings]
    echoes = {place: echo_of(req) for place, req in enumerate(reqs)}
    return StepOutput(
        stamp_ns=stamp_ns,
        uids=[req.uid for req in reqs],
        attempts=[req.attempt for req in reqs],
        firsts=[len(req.output_ids) + 1 for req in reqs],
        tokens=[-1] * len(reqs),
        finishes={place: finish for place, (_, finish) in enumerate(endings)},
        starts={place: (req.prompt_len, max(0, req.cached_len)) for place, req in enumerate(reqs)},
        prompts={place: echo for place, echo in echoes.items() if echo is not None},
    )


def begin_answers(reqs: Mapping[int, Req]) -> tuple[dict[int, tuple[int, int]], dict[int, PromptEcho]]:
    """Say what goes with the first token of an attempt: `starts` and `prompts` of a StepOutput, once per request."""
    starts, prompts = {}, {}
    for place, req in reqs.items():
        if req.announced:
            continue
        req.announced = True
        starts[place] = (req.prompt_len, req.cached_len)
        echo = echo_of(req)
        if echo is not None:
            prompts[place] = echo
    return starts, prompts


def drawn_output(
    table: SlotTable,
    batch: Batch,
    result: StepResult,
    drawn: IntArray,
    stamp_ns: int,
    starts: Mapping[int, tuple[int, int]],
    prompts: Mapping[int, PromptEcho],
    finishes: Mapping[int, FinishReason],
    complete: Sequence[int],
) -> StepOutput:
    """Say what the rows `drawn` of a step drew; their slots must still be taken."""
    slots = batch.slots[drawn]
    places = {int(row): place for place, row in enumerate(drawn)} if result.logprobs else {}
    return StepOutput(
        stamp_ns=stamp_ns,
        uids=table.uids[slots].tolist(),
        attempts=table.attempts[slots].tolist(),
        firsts=batch.out_index[drawn].tolist(),
        tokens=np.asarray(result.token_ids)[drawn].tolist(),
        finishes=finishes,
        starts=starts,
        logprobs={places[row]: entry for row, entry in result.logprobs.items() if row in places},
        prompts=prompts,
        complete=complete,
    )
