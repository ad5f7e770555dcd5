"""Graphs that others made, judged by a module or by another graph."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Cli
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject, assert_parity, verify
from attn_export.errors import GraphError, UsageError
from attn_export.jobs.check import check
from attn_export.jobs.compare import compare
from attn_export.results import Report

E, H = 16, 2
INPUTS = {"x": torch.randn(2, 5, E), "y": torch.randn(2, 7, E)}
AXES = {"x": {0: "batch", 1: "query_len"}, "y": {0: "batch", 1: "key_len"}}


def split(x: Tensor) -> Tensor:
    """Split [B, L, E] into [B, H, L, D]."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def tiled(x: Tensor) -> Tensor:
    """Split [B, L, E] into [B, H, L, D], with the heads as the inner axis."""
    return x.unflatten(-1, (-1, H)).permute(0, 3, 1, 2)


class Cross(nn.Module):
    """Cross-attention; `split` and `scale` may be mistakes."""

    def __init__(self, split: Callable[[Tensor], Tensor] = split, scale: float | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        self.split, self.scale = split, scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))
        return self.out(attend(q, k, v, scale=self.scale).transpose(1, 2).flatten(2))


def subject() -> Subject:
    return Subject(Cross().eval(), INPUTS, AXES, ["z"])


def export(*arguments: object, **options: object) -> None:
    with warnings.catch_warnings():  # PyTorch's exporters warn of themselves
        warnings.simplefilter("ignore")
        torch.onnx.export(*arguments, verbose=False, **options)


def exported(
    path: Path,
    module: nn.Module | None = None,
    *,
    opset: int = 18,
    dynamo: bool = True,
    dynamic: bool = True,
    names: str = "x y z",
) -> Path:
    """Export as users do, with PyTorch's own exporter."""
    a, b, out = names.split()
    options: dict[str, object] = {}
    if dynamic and dynamo:
        batch, queries, keys = (torch.export.Dim(name) for name in ("n", "l", "s"))
        options["dynamic_shapes"] = {"x": {0: batch, 1: queries}, "y": {0: batch, 1: keys}}
    elif dynamic:
        options["dynamic_axes"] = {a: {0: "n", 1: "l"}, b: {0: "n", 1: "s"}, out: {0: "n", 1: "l"}}
    export(
        module or Cross().eval(), tuple(INPUTS.values()), str(path), opset_version=opset,
        dynamo=dynamo, input_names=[a, b], output_names=[out], **options,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a right graph with all its weights in the file."""
    path = exported(tmp_path_factory.mktemp("good") / "good.onnx")
    onnx.save(onnx.load(path), path)
    return path


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a graph with a wrong scale."""
    return exported(tmp_path_factory.mktemp("scaled") / "scaled.onnx", Cross(scale=0.3).eval())


def changed(good: Path, target: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    model = onnx.load(good)
    change(model.graph)
    onnx.save(model, target)
    return target


def failed_cases(report: Report) -> set[str]:
    return {verdict.case for verdict in report.verdicts if verdict.status == "failed"}


# -- a module and a graph -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {}, {"opset": 23}, {"dynamo": False, "opset": 14, "names": "a b c"},
        {"dynamic": False}, {"dynamic": False, "opset": 23, "names": "y x z"},
    ],
    ids=str,
)  # fmt: skip
def test_a_right_graph_of_another_exporter_passes(options, tmp_path: Path):
    report = compare(subject(), exported(tmp_path / "mine.onnx", **options), runtimes=["ort-cpu"])
    if options.get("names") == "y x z":  # what has the same name is taken for the same input
        assert not report.passed
        return
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert ("in the graph, x is a, y is b, z is c" in report.notes) == ("names" in options)
    fixed = [note for note in report.notes if "fixed axes" in note]
    assert bool(fixed) == ("dynamic" in options)
    sizes = {verdict.case for verdict in report.verdicts}
    assert len(sizes) > (5 if fixed else 30)


