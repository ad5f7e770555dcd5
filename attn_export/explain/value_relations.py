"""Relation of the first wrong value of a graph to the value of the same name in a right one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from attn_export.explain.localise import GRAPHS_AGREE, value_error
from attn_export.explain.relations import differences, relation, wrong_part
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

_UNITS: Mapping[int, Sequence[str]] = {
    1: ("element",), 2: ("batch element", "position"), 3: ("batch element", "position", "channel"),
    4: ("batch element", "head", "position", "channel"),
}  # fmt: skip
"""The names of an element of each axis of a value, by the number of axes."""

_INITIALISER_UNITS: Mapping[int, Sequence[str]] = {**_UNITS, 2: ("row", "column")}
_MASK_UNITS: Mapping[int, Sequence[str]] = {
    2: ("query", "key"), 3: ("head", "query", "key"), 4: ("batch element", "head", "query", "key"),
    5: ("batch element", "K/V head", "head", "query", "key"),
}  # fmt: skip

_OPERANDS = ("query", "key", "value", "mask", "past key", "past value", "length")
"""The inputs of `Attention`, in their order."""

ONE = np.ones(1)

_PASSED_ON = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose output holds what their input holds."""


def first_relation(
    name: str, wrong: Evaluation, right: Evaluation, cases: Sequence[tuple[Values, Values]]
) -> tuple[str, bool]:
    """Describe how the first wrong value, or what its node reads, differs from the right one.

    Returns:
        A clause, "" if no relation is known; and whether it is that of weights.
    """
    node, counterpart = wrong.producer[name], right.producer.get(name)
    if counterpart is None or not _pairs(cases, name, name):
        return "", False
    read = []
    if counterpart.op_type == node.op_type:
        names = itertools.zip_longest(node.input, counterpart.input, fillvalue="")
        read = [pair for pair in names if _pairs(cases, *pair)]
    names_read = read or [(name, name)]
    texts = [_relation(right, cases, *pair) for pair in names_read]
    in_weights = all(right.initializers.get(r, ONE).size > 1 for _, r in names_read)
    return (" and ".join(dict.fromkeys(texts)), in_weights) if all(texts) else ("", False)


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
    """Describe how a value differs from the right one: by a change, or as another value."""
    pairs = _pairs(cases, name, right_name)
    label = f"{right_name}{_role(right, right_name)}"
    ndim = pairs[0][1].ndim
    table = _INITIALISER_UNITS if right_name in right.initializers else _UNITS
    if "mask" in label or pairs[0][1].dtype == np.bool_:
        table = _MASK_UNITS
    units = table.get(ndim, [f"part of axis {axis}" for axis in range(ndim)])
    for other in cases[0][1]:
        others = [right_values.get(other) for _, right_values in cases]
        if other and other != right_name and _takes_the_place(pairs, others):
            parts = (wrong_part(pairs, axis, unit)[0] for axis, unit in enumerate(units))
            where = "".join(
                f" in {part} alone" for part in itertools.islice(filter(None, parts), 1)
            )
            return f"{other}{_role(right, other)} takes the place of {label.rstrip(',')}{where}"
    text = relation(pairs, units)
    return f"{label} {text}" if text else ""


def _takes_the_place(pairs: Sequence[tuple[Array, Array]], others: Sequence[Array | None]) -> bool:
    """Return whether the wrong arrays are others, at least where they are not the right ones."""
    found = False
    for (w, r), other in zip(pairs, others, strict=False):
        if not isinstance(other, np.ndarray) or other.shape != w.shape or r.shape != w.shape:
            return False
        differs = differences(w, r)
        if not np.isclose(w[differs], other[differs], rtol=GRAPHS_AGREE, atol=0).all():
            return False
        # Constants may agree by chance, and so may masks of two values in a few elements.
        is_all = np.array_equal(w, other) and len(np.unique(w)) > 1
        found |= is_all or len(np.unique(w[differs])) > 2
    return found


def _role(graph: Evaluation, name: str) -> str:
    """Return which input of an `Attention` node a value is, as an apposition; "" if none."""
    while True:
        readers = [node for node in graph.nodes if name in node.input]
        for node in readers:
            if node.op_type == "Attention":
                return f", the {_OPERANDS[list(node.input).index(name)]} of {node.name},"
        if len(readers) != 1 or readers[0].op_type not in _PASSED_ON:
            return ""
        name = readers[0].output[0]
