"""The attention part of a layer between its projections: norms per head, rotation, the backend."""

from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.layers.rotary import Angles, rotate


class Attention:
    """Multi-head attention with grouped keys and values."""

    def __init__(
        self,
        layer_id: int,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        """Describe the heads.

        Args:
            layer_id: the layer, from 0; it chooses the KV tensors.
            num_qo_heads: query heads.
            num_kv_heads: key and value heads, a divisor of the query heads.
            head_dim: size of a head.
            window: tokens a position sees, itself included; None for all.
            q_norm: norm of each query head before the rotation.
            k_norm: norm of each key head before the rotation.
        """
        self._layer_id = layer_id
        self._num_qo_heads = num_qo_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        self._window = window
        self._q_norm = q_norm
        self._k_norm = k_norm

    def __call__(self, qkv: Tensor, angles: Angles, context: ForwardContext) -> Tensor:
        """(num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim) -> (num_tokens, num_qo_heads * head_dim)."""
        if context.fused is not None:
            return context.fused.run_fused(
                self._layer_id,
                qkv,
                self._norms(),
                angles.table,
                num_qo_heads=self._num_qo_heads,
                scale=self._scale,
                window=self._window,
            )
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        num_rotated = self._num_qo_heads + self._num_kv_heads
        if self._q_norm is None or self._k_norm is None:
            rotated = rotate(heads[:, :num_rotated], angles)
            q, k = rotated[:, : self._num_qo_heads], rotated[:, self._num_qo_heads :]
        else:
            q = rotate(self._q_norm(heads[:, : self._num_qo_heads]), angles)
            k = rotate(self._k_norm(heads[:, self._num_qo_heads : num_rotated]), angles)
        return context.attention.run(
            self._layer_id, q, k, heads[:, num_rotated:], scale=self._scale, window=self._window
        )

    def _norms(self) -> tuple[Tensor, Tensor, float] | None:
        if self._q_norm is None or self._k_norm is None:
            return None
        return self._q_norm.weight.tensor, self._k_norm.weight.tensor, self._q_norm.eps
