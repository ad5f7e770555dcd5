"""Rooflines: how fast this machine multiplies matrices, and how fast it reads memory.

Each is tried in PyTorch and in ONNX Runtime, as candidates of the same interleaved run; the
better one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from attn_export.bench.dims import Dims
from attn_export.bench.feeds import Feed
from attn_export.bench.measurements import Candidate, Cost
from attn_export.system_info import missing_package

# -- small graphs made by hand: attention alone in canonical form, a GEMM, a sum ----------------

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


# -- rooflines ----------------------------------------------------------------------------------

LARGE = 2048
"""M, K and N of a GEMM that is large enough to be as fast as any."""

READ_MIB = 512
"""Well beyond the last cache of most processors."""

ROWS = 64
"""ONNX Runtime sums rows in parallel."""


def gemm_rooflines(folder: Path, sizes: Sequence[int] = (LARGE, LARGE, LARGE)) -> list[Candidate]:
    """Return a product [M, K] x [K, N] as candidates in both libraries.

    Args:
        folder: The folder to write the graph to.
        sizes: M, K and N.
    """
    M, K, N = sizes
    name = "sgemm" if M == K == N else f"sgemm {M}x{K}x{N}"
    work = Cost(flops=2.0 * M * K * N)
    graph = {
        "file": str(save_gemm(folder / f"gemm-{M}-{K}-{N}.onnx")),
        "inputs": {"a": Feed((M, K)).to_json(), "b": Feed((K, N)).to_json()},
        "outputs": {"c": Feed((M, N)).to_json()},
    }
    return [
        _in_torch(f"{name}, torch", {"gemm": list(sizes)}, work),
        Candidate(f"{name}, ORT", "roof", "graph", graph, work),
    ]


def read_rooflines(folder: Path, mib: int = READ_MIB) -> list[Candidate]:
    """Return the sum over a buffer as candidates in both libraries.

    Args:
        folder: The folder to write the graph to.
        mib: The size of the buffer.
    """
    work = Cost(bytes=float(mib << 20))
    floats = (mib << 20) // 4
    graph = {
        "file": str(save_read(folder / "read.onnx")),
        "inputs": {"x": Feed((ROWS, floats // ROWS)).to_json()},
        "outputs": {"sum": Feed((ROWS,)).to_json()},
    }
    return [
        _in_torch("memory read, torch", {"read": floats}, work),
        Candidate("memory read, ORT", "roof", "graph", graph, work),
    ]


def _in_torch(name: str, options: dict[str, object], work: Cost) -> Candidate:
    return Candidate(name, "roof", "roof", options, work, reason=missing("torch"))


def missing(package: str) -> str:
    """Return the reason that a package is unavailable, or "". Do not import the package."""
    return "" if find_spec(package) else missing_package(package)
