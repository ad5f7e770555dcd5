"""Small constants that a graph lacks, or has another of, as of a router's denominator."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from attn_export.explain.eager_values import ValueReference, first_unmatched_node
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Evaluation

X = np.random.default_rng(0).uniform(0.1, 0.3, (4, 3))
TEXT = """
<ir_version: 9, opset_import: ["": 19]>
g (float[4,3] x) => (float[4,3] y) <float c = {{{given}}}, int64[1] last = {{-1}}> {{
    total = ReduceSum(x, last)
    {lines}
}}
"""
WITH = "[add] sum = Add(total, c) [div] y = Div(x, sum)"
WITHOUT = "[div] y = Div(x, total)"


def steps(added: float) -> list[ReferenceStep]:
    total = X.sum(-1, keepdims=True)
    found = [ReferenceStep("x", "", X, ()), ReferenceStep("sum", "m.py:1", total, (0,))]
    if added:
        found.append(ReferenceStep("add", "m.py:2", total + added, (1,)))
    denominator = len(found) - 1
    return [*found, ReferenceStep("div", "m.py:3", X / (total + added), (0, denominator))]


@pytest.mark.parametrize(
    ("lines", "given", "added", "says"),
    [
        (WITH, 1e-3, 1e-3, None),
        (WITHOUT, 0.0, 1e-6, "it reads total, to which the module adds 1e-06 first"),
        (WITHOUT, 0.0, 1e-3, "it reads total, to which the module adds 0.001 first"),
        (WITH, 1e-3, 1e-6, "it adds 0.001 to total, where the module adds 1e-06"),
        (WITH, 1e-3, 1e-20, "it adds 0.001 to total, where the module adds none that shows"),
        (WITH, 1e-3, 0.0, "it adds 0.001 to total, where the module has div of it"),
    ],
)
def test_the_constant_is_named(lines: str, given: float, added: float, says: str | None):
    graph = Evaluation(parser.parse_model(TEXT.format(lines=lines, given=f"{given:.9f}")))
    of, values = ValueReference("the module"), graph.values({"x": X})
    found = first_unmatched_node(graph, values, of, steps(added), {})
    assert (found.says if found else None) == says
