"""Integers of weights, activations and caches in float64, in steps of which a fault changes some.

Legend: B batch, Hkv key/value heads, L new tokens, S tokens of a cache, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.float64.attention_steps import Steps
from attn_export.quantiser import (
    BLOCK_LARGEST,
    MIDDLE,
    cached_integers,
    join_nibbles,
    split_nibbles,
)
from attn_export.tensorfile import Array


def packed_weight(constants: Sequence[Array | None], attributes: Mapping[str, Any]) -> Array:
    """Return the dequantised weight of a MatMulNBits node, float64 `[K, N]`."""
    arrays = [array for array in constants if array is not None]
    K, N, bits, block = (attributes[name] for name in ("K", "N", "bits", "block_size"))
    if bits not in (4, 8) or len(arrays) not in (2, 3) or len(arrays) != len(constants):
        raise NotImplementedError(f"MatMulNBits with {bits} bits or a further input")
    (packed, scales), packed_zeros = arrays[:2], arrays[2:]
    blocks = -(-K // block)
    numbers = _unpack(packed.reshape(N, blocks, -1), bits).astype(np.float64)
    zero_points = np.full((N, blocks), 2 ** (bits - 1))
    if packed_zeros:
        zero_points = _unpack(packed_zeros[0].reshape(N, -1), bits)[:, :blocks]
    weight = (numbers - zero_points[..., None]) * scales.reshape(N, blocks, 1)
    transposed: Array = weight.reshape(N, -1)[:, :K].T
    return transposed


def dequantised(
    stored: Array, scale: Array, zero_point: Array | None = None, *, axis: int = 1,
    block_size: int = 0,
) -> Array:  # fmt: skip
    """Return what integers stand for, float64, as DequantizeLinear of ONNX defines it."""

    def spread(of_blocks: Array) -> Array:
        if block_size:
            block = min(block_size, stored.shape[axis])
            repeated = np.repeat(of_blocks.astype(np.float64), block, axis)
            return np.take(repeated, range(stored.shape[axis]), axis)
        along = [-1 if at == axis % stored.ndim else 1 for at in range(stored.ndim)]
        return of_blocks.astype(np.float64).reshape(along if of_blocks.ndim else ())

    zero = 0.0 if zero_point is None else spread(zero_point)
    product: Array = (stored.astype(np.float64) - zero) * spread(scale)
    return product


def quantised_table(constants: Sequence[Array | None], attributes: Mapping[str, Any]) -> Array:
    """Return the dequantised table of a GatherBlockQuantized node, float64.

    Bytes hold unsigned integers, of which the middle stands for 0 by default.
    """
    stored, scale, *zeros = constants
    zero = zeros[0] if zeros else None
    assert stored is not None
    assert scale is not None
    bits = attributes.get("bits", 4)
    if stored.dtype == np.uint8:
        stored = _unpack(stored, bits)
        middle = np.full(scale.shape, 2 ** (bits - 1))
        zero = middle if zero is None else _unpack(zero, bits)[..., : scale.shape[-1]]
    axis, block = attributes.get("quantize_axis", 1), attributes.get("block_size", 128)
    return dequantised(stored, scale, zero, axis=axis, block_size=block)


def _unpack(packed: Array, bits: int) -> Array:
    """Return the unsigned integers of 4 or 8 bits that bytes hold along the last axis."""
    return packed if bits == 8 else split_nibbles(packed)


def round_by_block(x: Array, block: int, at: Steps) -> Array:
    """Return an input `[…, K]` rounded to whole multiples of a scale for each `block` elements.

    Steps: ``width`` of a block; ``largest`` magnitudes and ``scale``, `[…, blocks, 1]`;
    ``quotients`` as rounded to integers; ``integers`` as clipped from ``low`` to ``high``;
    ``read_scale``; ``rounded``, `[…, blocks, block]`.
    """
    size = x.shape[-1]
    width = min(max(int(at.set("width", block)), 1), max(size, block))
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % block)])
    at["blocks"] = padded.reshape(*x.shape[:-1], -1, width)
    largest = at.set("largest", np.abs(at["blocks"]).max(-1, keepdims=True))
    scale = at.set("scale", np.where(largest > 0, largest / BLOCK_LARGEST, 1.0))
    at["exact"] = at["blocks"] / scale
    low, high = at.set("low", -BLOCK_LARGEST), at.set("high", BLOCK_LARGEST)
    integers = np.clip(at.set("quotients", np.rint(at["exact"])), low, high)
    rounded = at.set("integers", integers) * at.set("read_scale", scale)
    return np.asarray(at.set("rounded", rounded)).reshape(padded.shape)[..., :size]


def to_cache(x: Array, scale: Array, bits: int, at: Steps) -> Array:
    """Return new keys or values `[B, Hkv, L, D]` as a cache stores them.

    They are int8, or uint8 `[B, Hkv, L, D / 2]` for 4 bits. Steps: ``write_scale``; ``rounded``,
    the integers before they are clipped to ``low`` and ``high``; ``written`` ones, `[B, Hkv, L,
    D]`; with 4 bits ``packed`` bytes, `[B, Hkv, L, D / 2]`.
    """
    end = 2 ** (bits - 1)
    at["quotients"] = x / at.set("write_scale", scale)
    rounded = at.set("rounded", np.rint(at["quotients"]))
    low, high = at.set("low", -end), at.set("high", end - 1)
    if bits == 8:  # QuantizeLinear saturates after it has added the zero point
        new = np.clip(at.set("written", rounded), low, high)
        return np.asarray(new.astype(np.int64).astype(np.int8))
    nibbles = at.set("written", np.clip(rounded, low, high)).astype(np.int64) + MIDDLE
    return np.asarray(at.set("packed", join_nibbles(nibbles) % 256)).astype(np.uint8)


def from_cache(stored: Array, scale: Array, bits: int, at: Steps) -> Array:
    """Return the keys or values `[B, Hkv, S, D]` that a cache represents.

    Steps: ``read`` integers, `[B, Hkv, S, D]`; ``read_scale``; ``dequantised``.
    """
    read = at.set("read", cached_integers(stored, bits).astype(np.float64))
    return np.asarray(at.set("dequantised", read * at.set("read_scale", scale)))
