"""Keys and values as 4 bits, with a scale and a zero point for each block of each token.

A block is up to 32 neighbouring channels of a head. Its scale follows from its own range, so that
nothing is calibrated and no token takes digits from another. Both are bytes in the row of the
token, behind those of its channels: a cache is one array, as any other.

Keys are multiplied by a Hadamard matrix before that, and queries by the same, which leaves scores
as they are: a channel that is larger than all others would take the digits of its block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.attention.quantised_cache import (
    CacheScales,
    Pair,
    Quotients,
    halves_of_bytes,
    in_bytes,
)
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import BY_BLOCK, FLOAT16, block_width

if TYPE_CHECKING:
    from attn_export.attention.float16_cache import Float16Cache

AN_OCTAVE, OCTAVES = 8, 32
"""The scales from one to twice that, and the number of such steps: a byte holds the index."""

LEAST_EXPONENT = -24
"""The least scale is 2 to the power of this."""

WIDTH = 15.5
"""The largest range of a block in scales: integers go from 0 to 15, and clipping a value by half a
step at times loses less than larger steps do."""

APART = 1 / 8
"""The least range of a block, in magnitudes of its least value: zero points fit into a byte."""

LEAST_ZERO, LARGEST_ZERO = -128, 127
"""The zero points, in scales; a byte holds one less the least."""

SIXTEENTH = 15
"""The largest integer of 4 bits."""


def scales_of_bytes() -> Tensor:
    """Return the scale that each byte stands for, float32 `[256]`."""
    exponents = torch.arange(AN_OCTAVE * OCTAVES, dtype=torch.float64) / AN_OCTAVE
    return torch.exp2(exponents + LEAST_EXPONENT).float()


def hadamard(width: int) -> Tensor:
    """Return an orthogonal and symmetric matrix, float32 `[width, width]`.

    It is made of Hadamard matrices of the largest power of 2 that divides the width, along the
    diagonal: each element is the same magnitude, or 0.

    Args:
        width: The width.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while width % (2 * len(matrix)) == 0:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    many = torch.eye(width // len(matrix), dtype=torch.float64)
    whole: Tensor = torch.kron(many, matrix) / len(matrix) ** 0.5
    return whole.float()


class BlockScales(nn.Module):
    """Rounding of keys and values to 4 bits by block.

    Args:
        spec: The spec; its `kv_scale` is ``"per-block"``.

    Attributes:
        hadamard: The matrix that queries and keys are multiplied by, `[D, D]`.
        steps: The scale that each byte stands for, `[256, 1]`.
        octaves: The ranges from which on the next octave of scales begins, `[31]`.
        eighths: The ranges from which on the next scale of an octave is taken, `[32, 7]`.
        halves: The two numbers that each byte holds, `[256, 2]`.
    """

    hadamard: Tensor
    steps: Tensor
    octaves: Tensor
    eighths: Tensor
    halves: Tensor

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self._widths = spec.cache_widths
        scales = scales_of_bytes()
        # the largest range of each scale
        edges = (scales * WIDTH).reshape(OCTAVES, AN_OCTAVE)
        tables = {
            "hadamard": hadamard(spec.head_dim), "steps": scales[:, None],
            "octaves": edges[:-1, -1].clone(), "eighths": edges[:, :-1].clone(),
            "halves": halves_of_bytes(0),
        }  # fmt: skip
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def mixed(self, x: Tensor) -> Tensor:
        """Return queries or keys times the matrix, `[B, H, L, D]`; twice gives them back."""
        return x @ self.hadamard

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return the rows of new keys and values.

        Args:
            key: `[B, Hkv, L, D]`, mixed.
            value: `[B, Hkv, L, Dv]`.

        Returns:
            uint8 `[B, Hkv, L, D / 2 + 2 n]` of n blocks: channels as `in_bytes` has them, then the
            index of the scale of each block, then its zero point.
        """
        return self._row(key), self._row(value)

    def _row(self, x: Tensor) -> Tensor:
        blocks = _blocks(x)
        index = self._index(_ranges(blocks))
        lowest, highest = LEAST_ZERO, LARGEST_ZERO + SIXTEENTH
        # integers: what follows must not round
        whole = (blocks / self._scale(index)).round().clamp(lowest, highest).int()
        zero = whole.amin(-1, keepdim=True).clamp(max=LARGEST_ZERO)
        halves = (whole - zero).clamp(max=SIXTEENTH).flatten(-2)
        row = [in_bytes(halves), index, zero.squeeze(-1) - LEAST_ZERO]
        return torch.cat(row, dim=-1).to(torch.uint8)

    def _index(self, ranges: Tensor) -> Tensor:
        """Return the index of the least scale that is enough for each range, int32.

        Edges are counted: a logarithm may differ in its last digit.
        """
        wide = ranges.unsqueeze(-1)
        octave = (self.octaves < wide).sum(-1, dtype=torch.int32)
        edges = F.embedding(octave, self.eighths)
        return octave * AN_OCTAVE + (edges < wide).sum(-1, dtype=torch.int32)

    def _scale(self, index: Tensor) -> Tensor:
        """Return scales, `[..., 1]`, of their indices."""
        return F.embedding(index, self.steps)

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return what rows stand for.

        Args:
            key: uint8 `[B, Hkv, S, D / 2 + 2 n]`.
            value: uint8, likewise.
            dtype: The type of the result.

        Returns:
            Mixed keys `[B, Hkv, S, D]`, and values `[B, Hkv, S, Dv]`.
        """
        of_keys, of_values = self._widths
        return self._meant(key, of_keys, dtype), self._meant(value, of_values, dtype)

    def _meant(self, row: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        count = width // block_width(width)
        halves, index, zero = row.split([width // 2, count, count], dim=-1)
        numbers = F.embedding(halves.int(), self.halves.to(dtype)).flatten(-2)
        zeros = zero.to(dtype).unsqueeze(-1) + LEAST_ZERO
        scales = F.embedding(index.int(), self.steps.to(dtype))
        meant: Tensor = (_blocks(numbers) + zeros) * scales
        return meant.flatten(-2)

    def step_sizes(self, key: Tensor, value: Tensor) -> Pair:
        """Return the difference that one integer more makes, of each channel.

        Args:
            key: `[B, Hkv, L, D]`, mixed.
            value: `[B, Hkv, L, Dv]`.
        """
        return self._step_size(key), self._step_size(value)

    def _step_size(self, x: Tensor) -> Tensor:
        blocks = _blocks(x)
        return self._scale(self._index(_ranges(blocks))).expand_as(blocks).flatten(-2)

    def quotients(self, key: Tensor, value: Tensor) -> list[Quotients]:
        """Return what is rounded to integers: channels by their scales, and ranges.

        Args:
            key: `[B, Hkv, L, D]`, mixed.
            value: `[B, Hkv, L, Dv]`.
        """
        found = []
        for blocks in (_blocks(key), _blocks(value)):
            ranges = _ranges(blocks)
            channels = blocks / self._scale(self._index(ranges))
            limits = (LEAST_ZERO, LARGEST_ZERO + SIXTEENTH)
            found.append(Quotients(channels.flatten(-2), *limits))
            # where the next scale is taken, this is a whole number and a half
            exact = (ranges / WIDTH).clamp_min(torch.finfo(ranges.dtype).tiny).log2()
            last = AN_OCTAVE * OCTAVES - 1
            found.append(Quotients((exact - LEAST_EXPONENT) * AN_OCTAVE + 0.5, 0, last))
        return found


def scales_of(spec: AttentionSpec) -> CacheScales | BlockScales | Float16Cache:
    """Return the rounding of keys and values, of a cache in another type than the layer."""
    if spec.kv_dtype == FLOAT16:
        from attn_export.attention.float16_cache import Float16Cache  # few layers have one

        return Float16Cache()
    return BlockScales(spec) if spec.kv_scale == BY_BLOCK else CacheScales(spec)


def _blocks(x: Tensor) -> Tensor:
    """Return `[..., D]` as `[..., n, D / n]`."""
    blocks: Tensor = x.unflatten(-1, (-1, block_width(x.shape[-1])))
    return blocks


def _ranges(blocks: Tensor) -> Tensor:
    """Return the range of each block that its scale is found from, `[..., n]`."""
    least = blocks.amin(-1)
    return torch.maximum(blocks.amax(-1) - least, least.abs() * APART)
