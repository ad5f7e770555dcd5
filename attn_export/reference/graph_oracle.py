"""Reference and tolerance of a graph without a module, from float64 runs of the graph itself.

The rule is that of modules (`reference/oracle.py`), and the same operations round at random.
Eager's outputs are replaced by those of a run that rounds each value to the graph's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from attn_export.cases.draw import seed_of
from attn_export.errors import GraphError, first_few
from attn_export.float64 import ReferenceStep
from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import Evaluation, NotComputedError, Values, is_float
from attn_export.graph.requirements import EXACT
from attn_export.interface import Shape
from attn_export.measures import EPS_FLOAT32, eps
from attn_export.reference.operations import threads
from attn_export.reference.rounding import RandomRounding
from attn_export.reference.tolerance import BaseOracle, build_golden, run_count
from attn_export.results import BASE, CHANGED, Arrays, Case, Golden
from attn_export.tensorfile import is_floating

CHOOSING = frozenset({
    "ArgMax", "ArgMin", "Cast", "DynamicQuantizeLinear", "MaxPool", "QuantizeLinear", "ReduceMax",
    "ReduceMin", "TopK",
})  # fmt: skip
"""Operators that may make a number of NaN: they choose an element, or round to integers."""

DECIDING = frozenset({"Ceil", "Floor", "Mod", "Round", "Sign"})
"""Operators with floating results that jump. All operators with other results do, too."""

_ATTENTIONS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})


class GraphOracle(BaseOracle):
    """Source of the expected outputs of a graph.

    `evaluation`: The float64 evaluation of the graph.
    `shapes`: The shape of every output.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        name: str,
        dtype: np.dtype,
        shapes: Mapping[str, Shape],
        least_eps: float = 0.0,
    ) -> None:
        self._evaluation, self._name, self._dtype, self._shapes = evaluation, name, dtype, shapes
        self._in_float32 = dtype.name == "bfloat16"
        self.is_narrower = least_eps > 0
        self._eps = max(EPS_FLOAT32 if self._in_float32 else eps(dtype), least_eps)
        self._input_free = _input_free(evaluation)

    def output_shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every output; dynamic axes by name."""
        return self._shapes

    def computable(self, cases: Sequence[Case]) -> tuple[list[Case], tuple[str, ...]]:
        """Return the cases that the graph can compute, and a note on the others."""
        computed, left_out = [], []
        for case in cases:
            try:
                self._evaluation.outputs_at(case.inputs)
                computed.append(case)
            except NotComputedError as error:
                if case.name == BASE or case.name.startswith(CHANGED):
                    raise GraphError(f"{self._name}, in the case {case.name}: {error}") from error
                left_out.append(case.name)
        if not left_out:
            return computed, ()
        note = f"left out, since {self._name} does not take them: {first_few(left_out)}"
        return computed, (note,)

    def reference(self, inputs: Arrays) -> Arrays:
        """Return the outputs of the float64 run."""
        return self._evaluation.outputs_of(self._evaluation.values(inputs))

    def eager(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs of a run that rounds each value to the graph's own type."""
        return self._narrowed(self._evaluation.rounded_values(inputs, self._dtype))

    def _narrowed(self, values: Values) -> dict[str, np.ndarray]:
        return {
            name: a.astype(self._dtype) if is_floating(a.dtype) else a
            for name, a in self._evaluation.outputs_of(values).items()
        }

    def golden(self, case: Case) -> Golden:
        """Return the case with its reference, the graph's own outputs, and the tolerance."""
        evaluation = self._evaluation
        rounded = evaluation.rounded_values(case.inputs, self._dtype)
        eager = self._narrowed(rounded)
        decided = self._decisions(case.inputs, rounded)

        def compute(node: onnx.NodeProto, values: Values) -> Values:
            computed = evaluation.compute_node(node, values)
            return {name: decided.get(name, array) for name, array in computed.items()}

        def recompute(inputs: Arrays) -> Arrays:
            return evaluation.outputs_at(inputs, compute)

        _, count = run_count(eager, case.contents)
        runs = [self._run(case, number, decided) for number in range(count)]
        # For NaN, such an operator has no defined result.
        chooses = any(node.op_type in CHOOSING for node in self._evaluation.nodes)
        return build_golden(
            case, eager, recompute(case.inputs), runs, in_float32=self._in_float32,
            is_narrower=self.is_narrower, recompute=None if chooses else recompute,
        )  # fmt: skip

    def _decisions(self, inputs: Arrays, rounded: Values) -> dict[str, np.ndarray]:
        """Return what is decided without inputs, such as the bucket of each distance.

        A distance may lie on the boundary of two buckets. Neither random rounding nor float64 with
        constants that were rounded to float32 decides as the graph does, which is in float32.
        """
        if self._dtype != np.float32:
            rounded = self._evaluation.rounded_values(inputs, np.dtype(np.float32))
        return {
            name: value
            for name, operator in self._input_free.items()
            if isinstance(value := rounded[name], np.ndarray)
            and (operator in DECIDING or not is_float(value))
        }

    def move_off_ties(self, case: Case) -> Case | None:
        """Return the case itself, or None if DynamicQuantizeLinear makes it meaningless.

        Its one scale for all batch elements spreads values that are not finite from the ignored
        element to the others. No other ties are looked for in graphs without a module.
        """
        nodes = self._evaluation.nodes
        spreads = case.ignored_rows and any(n.op_type == "DynamicQuantizeLinear" for n in nodes)
        return None if spreads else case

    def steps(self, inputs: Arrays) -> list[ReferenceStep]:
        """Return every operation of the float64 run, after the inputs and weights."""
        graph = self._evaluation
        values, numbers, steps = graph.values(inputs), dict[str, int](), list[ReferenceStep]()
        # The name, the operator and the operands of each value.
        defined: list[tuple[str, str, Sequence[str]]]
        defined = [(name, "", ()) for name in (*inputs, *graph.initializers)]
        defined += [(name, n.op_type, n.input) for n in graph.nodes for name in n.output]
        for name, operation, operands in defined:
            value = values.get(name)
            if isinstance(value, np.ndarray):
                numbers[name] = len(steps)
                reads = tuple(numbers[operand] for operand in operands if operand in numbers)
                steps.append(ReferenceStep(operation, "", value, reads))
        return steps

    def _run(self, case: Case, number: int, decided: Values) -> Arrays:
        mode = RandomRounding(self._eps, EPS_FLOAT32, seed_of(case.name, number))
        # On matrices this small, handing work over takes longer than doing it.
        with torch.no_grad(), threads(1):
            return _rounded(self._evaluation, case.inputs, mode, decided)


