"""What one forward pass is told besides its weights. It is an argument everywhere, never a module global."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class PlannedAttention(Protocol):
    """Attention of one step, planned once and run once per layer."""

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the keys and values of the step's tokens, then attend to all that their requests have.

        Args:
            layer_id: the layer, from 0.
            q: (num_tokens, num_qo_heads, head_dim), rotated.
            k: (num_tokens, num_kv_heads, head_dim), rotated.
            v: (num_tokens, num_kv_heads, head_dim).
            scale: factor on the scores.
            window: tokens a position sees, itself included; None for all.
            softcap: scores are squeezed into (-softcap, softcap); None leaves them. Models that are defined here
                have none, and only the `torch` backend knows it.

        Returns:
            (num_tokens, num_qo_heads * head_dim).
        """
        ...


class FusedAttention(Protocol):
    """The same in one call from the merged projections on, for devices with a kernel for what lies between."""

    def run_fused(
        self,
        layer_id: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        angles: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Normalise and rotate the heads, store keys and values, attend.

        Args:
            layer_id: the layer, from 0.
            qkv: (num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim), may be changed.
            norms: weights (head_dim,) of the query and the key norm and their eps, or None.
            angles: (positions, head_dim) float32, cosines and then sines.
            num_qo_heads: query heads in `qkv`.
            scale: factor on the scores.
            window: tokens a position sees, itself included; None for all.

        Returns:
            (num_tokens, num_qo_heads * head_dim).
        """
        ...


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward pass.

    Attributes:
        positions: (num_tokens,) int64, place of each token in its request.
        attention: the planned attention.
        logits_index: (num_wanted,) int64, tokens whose logits are wanted; None for all.
        fused: the same attention where it can also do what comes before; layers prefer it.
        num_decode: the first tokens are those of decode rows.
        mapping: (num_tokens,) int32, negative for tokens that only pad the step; None: there are none.
        few: there are so few tokens, and all their final states are wanted, that layers with a form for that use it.
    """

    positions: Tensor
    attention: PlannedAttention
    logits_index: Tensor | None
    fused: FusedAttention | None = None
    num_decode: int = 0
    mapping: Tensor | None = None
    few: bool = False
