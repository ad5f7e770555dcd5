"""The node at which a graph that quantises leaves its float model: where its values become far.

No value of such a graph is that of the model, so each is compared with the nearest of its size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx

from attn_export.explain.eager_values import MANY_NUMBERS, distance, is_mask
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

_RELATED = 0.7
"""The relative distance above which a value is no value of the model, however rounded."""

_EQUAL, _ROUNDED = 1e-4, 5e-3
"""The distance of values that no integers rounded, and the least that rounding explains."""

_NEIGHBOURS = 10
"""The number of nodes whose distance is taken together: single ones may be near by chance."""

_JUMP = 4.0
"""The factor by which the distance grows at a node that does more than round."""


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A node, the distance of its value from the nearest one of the model, and where that is."""

    node: onnx.NodeProto
    away: float
    line: str


def where_it_leaves(graph: Evaluation, values: Values, steps: Sequence[ReferenceStep]) -> str:
    """Return a sentence on the node at which the distance from the model grows; "" if at none."""
    compared = list(_compared(graph, values, steps))
    related = [one for one in compared if one.away < _RELATED]
    if not related:
        return ""
    behind = compared[compared.index(related[-1]) + 1 :]
    if any(not set(graph.outputs).isdisjoint(one.node.output) for one in behind):
        before = related[-1]
        return (
            f"behind {_shown(before)}, which is {before.away:.1e} from the model's value, nothing "
            f"resembles the model: {_shown(behind[0])} is next"
        )
    for at, node in enumerate(related):
        usual = _median(related[max(0, at - _NEIGHBOURS) : at])
        if min(_median(related[at : at + _NEIGHBOURS]), node.away) > _JUMP * usual:
            return f"it grows from {usual:.1e} to {node.away:.1e} at {_shown(node)}"
    first = next((one for one in related if one.away > _EQUAL), None)
    if first is None:
        return ""
    return (
        "it grows from node to node; the first one that is not the model's is "
        f"{_shown(first)}, {first.away:.1e} away"
    )


def _median(compared: Sequence[_Compared]) -> float:
    return max(float(np.median([one.away for one in compared] or [0.0])), _ROUNDED)


def _shown(one: _Compared) -> str:
    line = f" ({one.line})" if one.line else ""
    return f"{one.node.op_type} {one.node.name or one.node.output[0]}{line}"


def _compared(graph: Evaluation, values: Values, steps: Sequence[ReferenceStep]) -> list[_Compared]:
    by_size: dict[int, list[ReferenceStep]] = {}
    for size, same in itertools.groupby(
        sorted((s for s in steps if s.reads), key=lambda s: s.value.size), lambda s: s.value.size
    ):
        by_size[size] = [step for step in same if _is_shown(step.value)]
    found = []
    for node in graph.nodes:
        value = values.get(node.output[0])
        if isinstance(value, np.ndarray) and _is_shown(value) and by_size.get(value.size):
            pairs = ((distance(value, s.value), n, s) for n, s in enumerate(by_size[value.size]))
            away, _, step = min(pairs, key=lambda pair: pair[:2])
            if math.isfinite(away):
                found.append(_Compared(node, away, step.line if away < _RELATED else ""))
    return found


def _is_shown(value: Array) -> bool:
    return value.dtype.kind == "f" and value.size > MANY_NUMBERS and not is_mask(value)
