"""Small constants, as of the denominator of a router, that a graph lacks or has another of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from attn_export.errors import printable
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Values
from attn_export.tensorfile import Array

_EXACT = 1e-12
"""The largest difference of two float64 sums that are equal, relative to the largest element."""

_LETTERS = 60


def other_constant(
    node: onnx.NodeProto, values: Values, matches: Mapping[str, Sequence[int]],
    step: ReferenceStep | None, steps: Sequence[ReferenceStep], whose: str,
) -> str:  # fmt: skip
    """Return how a number that a node adds differs from that of the reference; "" if it does not.

    `matches`: The numbers of the steps that are equal to values, but for rounding.
    `step`: What the reference computes where the node is; None if that is not known.
    """
    for name in filter(matches.get, node.input):
        near = set(matches[name])
        sums = {
            number: added
            for number, each in enumerate(steps)
            if len(each.reads) == 1 and near.issuperset(each.reads)
            for added in [_added(each, steps[each.reads[0]].value)]
            if added is not None
        }
        shown = printable(name, _LETTERS)
        own = _constant(node, name, values)
        if own is not None and sums:
            added = next(iter(sums.values()))
            given = f"adds {added:.3g}" if added else "adds none that shows"
            return f"it adds {own:.3g} to {shown}, where {whose} {given}"
        if own is not None and step is not None:
            return f"it adds {own:.3g} to {shown}, where {whose} has {step.operation} of it"
        for number in step.reads if step is not None and own is None else ():
            # The value is the sum before, not the one after.
            value, right = values[name], steps[number].value
            if value is None or value.size != right.size:
                continue
            if sums.get(number) and _added(steps[number], value.reshape(right.shape)):
                return f"it reads {shown}, to which {whose} adds {sums[number]:.3g} first"
    return ""


def _added(step: ReferenceStep, read: Array) -> float | None:
    """Return the number that a step adds to a value; 0 if none shows, None if it does not add."""
    value = step.value
    if not step.operation.startswith(("add", "sub")) or value.shape != read.shape:
        return None
    difference = value - read
    number, limit = float(np.median(difference)), _EXACT * float(np.abs(value).max())
    if not np.abs(difference - number).max() <= limit:
        return None
    return number if abs(number) > limit else 0.0


def _constant(node: onnx.NodeProto, name: str, values: Values) -> float | None:
    """Return the number that a node adds to one of its inputs; None if it does not."""
    if node.op_type not in ("Add", "Sub") or len(node.input) != 2:
        return None
    other = values.get(next((x for x in node.input if x != name), ""))
    if not isinstance(other, np.ndarray) or other.size != 1:
        return None
    return float(other.item()) * (-1 if node.op_type == "Sub" else 1)
