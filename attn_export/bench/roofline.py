"""Rooflines: the speed at which this machine multiplies matrices and reads memory.

Both are measured in PyTorch and in ONNX Runtime, as candidates of the same interleaved run. The
faster library gives the roofline.
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

# -- small graphs: attention without projections, a GEMM, a sum ---------------------------------

IR_VERSION = 11
PREFILL_OPSET = 23
CACHE_OPSET = 24
"""The first opset with TensorScatter and with the input `nonpad_kv_seqlen` of Attention."""

Axes = Sequence[str | int]


def save_core(dims: Dims, path: Path) -> Path:
    """Write a canonical graph of attention without projections; return its path.

    With a past, the graph decodes: queries and the output are [B, H, L, D], and new keys and
    values are written into caches [B, Hkv, capacity, D]. Without one it computes a whole prompt:
    queries and the output are [B, L, H * D].

    Args:
        dims: Sizes of the attention.
        path: The file to write.
    """
    return _decode(dims, path) if dims.past_len else _prefill(dims, path)


def _prefill(dims: Dims, path: Path) -> Path:
    num_heads = {"query": dims.num_heads, "key": dims.num_kv_heads, "value": dims.num_kv_heads}
    inputs = [
        _value(name, ("batch", "query_len", heads * dims.head_dim))
        for name, heads in num_heads.items()
    ]
    node = helper.make_node(
        "Attention", list(num_heads), ["output"], name="attention", is_causal=int(dims.causal),
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
    """Write a graph that multiplies a [M, K] by b [K, N]; return its path."""
    inputs = [_value("a", ("M", "K")), _value("b", ("K", "N"))]
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    return _save([node], inputs, [_value("c", ("M", "N"))], PREFILL_OPSET, path)


def save_read(path: Path) -> Path:
    """Write a graph that sums x [M, N] over its last axis; return its path."""
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
"""M, K and N of the GEMM. Larger ones reach no more FLOP/s."""

READ_MIB = 512
"""The size of the buffer that is read: much more than the last-level cache of most processors."""

ROWS = 64
"""The first axis of that buffer. ONNX Runtime computes the sums of different rows in parallel."""


def gemm_rooflines(folder: Path, sizes: Sequence[int] = (LARGE, LARGE, LARGE)) -> list[Candidate]:
    """Return the candidates that multiply [M, K] by [K, N], one for each library.

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
    """Return the candidates that sum the elements of a float32 buffer, one for each library.

    Args:
        folder: The folder to write the graph to.
        mib: The size of the buffer in MiB.
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
    """Return a message if a package is not installed, else "". The package is not imported."""
    return "" if find_spec(package) else missing_package(package)
