"""Search for the one node of a wrong graph that computes something else than it should.

A node near the first wrong value computes another function of its inputs, and the outputs become
right. So a fault is named that is in no table of models, such as a Tanh in place of an Erf.

It is for graphs without a right one of the same names.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from attn_export.errors import counted, printable
from attn_export.explain.comparison import Evidence
from attn_export.explain.explanation import Cause, Deviation, Lines, OutOfTime, line_suffix
from attn_export.explain.graph_evaluation import EvaluatedGraph
from attn_export.explain.graph_run import GoldenCase
from attn_export.explain.search import Hypothesis, Search
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.float64.fused_layers import erf, fast_gelu, gelu, quick_gelu
from attn_export.graph.load import names_read
from attn_export.tensorfile import Array

_Function = Callable[..., Array]

_BEFORE, _BEHIND = 3, 7
"""The number of steps before, and of nodes behind, the first wrong value that are changed."""

_MOST_AXES = 4
_HIDING, _HUGE = 1e4, 1e30
"""The size of numbers that hide keys at least, and one that surely does."""


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


_OF_ONE: Mapping[str, _Function] = {
    "Identity": np.positive, "Neg": np.negative, "Tanh": np.tanh, "Erf": erf,
    "Sigmoid": _sigmoid, "Gelu": lambda x: gelu(x)[0],
    "Gelu in its tanh form": lambda x: fast_gelu(x)[0],
    "Swish": lambda x: x * _sigmoid(x), "QuickGelu": lambda x: quick_gelu(x)[0],
    "Relu": lambda x: np.maximum(x, 0), "Softplus": lambda x: np.logaddexp(x, 0), "Sin": np.sin,
    "Cos": np.cos, "Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt, "Reciprocal": np.reciprocal,
    "Square": np.square, "Abs": np.abs,
}  # fmt: skip
"""Functions of one floating value, by operator."""

_ACTIVATIONS = frozenset({
    "BiasGelu", "FastGelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Elu", "Celu", "Selu", "Mish",
    "Clip", "Softsign", "QuickGelu", *_OF_ONE,
})  # fmt: skip
"""Operators that may stand for one of them; a second input is an added bias in some."""

_OF_TWO: Mapping[str, _Function] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum,
    "Min": np.minimum,
}  # fmt: skip
_COMPARED: Mapping[str, _Function] = {
    "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}  # fmt: skip
_JOINED: Mapping[str, _Function] = {"And": np.logical_and, "Or": np.logical_or}
_REDUCED: Mapping[str, Callable[..., Array]] = {
    "ReduceMean": np.mean, "ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Repair(Hypothesis):
    """Another function of what nodes read, or of what they give.

    `effect` says what the node should do: ``"should be Erf"``.

    Attributes:
        nodes: The node, and others like it.
    """

    function: _Function
    of_output: bool = False
    nodes: Sequence[onnx.NodeProto] = ()


_repair = functools.partial(_Repair, "wrong node")


def node_repair(
    graph: EvaluatedGraph, first: Deviation, cases: Sequence[GoldenCase], lines: Lines,
    out_of_time: OutOfTime,
) -> Cause | None:  # fmt: skip
    """Return the node near the first wrong value whose change makes all outputs right.

    It is changed alone, then with all nodes of its kind, as where each layer has one.

    `cases`: Cases to compute, the first of which failed.
    """
    evaluation, names = graph.evaluation, set(graph.evaluation.outputs)
    computed = [(case, values) for case in cases if (values := graph.values(case)) is not None]
    if not computed or computed[0][0] is not cases[0] or names != {*cases[0].golden.expected}:
        return None

    def compared(case: GoldenCase, values: Values) -> dict[str, Array]:
        outputs = graph.runner.to_case_layout(evaluation.outputs_of(values))
        return {name: case.compared(name, array) for name, array in outputs.items()}

    def outputs(repair: _Repair, at: Evidence) -> dict[str, Array]:
        (case,) = (case for case, values in computed if values is at.values)
        return compared(case, _values_with(evaluation, repair, at.values))

    evidence = [Evidence(x, compared(case, x), case.golden.expected) for case, x in computed]
    cost = len(evaluation.nodes) * 1e-4
    search = Search(outputs, evidence, cost, out_of_time)
    for tried in search.each(_repairs(evaluation, computed[0][1], first)):
        if any(one.exact for one in search.confirmed([tried], lambda _: "")):
            node, *others = tried.fault.nodes
            line = lines.get(node.name, "")
            alike = f", and {counted(len(others), 'node')} like it," if others else ""
            sentence = (
                f"the graph is wrong: {node.op_type} {node.name or node.output[0]}{alike} "
                f"{tried.fault.effect}: with this alone its outputs are right{line_suffix(line)}"
            )
            return Cause(tried.fault.kind, sentence, node.name, line, 0.0)
    return None


def _repairs(evaluation: Evaluation, values: Values, first: Deviation) -> Iterator[_Repair]:
    """Yield repairs of one node near the first wrong value, then of all nodes of its kind.

    `values`: Those of one case.
    """
    near, of_masks = _near(evaluation, first.node), _of_masks(evaluation, values)
    alike = [[node, *_alike(evaluation, node)] for node in near[: _BEHIND + 1]]
    for node, *others in (*([n] for n in (*near, *of_masks)), *(x for x in alike if x[1:])):
        repairs = _of_node(node, values) if node in near else _of_elements(node, values)
        yield from (dataclasses.replace(each, nodes=(node, *others)) for each in repairs)


def _alike(graph: Evaluation, one: onnx.NodeProto) -> list[onnx.NodeProto]:
    return [
        node for node in graph.nodes
        if (node.op_type, node.attribute) == (one.op_type, one.attribute)
        and len(node.input) == len(one.input) and node is not one
    ]  # fmt: skip


def _near(graph: Evaluation, name: str) -> list[onnx.NodeProto]:
    """Return nodes near to one: itself, those behind it, then those before it."""
    start = next((n for n in graph.nodes if name in (n.name, n.output[0])), None)
    if start is None:
        return []
    reached, behind = set(start.output), [start]
    for node in graph.nodes:
        if len(behind) <= _BEHIND and node is not start and reached.intersection(node.input):
            reached.update(node.output)
            behind.append(node)
    before, level = list[onnx.NodeProto](), [start]
    for _ in range(_BEFORE):
        level = [graph.producer[x] for node in level for x in node.input if x in graph.producer]
        before += level
    return list({id(node): node for node in (*behind, *before)}.values())


def _of_masks(graph: Evaluation, values: Values) -> list[onnx.NodeProto]:
    return [
        n for n in graph.nodes
        if n.op_type in {*_COMPARED, *_JOINED, "Not", "Where"} or _hides_little(values[n.output[0]])
    ]  # fmt: skip


def _hides_little(value: object) -> bool:
    """Return whether a value adds 0 to some scores, and one negative number to others, not huge."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not value.size:
        return False
    return bool(
        np.isin(value, (0, value.min())).all() and -_HIDING < value.min() < value.max() == 0
    )


