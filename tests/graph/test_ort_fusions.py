"""Norms of sums and SiLU as ONNX Runtime's own operators, and what is left as it is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attention_graphs import run_ort
from ir_graphs import model_of, operators, value, weight

from attn_export.graph.lower.ort import fuse_for_ort

E = 16
RANDOM = np.random.default_rng(0)


def normed(operator: str, other: tuple[str | int, ...], *, axis: int = -1) -> ir.Model:
    """Return a graph with a sum, its norm, and their product."""
    x, y, out = value("x", "b", "n", E), value("y", *other), value("out", "b", "n", E)
    total, norm = value("total", "b", "n", E), value("norm", "b", "n", E)
    factor = weight("w", RANDOM.standard_normal(E).astype(np.float32))
    attributes = {"epsilon": 1e-2, "axis": axis}
    nodes = [
        ir.node("Add", [x, y], outputs=[total]),
        ir.node(operator, [total, factor], attributes, outputs=[norm]),
        ir.node("Mul", [total, norm], outputs=[out]),
    ]
    return model_of([x, y], [out], nodes, [factor])


@pytest.mark.parametrize(
    ("operator", "fused"),
    [
        ("RMSNormalization", "SkipSimplifiedLayerNormalization"),
        ("LayerNormalization", "SkipLayerNormalization"),
    ],
)
def test_a_sum_and_its_norm_are_one_node_that_returns_both(operator, fused):
    model = normed(operator, ("b", "n", E))
    inputs = {name: RANDOM.standard_normal((2, 3, E)).astype(np.float32) for name in "xy"}
    wanted = run_ort(model, inputs)[0]
    fuse_for_ort(model)
    assert operators(model) == [fused, "Mul"]
    np.testing.assert_allclose(run_ort(model, inputs)[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("other", [(1, "n", E), ("n", E), (E,), ("b", "m", E)])
def test_a_sum_that_broadcasts_is_left(other):
    model = normed("RMSNormalization", other)
    fuse_for_ort(model)
    assert operators(model) == ["Add", "RMSNormalization", "Mul"]


def test_a_norm_of_more_than_the_last_axis_is_left():
    model = normed("RMSNormalization", ("b", "n", E), axis=1)
    fuse_for_ort(model)
    assert operators(model) == ["Add", "RMSNormalization", "Mul"]


def silu(*, gated: bool) -> ir.Model:
    x, out = value("x", "n"), value("out", "n")
    gate, product = value("gate", "n"), value("product", "n")
    nodes = [
        ir.node("Sigmoid", [x], outputs=[gate]),
        ir.node("Mul", [x, gate], outputs=[product if gated else out]),
        *([ir.node("Mul", [product, x], outputs=[out])] if gated else []),
    ]
    return model_of([x], [out], nodes)


def test_silu_is_one_node_in_a_gated_product_alone():
    numbers = np.array([-80, -16, -1, 0, 1, 30], np.float32)
    model = silu(gated=True)
    wanted = run_ort(model, {"x": numbers})[0]
    fuse_for_ort(model)
    assert [name for name in operators(model) if name != "Sigmoid"] == ["QuickGelu", "Mul"]
    np.testing.assert_allclose(run_ort(model, {"x": numbers})[0], wanted, rtol=1e-5, atol=1e-5)
    model = silu(gated=False)
    fuse_for_ort(model)
    assert operators(model) == ["Sigmoid", "Mul"]
