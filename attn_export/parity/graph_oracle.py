"""Truth and the error allowed, from a graph itself: its float64 run, and runs that round at random.

The rule is that of modules (`parity/oracle.py`): the same operations are rounded alike. In place of
eager stand the outputs of a run that rounds each value to the graph's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from attn_export.diagnose.attention_steps import Change
from attn_export.diagnose.evaluate import Evaluation, NotComputedError, Values, is_float, to_float64
from attn_export.diagnose.explanation import Step
from attn_export.errors import GraphError
from attn_export.parity.allowed import judged_by, run_count, short_rows, usable_golden
from attn_export.parity.draw import seed_of
from attn_export.parity.measures import eps
from attn_export.parity.oracle import threads
from attn_export.parity.rounding import RandomRounding
from attn_export.results import BASE, CHANGED, Arrays, Case, Golden
from attn_export.spec import Shape
from attn_export.tensorfile import is_floating

EXACT = frozenset({
    "Abs", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Dropout",
    "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Identity", "Max", "Min",
    "Neg", "Pad", "Range", "ReduceMax", "ReduceMin", "Relu", "Reshape", "Round", "ScatterElements",
    "ScatterND", "Sign", "Slice", "Split", "Squeeze", "TensorScatter", "Tile", "TopK", "Transpose",
    "Trilu", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that round nothing: they move, choose or compare elements."""

ATTENTIONS = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention"})


class GraphOracle:
    """Source of the expected outputs of a graph.

    Args:
        evaluation: The graph.
        name: Its name in messages.
        dtype: Its floating type.
        shapes: The shape of every output.
        least_eps: Of a graph that is judged by it and computes in fewer bits, the eps of its type.
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
        single = eps(np.dtype(np.float32))
        self._in_float32 = dtype.name == "bfloat16"
        self._eps = max(single if self._in_float32 else eps(dtype), least_eps)

    @property
    def has_short_rows(self) -> bool:
        """Return whether an output has rows so short that all their elements may nearly vanish."""
        return short_rows(self._shapes)

    def computable(self, cases: Sequence[Case]) -> tuple[list[Case], tuple[str, ...]]:
        """Return the cases that the graph can compute, and a note on the others.

        Raises:
            GraphError: If it cannot compute the base case, or one that differs in an input.
        """
        found, left_out = [], []
        for case in cases:
            try:
                self._evaluation.values(case.inputs)
                found.append(case)
            except NotComputedError as error:
                if case.name == BASE or case.name.startswith(CHANGED):
                    raise GraphError(f"{self._name}, in the case {case.name}: {error}") from error
                left_out.append(case.name)
        if not left_out:
            return found, ()
        names = ", ".join(left_out[:3]) + (" …" if len(left_out) > 3 else "")
        note = f"left out, since {self._name} does not take them: {names}"
        return found, (note,)

    def golden(self, case: Case) -> Golden:
        """Return the case with its truth, the graph's own outputs, and the error allowed."""
        of = self._evaluation
        truth = of.outputs_of(of.values(case.inputs))
        rounded = of.outputs_of(of.noisy_values(case.inputs, self._dtype))
        eager = {
            name: a.astype(self._dtype) if is_floating(a.dtype) else a
            for name, a in rounded.items()
        }
        _, count = run_count(eager)
        runs = [self._run(case, number) for number in range(count)]
        return judged_by(case, eager, truth, runs, in_float32=self._in_float32)

    def settled(self, case: Case) -> Case | None:
        """Return the case; None where one scale takes what is not finite in a row to all others.

        Else no integers of a graph of others are known to depend on rounding.
        """
        nodes = self._evaluation.nodes
        shared = case.ignored_rows and any(n.op_type == "DynamicQuantizeLinear" for n in nodes)
        return None if shared else case

    def usable(self, case: Case) -> Golden:
        """Return a case with its truth, its inputs changed as far as evidence requires."""
        return usable_golden(case, self.golden, short_rows=self.has_short_rows)

    def steps(self, inputs: Arrays) -> list[Step]:
        """Return every operation of the float64 run, after the inputs and weights."""
        of = self._evaluation
        values, numbers, steps = of.values(inputs), dict[str, int](), list[Step]()
        made: list[tuple[str, str, Sequence[str]]]
        made = [(name, "", ()) for name in (*inputs, *of.initializers)]
        made += [(name, node.op_type, node.input) for node in of.nodes for name in node.output]
        for name, operation, read in made:
            value = values.get(name)
            if isinstance(value, np.ndarray):
                numbers[name] = len(steps)
                reads = tuple(numbers[each] for each in read if each in numbers)
                steps.append(Step(operation, "", value, reads))
        return steps

    def _run(self, case: Case, number: int) -> Arrays:
        mode = RandomRounding(self._eps, eps(np.dtype(np.float32)), seed_of(case.name, number))
        # On matrices this small, handing work over takes longer than doing it.
        with torch.no_grad(), threads(1):
            return self._evaluation.outputs_of(_rounded(self._evaluation, case.inputs, mode))


