"""What positions add to the scores or hide: ALiBi, T5's relative bias, windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_export.attention import masking
from attn_export.attention.positions import (
    alibi_slopes,
    distances,
    relative_buckets,
    window,
)
from attn_export.attention.wide import WideBuffers
from attn_export.spec import AttentionSpec


class ScoreBias(WideBuffers):
    """Adds what a spec says of positions to a mask.

    Args:
        spec: Its windows, ALiBi and relative bias are used.
    """

    slopes: Tensor
    buckets: Tensor

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.alibi:
            slopes = torch.tensor(alibi_slopes(spec.num_heads), dtype=torch.float64)
            self.add_wide("slopes", slopes[:, None, None])  # [H, 1, 1]
        if spec.relative_buckets:
            self.relative_attention_bias = nn.Embedding(spec.relative_buckets, spec.num_heads)
            table = relative_buckets(
                spec.relative_buckets,
                spec.relative_max_distance,
                # Hidden keys need no buckets, as in T5's decoder.
                both_sides=not spec.causal,
            )
            self.register_buffer("buckets", table, persistent=False)

    def forward(self, mask: Tensor | None, L: int, S: int, like: Tensor) -> Tensor | None:
        """The mask with windows and biases; the same mask where the spec has none.

        Args:
            mask: Bool or float, broadcasts to `[B, H, L, S]`.
            L: Query length; the queries are the last L of S positions.
            S: Key length.
            like: Of the dtype and device that a bias should have.
        """
        spec = self.spec
        if not (spec.alibi or spec.relative_buckets or self._has_window()):
            return mask
        offsets = distances(L, S, like.device)
        mask = masking.restrict(mask, window(offsets, spec.window_left, spec.window_right))
        if spec.alibi:
            lost = offsets.abs().to(self.slopes.dtype) * self.slopes  # [H, L, S]
            mask = masking.add_bias(mask, -lost[None].to(like.dtype))
        if spec.relative_buckets:
            far = spec.relative_max_distance
            by_offset = self.relative_attention_bias.weight.index_select(0, self.buckets)
            bias = functional.embedding(offsets.clamp(-far, far) + far, by_offset)  # [L, S, H]
            mask = masking.add_bias(mask, bias.permute(2, 0, 1)[None])  # [1, H, L, S]
        return mask

    def _has_window(self) -> bool:
        return self.spec.window_left is not None or self.spec.window_right is not None
