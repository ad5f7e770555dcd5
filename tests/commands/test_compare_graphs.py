"""`compare`: graphs of any origin, judged by another graph; and its command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from compared import changed, exported, good_graph, scaled_graph
from conftest import Cli, on
from onnx import TensorProto, helper, numpy_helper
from shared import extended

from attn_export.commands.compare import compare
from attn_export.errors import UsageError
from attn_export.graph.ranges import described_inputs
from attn_export.reference.reference import read_reference


@pytest.fixture
def good() -> Path:
    """Return a right graph of fixed sizes, and so of few cases."""
    return good_graph(dynamic=False)


@pytest.fixture
def scaled() -> Path:
    return scaled_graph(dynamic=False)


# -- two graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"opset": 23}, {"dynamo": False, "opset": 14}], ids=str)
@pytest.mark.every(2)
def test_two_right_graphs_pass(options, tmp_path: Path):
    report = compare(good_graph(), exported(tmp_path / "other.onnx", **options), on("ort-cpu"))
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert len({verdict.case for verdict in report.verdicts}) > 20


def test_of_two_graphs_the_wrong_one_fails_and_its_first_wrong_node_is_named(good, scaled):
    report = compare(good, scaled, on("ort-cpu"))
    assert report.exit_code == 6
    assert re.search(r"differs from good\.onnx first at Mul ", report.explanations[0])


def in_constant_nodes(graph: onnx.GraphProto, factor: float = 1.0) -> None:
    """Hold the scale, `[1]`, in a `Constant` node, as the TorchScript exporter does."""
    (scale,) = (t for t in graph.initializer if t.dims == [1] and t.data_type == TensorProto.FLOAT)
    numbers = [float(numpy_helper.to_array(scale)[0]) * factor]
    graph.initializer.remove(scale)
    graph.node.insert(0, helper.make_node("Constant", [], [scale.name], value_floats=numbers))


def test_a_wrong_constant_node_is_named(good: Path, tmp_path: Path):
    one = changed(good, tmp_path / "one.onnx", in_constant_nodes)
    other = changed(good, tmp_path / "other.onnx", lambda graph: in_constant_nodes(graph, 1.1))
    report = compare(one, other, on("ort-cpu"))
    assert report.exit_code == 6
    assert re.search("first at Mul .*the initialiser .* has other values", report.explanations[0])


def small_fault(graph: onnx.GraphProto) -> None:
    """Make one weight of many wrong by 1 %."""
    tensor = next(t for t in graph.initializer if t.name.endswith("out.bias"))
    array = numpy_helper.to_array(tensor).copy()
    array[3] *= 1.01
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def test_a_small_fault_is_no_rounding(good: Path, tmp_path: Path):
    assert not compare(good, changed(good, tmp_path / "w.onnx", small_fault)).passed


def stored_as(dtype: int, factor: float = 1.0) -> Callable[[onnx.GraphProto], None]:
    """Return a change that stores the weights of a graph in a narrower type, and casts them."""

    def change(graph: onnx.GraphProto) -> None:
        weights = [t for t in graph.initializer if len(t.dims) == 2]
        for tensor in weights:
            values = numpy_helper.to_array(tensor).ravel() * factor
            stored = helper.make_tensor(f"{tensor.name}.stored", dtype, tensor.dims, values)
            cast = helper.make_node("Cast", [stored.name], [tensor.name], to=TensorProto.FLOAT)
            graph.initializer.remove(tensor)
            graph.initializer.append(stored)
            graph.node.insert(0, cast)

    return change


@pytest.mark.parametrize(
    "dtype", extended([TensorProto.FLOAT16, TensorProto.BFLOAT16], TensorProto.BFLOAT16.__eq__)
)
def test_weights_in_a_narrower_type_are_judged_by_its_precision(dtype, good: Path, tmp_path: Path):
    graph = changed(good, tmp_path / "narrow.onnx", stored_as(dtype))
    report = compare(good, graph, on("ort-cpu"))
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert any("fewer bits" in note for note in report.notes)
    wrong = changed(good, tmp_path / "wrong.onnx", stored_as(dtype, 1.1))
    assert compare(good, wrong, on("ort-cpu")).exit_code == 6


def decoder(path: Path, *, table: int = 400, wrong: bool = False) -> Path:
    """Write a graph with token ids, a 0/1 mask of past and new keys, and a past."""
    rng = np.random.default_rng(0)
    table_ = numpy_helper.from_array(rng.standard_normal((table, 8)).astype(np.float32), "table")
    constants = [
        numpy_helper.from_array(np.float32(-1e4 if not wrong else -1.0), "low"),
        numpy_helper.from_array(np.float32(1), "one"),
        numpy_helper.from_array(np.array([1]), "axis"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["new"], "embed"),
        helper.make_node("Concat", ["past", "new"], ["keys"], "concat", axis=1),
        helper.make_node("Transpose", ["keys"], ["kt"], "turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["new", "kt"], ["scores"], "product"),
        helper.make_node("Cast", ["mask"], ["shown"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "shown"], ["hidden"], "invert"),
        helper.make_node("Mul", ["hidden", "low"], ["bias"], "lower"),
        helper.make_node("Unsqueeze", ["bias", "axis"], ["wide"], "widen"),
        helper.make_node("Add", ["scores", "wide"], ["masked"], "mask"),
        helper.make_node("Softmax", ["masked"], ["weights"], "softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "keys"], ["out"], "attend"),
    ]
    graph = helper.make_graph(
        nodes, "decoder",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "length"]),
            helper.make_tensor_value_info("mask", TensorProto.INT64, ["batch_size", "total"]),
            helper.make_tensor_value_info("past", TensorProto.FLOAT, ["batch_size", "before", 8]),
        ],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch_size", "length", 8])],
        [table_, *constants],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def test_ids_masks_and_sums_of_axes_are_inferred_and_ranges_are_the_users(tmp_path: Path):
    one, other = decoder(tmp_path / "a.onnx"), decoder(tmp_path / "b.onnx")
    inferred = read_reference(one, {}, {})
    assert "input_ids is drawn from 0 to 399, the rows of table" in inferred.notes
    report = compare(one, other, on("ort-cpu"), ranges={"input_ids": (2, 300)})
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    said = " | ".join(report.notes)
    assert "input_ids is drawn from 2 to 300" in said
    assert "mask is drawn from 0 to 1" in said
    assert re.search(r"of the axes, (total = (length \+ before|before \+ length))", said)
    wrong = compare(one, decoder(tmp_path / "c.onnx", wrong=True), on("ort-cpu"))
    assert wrong.exit_code == 6
    assert "low" in wrong.explanations[0]
    with pytest.raises(UsageError, match="has no such integer input"):
        compare(one, other, on("ort-cpu"), ranges={"past": (2, 3)})


@pytest.mark.parametrize(("operator", "hides"), [("Add", True), ("Mul", False)])
def test_a_value_added_to_scores_is_a_mask_whatever_its_name(operator: str, hides: bool):
    nodes = [
        helper.make_node("MatMul", ["x", "kt"], ["scores"]),
        helper.make_node(operator, ["scores", "given"], ["changed"]),
        helper.make_node("Softmax", ["changed"], ["y"]),
    ]
    ins = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, axes)
        for name, axes in (("x", ["b", 8]), ("kt", [8, "s"]), ("given", ["b", "s"]))
    ]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "s"])
    model = helper.make_model(helper.make_graph(nodes, "g", ins, [out]))
    inputs = described_inputs(model, {})[0]
    assert {name: entry.hides for name, entry in inputs.items()} == {
        "x": False, "kt": False, "given": hides,
    }  # fmt: skip


def cached(path: Path, names: str) -> Path:
    """Write attention with a 0/1 mask and a cache, whose axes have names of their own."""
    b, b2, b3, new, old, old2, total = names.split()
    nodes = [
        helper.make_node("Concat", ["old_k", "x"], ["k"], axis=1),
        helper.make_node("Concat", ["old_v", "x"], ["v"], axis=1),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "kt"], ["s"]),
        helper.make_node("Unsqueeze", ["mask", "one"], ["wide"]),
        helper.make_node("Cast", ["wide"], ["shown"], to=TensorProto.BOOL),
        helper.make_node("Where", ["shown", "s", "low"], ["t"]),
        helper.make_node("Softmax", ["t"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["y"]),
    ]

    def value(name: str, shape: list[str | int], dtype: int = TensorProto.FLOAT) -> object:
        return helper.make_tensor_value_info(name, dtype, shape)

    constants = [
        numpy_helper.from_array(np.array([1]), "one"),
        numpy_helper.from_array(np.float32(-1e9), "low"),
    ]
    ins = [
        value("x", [b, new, 8]), value("mask", [b3, total], TensorProto.INT64),
        value("old_k", [b, old, 8]), value("old_v", [b2, old2, 8]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "g", ins, [value("y", [b, new, 8])], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, path)
    return path


FREE, ALIKE = "s26 s27 s43 s70 s54 s84 s53", "b b b new old old total"


def test_axes_that_must_be_equal_are_found(tmp_path: Path):
    reference = read_reference(cached(tmp_path / "a.onnx", FREE), {}, {})
    assert reference.interface.sums == {"s53": "s54 + s70"}
    assert reference.interface.axes == ["s26", "s53", "s54", "s70"]
    assert reference.interface.roles.names == {
        "s26": "batch", "s70": "query_len", "s54": "past_len"
    }  # fmt: skip
    (note,) = (note for note in reference.notes if note.startswith("of the axes"))
    assert "s27 = s26, s43 = s26, s53 = s54 + s70, s84 = s54" in note
    named = read_reference(cached(tmp_path / "b.onnx", ALIKE), {}, {})
    assert named.interface.sums == {"total": "new + old"}


def test_relations_are_what_the_user_says(tmp_path: Path):
    graph, given = cached(tmp_path / "a.onnx", FREE), {"s84": "s54", "s53": "s54+s70"}
    reference = read_reference(graph, {}, given)
    assert reference.interface.sums == {"s53": "s54+s70"}
    for wrong in ({"s5": "s54"}, {"s53": "s54+x"}, {"s53": "s53"}, {"s84": "s53", "s53": "s54"}):
        with pytest.raises(UsageError, match="--relation"):
            read_reference(graph, {}, wrong)
    with pytest.raises(UsageError, match="ranges and relations are for two graphs"):
        read_reference(object(), {}, given)


# -- the command line -----------------------------------------------------------------------------

MINE = """
import torch
from attn_export import Subject


