"""Types of a known mistake and of evidence for it, and changes of values that many share."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import ml_dtypes
import numpy as np
import onnx

from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

Piece = TypeVar("Piece")

ArrayChange = Callable[[Array], Array]
"""Function that takes an array, and returns one that replaces it."""

Replacement = Callable[[Values], Mapping[str, Array]]
"""Function that takes all values of a case, and returns those that the mistake changes, by name."""


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A known mistake, made at one place of a graph.

    It is made in a right graph, where it may give the wrong outputs, or in a wrong graph, where it
    may correct them.

    Attributes:
        kind: The kind of the mistake, in a word or two: ``"scale"``. One that ends in
            ``"precision"`` is a mistake of rounding.
        effect: Its effect as a clause: ``"scores are multiplied by …"``.
        node: The name of the node, graph input or initialiser; "" if it applies everywhere.
    """

    kind: str
    effect: str
    node: str
    replaced: Replacement

    @property
    def share(self) -> float:
        """The smallest share of the error that it must explain; rounding is not repeated."""
        return 0.3 if self.kind.endswith("precision") else 0.9

    def outputs(self, evaluation: Evaluation, values: Values) -> dict[str, Array]:
        """Return the outputs of the graph with the mistake, by name."""
        return evaluation.outputs_of(evaluation.recompute(values, self.replaced(values)))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Right and actual outputs of one case.

    Attributes:
        values: All values of the graph without a mistake, in float64.
        right: The outputs of the graph without a mistake, in float64.
        allowed: The relative error of each output that the judge allows, by name, if it passes the
            actual outputs. A cause must not predict a larger one.
    """

    values: Values
    right: Mapping[str, Array]
    actual: Mapping[str, Array]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    allowed: Mapping[str, float] = dataclasses.field(default_factory=dict)


def array_of(values: Values, name: str) -> Array:
    """Return a value of any shape that must be there."""
    array = values[name]
    if array is None:
        raise ValueError(f"{name!r} has no value")
    return array


def change_value(name: str, change: ArrayChange) -> Replacement:
    """Return a function that changes one value of a graph.

    `change`: Takes the array, and returns one of the same shape.
    """
    return lambda values: {name: change(array_of(values, name))}


def skip_node(node: onnx.NodeProto) -> Replacement:
    """Return a function that passes the first input of a node on as its first output."""
    return lambda values: {node.output[0]: array_of(values, node.input[0])}


def join(functions: Iterable[Replacement]) -> Replacement:
    """Return a function that makes the changes of several. They must change different values."""
    parts = tuple(functions)

    def replaced(values: Values) -> dict[str, Array]:
        return {name: array for part in parts for name, array in part(values).items()}

    return replaced


def change_in_order(
    evaluation: Evaluation, changes: Sequence[tuple[str, str, ArrayChange]],
    replacements: Mapping[str, Array] = types.MappingProxyType({}),
) -> Replacement:  # fmt: skip
    """Return a function that changes values in turn, each computed with the changes before it.

    `changes`: Names of an input and an output, and the function from the first to the second, in
    the order of the graph.
    """

    def replaced(values: Values) -> dict[str, Array]:
        changed = dict(replacements)
        for name, output, change in changes:
            current = evaluation.recompute(values, changed) if changed else values
            changed[output] = change(array_of(current, name))
        return changed

    return replaced


def unchanged(x: Array) -> Array:
    """Return an array of any shape as it is."""
    return x


def round_to_bfloat16(x: Array) -> Array:
    """Round an array of any shape to bfloat16; the result is float64."""
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def swap_neighbours(axis: int) -> ArrayChange:
    """Return a function that swaps elements 2i and 2i + 1 along an axis."""

    def swapped(q: Array) -> Array:
        x = np.moveaxis(q, axis, -1)
        return np.moveaxis(x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape), -1, axis)

    return swapped


def cache_scatters(evaluation: Evaluation) -> dict[str, onnx.NodeProto]:
    """Return the nodes that write a cache: a TensorScatter by ``"keys"``, another by ``"values"``.

    Return an empty dict unless there is exactly one of each.
    """
    scatters = {}
    for name, past in (("keys", "past_key"), ("values", "past_value")):
        found = [n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past]
        if len(found) == 1:
            scatters[name] = found[0]
    return scatters if len(scatters) == 2 else {}


def keys_and_values(parts: Mapping[str, Piece]) -> dict[str, tuple[Piece, ...]]:
    """Return ``{"keys and values": (K, V), "keys": (K,), "values": (V,)}``; nothing for nothing."""
    both = {"keys and values": tuple(parts.values())} if parts else {}
    return {**both, **{name: (part,) for name, part in parts.items()}}


def scatter_into_cache(
    node: onnx.NodeProto, evaluation: Evaluation, values: Values, past: Array, new: Array
) -> Array:
    """Return the cache `[B, Hkv, capacity, …]` that a TensorScatter writes from other inputs.

    `past`: `[B, Hkv, capacity, .]`.
    `new`: `[B, Hkv, L, .]`.
    """
    changed_inputs = dict(zip(node.input[:2], (past, new), strict=True))
    return evaluation.compute_node(node, {**values, **changed_inputs})[node.output[0]]
