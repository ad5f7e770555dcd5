"""Hostile graphs for `range` and `compare`, drawn from a seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hostile.bundles import Random, changed_message, maker, pick
from hostile.values import HOSTILE
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TEXTS = [
    *(text for text in HOSTILE if isinstance(text, str) and "\ud800" not in text),
    "past + new", "n + n", "2*n", "n*n", "n - n", "+", "n +", "1", "0", "batch", "a\0b",
]  # fmt: skip
SIZES = [-1, 0, 1, 3, 2**20, 2**31, 2**40, 2**62, -(2**63), "", "b", *TEXTS]
NUMBERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 2**16, 2**31, 2**40, 2**62, 2**63 - 1]
FLOATS = [0.0, -1.0, 1e30, np.inf, np.nan, 1e-40]
value = helper.make_tensor_value_info


def ints(random: Random, count: int, name: str) -> TensorProto:
    """Return a tensor of hostile integers."""
    return numpy_helper.from_array(np.array([pick(random, NUMBERS) for _ in range(count)]), name)


def body(random: Random, kind: str, depth: int = 0) -> onnx.GraphProto:
    """Return the body of a loop that may grow, end late, or hold another one."""
    step = pick(random, ["Add", "Identity", "Concat", "Mul"])
    ends = {"Concat": {"axis": 0}}.get(step, {})
    nodes = [helper.make_node(step, ["s"] if step == "Identity" else ["s", "s"], ["t"], **ends)]
    if depth < 3 and random.random() < 0.3:
        inner = body(random, "Loop", depth + 1)
        nodes.append(helper.make_node("Loop", ["n", "on", "t"], ["u"], body=inner))
    else:
        nodes.append(helper.make_node("Identity", ["t"], ["u"]))
    if kind == "Scan":
        nodes.append(helper.make_node("Identity", ["e"], ["v"]))
        return helper.make_graph(
            nodes, "body", [value(x, FLOAT, None) for x in "se"],
            [value(x, FLOAT, None) for x in "uv"],
        )  # fmt: skip
    nodes.append(helper.make_node("Identity", ["c"], ["d"]))
    given = [value("i", INT64, []), value("c", BOOL, []), value("s", FLOAT, None)]
    return helper.make_graph(
        nodes, "body", given, [value("d", BOOL, []), value("u", FLOAT, None)]
    )  # fmt: skip


def added(model: onnx.ModelProto, random: Random) -> None:
    """Add a node that may take work without end, memory without end, or the wrong inputs."""
    weights, nodes = model.graph.initializer, model.graph.node
    node = helper.make_node
    weights.append(numpy_helper.from_array(np.array(pick(random, NUMBERS)), "n"))
    weights.append(numpy_helper.from_array(np.array(True), "on"))
    weights.append(ints(random, int(random.integers(1, 5)), "sizes"))
    weights.append(numpy_helper.from_array(np.array([pick(random, FLOATS)]), "f"))
    kinds: list[Callable[[], Any]] = [
        lambda: node("Loop", ["n", "on", "x"], ["z"], body=body(random, "Loop")),
        lambda: node("Loop", ["n", "", "x"], ["z"], body=body(random, "Loop")),
        lambda: node("Loop", ["", "on", "x"], ["z"], body=body(random, "Loop")),
        lambda: node("Scan", ["x", "x"], ["z", "w"], body=body(random, "Scan"), num_scan_inputs=1),
        lambda: node("If", ["on"], ["z"], then_branch=body(random, "Scan"),
                     else_branch=body(random, "Scan")),
        lambda: node("Expand", ["x", "sizes"], ["z"]),
        lambda: node("ConstantOfShape", ["sizes"], ["z"]),
        lambda: node("Tile", ["x", "sizes"], ["z"]),
        lambda: node("Reshape", ["x", "sizes"], ["z"]),
        lambda: node("Range", ["n", "n", "n"], ["z"]),
        lambda: node("Pad", ["x", "sizes"], ["z"]),
        lambda: node("OneHot", ["sizes", "n", "f"], ["z"]),
        lambda: node("Gather", ["x", "sizes"], ["z"], axis=pick(random, NUMBERS)),
        lambda: node("Slice", ["x", "sizes", "sizes"], ["z"]),
        lambda: node("Resize", ["x", "", "f"], ["z"]),
        lambda: node("SequenceConstruct", ["x", "x"], ["z"]),
        lambda: node("SequenceEmpty", [], ["z"]),
        lambda: node("Cast", ["x"], ["z"], to=int(random.integers(0, 30))),
        lambda: node("Transpose", ["x"], ["z"], perm=[pick(random, NUMBERS), 0]),
        lambda: node("Softmax", ["x"], ["z"], axis=pick(random, NUMBERS)),
        lambda: node("RandomNormal", [], ["z"], shape=[pick(random, NUMBERS)]),
        lambda: node("Attention", ["x", "x", "x"], ["z"]),
        lambda: node("EyeLike", ["x"], ["z"], k=pick(random, NUMBERS)),
        lambda: node("Constant", [], ["z"], value_ints=[pick(random, NUMBERS)]),
        lambda: node("Constant", [], ["z"], value_strings=["a", "b"]),
        lambda: node("StringNormalizer", ["x"], ["z"]),
        lambda: node(str(pick(random, TEXTS)) or "Empty", ["x"], ["z"]),
        lambda: node(str(pick(random, TEXTS)) or "Empty", ["x"], ["z"], domain="com.microsoft"),
        lambda: node("GroupQueryAttention", ["x", "x", "x"], ["z"], domain="com.microsoft",
                     num_heads=pick(random, [0, 1, -1, 2**40]), kv_num_heads=1),
    ]  # fmt: skip
    nodes.insert(0, pick(random, kinds)())
    if random.random() < 0.7 and nodes[-1].input:
        nodes[-1].input[0] = "z"


def spoiled(model: onnx.ModelProto, folder: Path, random: Random) -> None:
    """Change the type, the size, the weight, its place or its name."""
    graph = model.graph
    if not (graph.initializer and graph.input and graph.output):
        return
    tensor, end = graph.initializer[0], pick(random, [*graph.input, *graph.output])
    cut = int(random.integers(len(tensor.raw_data) or 1))
    kinds: list[Callable[[], Any]] = [
        lambda: setattr(end.type.tensor_type, "elem_type", int(random.integers(0, 30))),
        lambda: resized(end, random),
        lambda: tensor.dims.append(pick(random, NUMBERS)),
        lambda: tensor.dims.__setitem__(0, pick(random, NUMBERS)) if tensor.dims else None,
        lambda: setattr(tensor, "data_type", int(random.integers(0, 30))),
        lambda: setattr(tensor, "raw_data", tensor.raw_data[:cut]),
        lambda: external(tensor, folder, random),
        lambda: renamed(graph, pick(random, ["x", "w", "y"]), pick(random, TEXTS)),
        end.type.Clear,
        lambda: setattr(end.type.sequence_type.elem_type.tensor_type, "elem_type", FLOAT),
        lambda: setattr(model.opset_import[0], "version", pick(random, NUMBERS)),
    ]
    pick(random, kinds)()


def resized(end: onnx.ValueInfoProto, random: Random) -> None:
    """Change a size of an input or output."""
    size = pick(random, SIZES)
    for dim in end.type.tensor_type.shape.dim[:1]:
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size


def renamed(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value."""
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for named in (*graph.input, *graph.output, *graph.initializer):
        named.name = new if named.name == old else named.name


