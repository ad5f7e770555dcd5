"""Faults in the nodes and inputs of graphs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from planted.edited_graph import (
    Edited,
    GraphFault,
    Place,
    attribute_of,
    nodes_of,
    scalar_of,
    swapped,
    type_of,
)


def _is_residual(g: Edited, node: onnx.NodeProto) -> bool:
    shapes = [g.shapes.get(x, ()) for x in node.input]
    return shapes[0] == shapes[1] and len(shapes[0]) == 3 and not set(node.input) & {*g.weights}


def _reads_cache(g: Edited, node: onnx.NodeProto) -> bool:
    return node.input[0] in g.inputs and len(node.input) == 2


def _is_half(g: Edited, node: onnx.NodeProto) -> bool:
    shapes = [g.shapes.get(x, ()) for x in node.input]
    return len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 4 and not (
        _reads_cache(g, node)
    )  # fmt: skip


def _near_softmax(g: Edited, node: onnx.NodeProto, _: float) -> bool:
    """Return whether a node lies at most 4 nodes before a Softmax."""
    level = {node.output[0]}
    for _ in range(4):
        users = [user for value in level for user in g.users(value)]
        if any(user.op_type == "Softmax" for user in users):
            return True
        level = {out for user in users for out in user.output}
    return False


def _is_eps(g: Edited, node: onnx.NodeProto, value: float) -> bool:
    return 0 < value < 1e-3 and any(
        g.made.get(x) is not None and g.made[x].op_type == "ReduceMean" for x in node.input
    )


def _interleaved(g: Edited, node: onnx.NodeProto) -> list[str]:
    """Read the heads of a projection in another order: [D, H] for [H, D]."""
    *_, heads, size = g.shapes[node.output[0]]
    old, value = node.input[1], node.output[0]
    shape = numpy_helper.from_array(np.array([0, 0, size, heads]), f"{value}.shape")
    g.graph.initializer.append(shape)
    index = list(g.graph.node).index(node)
    turned = helper.make_node("Transpose", [f"{value}.other"], [value], perm=[0, 1, 3, 2])
    node.input[1], node.output[0] = shape.name, f"{value}.other"
    g.graph.node.insert(index + 1, turned)
    return [node.name, value, f"{value}.other", old]


def _splits_heads(g: Edited, node: onnx.NodeProto) -> bool:
    shape = g.shapes.get(node.output[0], ())
    return g.rank(node.input[0]) == 3 and len(shape) == 4 and shape[2] > 1


def _half_precision(g: Edited, node: onnx.NodeProto) -> list[str]:
    value = node.input[0]
    down = helper.make_node("Cast", [value], [f"{value}.half"], to=10)
    up = helper.make_node("Cast", [f"{value}.half"], [f"{value}.whole"], to=1)
    return g.before(node, 0, down, up)


def _inputs(name: str, make: Callable[[str, str], list[onnx.NodeProto]]) -> Any:
    """Replace an input by what nodes make of it."""

    def places(g: Edited) -> Iterator[Place]:
        found = [x for x in sorted(g.inputs) if re.search(name, x)]
        for value in found:
            if g.users(value):
                yield functools.partial(edit, g, value)

    def edit(g: Edited, value: str) -> list[str]:
        for node in g.users(value):
            node.input[:] = [f"{value}.edited" if x == value else x for x in node.input]
        for number, node in enumerate(make(value, f"{value}.edited")):
            g.graph.node.insert(number, node)
        return [value, f"{value}.edited"]

    return places


def _const(name: str, value: Any) -> onnx.NodeProto:
    array = numpy_helper.from_array(np.array(value, np.int64))
    return helper.make_node("Constant", [], [name], value=array)


def _of_first(value: str, new: str) -> list[onnx.NodeProto]:
    """Return nodes that give every batch element the value of the first one."""
    zero, shape, row = (f"{new}.{x}" for x in ("zero", "shape", "row"))
    return [
        _const(zero, [0]), helper.make_node("Shape", [value], [shape]),
        helper.make_node("Gather", [value, zero], [row], axis=0),
        helper.make_node("Expand", [row, shape], [new]),
    ]  # fmt: skip


def _combined(op: str, constant: int) -> Callable[[str, str], list[onnx.NodeProto]]:
    return lambda value, new: [
        _const(f"{new}.constant", constant),
        helper.make_node(op, [value, f"{new}.constant"], [new]),
    ]


def _exchanged_caches(g: Edited) -> Iterator[Place]:
    """Exchange the caches of two layers where they are read."""
    for part in ("key", "value"):
        names = [x for x in sorted(g.inputs) if re.search(rf"past.*\.{part}s?$", x)][:2]
        if len(names) == 2:
            yield functools.partial(_exchange_reads, g, *names)


def _exchange_reads(g: Edited, a: str, b: str) -> list[str]:
    other = {a: b, b: a}
    for node in g.nodes:
        node.input[:] = [other.get(x, x) for x in node.input]
    return [a, b]


def _dropped(g: Edited, node: onnx.NodeProto) -> list[str]:
    return g.dropped(node)


def _other_gelu(g: Edited, node: onnx.NodeProto) -> None:
    is_tanh = any(a.s == b"tanh" for a in node.attribute)
    attribute_of("approximate", "none" if is_tanh else "tanh")(g, node)


def _ones_like(value: str, new: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Equal", [value, value], [f"{new}.is"]),
        helper.make_node("Cast", [f"{new}.is"], [new], to=7),
    ]


def _is_gate(g: Edited, node: onnx.NodeProto) -> bool:
    return g.rank(node.input[0]) == g.rank(node.input[1]) == 3


def _is_large(g: Edited, node: onnx.NodeProto) -> bool:
    return g.rank(node.input[0]) >= 3


def _is_mask(g: Edited, node: onnx.NodeProto, value: float) -> bool:
    return value < -1e4


_SCALES = ("scale", "sqrt", "factor", "multipl")
_MASK = ("mask", "causal", "window", "padding")
_ROTARY = ("rotary", "rope", "rotat", "frequenc", "cos", "sin", "pair")
_NORMS = (
    "LayerNormalization", "RMSNormalization", "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
)  # fmt: skip
_EPS = ("eps", "norm")
_MASKS = ("Where", "Mul", "Add", "Expand")
_IDS, _POSITIONS, _PADDING = r"^input_ids$", r"^position_ids$", r"^attention_mask$"
_RESIDUAL, _CACHE = ("residual", "add", "skip"), ("cache", "past", "concat", "order", "batch")

NODE_FAULTS = (
    GraphFault("added eps times 10", scalar_of(("Add",), lambda v: 10 * v, _is_eps), _EPS),
    GraphFault("added eps times 100", scalar_of(("Add",), lambda v: 100 * v, _is_eps), _EPS),
    GraphFault("norm: epsilon", nodes_of(_NORMS, attribute_of("epsilon", 1e-3)), _EPS),
    *(
        GraphFault(f"scale: {name}", scalar_of(("Mul", "Div"), change, _near_softmax), _SCALES)
        for name, change in (
            ("1 %", lambda v: 1.01 * v), ("3 %", lambda v: 1.03 * v),
            ("root", lambda v: abs(v) ** 0.5),
        )
    ),
    GraphFault("softmax: axis", nodes_of(("Softmax",), attribute_of("axis", -2)), ("softmax",)),
    GraphFault(
        "residual dropped", nodes_of(("Add",), lambda g, n: g.dropped(n, 1), _is_residual),
        _RESIDUAL,
    ),
    GraphFault("residual: Sub", nodes_of(("Add",), type_of("Sub"), _is_residual), _RESIDUAL),
    GraphFault("Neg dropped", nodes_of(("Neg",), _dropped), (*_ROTARY, "neg")),
    GraphFault("Sin for Cos", nodes_of(("Cos",), type_of("Sin")), _ROTARY),
    GraphFault(
        "halves exchanged", nodes_of(("Concat",), swapped, _is_half),
        (*_ROTARY, "concat", "half", "halves"),
    ),
    GraphFault("cache behind the keys", nodes_of(("Concat",), swapped, _reads_cache), _CACHE),
    GraphFault("Where: branches", nodes_of(("Where",), swapped), (*_MASK, "where", "branch")),
    GraphFault("mask of -1", scalar_of(_MASKS, lambda _: -1.0, _is_mask), (*_MASK, "-inf")),
    GraphFault("mask of -100", scalar_of(_MASKS, lambda _: -100.0, _is_mask), (*_MASK, "-inf")),
    GraphFault(
        "causal off by one", nodes_of(("LessOrEqual",), type_of("Less")), (*_MASK, "compar", "less")
    ),
    GraphFault(
        "window off by one", nodes_of(("Greater",), type_of("GreaterOrEqual")),
        (*_MASK, "compar", "greater"),
    ),
    GraphFault("And as Or", nodes_of(("And",), type_of("Or")), (*_MASK, "and", "or")),
    GraphFault("Tanh dropped", nodes_of(("Tanh",), _dropped), ("tanh", "softcap", "gelu")),
    GraphFault(
        "Sigmoid as HardSigmoid", nodes_of(("Sigmoid",), type_of("HardSigmoid")),
        ("sigmoid", "silu", "activation"),
    ),
    GraphFault("Gelu: other form", nodes_of(("Gelu",), _other_gelu), ("gelu", "activation")),
    GraphFault("Erf as Tanh", nodes_of(("Erf",), type_of("Tanh")), ("erf", "gelu", "activation")),
    GraphFault("Mul as Add", nodes_of(("Mul",), type_of("Add"), _is_gate), ("mul", "add", "gate")),
    GraphFault(
        "ReduceMean as ReduceSum", nodes_of(("ReduceMean",), type_of("ReduceSum")),
        ("mean", "sum", "norm", "reduce"),
    ),
    GraphFault("Sqrt dropped", nodes_of(("Sqrt",), _dropped, _is_large), ("sqrt", "root", "norm")),
    GraphFault(
        "heads in another order", nodes_of(("Reshape",), _interleaved, _splits_heads),
        ("head", "reshape", "order", "interleav", "transpos"),
    ),
    GraphFault(
        "values as float16", nodes_of(("MatMul",), _half_precision, _is_large),
        ("float16", "half", "precision", "cast", "round"),
    ),
    GraphFault("mask ignored", _inputs(_PADDING, _ones_like), _MASK),
    GraphFault("mask of the first row", _inputs(_PADDING, _of_first), (*_MASK, "batch")),
    GraphFault("positions of the first row", _inputs(_POSITIONS, _of_first), ("position",)),
    GraphFault("positions plus 1", _inputs(_POSITIONS, _combined("Add", 1)), ("position",)),
    GraphFault("all positions 0", _inputs(_POSITIONS, _combined("Mul", 0)), ("position",)),
    GraphFault("past of the first row", _inputs(r"past", _of_first), _CACHE),
    GraphFault(
        "largest token id", _inputs(_IDS, _combined("Min", 62)),
        ("input_ids", "token", "embed", "gather", "largest"),
    ),
    GraphFault("caches exchanged", _exchanged_caches, (*_CACHE, "exchang", "layer")),
)  # fmt: skip
