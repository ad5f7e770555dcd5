"""Quantised activations of the module: those of ONNX, one scale for each input of projections."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_spec
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import DynamicInt8

INPUTS = {
    "both signs": torch.linspace(-1.7, 3.3, 48).reshape(2, 3, 8),
    "positive": torch.linspace(0.5, 3.3, 48).reshape(2, 3, 8),
    "negative": torch.linspace(-3.3, -0.5, 48).reshape(2, 3, 8),
    "zeros": torch.zeros(1, 2, 8),
    "an outlier": torch.tensor([[[0.01, 3e4, -0.02, 4.0, 0.5, -300.0, 200.0, 55.0]]]),
}


def of_onnx(x: np.ndarray) -> np.ndarray:
    """Return what DynamicQuantizeLinear keeps of an array."""
    names = ["y", "scale", "zero"]
    node = helper.make_node("DynamicQuantizeLinear", ["x"], names)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", *names)]
    model = helper.make_model(helper.make_graph([node], "one", ends[:1], ends[1:]))
    y, scale, zero = ReferenceEvaluator(model).run(None, {"x": x})
    return (y.astype(np.float32) - zero) * scale


@pytest.mark.parametrize("name", INPUTS)
def test_the_values_are_those_of_the_operator(name: str):
    x = INPUTS[name]
    assert np.array_equal(DynamicInt8()(x).numpy(), of_onnx(x.numpy()))


def test_each_input_of_projections_is_rounded_once():
    spec = small_spec(
        weights_dtype="int8", activations="dynamic-int8", cross=True, causal=False, cache="none",
        attn_mask="none", kdim=24,
    )  # fmt: skip
    module, seen = Attention(spec), list[tuple[int, ...]]()
    module.activations.register_forward_pre_hook(lambda _, x: seen.append(tuple(x[0].shape)))
    module(torch.randn(2, 3, 32), torch.randn(2, 4, 24), torch.randn(2, 4, 24))
    assert seen == [(2, 3, 32), (2, 4, 24), (2, 4, 24), (2, 3, 32)]


def test_a_loud_row_changes_the_others():
    module = Attention(small_spec(
        weights_dtype="int8", activations="dynamic-int8", attn_mask="none", cache="none"
    )).eval()  # fmt: skip
    query = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))
    loud = torch.cat([query[:1], 100 * query[1:]])
    with torch.no_grad():
        assert not torch.equal(module(query)[0], module(loud)[0])
