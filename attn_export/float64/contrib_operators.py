"""ONNX Runtime's contrib operators in float64, as far as the `ort` dialect uses them.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. An input or attribute
that is not implemented here raises NotImplementedError, so that no graph is reported as wrong
because of it.

Legend: B batch, H query heads, Hkv key/value heads, L query length, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from attn_export.dialect_names import MICROSOFT
from attn_export.float64.attention_steps import StepChange, attention, split_heads
from attn_export.quantiser import BLOCK_LARGEST, INTEGER_PRODUCTS
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
        if "k_scale" in operands:
            k, v = (_quantise(x, operands[f"{n}_scale"], bits) for n, x in (("k", k), ("v", v)))
        keys = _write_cache(operands.get("past_key"), k, start, total)
        values = _write_cache(operands.get("past_value"), v, start, total)
        read = (keys, values)
        if "k_scale" in operands:
            integers = [x if bits == 8 else unpack_nibbles(x) - 8.0 for x in (keys, values)]
            read = (integers[0] * operands["k_scale"], integers[1] * operands["v_scale"])
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
        """Round an input `[…, K]` to whole multiples of a scale for each `block` elements."""
        input_size = x.shape[-1]
        padding = [(0, 0)] * (x.ndim - 1) + [(0, -input_size % block)]
        blocks = np.pad(x, padding).reshape(*x.shape[:-1], -1, block)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        scales = np.where(largest > 0, largest / BLOCK_LARGEST, 1.0)
        rounded = np.rint(blocks / scales) * scales
        return np.asarray(rounded.reshape(*x.shape[:-1], -1)[..., :input_size])


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
    return packed if bits == 8 else unpack_nibbles(packed)


def unpack_nibbles(packed: Array) -> Array:
    """Return the integers of 4 bits that bytes hold, lower half first: uint8 `[…, D / 2]` to D."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


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


def _quantise(x: Array, scale: Array, bits: int) -> Array:
    """Quantise new keys or values `[B, Hkv, L, D]`: divide by a scale, round half to even, clip.

    The result is int8; with 4 bits uint8 `[B, Hkv, L, D / 2]`: two integers in a byte, each plus 8.
    """
    if bits not in (4, 8):
        raise NotImplementedError(f"{bits} bits of GroupQueryAttention")
    offset = 2 ** (bits - 1)
    integers = np.clip(np.rint(x / scale), -offset, offset - 1)
    if bits == 8:
        return integers.astype(np.int8)
    nibbles = (integers + offset).astype(np.uint8)
    packed: Array = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return packed


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
