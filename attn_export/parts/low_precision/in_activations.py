"""Known mistakes of inputs rounded to 8 bits, and of products of integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from attn_export.explain.in_weights import WEIGHT_ROWS
from attn_export.explain.mistake import (
    WRONG_SCALES,
    constant,
    fitted,
    of_step,
    plain,
    plus,
    repeat_first,
    roll,
    rows,
    step,
    times,
)
from attn_export.float64.attention_steps import StepChange
from attn_export.parts.low_precision.activation_places import (
    TOKEN,
    all_rounded_inputs,
    integer_products,
    product_weights,
    rounded_inputs,
)
from attn_export.tensorfile import Array

# -- changes ------------------------------------------------------------------------------------


def _shared_by(axes: tuple[int, ...] | None) -> StepChange:
    """Return the largest magnitude of the elements that share a scale."""
    return lambda _, at: np.abs(at["blocks"]).max(axis=axes, keepdims=True)


def _with_zero_points(axes: tuple[int, ...]) -> StepChange:
    """Return asymmetric rounding to 256 integers; `axes` of `[…, blocks, block]` share a scale."""

    def rounded(_: Array, at: Mapping[str, Any]) -> Array:
        blocks = at["blocks"]
        least = np.minimum(blocks.min(axis=axes, keepdims=True), 0.0)
        largest = np.maximum(blocks.max(axis=axes, keepdims=True), 0.0)
        scales = np.where(largest > least, (largest - least) / 255, 1.0)
        zero_point = np.rint(-least / scales)
        integers = np.clip(np.rint(blocks / scales) + zero_point, 0, 255) - zero_point
        return np.asarray(integers * scales)

    return rounded


def _truncate_to_bfloat16(scales: Array, _: object) -> Array:
    """Keep the upper 16 bits of each float32 scale."""
    bits = scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32), np.float64)


def _range_over(axes: tuple[int, ...]) -> StepChange:
    """Return the range of the elements that share a scale and a zero point."""

    def change(_: object, at: Mapping[str, Any]) -> tuple[Array, Array]:
        x = at["x"]
        least, largest = x.min(axis=axes, keepdims=True), x.max(axis=axes, keepdims=True)
        return np.minimum(least, 0.0), np.maximum(largest, 0.0)

    return change


def _symmetric(ends: tuple[Array, Array], _: object) -> tuple[Array, Array]:
    largest = np.maximum(-ends[0], ends[1])
    return -largest, largest


def _saturate_pairs(_: Array, at: Mapping[str, Any]) -> Array:
    """Add two products at a time in 16 bits with saturation, as x86 does without VNNI."""
    q, w = at["integers"], at["weights"]
    pairs = q.reshape(*q.shape[:-1], -1, 2)[..., None] * w.reshape(-1, 2, w.shape[-1])
    return np.asarray(np.clip(pairs.sum(-2), -(2**15), 2**15 - 1).sum(-2))


# -- the table ----------------------------------------------------------------------------------

NOT_ROUNDED, ACTIVATIONS, INTEGERS = "inputs not rounded", "activation scale", "activation rounding"
_IN_ACTIVATIONS: Final = (
    *rows(all_rounded_inputs,
        (ACTIVATIONS, "the input of each product has a scale and a zero point for each token, and "
         "scales of weights are truncated to bfloat16, as in KleidiAI",
         {"rounded": _with_zero_points(TOKEN), "weight_scales": _truncate_to_bfloat16})),
    *rows(rounded_inputs,
        (NOT_ROUNDED, "{} is not rounded to 8 bits", {"rounded": step("blocks")}),
        (ACTIVATIONS, "{} has one scale for each token, not for each block",
         {"largest": _shared_by(TOKEN)}),
        (ACTIVATIONS, "{} has one scale for all tokens, not for each block",
         {"largest": _shared_by(None)}),
        (ACTIVATIONS, "{} has a scale and a zero point for each token",
         {"rounded": _with_zero_points(TOKEN)}),
        (ACTIVATIONS, "{} has a scale and a zero point for each block",
         {"rounded": _with_zero_points((-1,))}),
        (ACTIVATIONS, "blocks of {} are half as large", {"width": times(0.5)}),
        (ACTIVATIONS, "blocks of {} are twice as large", {"width": times(2)}),
        *((ACTIVATIONS, f"scales of {{}} are {how} in dequantisation", {"read_scale": change})
          for how, change in WRONG_SCALES.items()),
        (ACTIVATIONS, "each block of {} has the scale of the previous block",
         {"read_scale": roll(1, -2)}),
        (ACTIVATIONS, "each block of {} has the scale of the next block",
         {"read_scale": roll(-1, -2)}),
        (ACTIVATIONS, "all blocks of {} have the scale of the first",
         {"read_scale": repeat_first(-2)}),
        (ACTIVATIONS, "scales of {} are doubled", {"scale": times(2)}),
        (ACTIVATIONS, "scales of {} are halved", {"scale": times(0.5)}),
        (ACTIVATIONS, "scales of {} are a 128th of the largest, not a 127th",
         {"scale": times(127 / 128)}),
        (ACTIVATIONS, "scales of {} are a 126th of the largest, not a 127th",
         {"scale": times(127 / 126)}),
        (ACTIVATIONS, "{} has 4 bits", {"scale": times(127 / 7)}),
        (INTEGERS, "{} has 7 bits", {"integers": lambda q, _: np.floor(q / 2) * 2}),
        (INTEGERS, "quotients of {} are rounded down", {"quotients": of_step(np.floor, "exact")}),
        (INTEGERS, "quotients of {} are rounded up", {"quotients": of_step(np.ceil, "exact")}),
        (INTEGERS, "quotients of {} are rounded to 0", {"quotients": of_step(np.trunc, "exact")}),
        (INTEGERS, "integers of {} are clipped at 126", {"high": constant(126)}),
        (INTEGERS, "integers of {} are clipped at -126", {"low": constant(-126)}),
        (INTEGERS, "integers of {} are clipped at 0", {"low": constant(0)}),
        (INTEGERS, "integers of {} are read as unsigned", {"integers": lambda q, _: q % 256}),
        (INTEGERS, "integers of {} lose their sign", {"integers": plain(np.abs)})),
)  # fmt: skip
"""Mistakes of rounding the inputs of products by block."""

_ACTIVATION_ZERO = "activation zero point"
_IN_INTEGER_PRODUCTS: Final = (*rows(
    integer_products,
    (NOT_ROUNDED, "{} is not rounded to 8 bits",
     {"output": lambda _, at: at["x"] @ at["dequantised"]}),
    (ACTIVATIONS, "{} has a scale for each token, not one for all", {"range": _range_over((-1,))}),
    (ACTIVATIONS, "{} has a scale for each batch element, not one for all",
     {"range": _range_over((-2, -1))}),
    (ACTIVATIONS, "the range of {} is symmetric around 0", {"range": _symmetric}),
    *((ACTIVATIONS, f"the range of {{}} is divided by {levels}, not 255",
       {"scale": times(255 / levels)}) for levels in (127, 254, 256)),
    *((ACTIVATIONS, f"the scale of {{}} is {how}", {"scale": change})
      for how, change in WRONG_SCALES.items()),
    (ACTIVATIONS, "the scale of {} is rounded to float16",
     {"scale": lambda s, _: s.astype(np.float16).astype(np.float64)}),
    *((ACTIVATIONS, f"the scale of {{}} is {how} in dequantisation", {"read_scale": change})
      for how, change in WRONG_SCALES.items()),
    (_ACTIVATION_ZERO, "the zero point of {} is one too high", {"zero": plus(1)}),
    (_ACTIVATION_ZERO, "the zero point of {} is one too low", {"zero": plus(-1)}),
    (_ACTIVATION_ZERO, "the zero point of {} is one too high, and integers wrap",
     {"zero": plus(1), "integers": of_step(lambda q: q % 256, "unclipped")}),
    (_ACTIVATION_ZERO, "the zero point that is subtracted from {} is one too high",
     {"read_zero": plus(1)}),
    (_ACTIVATION_ZERO, "the zero point that is subtracted from {} is one too low",
     {"read_zero": plus(-1)}),
    (_ACTIVATION_ZERO, "no zero point is subtracted from {}", {"read_zero": plain(np.zeros_like)}),
    (_ACTIVATION_ZERO, "128 is subtracted from {}, not its zero point",
     {"read_zero": lambda z, _: np.full_like(z, 128.0)}),
    (INTEGERS, "quotients of {} are rounded down", {"quotients": of_step(np.floor, "exact")}),
    (INTEGERS, "quotients of {} are rounded up", {"quotients": of_step(np.ceil, "exact")}),
    (INTEGERS, "quotients of {} are rounded to 0", {"quotients": of_step(np.trunc, "exact")}),
    (INTEGERS, "integers of {} are clipped at 254", {"integers": lambda q, _: q.clip(0, 254)}),
    (INTEGERS, "integers of {} are clipped at 1", {"integers": lambda q, _: q.clip(1, 255)}),
    (INTEGERS, "integers of {} are clipped at 127", {"integers": lambda q, _: q.clip(0, 127)}),
    (INTEGERS, "integers of {} are read as signed",
     {"integers": lambda q, _: (q + 128) % 256 - 128}),
    (INTEGERS, "integers of {} are read 128 too low", {"integers": plus(-128)}),
    (INTEGERS, "{} has 7 bits", {"integers": lambda q, _: np.floor(q / 2) * 2}),
    (INTEGERS, "{} has 4 bits", {"integers": lambda q, _: np.floor(q / 16) * 16}),
    ("sums of 16 bits", "pairs of products of {} are added in 16 bits, which saturate",
     {"product": _saturate_pairs}),
    ("wrong batch element", "{} has the tokens of the previous batch element", {"x": roll(1, 0)})),
    *rows(product_weights, *WEIGHT_ROWS),
)  # fmt: skip
"""Mistakes of rounding the inputs of products of integers, and of reading their weights."""

FITTED: Final = tuple(
    fitted(integer_products, ACTIVATIONS,
           f"the scale of {{}} is {{factor}} times the right one{where}", step)
    for step, where in (("scale", ""), ("read_scale", " in dequantisation"))
)  # fmt: skip

KNOWN: Final = (*_IN_ACTIVATIONS, *_IN_INTEGER_PRODUCTS)