def subject():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4).eval()
    return Subject(module, {"input": torch.randn(2, 4)}, {"input": {0: "batch"}}, ["out"])


if __name__ == "__main__":
    batch = {"input": {0: torch.export.Dim("n")}}
    torch.onnx.export(
        subject().module, (torch.randn(2, 4),), "linear.onnx", dynamo=True, dynamic_shapes=batch
    )
"""


def zero_weights(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor) * 0
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


@pytest.mark.extended
def test_the_command_compares_and_writes_its_reports(cli: Cli, good, scaled, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, check=True, capture_output=True)
    module = ("--module", "mine.py:subject", "--graph", "linear.onnx")
    done = cli("compare", *module, "--junit", "j.xml")
    assert done.returncode == 0, done.stderr
    wrong = changed(tmp_path / "linear.onnx", tmp_path / "wrong.onnx", zero_weights)
    done = cli("explain", *module[:3], str(wrong), "--runtime", "ort-cpu", "--output", "why")
    assert done.returncode == 6, done.stderr
    assert "wrong.onnx: the graph is wrong" in done.stdout
    assert (tmp_path / "why" / "reproduce.py").is_file()
    files = ("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    done = cli("compare", str(good), str(scaled), *files)
    assert done.returncode == 6
    assert "why: ort-cpu, scaled.onnx" in done.stdout
    assert json.loads((tmp_path / "r.json").read_text())["passed"] is False
    assert "<testcase" in (tmp_path / "j.xml").read_text()
    assert "scaled.onnx" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--module PATH.py:FUNCTION --graph FILE.onnx, or two files"),
        (["a.onnx"], "or two files"),
        (["a.onnx", "b.onnx", "--graph", "c.onnx"], "or two files"),
        (["a.onnx", "b.onnx", "--name", "x"], "--name is NAME=OTHER"),
        (["a.onnx", "b.onnx", "--relation", "x"], "--relation is AXIS=SUM"),
        (["a.onnx", "b.onnx", "--range", "x=3:1"], "--range is NAME=LOW:HIGH"),
        (["a.onnx", "b.onnx", "--range", "x=a:b"], "--range is NAME=LOW:HIGH"),
    ],
)
def test_wrong_usage_is_one_line(cli: Cli, words, says):
    done = cli("compare", *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_is_no_graph_is_refused(cli: Cli, good: Path, tmp_path: Path):
    (tmp_path / "text.onnx").write_text("no graph")
    for pair in ((good, tmp_path / "text.onnx"), (tmp_path / "text.onnx", good)):
        done = cli("compare", *map(str, pair))
        assert done.returncode == 4
        assert "text.onnx is not an ONNX model" in done.stderr