def external(tensor: TensorProto, folder: Path, random: Random) -> None:
    """Let a weight lie in a file, at a place that may be none."""
    if not (folder / "first").exists():
        (folder / "first").write_bytes(tensor.raw_data)
        os.link(folder / "first", folder / "w.bin")
        (folder / "out.bin").symlink_to("/etc/hostname")
    tensor.data_location = TensorProto.EXTERNAL
    if random.random() < 0.7:
        tensor.ClearField("raw_data")
    place = {"location": pick(random, ["w.bin", "w.bin", "out.bin", *TEXTS])}
    for key in ("offset", "length"):
        if random.random() < 0.4:
            place[key] = str(pick(random, [*NUMBERS, 64, 256, "", "x", "1e3", "9" * 5000]))
    for key, text in place.items():
        tensor.external_data.add(key=key, value=text)


def hostile_graph(folder: Path, random: Random) -> Path:
    """Write a graph with one to three things wrong."""
    folder.mkdir()
    shape = ["batch", 8]
    table = random.standard_normal((8, 8)).astype(np.float32)
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])],
        "g", [value("x", FLOAT, shape)], [value("y", FLOAT, shape)],
        [numpy_helper.from_array(table, "w")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    for _ in range(int(random.integers(1, 4))):
        change = random.random()
        if change < 0.45:
            spoiled(model, folder, random)
        elif change < 0.85:
            added(model, random)
        else:
            changed_message(model, random)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@maker
def range_graph(bundle: Path, place: Path, random: Random) -> list[str]:
    """Look at the ranges of a hostile graph, and mend it."""
    path = hostile_graph(place, random)
    words = ["range", str(path), "--quiet"]
    if random.random() < 0.4:
        words += ["--fix", f"{place}.out.onnx"]
    if random.random() < 0.2:
        words += ["--dtype", "bfloat16"]
    if random.random() < 0.2:
        types = ["<f4", "<f8", "<i4", "U3", "c8", "?", "<f2"]
        array = np.ones(pick(random, [(), (3,), (3, 8), (0, 8)])).astype(pick(random, types))
        np.savez(place / "i.npz", x=array)
        words += ["--inputs", str(place / "i.npz")]
    if random.random() < 0.1:
        words += ["--fix-input", f"x={pick(random, ['1', '-1', 'nan', '1e999', 'true'])}"]
    return words


@maker
def compared_graph(bundle: Path, place: Path, random: Random) -> list[str]:
    """Compare a hostile graph with itself, or with a good one."""
    path = str(hostile_graph(place, random))
    good = str(bundle / "model.onnx")
    pair = pick(random, [[path, path], [path, path], [path, good], [good, path]])
    return ["compare", *pair, "--quiet", "--runtime", "ort-cpu"]
