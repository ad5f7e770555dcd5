"""`--fix-input`: merged decoders, whose `If` chooses between a first call and one with a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Cli
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

E, H, D = 8, 2, 4
FLOAT = TensorProto.FLOAT
PAST = {name: ["batch", H, "past_len", D] for name in ("past_key_values.0.key", "past_value.0")}
PRESENT = {name: ["batch", H, "total_len", D] for name in ("present.0.key", "present.0.value")}


def value(name: str, shape: list, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def attention(tag: str, *, cached: bool) -> list[NodeProto]:
    """Return written-out attention whose values have names with a tag, as in optimum's branches."""
    nodes = []

    def node(op_type: str, *inputs: str, **attributes: object) -> str:
        nodes.append(helper.make_node(
            op_type, inputs, [f"{tag}/{len(nodes)}"], name=f"{tag}/{op_type}_{len(nodes)}",
            **attributes,
        ))  # fmt: skip
        return nodes[-1].output[0]

    def heads(weight: str) -> str:
        split = node("Reshape", node("MatMul", "x", weight), "heads")
        return node("Transpose", split, perm=[0, 2, 1, 3])

    query, *new = map(heads, ("wq", "wk", "wv"))
    pairs = zip(PAST, new, strict=True)
    key, values = (node("Concat", *p, axis=2) for p in pairs) if cached else new
    scores = node("MatMul", query, node("Transpose", key, perm=[0, 1, 3, 2]))
    weights = node("Softmax", node("Mul", scores, "scale"), axis=-1)
    merged = node("Transpose", node("MatMul", weights, values), perm=[0, 2, 1, 3])
    node("MatMul", node("Reshape", merged, "joined"), "wo")
    for name, output in zip(PRESENT, (key, values), strict=True):
        nodes.append(helper.make_node("Identity", [output], [f"{tag}/{name}"]))
    return nodes


def tensors() -> list[TensorProto]:
    random = np.random.default_rng(0)
    arrays = {f"w{n}": random.standard_normal((E, E), np.float32) for n in "qkvo"}
    arrays |= {"heads": np.array([0, 0, H, D]), "joined": np.array([0, 0, E])}
    arrays["scale"] = np.array(D**-0.5, np.float32)
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


def saved(path: Path, graph: GraphProto) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def outputs(nodes: list[NodeProto]) -> list[str]:
    """Return the values that are outputs: that of the last MatMul, and the new cache."""
    return [nodes[-3].output[0], nodes[-2].output[0], nodes[-1].output[0]]


def shapes(tag: str, nodes: list[NodeProto]) -> list[onnx.ValueInfoProto]:
    known = [["batch", "query_len", E], *PRESENT.values()]
    return [value(name, shape) for name, shape in zip(outputs(nodes), known, strict=True)]


def decoder(path: Path, *, cached: bool) -> Path:
    """Write one branch as a graph of its own."""
    nodes = attention("d", cached=cached)
    inputs = [value("x", ["batch", "query_len", E])]
    inputs += [value(name, shape) for name, shape in PAST.items() if cached]
    return saved(path, helper.make_graph(nodes, "g", inputs, shapes("d", nodes), tensors()))


def merged_decoder(path: Path) -> Path:
    """Write a merged decoder: nothing but an `If`, on the negation of a bool of one element."""
    branches = {}
    for name, cached in (("then_branch", False), ("else_branch", True)):
        nodes = attention(name, cached=cached)
        branches[name] = helper.make_graph(nodes, name, [], shapes(name, nodes))
    nodes = [
        helper.make_node("Not", ["use_cache_branch"], ["first"]),
        helper.make_node("If", ["first"], ["output", *PRESENT], **branches),
    ]
    ends = [value("output", ["batch", "query_len", E])]
    ends += [value(name, shape) for name, shape in PRESENT.items()]
    inputs = [value("x", ["batch", "query_len", E])]
    inputs += [value(name, shape) for name, shape in PAST.items()]
    inputs.append(value("use_cache_branch", [1], TensorProto.BOOL))
    return saved(path, helper.make_graph(nodes, "g", inputs, ends, tensors()))


@pytest.mark.parametrize("cached", [False, True])
def test_a_merged_decoder_is_compared_and_lowered_as_the_branch(
    cached: bool, cli: Cli, tmp_path: Path
):
    """Its attention is recognised by `parts/decomposed`."""
    merged = merged_decoder(tmp_path / "merged.onnx")
    plain = decoder(tmp_path / "plain.onnx", cached=cached)
    fix = ["--fix-input", f"use_cache_branch={'True' if cached else 0}"]
    other = decoder(tmp_path / "other.onnx", cached=not cached)
    compared = [
        (0, "compare", plain, merged, "--runtime", "ort-cpu"),
        (4, "compare", other, merged, "--runtime", "ort-cpu"),
    ]
    for code, *words in (
        *compared[: 2 if cached else 0],
        (0, "check", merged),
        (0, "lower", merged, "--dialect", "standard", "--output", tmp_path / "s.onnx"),
    ):
        done = cli(*words, *fix)
        assert done.returncode == code, done.stderr
    graph = onnx.load(tmp_path / "s.onnx").graph
    names = [node.op_type for node in graph.node]
    assert names.count("Attention") == 1
    assert not {"If", "Not"} & {*names}
    assert {v.name for v in graph.input} == {"x", *(PAST if cached else ())}


def scalars(path: Path) -> Path:
    """Write a graph of inputs of several types, of which one number each is used."""
    types = {
        "flag": (TensorProto.BOOL, []), "count": (TensorProto.INT8, [1]),
        "factor": (TensorProto.FLOAT16, [1, 1]), "axis": (TensorProto.INT64, ["batch"]),
        "text": (TensorProto.STRING, []),
    }  # fmt: skip
    inputs = [value(name, shape, dtype) for name, (dtype, shape) in types.items()]
    nodes = [
        helper.make_node("Cast", [name], [f"{name}_f"], to=FLOAT)
        for name in ("flag", "count", "factor")
    ]
    nodes.append(helper.make_node("Sum", [f"{n}_f" for n in ("flag", "count", "factor")], ["y"]))
    return saved(path, helper.make_graph(nodes, "g", inputs, [value("y", [1, 1])]))


WRONG = {
    "nothing=1": "there is no such input; choose from axis, count, factor, flag, text",
    "flag=2": "flag: '2' is not of its type bool; write 1 or 0",
    "count=300": "count: '300' is not of its type int8; write a number of that type",
    "count=1.5": "'1.5' is not of its type int8",
    "factor=1e9": "'1e9' is not of its type float16",
    "factor=\n": "is not of its type float16",
    "axis=1": "axis: its shape is [batch], and only a scalar or a tensor of one element",
    "text=1": "text: it is no bool, integer or float; feed it instead",
    "flag": "--fix-input is NAME=VALUE; got 'flag'",
}


def test_wrong_names_values_and_types_are_refused_in_one_line(cli: Cli, tmp_path: Path):
    path = scalars(tmp_path / "scalars.onnx")
    for given, says in WRONG.items():
        done = cli("check", path, "--fix-input", given)
        assert says in done.stderr
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    right = ["--fix-input=flag=true", "--fix-input=count=-3", "--fix-input=factor=0.5"]
    assert cli("lower", path, *right, "--dialect", "ort", "--output", path).returncode == 2
    assert cli("check", path, *right).returncode == 0
