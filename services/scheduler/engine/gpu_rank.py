"""One GPU with its piece of a model, or all of it: what every rank has and does alike.

Owns the forward pass, the draws and the graphs of both. Who decides what is computed is told elsewhere: `gpu` of rank
0, `gpu_follower` of the others.
"""

import logging
from typing import Final

import torch
from torch import Tensor

from services.scheduler.core.ports import EngineLimits
from services.scheduler.engine.gpu_forward import Forward
from services.scheduler.engine.graph import StepGraphs
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.parallel.comm import SOLO, Comm
from services.scheduler.engine.parallel.orders import DrawMode
from services.scheduler.engine.sampler_device import DeviceSampler
from services.scheduler.engine.stream import Streams

log = logging.getLogger(__name__)

_NAMES: Final[dict[DrawMode, str]] = {"pieces": "draw", "whole": "draw of all logits"}


class GpuRank:
    """What one GPU of an engine does. Used by one thread.

    Attributes:
        model: with its weights.
        limits: what callers may ask for.
        streams: where things run.
        comm: the other ranks.
        forward: the forward pass.
        sampler: the draws.
        draws: their graphs, by the numbers of rows of the decode graphs.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, limits: EngineLimits, streams: Streams, comm: Comm = SOLO
    ) -> None:
        """Take over what was loaded and reserve the buffers of a step.

        Args:
            model: with its weights.
            cache: the pool; nobody else writes to it.
            limits: what callers may ask for.
            streams: where things run.
            comm: the other ranks of the model.
        """
        self.model = model
        self.limits = limits
        self.streams = streams
        self.comm = comm
        self.forward = Forward(model, cache, limits, streams.multiprocessors, comm)
        self.sampler = DeviceSampler(limits.max_running, limits.vocab_size, limits.eos_token_ids, self.forward.block)
        modes: list[DrawMode] = ["whole"] if comm.ranks.size == 1 else ["pieces", "whole"]
        self.draws = {mode: self._make_graphs(mode) for mode in modes}

    def capture(self, sizes: list[int], *, mixed: bool, show: bool = True) -> None:
        """Capture the graphs of decode steps of some sizes, and of steps with prompts; all ranks do so together."""
        with torch.inference_mode(), self.streams.compute():
            self.forward.capture(sizes, mixed=mixed, show=show)
            for graphs in self.draws.values():
                graphs.capture(self.forward.decode_graphs.sizes, show=show)

    def compute_padding(self, num_tokens: int) -> None:
        """Compute a step of padding, as large as a step can be: what memory it takes is what a step takes."""
        with torch.inference_mode(), self.streams.compute():
            hidden = self.forward.compute_padding(num_tokens)
            for mode in self.draws:
                self._compute_draw(mode, hidden)

    def draw(self, mode: DrawMode, hidden: Tensor, num_drawn: int, replayed: int | None) -> None:
        """Draw from final states in a way that all ranks share.

        Args:
            mode: "pieces" or "whole".
            hidden: (num_drawn or more, hidden_size).
            num_drawn: rows that draw.
            replayed: rows of the decode graph that left them, if one did.
        """
        graphs = self.draws[mode]
        if replayed is not None and graphs.size_for(replayed) == replayed:
            graphs.replay(replayed)
        else:
            self._compute_draw(mode, hidden[:num_drawn])

    def close(self) -> None:
        """Let the device finish and drop the graphs."""
        self.streams.finish()
        for graphs in (*self.draws.values(), self.forward.decode_graphs, self.forward.mixed_graphs):
            graphs.drop()

    def _make_graphs(self, mode: DrawMode) -> StepGraphs:
        def compute(rows: int) -> Tensor:
            self._compute_draw(mode, self.forward.decode_graphs.result(rows))
            return self.sampler.tokens

        return StepGraphs(_NAMES[mode], compute, self.comm)

    def _compute_draw(self, mode: DrawMode, hidden: Tensor) -> None:
        if mode == "pieces":
            head = self.model.head
            self.sampler.draw_pieces(head.piece(hidden), head.first_id, self.comm)
        else:
            self.sampler.draw_plain(self.model.logits(hidden))
