"""Scoring: prompts whose own tokens are to be reported, with or without their log probabilities.

A scored prompt is computed from its first token, whatever the prefix cache holds: the cache keeps keys and values,
not the log probabilities of what follows each token.
"""

import numpy as np

from services.scheduler.core.batch import Batch, BoolArray, ScoreRow, StepResult
from services.scheduler.core.link import PromptEcho
from services.scheduler.core.prefill import Chunk
from services.scheduler.core.req import Req
from services.scheduler.core.slots import SlotTable


def score_rows(chunks: list[Chunk], num_decode: int) -> tuple[ScoreRow, ...]:
    """Say which rows of a step are scored: chunks stand behind the decode rows."""
    return tuple(
        _score_row(chunk, num_decode + place, chunk.req.params.prompt_logprobs or 0)
        for place, chunk in enumerate(chunks)
        if chunk.req.is_scored
    )


def _score_row(chunk: Chunk, row: int, num_top: int) -> ScoreRow:
    end = min(chunk.start + chunk.length + 1, chunk.req.prompt_len)
    return ScoreRow(row, chunk.req.token_ids[chunk.start + 1 : end], num_top)


def keep_scores(batch: Batch, result: StepResult, alive: BoolArray, table: SlotTable) -> list[Req]:
    """Keep what a step has scored.

    Returns:
        Requests that are scored whole and draw nothing.
    """
    done = []
    for score in batch.scores:
        if not alive[score.row]:
            continue
        req = table.req(int(batch.slots[score.row]))
        req.scores.append(result.scores[score.row])
        if int(batch.starts[score.row] + batch.lengths[score.row]) >= req.end_len:
            done.append(req)
    return done


def echo_of(req: Req) -> PromptEcho | None:
    """Give a request's prompt if its client asked for it and has not got it yet."""
    if req.params.prompt_logprobs is None and not req.params.returns_prompt:
        return None
    if req.was_resumed:
        return None
    scores, req.scores = tuple(req.scores), []
    return PromptEcho(np.asarray(req.token_ids[: req.prompt_len]), scores)
