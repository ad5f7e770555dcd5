"""Faults of a graph that quantises while it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from attn_export.explain.integer_faults import integer_fault
from attn_export.float64 import ReferenceStep
from attn_export.float64.evaluate import Evaluation

RANDOM = np.random.default_rng(0)
X, WEIGHT = RANDOM.standard_normal((6, 16)), RANDOM.standard_normal((16, 8))
TEXT = """
<ir_version: 9, opset_import: ["": 19]>
g (float[6,16] x) => (float[6,8] y) {{
    q, a, z = DynamicQuantizeLinear(x)
    [product] i = MatMulInteger({read})
    f = Cast <to = 1> (i)
    s = Mul(a, scale)
    p = Mul(f, s)
    y = Erf(p)
}}
"""
FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "nothing": ({}, ""),
    "zero point": (
        {"zero": 25}, "product has the zero point 25 where the integers of layer.weight have 0",
    ),
    "zero point of a column": (
        {"zero": [0, 0, -7, 0, 0, 0, 0, 0]}, "zero point -7 where the integers of layer.weight",
    ),
    "scale": ({"scale": 1.5}, "product has 1.5 times the scale that the integers of layer.weight"),
    "lost zero point": (
        {"read": "q, w, , zero"}, "product subtracts no zero point where its input has z",
    ),
}  # fmt: skip


def graph_of(
    path: Path, zero: object = 0, scale: float = 1.0, read: str = "q, w, z, zero"
) -> Evaluation:
    model = parser.parse_model(TEXT.format(read=read))
    step = np.abs(WEIGHT).max() / 127
    tensors = {
        "w": np.round(WEIGHT / step).astype(np.int8), "zero": np.array(zero, np.int8),
        "scale": np.array(step * scale, np.float32),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in tensors.items())
    onnx.save(model, path)
    return Evaluation.load(path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_integers_is_named(name: str, tmp_path: Path):
    changes, says = FAULTS[name]
    graph = graph_of(tmp_path / "g.onnx", **changes)
    steps = [
        ReferenceStep("x", "", X, ()),
        ReferenceStep("other.weight", "", RANDOM.standard_normal((8, 16)), ()),
        ReferenceStep("model.layer.weight", "", WEIGHT.T, ()),
        ReferenceStep("mm", "", X @ WEIGHT, (0, 2)),
    ]
    said = integer_fault(graph, graph.values({"x": X}), steps)
    assert says in said
    assert bool(says) == bool(said)