def test_names_are_mapped_by_a_dict(tmp_path: Path):
    graph = exported(tmp_path / "mine.onnx", names="y x z")
    found = compare(subject(), graph, names={"x": "y", "y": "x"}, runtimes=["ort-cpu"])
    assert found.passed


@pytest.mark.parametrize(
    ("module", "node", "line"),
    [
        (Cross(scale=0.3), "Mul", "test_compare.py"),
        (Cross(split=tiled), "", "test_compare.py"),
    ],
    ids=["scale", "heads"],
)  # fmt: skip
def test_a_fault_fails_and_is_located_in_the_module(module, node, line, tmp_path: Path):
    graph = exported(tmp_path / "wrong.onnx", module.eval())
    report = compare(subject(), graph, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    assert len(failed_cases(report)) > 20
    (why,) = report.explanations
    assert "whoever" not in why
    assert f"differs from the module first at {node}" in why
    assert line in why


def test_a_wrong_weight_is_located(good: Path, tmp_path: Path):
    def change(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == "v.bias")
        array = numpy_helper.to_array(tensor) * 1.001
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    graph = changed(good, tmp_path / "wrong.onnx", change)
    report = compare(subject(), graph, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    assert re.search(r"first at (Add|Gemm) \S+ \(test_compare\.py:\d+\)", report.explanations[0])


def test_rows_that_pytorchs_decomposition_does_not_mask_fail(tmp_path: Path):
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q = x[:, None]
            return attend(q, q, q, attn_mask=mask[:, None, None])

    inputs = {"x": torch.randn(2, 5, 4), "mask": torch.ones(2, 5, dtype=torch.bool)}
    axes = {"x": {0: "batch", 1: "query_len"}, "mask": {0: "batch", 1: "query_len"}}
    batch, length = torch.export.Dim("n"), torch.export.Dim("l")
    export(
        Masked().eval(), tuple(inputs.values()), str(tmp_path / "m.onnx"), opset_version=18,
        dynamo=True, dynamic_shapes={name: {0: batch, 1: length} for name in inputs},
        input_names=["x", "mask"],
    )  # fmt: skip
    report = compare(
        Subject(Masked().eval(), inputs, axes, ["z"]), tmp_path / "m.onnx", runtimes=["ort-cpu"]
    )
    failed = failed_cases(report)
    assert failed
    assert all("masked" in name or "padding" in name or "L1" in name for name in failed), failed


def one_more_output(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Identity", [graph.output[0].name], ["more"]))
    graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))


def one_more_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))


