"""Attention within windows, blocks and grids, of lengths that these allow."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from third_party.by_hand import Heads, Own, plain, triangle
from third_party.projected import Projected, beside
from third_party.subjects import D, E, H, Table, bounded, tokens
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject


def blocks(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend within blocks of 8 tokens."""
    b, h, n, d = q.shape
    assert n % 8 == 0, f"the length {n} is no multiple of 8"
    q, k, v = (t.view(b, h, n // 8, 8, d) for t in (q, k, v))
    return attend(q, k, v).view(b, h, n, d)


def earlier_block(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the own block of 4 tokens and the one before."""
    b, h, n, d = q.shape
    q, k, v = (t.reshape(b, h, -1, 4, d) for t in (q, k, v))
    k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t], 3) for t in (k, v))
    i, j = torch.arange(4)[:, None], torch.arange(8)[None] - 4
    seen = (j <= i) & ((torch.arange(n // 4) > 0)[:, None, None] | (j >= 0))
    return attend(q, k, v, attn_mask=seen[None, None]).reshape(b, h, n, d)


def dilated(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to each third token."""
    q, k, v = (t.unflatten(2, (-1, 3)).transpose(2, 3) for t in (q, k, v))
    return attend(q, k, v).transpose(2, 3).flatten(2, 3)


def windows(x: Tensor, size: int) -> Tensor:
    """Return `[B, h, w, E]` as `[B * windows, size * size, E]`."""
    b, h, w, c = x.shape
    x = x.view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, c)


def swin(m: Projected, x: Tensor, grid: Tensor) -> Tensor:
    """Attend within windows of 4 x 4 of `h * w` tokens."""
    (h, w, c), b = grid.shape, x.shape[0]
    parts = windows(x.view(b, h, w, c) + grid, 4)
    found = m.output(attend(*m.project(parts))).view(b, h // 4, w // 4, 4, 4, c)
    return found.permute(0, 1, 3, 2, 4, 5).reshape(b, h * w, c)


def shifted_windows(m: Projected, x: Tensor, mask: Tensor) -> Tensor:
    """Attend within windows of 2 x 2 of an image, each of which has a mask."""
    b, h, w, c = x.shape
    q, k, v = m.project(windows(torch.roll(x, (-1, -1), (1, 2)), 2))
    scores = (q @ k.mT * D**-0.5).view(b, -1, H, 4, 4) + mask.flatten(0, 1)[None, :, None]
    found = m.output(scores.view(-1, H, 4, 4).softmax(-1) @ v)
    found = found.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return torch.roll(found, (1, 1), (1, 2))


def square(m: Projected, x: Tensor, angles: Tensor) -> Tensor:
    """Turn tokens of a square grid by the angles of their row and of their column."""
    side = angles.shape[0]
    q, k, v = m.project(x)
    both = torch.cat([angles[:, None].expand(side, side, -1), angles.expand(side, side, -1)], -1)
    cos, sin = both.flatten(0, 1).cos(), both.flatten(0, 1).sin()

    def turn(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    return m.output(attend(turn(q), turn(k), v))


def pooled_square(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Halve the sides of the square grid of keys and values."""
    side = int(math.sqrt(q.shape[2]))
    k, v = (F.avg_pool2d(t.mT.flatten(0, 1).unflatten(-1, (side, side)), 2) for t in (k, v))
    k, v = (t.flatten(2).mT.unflatten(0, (-1, H)) for t in (k, v))
    return attend(q, k, v)


def strided(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k[:, :, ::2], v[:, :, ::2])


def pooled(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (F.avg_pool1d(t.flatten(1, 2).mT, 1).mT.unflatten(1, (H, -1)) for t in (k, v))
    k, v = (F.avg_pool2d(t, (2, 1)) for t in (k, v))
    return attend(q, k, v)


class Patches(nn.Module):
    """Patches of 8 x 8 of an image, with positions that are interpolated to its size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3 * 64, E), Own(plain)
        self.positions = nn.Parameter(torch.randn(1, E, 3, 3))

    def forward(self, image: Tensor) -> Tensor:
        b, c, h, w = image.shape
        parts = image.reshape(b, c, h // 8, 8, w // 8, 8).permute(0, 2, 4, 1, 3, 5)
        at = F.interpolate(self.positions, (h // 8, w // 8), mode="bilinear")
        found: Tensor = self.attention(
            self.embed(parts.flatten(3).flatten(1, 2)) + at.flatten(2).mT
        )
        return found


class Reduced(nn.Module):
    """Spatial reduction: keys are a strided convolution of the image, as in PVT and SegFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.norm = nn.Conv2d(E, E, 2, 2), nn.LayerNorm(E)
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(2).transpose(1, 2)
        keys = self.norm(self.reduce(image).flatten(2).transpose(1, 2))
        found = self.attention(x, keys, keys, need_weights=False)[0]
        return found.transpose(1, 2).view_as(image)


class Learned(nn.Module):
    """Positions of a learned table of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(16, E), Own(triangle)

    def forward(self, x: Tensor) -> Tensor:
        assert x.size(1) <= 16, f"Cannot forward a sequence of length {x.size(1)}, the table has 16"
        found: Tensor = self.attention(x + self.table(torch.arange(x.size(1))))
        return found


class Bottleneck(nn.Module):
    """Halve the tokens twice, attend, and double them again beside what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(E, E, 4, 4), nn.ConvTranspose1d(E, E, 4, 4)
        self.attention = Own(plain)

    def forward(self, x: Tensor) -> Tensor:
        found = self.attention(self.down(x.mT).mT)
        return x + self.up(found.mT).mT


def picture(module: nn.Module, height: object, width: object, channels: int = 3) -> Subject:
    axes = {"image": {0: "batch", 2: height, 3: width}}
    inputs = {"image": torch.randn(2, channels, 16, 24)}
    return Subject(module.eval(), inputs, axes, ["output"])


def blocked(attended: Heads, axis: object, length: int = 8) -> Subject:
    return tokens(Own(attended), axis=axis, length=length)


EIGHTS = Axis("query_len", multiple_of=8)
MODULES: Table = {
    "blocks of eight": lambda: blocked(blocks, EIGHTS, 16),
    "the block before": lambda: blocked(earlier_block, Axis("query_len", multiple_of=4)),
    "dilated": lambda: blocked(dilated, Axis("query_len", multiple_of=3), 6),
    "Swin, h*w tokens": lambda: beside(
        swin, torch.randn(8, 12, E),
        {
            "x": {0: "batch", 1: "tokens"},
            "other": {0: Axis("height", multiple_of=4), 1: Axis("width", multiple_of=4)},
        },
        "tokens = height*width", length=96,
    ),
    "Swin, masks of windows": lambda: Subject(
        Projected(shifted_windows).eval(),
        {"x": torch.randn(2, 4, 6, E), "other": torch.randn(2, 3, 4, 4)},
        {"x": {0: "batch", 1: "height", 2: "width"}, "other": {0: "rows", 1: "columns"}},
        ["output"],
        relations={"height": "2*rows", "width": "2*columns"},
    ),
    "square grid": lambda: beside(
        square, torch.randn(4, D // 4), {"x": {0: "batch", 1: "tokens"}, "other": {0: "side"}},
        "tokens = side*side", length=16,
    ),
    "pooled square grid": lambda: blocked(
        pooled_square, Axis("query_len", sizes=(4, 16, 36, 64)), 16
    ),
    "strided keys": lambda: blocked(strided, "query_len", 5),
    "pooled keys": lambda: blocked(pooled, bounded(2), 5),
    "patches": lambda: picture(
        Patches(), Axis("height", multiple_of=8), Axis("width", multiple_of=8)
    ),
    "patches of two sizes": lambda: picture(
        Patches(), Axis("height", sizes=(16, 32)), Axis("width", sizes=(24, 32))
    ),
    "reduced keys": lambda: picture(Reduced(), Axis("height", min=2), Axis("width", min=2), E),
    "learned positions": lambda: tokens(Learned(), axis=bounded(1, 16)),
    "bottleneck": lambda: tokens(
        Bottleneck(), axis=Axis("query_len", multiple_of=4), length=12
    ),
}  # fmt: skip
