"""Faults of single nodes: another operator, other inputs, attributes and constants."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from graph_surgery import Graph
from mutants.mutant import Mutant, Setting
from mutants.planting import Path, graph_at, graphs_of
from onnx import helper, numpy_helper

OTHERS = {
    "LessOrEqual": ("Less", "GreaterOrEqual"),
    "Less": ("LessOrEqual", "GreaterOrEqual"),
    "GreaterOrEqual": ("Greater", "LessOrEqual"),
    "Greater": ("GreaterOrEqual", "Less"),
    "And": ("Or",), "Or": ("And",), "Add": ("Sub",), "Sub": ("Add",),
    "Mul": ("Div",), "Div": ("Mul",), "Min": ("Max",), "Max": ("Min",),
    "Sin": ("Cos",), "Cos": ("Sin",), "ReduceMax": ("ReduceMin",),
    "Softmax": ("Hardmax",), "Exp": ("Identity",), "Tanh": ("Identity",),
}  # fmt: skip
COMMUTATIVE = frozenset({"Add", "And", "Equal", "Max", "Min", "Mul", "Or"})
FACTORS = (1.01, 0.97, 2.0, 0.5)
BIG = 8
"""Constants of more elements are weights."""


def in_operators(setting: Setting) -> Iterator[Mutant]:
    """Yield faults of each node and of each small constant."""
    for path, graph in graphs_of(setting.model):
        initializers = {t.name for _, g in graphs_of(setting.model) for t in g.proto.initializer}
        for number, node in enumerate(graph.nodes):
            yield from _of_node(path, number, node, initializers)
        for tensor in graph.proto.initializer:
            yield from _of_constant(path, tensor, setting)


def _at(path: Path, number: int, change: Callable[[Graph, onnx.NodeProto], None]):
    def changed(model: onnx.ModelProto) -> None:
        graph = graph_at(model, path)
        change(graph, graph.nodes[number])

    return changed


def _of_node(path: Path, number: int, node: onnx.NodeProto, constants: set[str]):
    name = f"{node.op_type} {node.name}"
    for other in OTHERS.get(node.op_type, ()):
        yield Mutant(
            "another operator", "j", f"{other} for {name}",
            _at(path, number, lambda _, n, other=other: _become(n, other)),
        )  # fmt: skip
    for one, other in itertools.combinations(range(len(node.input)), 2):
        both = node.op_type in COMMUTATIVE or {node.input[one], node.input[other]} <= {""}
        if not both and node.input[one] != node.input[other]:
            yield Mutant(
                "inputs swapped", "j", f"inputs {one} and {other} of {name} swapped",
                _at(path, number, lambda _, n, one=one, other=other: _swap(n, one, other)),
            )  # fmt: skip
    if node.op_type != "If":
        for at, given in enumerate(node.input):
            if given and given not in constants and node.op_type != "Identity":
                yield Mutant(
                    "node left out", "j", f"{name} left out, its input {at} kept",
                    _at(path, number, lambda _, n, at=at: _keep(n, at)),
                )  # fmt: skip
    else:
        for value in (True, False):
            yield Mutant(
                "one branch for all", "j", f"{name} is always {value}",
                _at(path, number, lambda g, n, value=value: _always(g, n, value)),
            )  # fmt: skip
    for attribute in node.attribute:
        for value in _other_values(node, attribute):
            yield Mutant(
                "another attribute", "j", f"{attribute.name} = {value} in {name}",
                _at(
                    path, number,
                    lambda g, n, a=attribute.name, value=value: g.set_attribute(n, a, value),
                ),
            )  # fmt: skip


def _become(node: onnx.NodeProto, operator: str) -> None:
    node.op_type = operator


def _swap(node: onnx.NodeProto, one: int, other: int) -> None:
    node.input[one], node.input[other] = node.input[other], node.input[one]


def _keep(node: onnx.NodeProto, at: int) -> None:
    kept = node.input[at]
    node.op_type, node.domain = "Identity", ""
    del node.attribute[:]
    del node.input[:]
    del node.output[1:]
    node.input.append(kept)


def _always(graph: Graph, node: onnx.NodeProto, value: bool) -> None:
    node.input[0] = graph.constant(np.array(value), f"planted_{value}")


def _other_values(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> list[Any]:
    value = helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.INT:
        return [value + 1, value - 1] if attribute.name not in ("to", "keepdims") else []
    if attribute.type == onnx.AttributeProto.FLOAT:
        if attribute.name == "scale":
            width = round(value**-2)
            more = [(width + 1) ** -0.5, max(width - 1, 1) ** -0.5, 1.0]
        else:
            more = [0.0, 1.0]
        return [x for x in [*(value * f for f in FACTORS), *more] if x != value]
    if attribute.type == onnx.AttributeProto.INTS and attribute.name == "perm":
        swapped = []
        for at in range(len(value) - 1):
            other = list(value)
            other[at], other[at + 1] = other[at + 1], other[at]
            swapped.append(other)
        return swapped
    return []


def _of_constant(path: Path, tensor: onnx.TensorProto, setting: Setting) -> Iterator[Mutant]:
    array = numpy_helper.to_array(tensor)
    if array.size > BIG:
        return
    is_integer = array.dtype.kind == "i"
    for at in range(array.size):
        old = array.reshape(-1)[at]
        if is_integer:
            new = [x for x in (int(old) + 1, int(old) - 1) if abs(x) < 2**31]
        elif array.dtype.kind == "b":
            new = [not old]
        elif not np.isfinite(old):
            new = []
        else:
            own = float(old)
            width = round(own**-2) if 0 < own < 1 else 0
            more = [(width + 1) ** -0.5, (width - 1) ** -0.5] if width > 1 else []
            new = [*(own * f for f in FACTORS), -own, *more] if old else [1e-3, -1e-3]
        for value in new:
            kind = "another integer" if is_integer else "another constant"
            yield Mutant(
                kind, "i" if kind == "another constant" else "j",
                f"{value:g} for element {at} of {tensor.name}",
                lambda model, at=at, value=value: graph_at(model, path).set_initializer(
                    tensor.name, lambda a: _with(a, at, value)
                ),
            )  # fmt: skip


def _with(array: np.ndarray, at: int, value: float) -> np.ndarray:
    found = array.copy()
    found.reshape(-1)[at] = value
    return found