def float16_input(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def two_axes(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.shape.dim.pop()


def another_width(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.shape.dim[2].dim_value = 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (one_more_output, "has the outputs z, more; those of the module are z"),
        (one_more_input, "has the inputs x, y, more; those of the module are x, y"),
        (float16_input, "x is float16; in the module it is float32"),
        (two_axes, "in the module it is ['batch', 'query_len', 16]"),
        (another_width, "in the module it is ['batch', 'query_len', 16]"),
    ],
)
def test_another_signature_is_refused_before_anything_runs(change, says, good: Path, tmp_path):
    graph = changed(good, tmp_path / "other.onnx", change)
    with pytest.raises(GraphError, match=r"other\.onnx") as caught:
        compare(subject(), graph, runtimes=["ort-cpu"])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_there_is_not_is_refused(good: Path):
    for names in ({"w": "x"}, {"x": "w"}):
        with pytest.raises(UsageError, match="has no input or output w"):
            compare(subject(), good, names=names, runtimes=["ort-cpu"])


def test_a_graph_that_computes_in_float16_is_judged_by_its_precision(tmp_path: Path):
    class Narrow(Cross):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x.half(), y.half()).float()

    graph = exported(tmp_path / "half.onnx", Narrow().eval().half())
    report = compare(subject(), graph, runtimes=["ort-cpu"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert any("computes in fewer bits" in note for note in report.notes)
    graph = exported(tmp_path / "wrong.onnx", Narrow(scale=0.3).eval().half())
    assert compare(subject(), graph, runtimes=["ort-cpu"]).exit_code == 6


def test_the_bundle_of_a_comparison_verifies_and_that_of_a_failure_fails(good, scaled, tmp_path):
    assert compare(subject(), good, output=tmp_path / "b", runtimes=["ort-cpu"]).passed
    assert verify(tmp_path / "b", runtimes=["ort-cpu"]).passed
    # Of a graph that others made only the ONNX standard is asked for.
    assert all(finding.is_warning for finding in check(tmp_path / "b" / "good.onnx"))
    assert not compare(good, scaled, output=tmp_path / "c", runtimes=["ort-cpu"]).passed
    report = verify(tmp_path / "c.failed", runtimes=["ort-cpu"])
    assert {v.graph for v in report.verdicts if v.status == "failed"} == {"scaled.onnx"}
    assert {v.graph for v in report.verdicts} == {"scaled.onnx", "reference.onnx"}


def test_a_test_asserts_parity_of_a_graph(good: Path, scaled: Path):
    options = {"outputs": ["z"], "runtimes": ["ort-cpu"]}
    assert assert_parity(Cross().eval(), INPUTS, AXES, graph=good, **options).passed
    with pytest.raises(AssertionError, match="differs from the module first at"):
        assert_parity(Cross().eval(), INPUTS, AXES, graph=scaled, **options)
    with pytest.raises(UsageError, match="give graph=FILE"):
        assert_parity(Cross().eval(), INPUTS, AXES, names={"x": "y"})


# -- two graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"opset": 23}, {"dynamo": False, "opset": 14}], ids=str)
def test_two_right_graphs_pass(options, good: Path, tmp_path: Path):
    report = compare(good, exported(tmp_path / "other.onnx", **options), runtimes=["ort-cpu"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert len({verdict.case for verdict in report.verdicts}) > 20


def test_of_two_graphs_the_wrong_one_fails_and_its_first_wrong_node_is_named(good, scaled):
    report = compare(good, scaled, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    assert re.search(r"differs from good\.onnx first at Mul ", report.explanations[0])


def small_fault(graph: onnx.GraphProto) -> None:
    """Make one weight of many wrong by 1 %."""
    tensor = next(t for t in graph.initializer if t.name.endswith("out.bias"))
    array = numpy_helper.to_array(tensor).copy()
    array[3] *= 1.01
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def test_a_small_fault_is_no_rounding(good: Path, tmp_path: Path):
    assert not compare(good, changed(good, tmp_path / "w.onnx", small_fault)).passed


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


def test_ids_masks_and_sums_of_axes_are_inferred(tmp_path: Path):
    one, other = decoder(tmp_path / "a.onnx"), decoder(tmp_path / "b.onnx")
    report = compare(one, other, runtimes=["ort-cpu"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    said = " | ".join(report.notes)
    assert "input_ids is drawn from 0 to 399, the rows of table" in said
    assert "mask is drawn from 0 to 1" in said
    assert re.search(r"of the axes, (total = (length \+ before|before \+ length))", said)
    wrong = compare(one, decoder(tmp_path / "c.onnx", wrong=True), runtimes=["ort-cpu"])
    assert wrong.exit_code == 6
    assert "low" in wrong.explanations[0]


def test_a_range_is_what_the_user_says(tmp_path: Path):
    one, other = decoder(tmp_path / "a.onnx"), decoder(tmp_path / "b.onnx")
    report = compare(one, other, ranges={"input_ids": (2, 300)}, runtimes=["ort-cpu"])
    assert report.passed
    assert "input_ids is drawn from 2 to 300" in report.notes
    with pytest.raises(UsageError, match="has no such integer input"):
        compare(one, other, ranges={"past": (2, 3)}, runtimes=["ort-cpu"])


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
        assert "text.onnx is no ONNX model" in done.stderr
