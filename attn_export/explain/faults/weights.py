"""Known faults of quantised weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.faults.fault import (
    Changes,
    FaultRow,
    GraphPlace,
    node_place,
    plain,
    plus,
    repeat_first,
    roll,
    round_to_bfloat16,
    rows,
    step,
    swap_neighbours,
    times,
)
from attn_export.float64.attention_steps import StepChange, Steps
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.quantiser import ORDER, QuantisedWeight
from attn_export.tensorfile import Array

# -- places ---------------------------------------------------------------------------------------

_MANY_OUTPUTS = 64
"""The largest number of outputs of a weight for which each output is tried."""


def _stored_weights(evaluation: Evaluation) -> Iterator[tuple[onnx.NodeProto, QuantisedWeight]]:
    """Yield each node that dequantises a weight, with the weight."""
    for node in evaluation.nodes:
        integers = evaluation.initializers.get(node.input[0]) if node.input else None
        if node.op_type != "DequantizeLinear" or integers is None or integers.ndim != 2:
            continue
        yield node, weight_of(*(evaluation.initializers[name] for name in node.input))


def weight_of(integers: Array, *scales_and_zeros: Array) -> QuantisedWeight:
    """Return a weight in float64 with zero points, which are 0 unless they are given."""
    s, *z = (np.atleast_2d(np.asarray(array, np.float64)) for array in scales_and_zeros)
    return QuantisedWeight("", np.asarray(integers, np.float64), s, z[0] if z else s * 0, False)


def _read_weight(weight: QuantisedWeight, at: Steps) -> QuantisedWeight:
    """Return a weight with the steps ``weight``, ``weight_scales`` and ``weight_zeros``."""
    q, s, z = weight.integers, weight.scales, weight.zero_points
    at["bits"] = 4 if np.abs(q).max(initial=0) < 16 else 8
    at["right_scales"] = s
    return dataclasses.replace(
        weight, integers=at.set("weight", q), scales=at.set("weight_scales", s),
        zero_points=at.set("weight_zeros", z),
    )  # fmt: skip


def _change_weight(
    output: str, weight: QuantisedWeight, other: Array, _: Values, changes: Changes
) -> Mapping[str, Array]:
    at = Steps(changes, {"other": other})
    dequantised = _read_weight(weight, at).dequantised(np.float64)
    return {output: dequantised} if np.isfinite(dequantised).all() else {}


def _dequantised_weights(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find weights behind DequantizeLinear."""
    for node, weight in _stored_weights(evaluation):
        compute = functools.partial(_change_weight, node.output[0], weight, weight.integers)
        yield GraphPlace(node.input[0], node.name, compute=compute)


