"""Faults of a graph that quantises: integers that it reads wrongly.

No value of such a graph is that of the model, and a budget alone judges it. So integer weights are
compared with the parameters that they were rounded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx

from attn_export.errors import printable
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

_READERS: Mapping[str, tuple[int, int, int]] = {
    "ConvInteger": (1, -1, 3), "DequantizeLinear": (0, 1, 2), "DynamicQuantizeMatMul": (1, 2, 3),
    "MatMulInteger": (1, -1, 3), "MatMulIntegerToFloat": (1, 3, 5), "QAttention": (1, 4, 7),
    "QLinearConv": (3, 4, 5), "QLinearMatMul": (3, 4, 5),
}  # fmt: skip
"""By operator: the inputs that hold a weight, its scale and its zero point; -1 if it has none."""

_ALIKE = 0.9
"""The least correlation of integers with the parameter that they were rounded from."""

_OFF, _SCALED = 0.5, 0.02
"""The least error of a zero point, and of a scale relative to it, that rounding does not make."""


def integer_fault(graph: Evaluation, values: Values, steps: Sequence[ReferenceStep]) -> str:
    """Return a sentence on what brings a graph that quantises far from its model; "" if not known.

    `steps`: What the model computed, after its inputs and parameters.
    """
    parameters = [
        s for s in steps if not s.reads and s.value.ndim > 1 and s.value.dtype.kind == "f"
    ]
    for node in graph.nodes:
        for what in (*_of_rounded(graph, node), *_of_weight(graph, node, values, parameters)):
            return f"{node.op_type} {node.name or node.output[0]} {what}"
    return ""


def _of_rounded(graph: Evaluation, node: onnx.NodeProto) -> Iterator[str]:
    """Yield how a product reads integers that the graph makes, if it made them otherwise."""
    if node.op_type not in ("MatMulInteger", "ConvInteger"):
        return
    made = graph.producer.get(node.input[0])
    if made is not None and made.op_type == "DynamicQuantizeLinear":
        used = node.input[2] if len(node.input) > 2 else ""
        if used != made.output[2]:
            shown = printable(used, 60) if used else "no zero point"
            yield f"subtracts {shown} where its input has {printable(made.output[2], 60)}"


def _of_weight(
    graph: Evaluation, node: onnx.NodeProto, values: Values, parameters: Sequence[ReferenceStep]
) -> Iterator[str]:
    """Yield what of a weight's zero point and scale is not that of the parameter it stands for."""
    if node.op_type not in _READERS:
        return
    at, scale_at, zero_at = _READERS[node.op_type]
    name, scale, zero = (
        node.input[n] if 0 <= n < len(node.input) else "" for n in (at, scale_at, zero_at)
    )
    made = graph.producer.get(name)
    if made is not None and made.op_type == "Gather":  # rows of a table
        name = made.input[0]
    weight, found = values.get(name), None
    if name in graph.initializers and isinstance(weight, np.ndarray) and weight.ndim > 1:
        found = _rounded_from(weight.astype(np.float64), parameters)
    if found is None or not isinstance(weight, np.ndarray):
        return
    path, right = found
    given_zeros = values.get(zero)
    zeros = np.zeros(1) if given_zeros is None else np.asarray(given_zeros, np.float64)
    axes = tuple(range(weight.ndim - 1)) if zeros.size > 1 else None
    step, middle = _line(weight.astype(np.float64), right, axes)
    if np.shape(middle) == zeros.shape or zeros.size == 1:
        off = np.abs(zeros - middle)
        if off.max() > _OFF:
            worst = int(off.argmax())
            given, wanted = np.broadcast_to(zeros.ravel(), off.size)[worst], np.ravel(middle)[worst]
            own = f"where the integers of {path} have {round(float(wanted))}"
            yield f"has the zero point {given:g} {own}"
    given_scale = values.get(scale or _scale_behind(graph, node))
    if isinstance(given_scale, np.ndarray) and given_scale.size == 1:
        ratio = float(given_scale.item() / np.mean(step))
        if abs(ratio - 1) > _SCALED:
            yield f"has {ratio:.3g} times the scale that the integers of {path} have"


def _rounded_from(weight: Array, parameters: Sequence[ReferenceStep]) -> tuple[str, Array] | None:
    """Return the parameter that is most like a weight, and it in the weight's order of axes."""
    best, found = _ALIKE, None
    for step in parameters:
        for value in (step.value, step.value.T):
            if value.shape == weight.shape:
                with np.errstate(all="ignore"):  # either may be constant
                    alike = float(np.corrcoef(weight.ravel(), value.ravel())[0, 1])
                if alike > best:
                    path = printable(step.operation.removeprefix("model."), 80)
                    best, found = alike, (path, value)
    return found


def _line(weight: Array, right: Array, axes: tuple[int, ...] | None) -> tuple[Array, Array]:
    """Return the scale and the zero point by which integers stand for a parameter, by columns."""
    means = [x.mean(axes, keepdims=True) for x in (weight, right)]
    apart, wanted = weight - means[0], right - means[1]
    scale = (apart * wanted).sum(axes) / (apart * apart).sum(axes)
    zero = means[0].reshape(np.shape(scale)) - means[1].reshape(np.shape(scale)) / scale
    return np.asarray(scale), np.asarray(zero)


def _scale_behind(graph: Evaluation, node: onnx.NodeProto) -> str:
    """Return the scale of a weight by which a later node multiplies, by name; "" if none does."""
    name = node.output[0]
    for kind in ("Cast", "Mul"):
        user = next((n for n in graph.nodes if n.op_type == kind and name in n.input), None)
        if user is None:
            return ""
        others = [other for other in user.input if other != name]
        name = user.output[0]
    product = graph.producer.get(others[0]) if others else None
    found = product.input if product is not None and product.op_type == "Mul" else ()
    return next((scale for scale in found if scale in graph.initializers), "")
