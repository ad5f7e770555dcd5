"""Relation of the first wrong value of a graph to the value of the same name in a right one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.diagnose.evaluate import Evaluation, Values
from attn_export.diagnose.localise import GRAPHS_AGREE, value_error
from attn_export.diagnose.relations import relation
from attn_export.tensorfile import Array

UNITS: Mapping[int, Sequence[str]] = {
    1: ("element",), 2: ("batch element", "position"), 3: ("batch element", "position", "channel"),
    4: ("batch element", "head", "position", "channel"),
}  # fmt: skip
"""The names of an element of each axis of a value, by the number of axes."""

INITIALISER_UNITS: Mapping[int, Sequence[str]] = {**UNITS, 2: ("row", "column")}
MASK_UNITS: Mapping[int, Sequence[str]] = {
    2: ("query", "key"), 3: ("head", "query", "key"), 4: ("batch element", "head", "query", "key"),
    5: ("batch element", "K/V head", "head", "query", "key"),
}  # fmt: skip

OPERANDS = ("query", "key", "value", "mask", "past key", "past value", "length")
"""The inputs of `Attention`, in their order."""

PASSED_ON = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose output holds what their input holds."""


def first_relation(
    wrong: Evaluation, right: Evaluation, cases: Sequence[tuple[Values, Values]]
) -> str:
    """Describe how the first wrong value, or what its node reads, differs from the right one.

    Args:
        wrong: The graph in question.
        right: The right graph, whose values share names with it.
        cases: The values of both in several cases.

    Returns:
        A clause; "" if no relation is known.
    """
    for node in wrong.nodes:
        for name in node.output:
            counterpart = right.producer.get(name)
            if counterpart is None or not _pairs(cases, name, name):
                continue
            read = []
            if counterpart.op_type == node.op_type:
                names = itertools.zip_longest(node.input, counterpart.input, fillvalue="")
                read = [pair for pair in names if _pairs(cases, *pair)]
            texts = [_relation(right, cases, *pair) for pair in read or [(name, name)]]
            return " and ".join(dict.fromkeys(texts)) if all(texts) else ""
    return ""


def _pairs(
    cases: Sequence[tuple[Values, Values]], name: str, right_name: str
) -> list[tuple[Array, Array]]:
    """Return the arrays of a value in all cases; none if it is the same in each, or no array.

    Of initialisers, which all cases share, there is one pair.
    """
    arrays = [(wrong.get(name), right.get(right_name)) for wrong, right in cases]
    pairs = [(w, r) for w, r in arrays if isinstance(w, np.ndarray) and isinstance(r, np.ndarray)]
    if len(pairs) < len(cases):
        return []
    if all(w is pairs[0][0] and r is pairs[0][1] for w, r in pairs):
        pairs = pairs[:1]
    return pairs if any(value_error(w, r) > GRAPHS_AGREE for w, r in pairs) else []


def _relation(
    right: Evaluation, cases: Sequence[tuple[Values, Values]], name: str, right_name: str
) -> str:
    """Describe how a value differs from the right one: from another value, or by a change."""
    pairs = _pairs(cases, name, right_name)
    label = f"{right_name}{_role(right, right_name)}"
    ndim = pairs[0][1].ndim
    for other in cases[0][1]:
        if other and other != right_name and _is_value(cases, pairs, other):
            return f"{other}{_role(right, other)} takes the place of {label.rstrip(',')}"
    table = INITIALISER_UNITS if right_name in right.initializers else UNITS
    if "mask" in label or pairs[0][1].dtype == np.bool_:
        table = MASK_UNITS
    units = table.get(ndim, [f"part of axis {axis}" for axis in range(ndim)])
    text = relation(pairs, units)
    return f"{label} {text}" if text else ""


def _is_value(
    cases: Sequence[tuple[Values, Values]], pairs: Sequence[tuple[Array, Array]], other: str
) -> bool:
    """Return whether the wrong arrays are those of another value of the right graph."""
    pairs_of_other = [
        (w, right.get(other)) for (w, _), (_, right) in zip(pairs, cases, strict=False)
    ]
    return any(w.size > 1 and w.any() for w, _ in pairs_of_other) and all(
        isinstance(o, np.ndarray) and o.shape == w.shape and value_error(w, o) <= GRAPHS_AGREE
        for w, o in pairs_of_other
    )


def _role(graph: Evaluation, name: str) -> str:
    """Return which input of an `Attention` node a value is, as an apposition; "" if none."""
    while True:
        readers = [node for node in graph.nodes if name in node.input]
        for node in readers:
            if node.op_type == "Attention":
                return f", the {OPERANDS[list(node.input).index(name)]} of {node.name},"
        if len(readers) != 1 or readers[0].op_type not in PASSED_ON:
            return ""
        name = readers[0].output[0]
