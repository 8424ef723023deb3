"""From a Batch to what the device computes with: ids, positions, rows of attention, rows that draw."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.scheduler.core.batch import FROM_DEVICE, Batch, IntArray
from services.scheduler.engine.attention.base import AttentionRows, IndexArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step, laid out.

    Attributes:
        input_ids: (num_tokens,) int64 on the device.
        positions: (num_tokens,) int64 on the device.
        attention: rows for the attention backend, on the host.
        logits_index: (num_wanted,) int64 on the device: the last token of each row that draws, then the tokens
            that are scored, score by score.
        drawn_rows: (num_drawn,) rows that draw, on the host.
    """

    input_ids: Tensor
    positions: Tensor
    attention: AttentionRows
    logits_index: Tensor
    drawn_rows: IndexArray


def prepare(batch: Batch, last_tokens: Tensor, device: torch.device) -> StepInputs:
    """Lay out a step.

    Args:
        batch: the step; the step before it must have been computed, or be queued ahead on the device.
        last_tokens: (max_running,) int64 on the device, the token drawn last for each slot.
        device: where the tensors go.
    """
    starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    token_rows = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    positions = np.arange(offsets[-1], dtype=np.int64) - (offsets[:-1] - starts)[token_rows]
    drawn_rows = np.flatnonzero(batch.sample)
    wanted = [offsets[drawn_rows + 1] - 1]
    wanted += [offsets[score.row] + np.arange(len(score.targets)) for score in batch.scores]
    return StepInputs(
        input_ids=_input_ids(batch.input_ids, batch.slots, token_rows, last_tokens, device),
        positions=torch.from_numpy(positions).to(device),
        attention=AttentionRows(
            starts, lengths, offsets, batch.page_table.astype(np.int64), token_rows, positions, batch.num_decode
        ),
        logits_index=torch.from_numpy(np.concatenate(wanted)).to(device),
        drawn_rows=drawn_rows,
    )


def _input_ids(
    ids: IntArray, slots: IntArray, token_rows: IndexArray, last_tokens: Tensor, device: torch.device
) -> Tensor:
    """Put the tokens that only the device knows in their places, without asking it for them."""
    input_ids = torch.from_numpy(ids.astype(np.int64)).to(device)
    places = np.flatnonzero(ids == FROM_DEVICE)
    if len(places):
        sources = torch.from_numpy(slots[token_rows[places]].astype(np.int64)).to(device)
        input_ids.index_copy_(0, torch.from_numpy(places).to(device), last_tokens.index_select(0, sources))
    return input_ids