def _input_free(graph: Evaluation) -> dict[str, str]:
    """Return the values that depend on no input but its shape, with their operators."""
    found = {"": "", **dict.fromkeys(graph.initializers, "")}
    for node in graph.nodes:
        bodies = any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute)
        if node.op_type in ("Shape", "Size") or (not bodies and found.keys() >= set(node.input)):
            found |= dict.fromkeys(node.output, node.op_type)
    return {name: operator for name, operator in found.items() if operator}


def _rounded(
    graph: Evaluation, inputs: Arrays, mode: RandomRounding, decided: Values
) -> Arrays:  # fmt: skip
    """Return the outputs of a graph, with each operation rounded at random but those decided."""
    changes = _noisy_steps(mode)

    def compute(node: onnx.NodeProto, values: Values) -> Values:
        outputs = _in_torch(node, values, mode)
        if decided.keys() >= set(node.output):
            return {name: decided[name] for name in node.output}
        if outputs is not None:
            return outputs
        if node.op_type in _ATTENTIONS:
            return graph.attention(node, values, changes)
        if node.op_type in EXACT:
            return graph.compute_node(node, values)
        # It amplifies the rounding of its inputs as much as that of its own sums.
        operands = {n: _noisy(values[n], mode) for n in node.input if is_float(values[n])}
        computed = graph.compute_node(node, {**values, **operands})
        return {n: _noisy(a, mode) if is_float(a) else a for n, a in computed.items()}

    return graph.outputs_at(inputs, compute)


def _noisy(array: Any, mode: RandomRounding) -> np.ndarray:
    return np.asarray(mode.rounded(torch.from_numpy(np.array(array))).numpy())


