"""An evaluation of graphs in float16 of its own, by the operators of `onnx.reference` in float64.

It shares no code with the package, whose findings it judges. The result of each node is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

MOST_WHOLE, MOST_ROW = 0.02, 0.1
"""The relative L2 error of outputs, over all and in the worst row, that still passes."""

_LARGEST = 65504.0
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16}
Arrays = Mapping[str, np.ndarray]


def half(x: np.ndarray) -> np.ndarray:
    """Return an array as float16 holds it."""
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(np.float16).astype(np.float64))


def overflows(x: np.ndarray) -> bool:
    """Return whether a finite element of an array is infinite in float16."""
    return bool((np.isfinite(x) & ~np.isfinite(half(x))).any())


class Graph:
    """A graph in float32, or one that is float16 in part."""

    def __init__(self, model: onnx.ModelProto) -> None:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self.types = {
            v.name: v.type.tensor_type.elem_type
            for v in (*inferred.value_info, *inferred.input, *inferred.output)
        } | {t.name: t.data_type for t in model.graph.initializer}
        wide = onnx.ModelProto()
        wide.CopyFrom(model)
        del wide.graph.value_info[:]
        for value in (*wide.graph.input, *wide.graph.output):
            if value.type.tensor_type.elem_type in _FLOATS:
                value.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in wide.graph.initializer:
            _widen(tensor)
        for attribute in (a for node in wide.graph.node for a in node.attribute):
            if attribute.name in ("to", "dtype") and attribute.i in _FLOATS:
                attribute.i = TensorProto.DOUBLE
            elif attribute.HasField("t"):
                _widen(attribute.t)
        self.nodes = list(wide.graph.node)
        self._evaluator = ReferenceEvaluator(wide)
        self.outputs = [value.name for value in wide.graph.output]

    def reference(self, inputs: Arrays) -> dict[str, Any]:
        """Return every value in float64."""
        return self._run(inputs, lambda _, x: x)

    def all_half(
        self, inputs: Arrays, kept: Set[str] = frozenset(), clipped: Set[str] = frozenset()
    ) -> dict[str, Any]:
        """Return every value if all are float16 but those in the nodes that are kept.

        `kept`: Names of nodes, which read and write in full precision.
        `clipped`: Weights that are limited to the largest number.
        """

        def rounded(name: str, x: np.ndarray) -> np.ndarray:
            return half(np.clip(x, -_LARGEST, _LARGEST) if name in clipped else x)

        return self._run(inputs, rounded, kept)

    def typed(self, inputs: Arrays) -> dict[str, Any]:
        """Return every value as its type holds it."""
        return self._run(
            inputs, lambda n, x: half(x) if self.types.get(n) == TensorProto.FLOAT16 else x
        )

    def _run(
        self, inputs: Arrays, rounded: Callable[[str, np.ndarray], np.ndarray],
        kept: Set[str] = frozenset(),
    ) -> dict[str, Any]:  # fmt: skip
        made: dict[str, Any] = {"": None}
        narrow: dict[str, Any] = {"": None}

        def put(name: str, x: Any, *, is_wide: bool) -> None:
            is_float = isinstance(x, np.ndarray) and x.dtype.kind == "f"
            narrow[name] = rounded(name, x.astype(np.float64)) if is_float else x
            made[name] = x if is_wide else narrow[name]

        for name, x in self._evaluator.rt_inits_.items():
            put(name, x, is_wide=True)
        for name, x in inputs.items():
            put(name, x.astype(np.float64) if x.dtype.kind == "f" else x, is_wide=True)
        with np.errstate(all="ignore"):
            for node, operator in zip(self.nodes, self._evaluator.rt_nodes_, strict=True):
                is_wide = node.name in kept
                read = made if is_wide else narrow
                found = operator.run(*(read[name] for name in node.input))
                for name, x in zip(node.output, found, strict=False):
                    put(name, np.asarray(x), is_wide=is_wide or node.op_type == "Constant")
        return made


def error(
    found: Mapping[str, Any], reference: Mapping[str, Any], names: list[str]
) -> tuple[float, float]:
    """Return the largest relative L2 errors of outputs, over all and of a row.

    They are infinite where an output is not finite.
    """
    whole = row = 0.0
    for name in names:
        t, d = reference[name], found[name] - reference[name]
        if not np.isfinite(d).all():
            return np.inf, np.inf
        norms = np.linalg.norm(t, axis=-1)
        whole = max(whole, float(np.linalg.norm(d) / np.linalg.norm(t)))
        row = max(row, float((np.linalg.norm(d, axis=-1) / np.maximum(norms, 1e-30)).max()))
    return whole, row


def is_near(found: tuple[float, float]) -> bool:
    """Return whether an error passes."""
    return found[0] <= MOST_WHOLE and found[1] <= MOST_ROW


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(11))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
