"""Self-attention that is a convolution (Cordonnier et al. 2020, arXiv:1911.03584, section 3).

Each head has a place in mind, `centre`, relative to the query, and looks there the more
sharply, the larger its `alpha` is: a key at the offset δ from the query scores
``-alpha * ||δ - centre||²``. What the tokens hold plays no part. Nine heads at the offsets of a
3x3 kernel and a projection of what they see are a 3x3 convolution.

Legend: B batch, C channels, L tokens, H heads, N dimensions of a position (1 or 2).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


class QuadraticAttention(nn.Module):
    """Heads that attend by relative position alone, and one projection of all that they see.

    Args:
        dims: N, how many numbers a position has.
        channels: C of the tokens.
        out_channels: C of the outputs.
        num_heads: H.
    """

    def __init__(self, dims: int, channels: int, out_channels: int, num_heads: int) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.randn(num_heads, dims))
        self.alpha = nn.Parameter(torch.ones(num_heads))  # below 0 it would look away
        self.mix = nn.Linear(num_heads * channels, out_channels)

    def weights(self, positions: Tensor) -> Tensor:
        """Return the attention weights, `[H, L, L]`, for tokens at `positions [L, N]`."""
        offsets = positions.unsqueeze(0) - positions.unsqueeze(1)  # [query, key, N]
        misses = offsets - self.centre[:, None, None]  # [H, query, key, N]
        scores = -self.alpha[:, None, None] * misses.square().sum(-1)
        return scores.softmax(-1)

    def attend(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Apply attention: `[B, L, C]` -> `[B, L, out_channels]`."""
        seen = self.weights(positions) @ tokens.unsqueeze(1)  # [B, H, L, C]
        return self.mix(seen.transpose(1, 2).flatten(2))


class SequenceAttention(QuadraticAttention):
    """In one dimension."""

    def __init__(self, channels: int, out_channels: int, num_heads: int) -> None:
        super().__init__(1, channels, out_channels, num_heads)

    def forward(self, tokens: Tensor) -> Tensor:
        """Apply attention: `[B, L, C]` -> `[B, L, out_channels]`."""
        return self.attend(tokens, _steps(tokens.shape[1], tokens).unsqueeze(-1))


class ImageAttention(QuadraticAttention):
    """In two dimensions: every pixel is a token, at (row, column)."""

    def __init__(self, channels: int, out_channels: int, num_heads: int) -> None:
        super().__init__(2, channels, out_channels, num_heads)

    def forward(self, images: Tensor) -> Tensor:
        """Apply attention: `[B, C, height, width]` -> `[B, out_channels, height, width]`."""
        height, width = images.shape[2:]
        rows = _steps(height, images)[:, None].expand(height, width)
        columns = _steps(width, images)[None].expand(height, width)
        positions = torch.stack([rows, columns], dim=-1).flatten(0, 1)  # [L, 2]
        tokens = images.flatten(2).transpose(1, 2)  # [B, L, C]
        mixed = self.attend(tokens, positions)
        return mixed.transpose(1, 2).unflatten(2, (height, width))


def from_convolution(
    convolution: nn.Conv1d | nn.Conv2d, *, alpha: float = 40.0
) -> SequenceAttention | ImageAttention:
    """Return attention that equals a convolution, within about exp(-alpha).

    One head for each place of the kernel. Where the kernel reaches over the border, a head
    looks at the nearest pixel there is: the convolution has `padding_mode="replicate"`.

    Args:
        convolution: With an odd kernel, stride 1, padding that keeps the size, and one group.
        alpha: How sharply the heads look. In float64, 40 leaves nothing to be seen.
    """
    offsets = [
        [step * (place - size // 2) for place in range(size)]
        for size, step in zip(convolution.kernel_size, convolution.dilation, strict=True)
    ]
    centres = torch.tensor(list(itertools.product(*offsets)))  # [H, N], as the kernel is laid out
    kind = SequenceAttention if len(offsets) == 1 else ImageAttention
    attention = kind(convolution.in_channels, convolution.out_channels, len(centres))
    kernel = convolution.weight.flatten(2)  # [out, C, H]
    with torch.no_grad():
        attention.centre.copy_(centres)
        attention.alpha.fill_(alpha)
        attention.mix.weight.copy_(kernel.transpose(1, 2).flatten(1))  # [out, H * C]
        attention.mix.bias.zero_()
        if convolution.bias is not None:
            attention.mix.bias.copy_(convolution.bias)
    return attention.to(convolution.weight.dtype)


def _steps(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device, dtype=like.dtype)
