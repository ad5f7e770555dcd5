"""ONNX Runtime's own attention operators in float64, as far as the `ort` dialect uses them.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. What else they can do
is refused, so that no graph is reported as wrong for something that is not computed here.

Legend: B batch, H query heads, Hkv key/value heads, L query length, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from attn_export.diagnose.attention_steps import Call, Change, attention
from attn_export.quantiser import BLOCK_LARGEST, INTEGER_PRODUCTS
from attn_export.tensorfile import Array

MICROSOFT = "com.microsoft"

GQA_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "cos", "sin",
    "position_ids", "bias", "sink", "k_scale", "v_scale",
)  # fmt: skip
NO_SINK = np.array(-1e30)
"""A score that adds nothing to the sum of a softmax."""
MHA_INPUTS = ("query", "key", "value", "packed_bias", "padding", "bias")
OF_INTEGERS = frozenset({"kv_cache_bit_width", "k_quant_type", "v_quant_type"})
SAID = frozenset({"num_heads", "kv_num_heads", "scale", "softcap"}) | OF_INTEGERS


class GroupQueryAttention(OpRun):
    """Causal; row b holds `seqlens_k[b] + 1` keys after the new ones."""

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        refused = {"cos", "sin", "position_ids"}
        given = _optional_inputs(GQA_INPUTS, inputs, attributes, refused)
        if (given.get("sink", NO_SINK) > NO_SINK).any():
            raise NotImplementedError("a sink that counts, of GroupQueryAttention")
        H, Hkv = attributes["num_heads"], attributes["kv_num_heads"]
        q, k, v = (_apart(given[name], n) for name, n in zip(GQA_INPUTS[:3], (H, Hkv, Hkv)))  # noqa: B905
        cache_length, L = given["seqlens_k"].astype(np.int64).reshape(-1) + 1, q.shape[2]
        total = int(np.asarray(given["total"]).reshape(()))
        # Keys of a prompt are the first; others follow what the row holds.
        start = np.zeros_like(cache_length) if total == L else cache_length - L
        bits = attributes.get("kv_cache_bit_width") or 8
        if "k_scale" in given:
            k, v = (_rounded(x, given[f"{n}_scale"], bits) for n, x in (("k", k), ("v", v)))
        keys = _written(given.get("past_key"), k, start, total)
        values = _written(given.get("past_value"), v, start, total)
        read = (keys, values)
        if "k_scale" in given:
            whole = (_whole(keys, bits), _whole(values, bits))
            read = (whole[0] * given["k_scale"], whole[1] * given["v_scale"])
        call = Call(
            q, *read, given.get("bias"), cache_length=start + L,
            attributes={**_numbers(attributes), "is_causal": 1},
        )  # fmt: skip
        return _joined(attention(call, self.changes)[0]), keys, values

    changes: Mapping[str, Change] = {}


class MultiHeadAttention(OpRun):
    """Every query sees every key."""

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        given = _optional_inputs(MHA_INPUTS, inputs, attributes, {"packed_bias", "padding"})
        q, k, v = (_apart(given[name], attributes["num_heads"]) for name in MHA_INPUTS[:3])
        call = Call(q, k, v, given.get("bias"), attributes=_numbers(attributes))
        return (_joined(attention(call, self.changes)[0]),)

    changes: Mapping[str, Change] = {}


class MatMulNBits(OpRun):
    """A product with a weight of 4 or 8 bits: `[out, blocks, bytes]`, the lower half first.

    At `accuracy_level` 4 inputs are rounded to 8 bits, as ONNX Runtime does on x86.
    """

    op_domain = MICROSOFT

    def _run(self, *inputs: Array | None, **attributes: Any) -> tuple[Array, ...]:
        x, *held = inputs
        weight = packed_weight(held, attributes)
        assert x is not None
        if attributes.get("accuracy_level") == INTEGER_PRODUCTS:
            x = self.round_input(x, attributes["block_size"])
        return (x @ weight,)

    @staticmethod
    def round_input(x: Array, block: int) -> Array:
        """Return the multiples of a scale for each block of inputs, which 8 bits hold.

        Args:
            x: `[…, K]`.
            block: The number of inputs in a block.
        """
        width = x.shape[-1]
        more = [(0, 0)] * (x.ndim - 1) + [(0, -width % block)]
        blocks = np.pad(x, more).reshape(*x.shape[:-1], -1, block)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        scales = np.where(largest > 0, largest / BLOCK_LARGEST, 1.0)
        rounded = np.rint(blocks / scales) * scales
        return np.asarray(rounded.reshape(*x.shape[:-1], -1)[..., :width])


def packed_weight(held: Sequence[Array | None], attributes: Mapping[str, Any]) -> Array:
    """Return the weight that a MatMulNBits multiplies by, float64 `[K, N]`.

    Args:
        held: Its inputs but for the first: integers, scales and, if there are any, zero points.
        attributes: Its attributes.

    Raises:
        NotImplementedError: If it has another number of bits, or a further input.
    """
    given = [array for array in held if array is not None]
    K, N, bits, block = (attributes[name] for name in ("K", "N", "bits", "block_size"))
    if bits not in (4, 8) or len(given) not in (2, 3) or len(given) != len(held):
        raise NotImplementedError(f"{bits} bits, or a further input, of MatMulNBits")
    (packed, scales), zeros = given[:2], given[2:]
    blocks = -(-K // block)
    numbers = _unpacked(packed.reshape(N, blocks, -1), bits).astype(np.float64)
    middle = np.full((N, blocks), 2 ** (bits - 1))
    if zeros:
        middle = _unpacked(zeros[0].reshape(N, -1), bits)[:, :blocks]
    weight = (numbers - middle[..., None]) * scales.reshape(N, blocks, 1)
    found: Array = weight.reshape(N, -1)[:, :K].T
    return found


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the numbers in bytes along the last axis."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _optional_inputs(
    names: tuple[str, ...],
    inputs: tuple[Array | None, ...],
    attributes: dict[str, Any],
    refused: set[str],
) -> dict[str, Any]:
    """Return the inputs and attributes by name.

    Raises:
        NotImplementedError: If an input or attribute is used that is not computed here.
    """
    given = {name: array for name, array in zip(names, inputs, strict=False) if array is not None}
    more = [array for array in inputs[len(names) :] if array is not None]
    others = {name for name, value in attributes.items() if name not in SAID and value}
    if refused & given.keys() or more or others:
        used = ", ".join(sorted((refused & given.keys()) | others)) or "a further input"
        raise NotImplementedError(f"{used} of a contrib operator")
    return given


def _numbers(attributes: dict[str, Any]) -> dict[str, float]:
    return {name: attributes[name] for name in ("scale", "softcap") if attributes.get(name)}


def _rounded(x: Array, scale: Array, bits: int) -> Array:
    """Return new keys or values as integers: divided by a scale, rounded half to even, clipped.

    Args:
        x: `[B, Hkv, L, D]`.
        scale: `[1]` or `[1, Hkv, 1, D]`.
        bits: 8, for int8, or 4: two in a byte, uint8 `[B, Hkv, L, D / 2]`, each plus 8.
    """
    if bits not in (4, 8):
        raise NotImplementedError(f"{bits} bits of GroupQueryAttention")
    middle = 2 ** (bits - 1)
    whole = np.clip(np.rint(x / scale), -middle, middle - 1)
    if bits == 8:
        return whole.astype(np.int8)
    halves = (whole + middle).astype(np.uint8)
    held: Array = halves[..., ::2] | halves[..., 1::2] << 4
    return held


def _whole(x: Array, bits: int) -> Array:
    """Return the integers of a cache, `[B, Hkv, S, D]`."""
    return x if bits == 8 else _unpacked(x, bits).astype(np.float64) - 8


def _apart(x: Array, heads: int) -> Array:
    """Reshape `[B, L, H·D]` to `[B, H, L, D]`."""
    B, L, width = x.shape
    return np.swapaxes(x.reshape(B, L, heads, width // heads), 1, 2)


def _joined(x: Array) -> Array:
    """Reshape `[B, H, L, D]` to `[B, L, H·D]`."""
    B, _, L, _ = x.shape
    return np.swapaxes(x, 1, 2).reshape(B, L, -1)


def _written(past: Array | None, new: Array, start: Array, total: int) -> Array:
    """Return the past with the new rows written at `start[b]`: a buffer of its size or `total`."""
    B, Hkv, L, D = new.shape
    cache_length = 0 if past is None else past.shape[2]
    present = np.zeros((B, Hkv, max(cache_length, total), D), new.dtype)
    if past is not None:
        present[:, :, :cache_length] = past
    for row, at in enumerate(start):
        present[row, :, at : at + L] = new[row]
    return present
