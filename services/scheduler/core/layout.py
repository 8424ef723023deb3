"""Lays the rows of one planned step out as the arrays of a Batch."""

import numpy as np

from services.scheduler.core.batch import FROM_DEVICE, Batch, IntArray, SlotSetup
from services.scheduler.core.page_table import PageTable
from services.scheduler.core.prefill import Chunk
from services.scheduler.core.req import Req
from services.scheduler.core.scoring import score_rows
from services.scheduler.core.slots import SlotTable


def lay_out(
    table: SlotTable,
    pages: PageTable,
    step: int,
    decode: tuple[IntArray, IntArray],
    chunks: list[Chunk],
    started: list[Req],
) -> Batch:
    """Make the batch of a step.

    Args:
        table: tokens of the slots; a decode row whose token is still under way reads it from the device.
        pages: pages of the slots, with room for every position of the step.
        step: its number.
        decode: slots of the decode rows, and the position each computes.
        chunks: parts of prompts, behind the decode rows.
        started: requests that got their slot for this step.
    """
    slots, starts = decode
    num_decode = len(slots)
    known = table.known_len[slots] > starts
    input_ids = np.where(known, table.token_ids[slots, starts], np.int32(FROM_DEVICE))
    lengths = np.ones(num_decode, np.int32)
    sample = np.ones(num_decode, np.bool_)
    if chunks:
        slots = np.concatenate([slots, np.array([chunk.req.slot for chunk in chunks], np.int32)])
        starts = np.concatenate([starts, np.array([chunk.start for chunk in chunks], np.int32)])
        lengths = np.concatenate([lengths, np.array([chunk.length for chunk in chunks], np.int32)])
        sample = np.concatenate([sample, np.array([chunk.draws for chunk in chunks], np.bool_)])
        parts = [chunk.req.token_ids[chunk.start : chunk.start + chunk.length] for chunk in chunks]
        input_ids = np.concatenate([input_ids, *parts])
    ends = starts + lengths
    return Batch(
        step=step,
        num_decode=num_decode,
        slots=slots,
        starts=starts,
        lengths=lengths,
        input_ids=input_ids,
        page_table=pages.rows(slots, int(ends.max())),
        sample=sample,
        out_index=np.where(sample, ends - table.prompt_len[slots] + 1, 0).astype(np.int32, copy=False),
        setups=tuple(
            SlotSetup(req.slot, req.params, req.token_ids[: req.prompt_len], req.output_ids) for req in started
        ),
        scores=score_rows(chunks, num_decode),
        guided=np.flatnonzero(sample & table.is_guided[slots]).astype(np.int32),
    )