def _in_torch(
    node: onnx.NodeProto, values: Values, mode: RandomRounding
) -> dict[str, np.ndarray] | None:
    """Return the output of an operator of `TORCH`, rounded at random; None for all others.

    None, too, if PyTorch refuses the operands, which NumPy took, as in a product with a scalar.
    """
    operator = TORCH.get(node.op_type)
    arrays = [values[name] for name in node.input]
    floats = [array for array in arrays if is_float(array)]
    if operator is None or node.domain not in ("", "ai.onnx") or len(node.output) > 1 or not floats:
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    try:
        tensors = [None if a is None else torch.from_numpy(np.array(a)) for a in arrays]
        with mode:
            result = operator(tensors, attributes)
    except Exception:  # a graph of unknown origin may raise anything
        return None
    return None if result is None else {node.output[0]: result.numpy()}


def _noisy_steps(mode: RandomRounding) -> dict[str, StepChange]:
    """Return changes of the steps of `Attention` that round each of them at random."""

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with mode:
            return np.asarray((torch.tensor(a) @ torch.tensor(b)).numpy())

    def products(_: Any, at: Mapping[str, Any]) -> np.ndarray:
        keys = np.swapaxes(at["keys"][:, at["kv_head"]], -1, -2)
        return _noisy(product(at["queries"], keys) * at["scale"], mode)

    def weights(weights: np.ndarray, at: Mapping[str, Any]) -> np.ndarray:
        scores = torch.tensor(at["scores"])
        with mode:
            noisy = torch.softmax(scores, -1).numpy()
        return np.where(np.isfinite(weights) & (weights != 0), noisy, weights)

    def attended(_: Any, at: Mapping[str, Any]) -> np.ndarray:
        return product(at["weights"], at["values"][:, at["kv_head"]])

    def capped(capped: np.ndarray, at: Mapping[str, Any]) -> np.ndarray:
        return capped if capped is at["products"] else _noisy(capped, mode)

    return {"products": products, "weights": weights, "attended": attended, "capped": capped}


# -- operators that PyTorch has ------------------------------------------------------------------

Tensors = Sequence[Any]
Operator = Callable[[Tensors, Mapping[str, Any]], Tensor | None]


def _gemm(operands: Tensors, attributes: Mapping[str, Any]) -> Tensor:
    a, b, *bias = operands
    a = a.T if attributes.get("transA") else a
    b = b.T if attributes.get("transB") else b
    result: Tensor = a @ b
    if attributes.get("alpha", 1.0) != 1.0:
        result = result * attributes["alpha"]
    if bias and bias[0] is not None:
        result = result + bias[0] * attributes.get("beta", 1.0)
    return result


def _layer_norm(operands: Tensors, attributes: Mapping[str, Any]) -> Tensor:
    x, scale, *bias = operands
    axis = attributes.get("axis", -1) % x.dim()
    shape = x.shape[axis:]
    scale = scale.expand(shape)
    shift = bias[0].expand(shape) if bias and bias[0] is not None else None
    return layer_norm(x, shape, scale, shift, attributes.get("epsilon", 1e-5))


def _reduction(function: Callable[..., Tensor]) -> Operator:
    def reduce(operands: Tensors, attributes: Mapping[str, Any]) -> Tensor | None:
        axes = attributes.get("axes") or (operands[1].tolist() if len(operands) > 1 else None)
        if not axes:
            return None
        return function(operands[0], axes, keepdim=bool(attributes.get("keepdims", 1)))

    return reduce


def _without_attributes(function: Callable[..., Tensor]) -> Operator:
    return lambda operands, _: function(*operands)


TORCH: Mapping[str, Operator] = {
    "MatMul": _without_attributes(torch.matmul),
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "Softmax": lambda operands, attributes: torch.softmax(operands[0], attributes.get("axis", -1)),
    "ReduceMean": _reduction(torch.mean),
    "ReduceSum": _reduction(torch.sum),
    **{
        name: _without_attributes(function)
        for name, function in (
            ("Add", torch.add), ("Sub", torch.sub), ("Mul", torch.mul), ("Div", torch.div),
            ("Pow", torch.pow), ("Sqrt", torch.sqrt), ("Exp", torch.exp), ("Tanh", torch.tanh),
            ("Sigmoid", torch.sigmoid), ("Erf", torch.erf), ("Log", torch.log),
            ("Reciprocal", torch.reciprocal), ("Sin", torch.sin), ("Cos", torch.cos),
        )
    },
}  # fmt: skip
