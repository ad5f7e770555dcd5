"""Effects of positions on the scores: ALiBi, T5's relative bias, windows."""

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
from attn_export.attention.wide_buffers import WideBuffers
from attn_export.spec import AttentionSpec


class ScoreBias(WideBuffers):
    """Bias and visibility that a spec derives from positions, added to a mask.

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

    def forward(self, mask: Tensor | None, queries: Tensor, S: int, like: Tensor) -> Tensor | None:
        """Return the mask with windows and biases; the same mask if the spec has none.

        Args:
            mask: Bool or float, broadcasts to `[B, H, L, S]`.
            queries: Their positions among the keys, `[L]`, or `[B, L]` where rows differ.
            S: Key length.
            like: Of the dtype that a bias should have.
        """
        spec = self.spec
        if not (spec.alibi or spec.relative_buckets or self._has_window()):
            return mask
        offsets = distances(queries, S)  # [L, S] or [B, L, S]
        mask = masking.restrict(mask, self._window(offsets))
        if spec.alibi:
            lost = offsets.abs().to(self.slopes.dtype).unsqueeze(-3) * self.slopes  # [.., H, L, S]
            mask = masking.add_bias(mask, -_with_batch(lost).to(like.dtype))
        if spec.relative_buckets:
            far = spec.relative_max_distance
            by_offset = self.relative_attention_bias.weight.index_select(0, self.buckets)
            bias = functional.embedding(offsets.clamp(-far, far) + far, by_offset)  # [.., L, S, H]
            mask = masking.add_bias(mask, _with_batch(bias.movedim(-1, -3)))
        return mask

    def _window(self, offsets: Tensor) -> Tensor | None:
        """Return the keys that the window shows, bool `[L, S]` or `[B, 1, L, S]`, or None."""
        shown = window(offsets, self.spec.window_left, self.spec.window_right)
        return shown if shown is None or shown.dim() == 2 else shown.unsqueeze(1)

    def _has_window(self) -> bool:
        return self.spec.window_left is not None or self.spec.window_right is not None


def _with_batch(bias: Tensor) -> Tensor:
    """Reshape `[H, L, S]` to `[1, H, L, S]`; return `[B, H, L, S]` unchanged."""
    return bias if bias.dim() == 4 else bias.unsqueeze(0)
