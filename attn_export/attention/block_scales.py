"""4-bit keys and values with a scale and a zero point for each block of each token.

A block is up to 32 neighbouring channels of a head. Its scale is computed from its own range, so
that no calibration is needed and a large token does not reduce the precision of others. Scales and
zero points are stored as bytes after the channels of the token, so the cache is a single array.

Before that, keys and queries are multiplied by the same orthogonal (Hadamard) matrix, which does
not change scores. It spreads a channel that is much larger than others over all channels; otherwise
that channel would reduce the precision of its block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_export.attention.quantised_cache import (
    CacheRounding,
    CacheScales,
    Float16Cache,
    Pair,
    Quotients,
    byte_nibbles,
)
from attn_export.quantiser import join_nibbles
from attn_export.spec import AttentionSpec
from attn_export.spec.low_precision import (
    BY_BLOCK,
    FLOAT16,
    LARGEST_NIBBLE,
    LARGEST_ZERO,
    LEAST_ZERO,
    block_width,
)

SCALES_PER_OCTAVE, OCTAVES = 8, 32
"""The number of scales in an octave, i.e. from a scale to twice that scale, and the number of
octaves. A byte holds the index of a scale."""

_LEAST_EXPONENT = -24
"""The base-2 logarithm of the least scale."""

_LARGEST_RANGE = 15.5
"""The largest range of a block, as a multiple of its scale. Integers are 0 to 15: clipping some
values by half a step loses less than a larger step."""

_LEAST_RANGE = 1 / 8
"""The least range of a block, as a share of the magnitude of its least value, so that its zero
point fits into a byte."""

_WHOLE_LIMITS = (LEAST_ZERO, LARGEST_ZERO + LARGEST_NIBBLE)
"""The least and the largest integer before the zero point is subtracted."""


def byte_scales() -> Tensor:
    """Return the scale of each byte, float32 `[256]`."""
    exponents = torch.arange(SCALES_PER_OCTAVE * OCTAVES, dtype=torch.float64) / SCALES_PER_OCTAVE
    return torch.exp2(exponents + _LEAST_EXPONENT).float()


def hadamard(width: int) -> Tensor:
    """Return an orthogonal and symmetric matrix, float32 `[width, width]`.

    It is block-diagonal. Its blocks are Hadamard matrices, scaled to be orthogonal, of the largest
    power of 2 that divides the width.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while width % (2 * len(matrix)) == 0:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    identity = torch.eye(width // len(matrix), dtype=torch.float64)
    whole: Tensor = torch.kron(identity, matrix) / len(matrix) ** 0.5
    return whole.float()


class BlockScales(CacheRounding):
    """Rounding of keys and values to 4 bits, with a scale for each block.

    A cache is uint8 `[B, Hkv, S, D / 2 + 2 n]` for n blocks (Dv for values): the channels, see
    `join_nibbles`, then the index of the scale of each block, then its zero point.

    Attributes:
        hadamard: The matrix that queries and keys are multiplied by, `[D, D]`.
        steps: The scale of each byte, `[256, 1]`.
        octaves: The largest range for each octave of scales but the last, `[31]`.
        eighths: The largest range for each scale of an octave but the last, `[32, 7]`.
        nibbles: The two integers that each byte holds, `[256, 2]`.
    """

    hadamard: Tensor
    steps: Tensor
    octaves: Tensor
    eighths: Tensor
    nibbles: Tensor

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self._widths = spec.cache_widths
        scales = byte_scales()
        edges = (scales * _LARGEST_RANGE).reshape(
            OCTAVES, SCALES_PER_OCTAVE
        )  # the largest range of each scale
        tables = {
            "hadamard": hadamard(spec.head_dim), "steps": scales[:, None],
            "octaves": edges[:-1, -1].clone(), "eighths": edges[:, :-1].clone(),
            "nibbles": byte_nibbles(0),
        }  # fmt: skip
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def change_basis(self, x: Tensor) -> Tensor:
        """Multiply queries or keys, `[B, H, L, D]`, by the matrix, which is its own inverse."""
        return x @ self.hadamard

    def forward(self, key: Tensor, value: Tensor) -> Pair:
        """Return new keys and values in the type of the cache."""
        return self._to_bytes(key), self._to_bytes(value)

    def _to_bytes(self, x: Tensor) -> Tensor:
        blocks = _blocks(x)
        index = self._index(_ranges(blocks))
        # Integers, so that the following steps are exact.
        scale = self._scale(index)
        whole = Quotients(blocks / scale, scale, *_WHOLE_LIMITS).integers().int()
        zero = whole.amin(-1, keepdim=True).clamp(max=LARGEST_ZERO)
        nibbles = (whole - zero).clamp(max=LARGEST_NIBBLE).flatten(-2)
        parts = [join_nibbles(nibbles), index, zero.squeeze(-1) - LEAST_ZERO]
        return torch.cat(parts, dim=-1).to(torch.uint8)

    def _index(self, ranges: Tensor) -> Tensor:
        """Return the index of the least scale that is enough for each range, int32 `[..., n]`.

        It is found by comparisons, since a logarithm may differ in its last digit between runtimes.
        """
        wide = ranges.unsqueeze(-1)
        octave = (self.octaves < wide).sum(-1, dtype=torch.int32)
        edges = F.embedding(octave, self.eighths)
        return octave * SCALES_PER_OCTAVE + (edges < wide).sum(-1, dtype=torch.int32)

    def _scale(self, index: Tensor) -> Tensor:
        """Return the scales of indices, `[..., 1]`."""
        return F.embedding(index, self.steps)

    def read(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> Pair:
        """Return the keys and values that a cache represents."""
        key_width, value_width = self._widths
        return self._from_bytes(key, key_width, dtype), self._from_bytes(value, value_width, dtype)

    def _from_bytes(self, x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        count = width // block_width(width)
        nibbles, index, zero = x.split([width // 2, count, count], dim=-1)
        numbers = F.embedding(nibbles.int(), self.nibbles.to(dtype)).flatten(-2)
        zeros = zero.to(dtype).unsqueeze(-1) + LEAST_ZERO
        scales = F.embedding(index.int(), self.steps.to(dtype))
        values: Tensor = (_blocks(numbers) + zeros) * scales
        return values.flatten(-2)

    def quotients_of(self, x: Tensor, part: int) -> list[Quotients]:  # noqa: ARG002 (as for both)
        """Return channels over scales, and the indices of scales before they are rounded."""
        blocks = _blocks(x)
        ranges = _ranges(blocks)
        scales = self._scale(self._index(ranges)).expand_as(blocks)
        # A range at which the next scale begins gives a whole number and a half, i.e. a tie.
        exact = (ranges / _LARGEST_RANGE).clamp_min(torch.finfo(ranges.dtype).tiny).log2()
        indices = (exact - _LEAST_EXPONENT) * SCALES_PER_OCTAVE + 0.5
        return [
            Quotients((blocks / scales).flatten(-2), scales.flatten(-2), *_WHOLE_LIMITS),
            Quotients(indices, 1.0, 0, SCALES_PER_OCTAVE * OCTAVES - 1),
        ]


def make_cache_rounding(spec: AttentionSpec) -> CacheRounding:
    """Return the module that rounds keys and values to the type of the cache."""
    if spec.kv_dtype == FLOAT16:
        return Float16Cache()
    return BlockScales(spec) if spec.kv_scale == BY_BLOCK else CacheScales(spec)


def _blocks(x: Tensor) -> Tensor:
    """Return `[..., D]` as `[..., n, D / n]`."""
    blocks: Tensor = x.unflatten(-1, (-1, block_width(x.shape[-1])))
    return blocks


def _ranges(blocks: Tensor) -> Tensor:
    """Return the range of each block, which determines its scale, `[..., n]`."""
    least = blocks.amin(-1)
    return torch.maximum(blocks.amax(-1) - least, least.abs() * _LEAST_RANGE)
