"""Operators of a runtime whose own errors are far larger than rounding, such as its Sigmoid."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from attn_export.explain.explanation import Deviation
from attn_export.explain.graph_evaluation import EvaluatedGraph
from attn_export.explain.graph_run import GoldenCase, passes
from attn_export.float64.evaluate import Evaluation, NotComputedError, Values, is_float
from attn_export.measures import EPS_FLOAT32
from attn_export.tensorfile import Array

_EXACT_FORMS = {
    "Sigmoid": "1 / (1 + exp(-x))",
    "Swish": "x / (1 + exp(-x))",
    "Elu": "where(x > 0, x, tanh(x / 2) * (exp(x) + 1))",
}
"""Forms with all digits, by the operator that loses some in ONNX Runtime.

Sigmoid does for values near 0, of which it has the absolute error 1e-7, and exp(x) - 1 for small x.
"""

LEAST = 8 * EPS_FLOAT32
"""The least relative error of an element that rounding does not explain."""


def inexact_operator(
    suspect: EvaluatedGraph, case: GoldenCase, actual: Mapping[str, Array]
) -> Deviation | None:
    """Return the node with the largest errors of its own, if they account for the wrong outputs."""
    evaluation, values = suspect.evaluation, suspect.values(case)
    if values is None:
        return None
    found = list(_inexact_nodes(evaluation, {**values, **actual}))
    replaced = {found_.value: actual[found_.value].astype(np.float64) for found_ in found}
    if not found or _is_right(suspect, case, actual, values):
        return None
    # With its values in place of the right ones, float64 must give the runtime's outputs.
    if not _is_right(suspect, case, actual, evaluation.recompute(values, replaced)):
        return None
    return max(found, key=lambda deviation: deviation.error)


def _inexact_nodes(evaluation: Evaluation, actual: Values) -> Iterator[Deviation]:
    """Yield nodes that take each element to another, with errors that their inputs do not have."""
    for node in evaluation.nodes:
        if len(node.input) != 1 or len(node.output) != 1:
            continue
        x, y = actual.get(node.input[0]), actual.get(node.output[0])
        if x is None or y is None or not is_float(x) or not is_float(y):
            continue
        if x.shape == y.shape and x.size:
            deviation = _own_error(evaluation, node, x, y)
            if deviation is not None and deviation.error > LEAST:
                yield deviation


def _own_error(
    evaluation: Evaluation, node: onnx.NodeProto, x: Array, y: Array
) -> Deviation | None:
    """Return the largest relative error of an element, from the node's own inputs in float64."""
    try:
        (right,) = evaluation.compute_node(node, {node.input[0]: x.astype(np.float64)}).values()
    except NotComputedError:
        return None
    if right.shape != y.shape:
        return None
    normal = np.isfinite(right) & (np.abs(right) > np.finfo(np.float32).tiny)
    errors = np.where(normal, np.abs(y - right) / np.where(normal, np.abs(right), 1), 0)
    at = np.unravel_index(int(np.argmax(errors)), errors.shape)
    largest = float(np.abs(np.where(normal, y - right, 0)).max())
    says = f"errors of up to {largest:.1e}, for {x[at]:.4g} gives {y[at]:.7g}, not {right[at]:.7g}"
    if node.op_type in _EXACT_FORMS:
        says += f"; write {_EXACT_FORMS[node.op_type]} in its place"
    return Deviation(node.name, node.op_type, node.output[0], "", float(errors[at]), says)


def _is_right(
    suspect: EvaluatedGraph, case: GoldenCase, actual: Mapping[str, Array], values: Values
) -> bool:
    """Return whether the runtime's outputs pass if those among some values are the reference."""
    reference = suspect.runner.to_case_layout(suspect.evaluation.outputs_of(values))
    types = {name: array.dtype for name, array in case.golden.expected.items()}
    expected = {name: array.astype(types[name]) for name, array in reference.items()}
    outputs = suspect.runner.to_case_layout({name: actual[name] for name in reference})
    return passes(dataclasses.replace(case.golden, expected=expected, tied={}), outputs)
