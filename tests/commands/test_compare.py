"""`compare`: graphs of any origin, judged by a module."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from compared import (
    AXES,
    INPUTS,
    Cross,
    changed,
    export,
    exported,
    good_graph,
    scaled_graph,
    subject,
    tiled,
)
from conftest import on
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject, assert_parity, verify
from attn_export.commands.check import check
from attn_export.commands.compare import compare
from attn_export.errors import GraphError, UsageError
from attn_export.results import Report


@pytest.fixture
def good() -> Path:
    return good_graph()


@pytest.fixture
def scaled() -> Path:
    return scaled_graph()


def failed_cases(report: Report) -> set[str]:
    return {verdict.case for verdict in report.verdicts if verdict.status == "failed"}


# -- a module and a graph -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"opset": 23}, {"dynamo": False, "opset": 14, "names": "a b c"}],
    ids=str,
)
@pytest.mark.every(3)
def test_a_right_graph_of_another_exporter_passes(options, tmp_path: Path):
    unbounded = {"x": {0: "batch", 1: "query_len"}, "y": {0: "batch", 1: "key_len"}}
    graph = exported(tmp_path / "mine.onnx", **options)
    report = compare(subject(unbounded), graph, on("ort-cpu"))
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    assert ("in the graph, x is a, y is b, z is c" in report.notes) == ("names" in options)
    assert len({verdict.case for verdict in report.verdicts}) > 30


def test_names_are_mapped_by_a_dict_and_cases_keep_within_bounds(tmp_path: Path):
    graph = exported(tmp_path / "mine.onnx", names="y x z")
    found = compare(subject(), graph, on("ort-cpu"), names={"x": "y", "y": "x"})
    assert found.passed
    assert any("query_len 1-21," in note for note in found.notes)
    # What has the same name is taken for the same input.
    assert not compare(subject(), graph, on("ort-cpu")).passed


@pytest.mark.parametrize(
    ("module", "node", "line"),
    [
        (Cross(scale=0.3), "Mul", "compared.py"),
        (Cross(split=tiled), "", "compared.py"),
    ],
    ids=["scale", "heads"],
)  # fmt: skip
@pytest.mark.every(3)
def test_a_fault_fails_and_is_located_in_the_module(module, node, line, tmp_path: Path):
    graph = exported(tmp_path / "wrong.onnx", module.eval())
    report = compare(subject(), graph, on("ort-cpu"))
    assert report.exit_code == 6
    assert len(failed_cases(report)) > 20
    (why,) = report.explanations
    assert f"differs from the module first at {node}" in why
    assert line in why


def test_a_wrong_weight_is_located(good: Path, tmp_path: Path):
    def change(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == "v.bias")
        array = numpy_helper.to_array(tensor) * 1.001
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    graph = changed(good, tmp_path / "wrong.onnx", change)
    report = compare(subject(), graph, on("ort-cpu"))
    assert report.exit_code == 6
    assert re.search(r"first at (Add|Gemm) \S+ \(compared\.py:\d+\)", report.explanations[0])


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
    masked = Subject(Masked().eval(), inputs, axes, ["z"])
    report = compare(masked, tmp_path / "m.onnx", on("ort-cpu"))
    failed = failed_cases(report)
    assert failed
    assert all(re.search("masked|padding|L1|in_rows|one_visible", name) for name in failed), failed


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


def fixed(*places: tuple[str, int, int]) -> Callable[[onnx.GraphProto], None]:
    """Return a change that fixes axes of inputs and outputs, by the index of the value."""

    def change(graph: onnx.GraphProto) -> None:
        for kind, index, axis in places:
            value = getattr(graph, kind)[index]
            value.type.tensor_type.shape.dim[axis].dim_value = 6

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (fixed(("input", 0, 1)), "query_len is fixed at 6 in the graph, and dynamic in the module"),
        (fixed(("input", 1, 0)), "batch is fixed at 6 in the graph"),
        (fixed(("output", 0, 1)), "query_len is fixed at 6 in the graph"),
        (fixed(("input", 0, 0), ("input", 1, 1)),
         "batch is fixed at 6, key_len is fixed at 6 in the graph"),
        (one_more_output, "has the outputs z, more; those of the module are z"),
        (one_more_input, "has the inputs x, y, more; those of the module are x, y"),
        (float16_input, "x is float16; in the module it is float32"),
        (two_axes, "in the module it is ['batch', 'query_len', 16]"),
        (another_width, "in the module it is ['batch', 'query_len', 16]"),
    ],
)  # fmt: skip
def test_another_signature_is_refused_before_anything_runs(change, says, good: Path, tmp_path):
    graph = changed(good, tmp_path / "other.onnx", change)
    with pytest.raises(GraphError, match=r"other\.onnx") as caught:
        compare(subject(), graph, on("ort-cpu"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_there_is_not_is_refused(good: Path):
    for names in ({"w": "x"}, {"x": "w"}):
        with pytest.raises(UsageError, match="has no input or output w"):
            compare(subject(), good, on("ort-cpu"), names=names)


def test_the_bundle_of_a_comparison_verifies_and_that_of_a_failure_fails(good, tmp_path: Path):
    assert compare(subject(), good, on("ort-cpu"), output=tmp_path / "b").passed
    assert verify(tmp_path / "b", runtimes=["ort-cpu"]).passed
    # A graph of others must only meet the ONNX standard.
    assert all(finding.is_warning for finding in check(tmp_path / "b" / "good.onnx"))
    pair = good_graph(dynamic=False), scaled_graph(dynamic=False)
    assert not compare(*pair, on("ort-cpu"), output=tmp_path / "c").passed
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
