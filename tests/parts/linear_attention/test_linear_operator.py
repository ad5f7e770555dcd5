"""`LinearAttention` in float64 is what the standard says, and what ONNX Runtime computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attn_export.errors import GraphError
from attn_export.float64.evaluate import Evaluation

Operands = dict[str, np.ndarray]
FLOAT = TensorProto.FLOAT
ROUNDED = 2e-6


def node_and_operands(
    rule: str, heads: tuple[int, int], wide: bool, shared: bool, past: bool, domain: str = "",
    B: int = 2, L: int = 7, **attributes: object,
) -> tuple[onnx.ModelProto, Operands]:  # fmt: skip
    """Return a graph of one node, and operands as a gated delta net has them."""
    (H, Hkv), D, Dv, rng = heads, 4, 3, np.random.default_rng(0)
    operands = {
        "query": rng.standard_normal((B, L, H * D)), "value": rng.standard_normal((B, L, Hkv * Dv))
    }  # fmt: skip
    keys = rng.standard_normal((B, L, Hkv, D))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    operands["key"] = keys.reshape(B, L, Hkv * D)
    if past:
        operands["past_state"] = rng.standard_normal((B, Hkv, D, Dv))
    if "gated" in rule:
        operands["decay"] = -rng.exponential(size=(B, L, Hkv * D if wide else Hkv))
    if "delta" in rule:
        operands["beta"] = rng.random((B, L, 1 if shared else Hkv))
    operands = {name: array.astype(np.float32) for name, array in operands.items()}
    order = ("query", "key", "value", "past_state", "decay", "beta")
    names = [name if name in operands else "" for name in order]
    node = helper.make_node(
        "LinearAttention", names, ["output", "present_state"], domain=domain, q_num_heads=H,
        kv_num_heads=Hkv, update_rule=rule, **attributes,
    )  # fmt: skip
    ends = {"output": (B, L, H * Dv), "present_state": (B, Hkv, D, Dv)}
    return model_of(node, operands, ends, domain), operands


def model_of(
    node: onnx.NodeProto, operands: Operands, ends: dict[str, tuple[int, ...]], domain: str
) -> onnx.ModelProto:
    inputs, outputs = (
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in shapes.items()]
        for shapes in ({n: a.shape for n, a in operands.items()}, ends)
    )
    graph = helper.make_graph([node], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", 18 if domain else 27)]
    opsets += [helper.make_opsetid(domain, 1)] if domain else []
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def forms() -> Iterator[tuple[str, tuple[int, int], bool, bool, bool]]:
    rules = ("linear", "gated", "delta", "gated_delta")
    for rule, heads, *rest in itertools.product(rules, ((2, 2), (4, 2), (4, 1)), *[(0, 1)] * 3):
        wide, shared, past = map(bool, rest)
        if ("gated" in rule or not wide) and ("delta" in rule or not shared):
            yield rule, heads, wide, shared, past


def computed(model: onnx.ModelProto, operands: Operands) -> list[np.ndarray]:
    evaluation = Evaluation(model)
    return [*evaluation.outputs_of(evaluation.values(operands)).values()]


@pytest.mark.parametrize("form", [*forms()], ids=str)
def test_it_is_the_operator_of_onnx_and_of_onnx_runtime(form: tuple):
    model, operands = node_and_operands(*form)
    contrib, _ = node_and_operands(*form, domain="com.microsoft")
    assert_the_same(model, contrib, operands)


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(("bias", "past", "L"), [(0, 0, 7), (0, 1, 1), (1, 1, 2), (1, 0, 3)])
def test_a_causal_convolution_is_that_of_onnx_and_of_onnx_runtime(
    activation: str, bias: int, past: int, L: int
):
    rng = np.random.default_rng(L)
    shapes = {"x": (2, 6, L), "weight": (6, 1, 4)} | ({"bias": (6,)} if bias else {})
    shapes |= {"past_state": (2, 6, 3)} if past else {}
    operands = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    names = [n if n in operands else "" for n in ("x", "weight", "bias", "past_state")]
    ends = {"output": (2, 6, L), "present_state": (2, 6, 3)}
    models = []
    for domain in ("", "com.microsoft"):
        node = helper.make_node(
            "CausalConvWithState", names, [*ends], domain=domain, activation=activation
        )
        models.append(model_of(node, operands, ends, domain))
    assert_the_same(*models, operands)


def assert_the_same(model: onnx.ModelProto, contrib: onnx.ModelProto, operands: Operands) -> None:
    """Assert that a model gives what onnx gives, and ONNX Runtime's operator, in both ways."""
    values = computed(model, operands)
    session = onnxruntime.InferenceSession(contrib.SerializeToString())
    for others in (
        ReferenceEvaluator(model).run(None, operands),
        session.run(None, operands),
        computed(contrib, operands),
    ):
        for value, other in zip(values, others, strict=True):
            assert value.dtype == np.float64
            np.testing.assert_allclose(other, value, rtol=ROUNDED, atol=ROUNDED)


def test_the_chunk_size_changes_nothing():
    form = ("gated_delta", (4, 2), False, False, True)
    for domain, size in itertools.product(("", "com.microsoft"), (1, 2, 64)):
        model, operands = node_and_operands(*form, domain=domain, L=70, chunk_size=size)
        usual = computed(node_and_operands(*form, L=70)[0], operands)
        assert all(map(np.array_equal, computed(model, operands), usual))


def test_what_the_operator_of_onnx_does_not_have_is_refused():
    model, operands = node_and_operands("delta", (2, 2), False, False, True)
    model.graph.node[0].attribute.append(helper.make_attribute("state_window", 2))
    with pytest.raises(GraphError, match="LinearAttention with state_window"):
        computed(model, operands)
    model, operands = node_and_operands("gated", (2, 2), False, False, True)
    model.graph.node[0].input[4] = ""
    with pytest.raises(GraphError, match="gated with other gates than it has"):
        computed(model, operands)