def _rounded(of: Evaluation, inputs: Arrays, mode: RandomRounding) -> Values:
    """Return every value of a graph, with each operation rounded at random."""
    known: dict[str, np.ndarray | None] = {"": None, **of.initializers}
    known |= {name: to_float64(array) for name, array in inputs.items()}
    changes = _noisy_steps(mode)
    for node in of.nodes:
        found = _in_torch(node, known, mode)
        if found is not None:
            known |= found
        elif node.op_type in ATTENTIONS:
            known |= of.attention(node, known, changes)
        elif node.op_type in EXACT:
            known |= of.compute_node(node, known)
        else:
            # It amplifies what its inputs lost as its own sums do.
            read = {n: _noisy(known[n], mode) for n in node.input if is_float(known[n])}
            given = of.compute_node(node, {**known, **read})
            known |= {n: _noisy(a, mode) if is_float(a) else a for n, a in given.items()}
    return known


def _noisy(array: Any, mode: RandomRounding) -> np.ndarray:
    return np.asarray(mode.rounded(torch.from_numpy(np.array(array))).numpy())


def _in_torch(
    node: onnx.NodeProto, known: Values, mode: RandomRounding
) -> dict[str, np.ndarray] | None:
    """Return the output of an operator of `TORCH`, rounded at random; None for all others."""
    operator = TORCH.get(node.op_type)
    arrays = [known[name] for name in node.input]
    floats = [array for array in arrays if is_float(array)]
    if operator is None or node.domain not in ("", "ai.onnx") or len(node.output) > 1 or not floats:
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    tensors = [None if a is None else torch.from_numpy(np.array(a)) for a in arrays]
    with mode:
        found = operator(tensors, attributes)
    return None if found is None else {node.output[0]: found.numpy()}


def _noisy_steps(mode: RandomRounding) -> dict[str, Change]:
    """Return changes by which `Attention` rounds each of its steps."""

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with mode:
            return np.asarray((torch.tensor(a) @ torch.tensor(b)).numpy())

    def products(_: Any, at: Mapping[str, Any]) -> np.ndarray:
        keys = np.swapaxes(at["keys"][:, at["kv_head"]], -1, -2)
        return _noisy(product(at["queries"], keys) * at["scale"], mode)

    def weights(weights: np.ndarray, at: Mapping[str, Any]) -> np.ndarray:
        scores = torch.tensor(at["scores"])
        with mode:
            found = torch.softmax(scores, -1).numpy()
        return np.where(np.isfinite(weights) & (weights != 0), found, weights)

    def attended(_: Any, at: Mapping[str, Any]) -> np.ndarray:
        return product(at["weights"], at["values"][:, at["kv_head"]])

    def capped(capped: np.ndarray, at: Mapping[str, Any]) -> np.ndarray:
        return capped if capped is at["products"] else _noisy(capped, mode)

    return {"products": products, "weights": weights, "attended": attended, "capped": capped}


# -- operators that PyTorch has ------------------------------------------------------------------

Tensors = Sequence[Any]
Operator = Callable[[Tensors, Mapping[str, Any]], Tensor | None]


def _gemm(given: Tensors, attributes: Mapping[str, Any]) -> Tensor:
    a, b, *rest = given
    a = a.T if attributes.get("transA") else a
    b = b.T if attributes.get("transB") else b
    found: Tensor = a @ b
    if attributes.get("alpha", 1.0) != 1.0:
        found = found * attributes["alpha"]
    if rest and rest[0] is not None:
        found = found + rest[0] * attributes.get("beta", 1.0)
    return found


def _layer_norm(given: Tensors, attributes: Mapping[str, Any]) -> Tensor:
    x, scale, *bias = given
    axis = attributes.get("axis", -1) % x.dim()
    shape = x.shape[axis:]
    scale = scale.expand(shape)
    shift = bias[0].expand(shape) if bias and bias[0] is not None else None
    return layer_norm(x, shape, scale, shift, attributes.get("epsilon", 1e-5))


def _reduced(function: Callable[..., Tensor]) -> Operator:
    def reduce(given: Tensors, attributes: Mapping[str, Any]) -> Tensor | None:
        axes = attributes.get("axes") or (given[1].tolist() if len(given) > 1 else None)
        if not axes:
            return None
        return function(given[0], axes, keepdim=bool(attributes.get("keepdims", 1)))

    return reduce


def _plain(function: Callable[..., Tensor]) -> Operator:
    return lambda given, _: function(*given)


TORCH: Mapping[str, Operator] = {
    "MatMul": _plain(torch.matmul),
    "Gemm": _gemm,
    "LayerNormalization": _layer_norm,
    "Softmax": lambda given, attributes: torch.softmax(given[0], attributes.get("axis", -1)),
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    **{
        name: _plain(function)
        for name, function in (
            ("Add", torch.add), ("Sub", torch.sub), ("Mul", torch.mul), ("Div", torch.div),
            ("Pow", torch.pow), ("Sqrt", torch.sqrt), ("Exp", torch.exp), ("Tanh", torch.tanh),
            ("Sigmoid", torch.sigmoid), ("Erf", torch.erf), ("Log", torch.log),
            ("Reciprocal", torch.reciprocal), ("Sin", torch.sin), ("Cos", torch.cos),
        )
    },
}  # fmt: skip