def _values_with(evaluation: Evaluation, repair: _Repair, values: Values) -> Values:
    """Return the values of a graph some of whose nodes compute another function."""
    moved, places = set[str](), {id(node) for node in repair.nodes}

    def compute(node: onnx.NodeProto, now: Values) -> Mapping[str, Array]:
        is_moved, is_repaired = not moved.isdisjoint(names_read(node)), id(node) in places
        found: dict[str, Any] = {}
        if is_moved and (repair.of_output or not is_repaired):
            found = evaluation.compute_node(node, now)
        if is_repaired:
            reads = node.output[:1] if repair.of_output else node.input
            found[node.output[0]] = repair.function(*({**now, **found}[name] for name in reads))
        moved.update(found)
        return found

    return evaluation.walk(dict(values), compute)


def _of_node(node: onnx.NodeProto, values: Values) -> Iterator[_Repair]:
    """Yield other functions of what a node reads, the likeliest first.

    `values`: Those of one case.
    """
    value, operands = values.get(node.output[0]), [values.get(name) for name in node.input]
    if len(node.output) > 1 or not isinstance(value, np.ndarray):
        return
    is_float = value.dtype.kind == "f" and value.size > 1
    if node.op_type in _ACTIVATIONS and is_float:
        has_bias = "Gelu" in node.op_type and len(operands) == 2
        for name, function in _OF_ONE.items():
            text = "should not be there" if name == "Identity" else f"should be {name}"
            if name != node.op_type:
                yield _repair(text, _with_bias(function) if has_bias else _first(function))
    yield from _of_elements(node, values)
    yield from _of_axes(node, value.ndim, operands)
    for name, function in _OF_ONE.items() if is_float else ():
        if name not in (node.op_type, "Identity"):
            yield _repair(f"should be followed by {name}", function, of_output=True)


