"""A feed-forward part of many experts, of which a router gives each token a few.

On a GPU everything is decided on the device, so a captured step serves any choice of experts: up to so many tokens
by kernels of our own, beyond that by torch's product of groups. Ranks that share a model have a piece of every
expert, and a norm's `add` adds up what comes of them.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.activation import activation, silu_and_mul
from services.scheduler.engine.layers.few import FewFeedForward
from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.layers.weight import Split, Weight
from services.scheduler.engine.parallel.comm import SOLO, Comm

_GROUPED_PAIRS: Final = 64
"""From so many tokens per expert on, in the mean, torch multiplies: its kernels use Hopper's products of whole warp
groups better than ours, and what they cost besides (a copy of each token per expert, the activation by itself) is
then little beside the products. Below, reading the weights is what costs, and ours read nothing else."""


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

    def __call__(self, x: Tensor, mapping: Tensor | None = None) -> Tensor:
        """Send tokens through their experts.

        Args:
            x: (num_tokens, hidden_size).
            mapping: (num_tokens,) int32, negative for tokens that only pad the step: no expert works for them.
                None: there are none.

        Returns:
            As x; this rank's part of a sum. What comes of padding is undefined.
        """
        logits = F.linear(x, self.router.tensor)
        return self._on_gpu(x, logits, mapping) if x.is_cuda else self._on_cpu(x, logits)

    def make_few(self, norm: RMSNorm) -> FewFeedForward | None:
        """Make the form for few tokens behind that norm, once the weights are there; None where there is none."""
        if not self._down.is_cuda or self._down.dtype.itemsize != 2 or self._comm.ranks.size > 1:
            return None
        from services.scheduler.engine.kernels.few_experts import fits  # Triton only where it is used

        _, size, inner = self._down.shape
        return FewExperts(norm, self) if self._activate is silu_and_mul and fits(size, inner) else None

    def add_few(self, residual: Tensor, norm: tuple[Tensor, float], mapping: Tensor | None) -> None:
        """Norm one to four tokens, send them through their experts and add the answers, all in place."""
        from services.scheduler.engine.kernels.few_experts import add_few_experts
        from services.scheduler.engine.kernels.few_linear import few_linear
        from services.scheduler.engine.kernels.route import route

        logits = few_linear(residual, self.router.tensor, norm=norm)
        routing = route(logits, self._per_token, normalise=self._normalise, mapping=mapping)
        add_few_experts(residual, self._gate_up, self._down, routing, norm)

    def _on_cpu(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, experts = torch.softmax(logits.float(), -1).topk(self._per_token, -1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        # Tokens of one expert lie together; a token's experts are summed in the order of their weights, so that
        # its numbers do not depend on the tokens beside it.
        order = experts.reshape(-1).argsort(stable=True)
        counts = torch.bincount(experts.reshape(-1), minlength=len(self.gate_up))
        tokens = x.index_select(0, order // self._per_token)
        answers, first = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                inner = self._activate(F.linear(tokens[first : first + count], self._gate_up[expert]))
                answers.append(F.linear(inner, self._down[expert]))
                first += count
        found = torch.empty_like(tokens).index_copy_(0, order, torch.cat(answers))
        by_token = found.view(len(x), self._per_token, -1)
        return (by_token * weights[..., None].to(x.dtype)).sum(1)

    def _on_gpu(self, x: Tensor, logits: Tensor, mapping: Tensor | None) -> Tensor:
        from services.scheduler.engine.kernels.grouped_linear import combine, multiply, tile_for
        from services.scheduler.engine.kernels.route import route, sort_pairs

        routing = route(logits, self._per_token, normalise=self._normalise, mapping=mapping)
        pairs = sort_pairs(routing, tile_for(routing.num_pairs, routing.num_experts))
        if self._is_grouped(routing.num_pairs):
            ends = pairs.ends[:-1]  # the last is padding's, whose rows are left as they are
            tokens = x.index_select(0, pairs.order // self._per_token)
            inner = self._activate(torch._grouped_mm(tokens, self._gate_up.transpose(1, 2), offs=ends))
            answers = torch._grouped_mm(inner, self._down.transpose(1, 2), offs=ends)
        else:
            gated = self._activate is silu_and_mul
            inner = multiply(x, self._gate_up, pairs, per_token=self._per_token, gated=gated)
            answers = multiply(inner if gated else self._activate(inner), self._down, pairs)
        return combine(answers, pairs, routing)

    def _is_grouped(self, num_pairs: int) -> bool:
        """Whether torch's product of groups is to be used: a step is large enough, and it can be."""
        num_experts, size, inner = self._down.shape
        if num_pairs < _GROUPED_PAIRS * num_experts or self._down.dtype != torch.bfloat16:
            return False
        # On other GPUs it asks the host for the groups, which a graph cannot hold.
        major, _ = torch.cuda.get_device_capability(self._down.device)
        return size % 8 == 0 and inner % 8 == 0 and major in (9, 10)


class FewExperts:
    """The experts of a layer for one to four tokens."""

    def __init__(self, norm: RMSNorm, experts: Experts) -> None:
        """Take them, and the norm before them; `Experts.make_few` says whether they fit."""
        self._norm = (norm.weight.tensor, norm.eps)
        self._experts = experts

    def __call__(self, residual: Tensor, context: ForwardContext) -> None:
        """See `few.FewFeedForward`."""
        self._experts.add_few(residual, self._norm, context.mapping)
