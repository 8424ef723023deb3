"""A feed-forward part of many experts, of which a router gives each token a few.

Ranks that share a model have a piece of every expert, and the results are added up.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.layers.activation import activation
from services.scheduler.engine.layers.weight import Split, Weight
from services.scheduler.engine.parallel.comm import SOLO, Comm


class Experts:
    """Router and experts of one layer.

    Attributes:
        router: (num_experts, hidden_size).
        gate_up: per expert (2 * inner_size, hidden_size), the gate first.
        down: per expert (hidden_size, inner_size).
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        per_token: int,
        *,
        normalise: bool,
        activation_name: str,
        dtype: torch.dtype,
        device: torch.device,
        comm: Comm = SOLO,
    ) -> None:
        """Lay out the layer.

        Args:
            hidden_size: of a token.
            inner_size: of an expert, as this rank has it.
            num_experts: of all ranks; each has a piece of every one.
            per_token: experts a token goes to.
            normalise: the weights of a token's experts add up to one.
            activation_name: between the halves of an expert.
            dtype: precision.
            device: where it lies.
            comm: the other ranks.
        """
        self._per_token = per_token
        self._normalise = normalise
        self._activate = activation(activation_name)
        self._comm = comm
        self.router = Weight((num_experts,), (hidden_size,), dtype, device)
        self._gate_up = torch.empty(num_experts, 2 * inner_size, hidden_size, dtype=dtype, device=device)
        self._down = torch.empty(num_experts, hidden_size, inner_size, dtype=dtype, device=device)
        outputs, inputs = Split(0, comm.ranks), Split(1, comm.ranks)
        self.gate_up = [Weight((inner_size,) * 2, (hidden_size,), dtype, device, outputs, w) for w in self._gate_up]
        self.down = [Weight((hidden_size,), (inner_size,), dtype, device, inputs, w) for w in self._down]

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, hidden_size) -> the same shape."""
        chances = torch.softmax(F.linear(x, self.router.tensor).float(), -1)
        weights, experts = chances.topk(self._per_token, -1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        # Tokens of one expert lie together; a token's experts are summed in the order of their weights, so that
        # its numbers do not depend on the tokens beside it.
        order = experts.reshape(-1).argsort(stable=True)
        counts = torch.bincount(experts.reshape(-1), minlength=len(self.gate_up))
        tokens = x.index_select(0, order // self._per_token)
        found = torch.empty_like(tokens)
        found.index_copy_(0, order, self._compute(tokens, counts))
        by_token = found.view(len(x), self._per_token, -1)
        summed = (by_token * weights[..., None].to(x.dtype)).sum(1)
        return self._comm.all_reduce(summed)

    def _compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens, sorted by expert, through their experts."""
        if tokens.is_cuda and tokens.dtype == torch.bfloat16:
            ends = counts.cumsum(0).to(torch.int32)
            inner = self._activate(torch._grouped_mm(tokens, self._gate_up.transpose(1, 2), offs=ends))
            return torch._grouped_mm(inner, self._down.transpose(1, 2), offs=ends)
        found, first = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                inner = self._activate(F.linear(tokens[first : first + count], self._gate_up[expert]))
                found.append(F.linear(inner, self._down[expert]))
                first += count
        return torch.cat(found)
