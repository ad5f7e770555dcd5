"""Mixtures of experts as ONNX Runtime's `MoE`, and what is left as it is."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from attn_export.graph.ir_helpers import nodes_of
from attn_export.graph.lower.ort_experts import fuse_experts

E, H, K = 5, 8, 2
INNER = 6
RANDOM = np.random.default_rng(0)

SHARES = {
    "normalised": "s = Softmax (l) v, i = TopK (s, k) m = ReduceSum <keepdims=1> (v, last)"
    " u = Div (v, m)",
    "softmax": "s = Softmax (l) u, i = TopK (s, k)",
    "of the chosen": "v, i = TopK (l, k) u = Softmax (v)",
    "sigmoid": "s = Sigmoid (l) u, i = TopK (s, k)",
}
"""How a token's logits `l` become its experts `i` and their shares `u`, `[T, K]`."""

GATED = "n = Sigmoid (g) o = Mul (g, n) z = Mul (o, f)"
CLAMPED = (
    "gc = Clip (g, , seven) fc = Clip (f, minus_seven, seven) p = Mul (gc, alpha) n = Sigmoid (p)"
    " o = Mul (gc, n) q = Add (fc, one) z = Mul (q, o)"
)


def mixture(
    shares: str = "normalised", activation: str = GATED, *, biased: bool = False
) -> ir.Model:
    """Return a graph in which every expert computes all tokens, `given [T, H] -> y [T, H]`.

    `activation`: How gates `g` and factors `f`, `[E, T, I]`, become `z`.
    """
    hidden, out = ("h = Add (h0, b1)", "d = Add (d0, b2)") if biased else ("", "")
    h, d = ("h", "d") if biased else ("h0", "d0")
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    g (float[T, {H}] given) => (float[T, {H}] y) <
        int64[1] k = {{{K}}}, int64[1] first = {{0}}, int64[1] second = {{1}}, int64[1] two = {{2}},
        int64[1] last = {{-1}}, int64[1] end = {{99}}, float zero = {{0}}, float one = {{1}},
        float seven = {{7}}, float minus_seven = {{-7}}, float alpha = {{1.5}}
    > {{
        x = Tanh (given) l = MatMul (x, router) {SHARES[shares]}
        xt = Transpose <perm=[1, 0]> (x) h0 = MatMul (w1, xt) {hidden}
        ht = Transpose <perm=[0, 2, 1]> ({h}) g = Slice (ht, first, end, two, two)
        f = Slice (ht, second, end, two, two) {activation}
        zt = Transpose <perm=[0, 2, 1]> (z) d0 = MatMul (w2, zt) {out}
        i3 = Unsqueeze (i, two) at = Equal (i3, all) u3 = Unsqueeze (u, two)
        c = Where (at, u3, zero) r = ReduceSum <keepdims=0> (c, second)
        rt = Transpose <perm=[1, 0]> (r) r3 = Unsqueeze (rt, second)
        e = Mul ({d}, r3) t = ReduceSum <keepdims=0> (e, first)
        total = Transpose <perm=[1, 0]> (t) y = Add (total, given)
    }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {
        "w1": (E, 2 * INNER, H),
        "w2": (E, H, INNER),
        "b1": (E, 2 * INNER, 1),
        "b2": (E, H, 1),
    }
    for name, shape in {**arrays, "router": (H, E)}.items():
        array = RANDOM.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(E), "all"))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    path = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"given": x})[0]
    return found


@pytest.mark.parametrize(
    ("shares", "activation", "biased"),
    [
        ("normalised", GATED, False), ("softmax", GATED, True), ("of the chosen", CLAMPED, True),
        ("sigmoid", CLAMPED, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_are_one_node_with_the_same_numbers(shares, activation, biased, tokens):
    model = mixture(shares, activation, biased=biased)
    x = 3 * RANDOM.standard_normal((tokens, H)).astype(np.float32)
    wanted = run(model, x)
    fuse_experts(model)
    (node,) = (node for node in model.graph if node.op_type == "MoE")
    assert node.attributes.get_int("k") == K
    assert bool(nodes_of(model, "Log")) == (shares == "sigmoid")
    ir.passes.common.RemoveUnusedNodesPass()(model)
    np.testing.assert_allclose(run(model, x), wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "activation",
    [
        "n = Relu (g) z = Mul (n, f)",
        GATED.replace("z = Mul (o, f)", "z = Mul (n, f)"),
        CLAMPED.replace("fc = Clip (f, minus_seven, seven)", "fc = Identity (f)"),
    ],
)
def test_experts_with_another_activation_are_left(activation):
    model = mixture(activation=activation)
    before = [node.op_type for node in model.graph]
    fuse_experts(model)
    assert [node.op_type for node in model.graph] == before