def _of_elements(node: onnx.NodeProto, values: Values) -> Iterator[_Repair]:
    kind, value = node.op_type, values[node.output[0]]
    if isinstance(value, np.ndarray) and _hides_little(value):
        text = f"adds {value.min():.6g} to the scores of hidden keys, and should add a huge number"
        yield _repair(text, lambda x: np.where(x < 0, -_HUGE, x), of_output=True)
    for table in (_OF_TWO, _COMPARED, _JOINED):
        if kind in table and len(node.input) == 2:
            yield from (_repair(f"should be {n}", f) for n, f in table.items() if n != kind)
            for at, name in enumerate(node.input):
                text = f"should give its input {printable(name, 60)} alone"
                yield _repair(text, functools.partial(_one, at))
            if kind in ("Sub", "Div"):
                yield _repair("should have its inputs exchanged", _exchanged(table[kind]))
    if kind == "Where":
        yield _repair("should have its branches exchanged", _other_branches)
    if kind == "Not":
        yield _repair("should not be there", np.array)


def _of_axes(node: onnx.NodeProto, ndim: int, operands: Sequence[object]) -> Iterator[_Repair]:
    kind = node.op_type
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    axis = attributes.get("axis", -1)
    if kind == "Concat":
        order = ", then ".join(printable(name, 60) for name in reversed(node.input))
        yield _repair(f"should join {order}", lambda *x: np.concatenate(x[::-1], axis))
    if kind == "Softmax":
        for at in range(ndim):
            if at != axis % ndim:
                yield _repair(f"should be over axis {at}", functools.partial(_softmax, axis=at))
    if kind in _REDUCED:
        given: Any = operands[1] if len(operands) > 1 else attributes.get("axes")
        axes = None if given is None else tuple(map(int, given))
        options = {"axis": axes, "keepdims": bool(attributes.get("keepdims", 1))}
        for name, function in _REDUCED.items():
            if name != kind:
                yield _repair(f"should be {name}", _first(functools.partial(function, **options)))
    if kind == "Transpose" and ndim <= _MOST_AXES:
        for perm in itertools.permutations(range(ndim)):
            text = f"should have the axes {list(perm)} as perm"
            yield _repair(text, functools.partial(np.transpose, axes=perm))
        own: Any = attributes.get("perm")
        yield _repair(
            "should leave the elements in their order, as a reshape does",
            lambda x: x.reshape(x.transpose(own).shape),
        )


def _other_branches(condition: Array, one: Array, other: Array) -> Array:
    return np.asarray(np.where(condition, other, one))


def _first(function: _Function) -> _Function:
    return lambda x, *_: function(x)


def _with_bias(function: _Function) -> _Function:
    return lambda x, bias: function(x + bias)


def _exchanged(function: _Function) -> _Function:
    return lambda a, b: function(b, a)


def _one(at: int, *x: Array) -> Array:
    return np.broadcast_to(x[at], np.broadcast_shapes(*(each.shape for each in x)))


def _softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))
