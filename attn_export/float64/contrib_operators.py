"""ONNX Runtime's contrib operators in float64, as far as the `ort` dialect uses them.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. An input or attribute
that is not implemented here raises NotImplementedError, so that no graph is reported as wrong
because of it.

Legend: B batch, H query heads, Hkv key/value heads, L new tokens, S tokens of a cache, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from attn_export.dialect_names import MICROSOFT
from attn_export.float64.attention_steps import StepChange, Steps, attention, split_heads
from attn_export.quantiser import (
    BLOCK_LARGEST,
    INTEGER_PRODUCTS,
    MIDDLE,
    cached_integers,
    join_nibbles,
    split_nibbles,
)
from attn_export.tensorfile import Array

_GQA_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
)  # fmt: skip
"""The inputs of GroupQueryAttention, as ONNX Runtime names them."""

_NO_SINK = np.array(-1e30)
"""A score that adds nothing to the sum of a softmax."""

_MHA_INPUTS = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")
"""The inputs of MultiHeadAttention up to the last one that is implemented."""

_REFUSED_INPUTS = frozenset({"cos_cache", "sin_cache", "position_ids", "bias", "key_padding_mask"})
"""Inputs of both operators that are not implemented here."""

_SUPPORTED_ATTRIBUTES = frozenset({
    "num_heads", "kv_num_heads", "scale", "softcap",
    "kv_cache_bit_width", "k_quant_type", "v_quant_type",  # of a cache of integers
})  # fmt: skip


class GroupQueryAttention(OpRun):
    """Causal attention over `seqlens_k[b] + 1` keys, the new ones included, in batch element b.

    In a prompt, where `total_sequence_length` is L, batch elements have L keys.
    """

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        operands = _optional_inputs(_GQA_INPUTS, inputs, attributes)
        if (operands.get("head_sink", _NO_SINK) > _NO_SINK).any():
            raise NotImplementedError("head_sink of GroupQueryAttention")
        H, Hkv = attributes["num_heads"], attributes["kv_num_heads"]
        q, L = operands["query"], operands["query"].shape[1]
        k, v = (split_heads(operands[name], Hkv) for name in ("key", "value"))
        cache_length = operands["seqlens_k"].astype(np.int64).reshape(-1) + 1
        total = int(np.asarray(operands["total_sequence_length"]).reshape(()))
        # The keys of a prompt begin at 0; later keys follow those in the cache.
        start = np.zeros_like(cache_length) if total == L else cache_length - L
        bits = attributes.get("kv_cache_bit_width") or 8
        if bits not in (4, 8):
            raise NotImplementedError(f"{bits} bits of GroupQueryAttention")
        scales = [operands[name] for name in ("k_scale", "v_scale") if "k_scale" in operands]
        if scales:
            k, v = (to_cache(*each, bits, Steps({})) for each in zip((k, v), scales, strict=True))
        keys = _write_cache(operands.get("past_key"), k, start, total)
        values = _write_cache(operands.get("past_value"), v, start, total)
        read: Sequence[Array] = (keys, values)
        if scales:
            read = [from_cache(*each, bits, Steps({})) for each in zip(read, scales, strict=True)]
        ends = (operands.get("attention_bias"), None, None, start + L)
        known = {**_scale_and_softcap(attributes), "is_causal": 1, "q_num_heads": H}
        return attention((q, *read, *ends), known, self.changes)[0], keys, values

    changes: Mapping[str, StepChange] = {}


class MultiHeadAttention(OpRun):
    """Attention in which every query sees every key."""

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        operands = _optional_inputs(_MHA_INPUTS, inputs, attributes)
        heads = dict.fromkeys(("q_num_heads", "kv_num_heads"), attributes["num_heads"])
        names = ("query", "key", "value", "attention_bias")
        known = {**_scale_and_softcap(attributes), **heads}
        return attention([operands.get(name) for name in names], known, self.changes)[:1]

    changes: Mapping[str, StepChange] = {}


class MatMulNBits(OpRun):
    """Product with a weight of 4 or 8 bits, stored as `[out, blocks, bytes]`, lower nibble first.

    At `accuracy_level` 4, inputs are rounded to 8 bits, as ONNX Runtime does on x86.
    """

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        x, *constants = inputs
        weight = packed_weight(constants, attributes)
        assert x is not None
        if attributes.get("accuracy_level") == INTEGER_PRODUCTS:
            x = self._round_input(x, attributes["block_size"])
        return (x @ weight,)

    @staticmethod
    def _round_input(x: Array, block: int) -> Array:
        return round_by_block(x, block, Steps({}))


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


def _unpack(packed: Array, bits: int) -> Array:
    """Return the unsigned integers of 4 or 8 bits that bytes hold along the last axis."""
    return packed if bits == 8 else split_nibbles(packed)


def _optional_inputs(
    names: tuple[str, ...], inputs: tuple[Array | None, ...], attributes: dict[str, Any]
) -> dict[str, Any]:
    """Return the set inputs by name; raise NotImplementedError if any is not implemented."""
    operands = {
        name: array for name, array in zip(names, inputs, strict=False) if array is not None
    }
    further = [array for array in inputs[len(names) :] if array is not None]
    unsupported = {
        name for name, value in attributes.items() if name not in _SUPPORTED_ATTRIBUTES and value
    }
    unsupported |= _REFUSED_INPUTS & operands.keys()
    if further or unsupported:
        used = ", ".join(sorted(unsupported)) or "a further input"
        raise NotImplementedError(f"a contrib operator with {used}")
    return operands


def _scale_and_softcap(attributes: dict[str, Any]) -> dict[str, float]:
    return {name: attributes[name] for name in ("scale", "softcap") if attributes.get(name)}


def _write_cache(past: Array | None, new: Array, start: Array, total: int) -> Array:
    """Return the past, at least `total` long, with new tokens of element b from `start[b]` on."""
    B, Hkv, L, D = new.shape
    capacity = 0 if past is None else past.shape[2]
    present = np.zeros((B, Hkv, max(capacity, total), D), new.dtype)
    if past is not None:
        present[:, :, :capacity] = past
    for element, position in enumerate(start):
        present[element, :, position : position + L] = new[element]
    return present


# -- integers in steps, of which a mistake changes some ------------------------------------------


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