def _pairs_of_weights(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find pairs of weights of the same shape behind DequantizeLinear."""
    found = list(_stored_weights(evaluation))
    for node, weight in found:
        for other_node, other in found:
            if other_node is not node and other.integers.shape == weight.integers.shape:
                compute = functools.partial(_change_weight, node.output[0], weight, other.integers)
                given = {"other_name": other_node.input[0]}
                yield GraphPlace(node.input[0], node.name, given=given, compute=compute)


def _input_orders(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find where the inputs of a product are put in order."""
    for node in evaluation.nodes:
        if node.op_type == "Gather" and node.input[1].endswith(ORDER):
            yield node_place(node, node.input[1])


# -- changes ------------------------------------------------------------------------------------


def _flip_signedness(q: Array, at: Mapping[str, Any]) -> Array:
    half, span = 2 ** (at["bits"] - 1), 2 ** at["bits"]
    return np.asarray(q % span if q.min() < 0 else (q + half) % span - half)


def _clip(q: Array, _: object) -> Array:
    """Take an eighth of the range of integers away at both ends."""
    low, high = q.min(), q.max()
    cut = (high - low) // 8
    return np.clip(q, low + cut, high - cut)


def _requantise(levels: float) -> StepChange:
    """Return the change to integers that were quantised again, per output, to `levels` at most."""

    def change(q: Array, _: object) -> Array:
        size = np.maximum(np.abs(q).max(axis=0) / levels, 1e-9)
        return np.asarray(np.clip(np.rint(np.rint(q / size) * size), q.min(), q.max()))

    return change


def _drop_last_row(q: Array, _: object) -> Array:
    return np.where(np.arange(len(q))[:, None] < len(q) - 1, q, 0.0)


def _in_output(output: int, factor: float) -> StepChange:
    """Return the change of the scale of one output of a weight with few."""

    def change(s: Array, _: object) -> Array:
        if not output < s.shape[-1] <= _MANY_OUTPUTS:
            raise IndexError(output)
        return s * np.where(np.arange(s.shape[-1]) == output, factor, 1.0)

    return change


# -- the table ----------------------------------------------------------------------------------

SCALE, AXIS, ZERO = "weight scale", "scale axis", "zero point"
WEIGHT_ROWS: Final[tuple[FaultRow, ...]] = (
    *((SCALE, f"the scales of {{}} are {how}", {"weight_scales": change}) for how, change in (
        ("halved", times(0.5)), ("doubled", times(2)), ("squared", plain(np.square)),
        ("rounded to bfloat16", round_to_bfloat16))),
    (SCALE, "the scales of {} are left out", {"weight_scales": plain(np.ones_like)}),
    (SCALE, "the scales of {} are divided by, not multiplied",
     {"weight_scales": lambda s, _: 1 / s}),
    (AXIS, "each output of {} has the scale of the one before",
     {"weight_scales": roll(1, -1)}),
    (AXIS, "each output of {} has the scale of the next", {"weight_scales": roll(-1, -1)}),
    (AXIS, "the scales of {} are in reverse order",
     {"weight_scales": lambda s, _: s[..., ::-1]}),
    (AXIS, "all outputs of {} have the scale of the first",
     {"weight_scales": repeat_first(-1)}),
    (AXIS, "the scales of {} are read along the other axis",
     {"weight_scales": lambda s, _: s.T.reshape(s.shape)}),
    (AXIS, "the scales of {} are those of inputs, not outputs",
     {"weight": lambda q, at: q * at["right_scales"].T, "weight_scales": plain(np.ones_like)}),
    (AXIS, "each block of {} has the scale of the one before", {"weight_scales": roll(1, 0)}),
    (AXIS, "each block of {} has the scale of the next", {"weight_scales": roll(-1, 0)}),
    (AXIS, "all blocks of {} have the scale of the first",
     {"weight_scales": repeat_first(0)}),
    (AXIS, "blocks of {} are read as twice as large",
     {"weight_scales": lambda s, _: np.repeat(s[::2], 2, 0)[: len(s)]}),
    (ZERO, "the zero points of {} are one too high", {"weight_zeros": plus(1)}),
    (ZERO, "the zero points of {} are one too low", {"weight_zeros": plus(-1)}),
    ("nibble order", "the two integers of each byte of {} are swapped",
     {"weight": swap_neighbours(-1)}),
    ("nibble order", "neighbouring inputs of {} are swapped, as if two shared a byte",
     {"weight": swap_neighbours(0)}),
    ("signedness", "signed integers of {} are read as unsigned, or the reverse",
     {"weight": _flip_signedness}),
    ("weight transposed", "{} is transposed", {"weight": plain(np.transpose)}),
    ("clipped range", "the integers of {} are clipped to a smaller range", {"weight": _clip}),
    ("rows left out", "the last row of {} is left out", {"weight": _drop_last_row}),
)  # fmt: skip
"""Faults of reading any weight of integers."""

IN_WEIGHTS: Final = (
    *rows(_dequantised_weights, *WEIGHT_ROWS),
    *rows(_pairs_of_weights,
        ("wrong weight", "{} has the integers of {other_name}", {"weight": step("other")})),
    *rows(_input_orders,
        ("input order", "{} is ignored: inputs keep their own order", {"output": step("input")})),
)  # fmt: skip
"""Faults of reading weights behind DequantizeLinear."""

MANY_IN_WEIGHTS: Final = rows(
    _dequantised_weights,
    *(("quantised twice", f"{{}} was quantised twice, the second time to ±{levels / 10:.1f}",
       {"weight": _requantise(levels / 10)}) for levels in range(15, 80)),
    *((SCALE, f"the scale of output {output} of {{}} is {change}",
       {"weight_scales": _in_output(output, factor)})
      for output in range(_MANY_OUTPUTS)
      for change, factor in (("doubled", 2.0), ("halved", 0.5))),
)  # fmt: skip
"""Faults with a parameter: one output's scale, or the levels of a second rounding."""
