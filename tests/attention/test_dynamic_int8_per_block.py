"""Quantised activations of the module by block: those of MatMulNBits at accuracy level 4."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import small_spec
from onnx import TensorProto, helper, numpy_helper

from attn_export.attention import Attention
from attn_export.attention.quantised_activations import DynamicInt8PerBlock
from attn_export.quantiser import quantise

SIZES = [  # tokens, inputs, outputs, the size of blocks
    (1, 64, 24, 16), (1, 256, 33, 32), (3, 256, 40, 64), (2, 128, 16, 128), (40, 96, 64, 32),
]  # fmt: skip


def packed(numbers: np.ndarray) -> np.ndarray:
    """Return numbers of 4 bits in bytes along the last axis, the first in the lower half."""
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).astype(np.uint8)


def of_onnx_runtime(x: np.ndarray, integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the product of MatMulNBits of ONNX Runtime for the CPU."""
    (inputs, outputs), blocks = integers.shape, len(scales)
    numbers = (integers.astype(np.int64) + 8).T.reshape(outputs, blocks, -1)
    held = {"weight": packed(numbers), "scales": np.ascontiguousarray(scales.T)}
    node = helper.make_node(
        "MatMulNBits", ["x", *held], ["y"], domain="com.microsoft", K=inputs, N=outputs, bits=4,
        block_size=inputs // blocks, accuracy_level=4,
    )  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    graph = helper.make_graph(
        [node], "one", ends[:1], ends[1:],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


def relative(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "block"), SIZES)
def test_the_values_are_those_of_onnx_runtime(tokens, inputs, outputs, block):
    random = np.random.default_rng([tokens, inputs])
    x = random.standard_normal((tokens, inputs)).astype(np.float32)
    x[0, :block] = 0  # a block of zeros has a scale, too
    x[-1, -block:] *= 1000
    weight = random.standard_normal((inputs, outputs)).astype(np.float32)
    stored = quantise(weight, "int4", block, symmetric=True)
    found = of_onnx_runtime(x, stored.integers, stored.scales)
    wide = torch.from_numpy(x.astype(np.float64))
    meant = stored.dequantised().astype(np.float64)
    assert relative(found, DynamicInt8PerBlock(block)(wide).numpy() @ meant) < 1e-6
    # which neither values as they are, nor blocks of another size give
    assert relative(found, x @ meant) > 1e-3
    assert relative(found, DynamicInt8PerBlock(block // 2)(wide).numpy() @ meant) > 1e-3


def test_tokens_have_scales_of_their_own():
    spec = small_spec(
        embed_dim=64, weights_dtype="int4", activations="dynamic-int8-per-block", attn_mask="none",
        cache="none",
    )  # fmt: skip
    module = Attention(spec).eval()
    query = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    loud = torch.cat([query[:1], 100 * query[1:]])
    with torch.no_grad():
        assert torch.equal(module(query)[0][:1], module(loud)[0][:1])
        assert not torch.equal(module.activations(query), query)
