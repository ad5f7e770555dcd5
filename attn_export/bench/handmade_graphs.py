"""Small graphs made by hand: attention alone in canonical form, a GEMM, a sum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from attn_export.bench.dims import Dims

IR_VERSION = 11
PREFILL_OPSET = 23
CACHE_OPSET = 24
"""The first with TensorScatter, and with `nonpad_kv_seqlen` of Attention."""

Axes = Sequence[str | int]


def save_core(dims: Dims, path: Path) -> Path:
    """Write attention alone: with a cache in place if there is a past, else the whole prompt.

    Decode takes and gives heads [B, H, L, D] and writes into caches [B, Hkv, capacity, D];
    prefill takes and gives [B, L, H * D].

    Args:
        dims: Sizes of the attention.
        path: The file to write.
    """
    return _decode(dims, path) if dims.past_len else _prefill(dims, path)


def _prefill(dims: Dims, path: Path) -> Path:
    wide = {"query": dims.num_heads, "key": dims.num_kv_heads, "value": dims.num_kv_heads}
    inputs = [
        _value(name, ("batch", "query_len", heads * dims.head_dim)) for name, heads in wide.items()
    ]
    node = helper.make_node(
        "Attention", list(wide), ["output"], name="attention", is_causal=int(dims.causal),
        q_num_heads=dims.num_heads, kv_num_heads=dims.num_kv_heads,
    )  # fmt: skip
    output = _value("output", ("batch", "query_len", dims.num_heads * dims.head_dim))
    return _save([node], inputs, [output], PREFILL_OPSET, path)


def _decode(dims: Dims, path: Path) -> Path:
    H, Hkv, D = dims.num_heads, dims.num_kv_heads, dims.head_dim
    cache = ("batch", Hkv, "capacity", D)
    inputs = [
        _value("query", ("batch", H, "query_len", D)),
        _value("key", ("batch", Hkv, "query_len", D)),
        _value("value", ("batch", Hkv, "query_len", D)),
        _value("past_key", cache),
        _value("past_value", cache),
        _value("past_length", ("batch",), TensorProto.INT64),
    ]
    node = helper.make_node
    nodes = [
        node("TensorScatter", ["past_key", "key", "past_length"], ["present_key"], axis=2),
        node("TensorScatter", ["past_value", "value", "past_length"], ["present_value"], axis=2),
        node("Shape", ["query"], ["new"], start=2, end=3),
        node("Add", ["past_length", "new"], ["filled"]),
        node(
            "Attention", ["query", "present_key", "present_value", "", "", "", "filled"],
            ["output"], name="attention", is_causal=1,
        ),
    ]  # fmt: skip
    outputs = [
        _value("output", ("batch", H, "query_len", D)),
        _value("present_key", cache),
        _value("present_value", cache),
    ]
    return _save(nodes, inputs, outputs, CACHE_OPSET, path)


def save_gemm(path: Path) -> Path:
    """Write a graph of ``c = a b``."""
    inputs = [_value("a", ("M", "K")), _value("b", ("K", "N"))]
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    return _save([node], inputs, [_value("c", ("M", "N"))], PREFILL_OPSET, path)


def save_read(path: Path) -> Path:
    """Write a graph of the sum of every row."""
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    nodes = [
        helper.make_node("Constant", [], ["axes"], value=axes),
        helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0),
    ]
    return _save(nodes, [_value("x", ("M", "N"))], [_value("sum", ("M",))], PREFILL_OPSET, path)


def _value(name: str, axes: Axes, dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, list(axes))


def _save(
    nodes: list[NodeProto],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
    opset: int,
    path: Path,
) -> Path:
    graph = helper.make_graph(nodes, "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    onnx.save(model, path)
    return path
