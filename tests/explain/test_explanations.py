"""Correct explanations of two faults, of other outputs, and without a right graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from conftest import on
from graph_faults import bundle_of
from graph_surgery import Graph

from attn_export.commands.explain_bundle import explain
from attn_export.errors import GraphError, UsageError
from attn_export.explain.causes import WRONG_SIGNATURE
from attn_export.explain.explanation import Explanation

Change = Callable[[Graph], None]


@pytest.fixture
def explained(tmp_path: Path) -> Callable[[Change], Explanation]:
    """Return a function that explains a changed graph of `gqa`, into the folder `explained`."""

    def of(change: Change) -> Explanation:
        graph = Graph(onnx.load(bundle_of("gqa") / "model.onnx"))
        change(graph)
        path = tmp_path / "changed.onnx"
        onnx.save(graph.model, path)
        folder = tmp_path / "explained"
        return explain(bundle_of("gqa"), on("ort-cpu"), graph=path, seconds=20, output=folder)

    return of


def not_causal_and_half_scale(graph: Graph) -> None:
    node = graph.one("Attention")
    graph.set_attribute(node, "is_causal", 0)
    graph.set_attribute(node, "scale", 0.125)


def not_causal_and_other_bias(graph: Graph) -> None:
    graph.set_attribute(graph.one("Attention"), "is_causal", 0)
    graph.set_initializer("out_proj.bias", lambda bias: bias * 1.01)


def test_of_two_faults_in_a_node_both_are_named(explained):
    found = explained(not_causal_and_half_scale)
    assert found.first.operator == "Attention"
    assert "its is_causal is 0, and should be 1" in found.first.says
    assert "its scale is 0.125, and should be 0.3535534" in found.first.says


def test_of_two_faults_the_first_is_found_although_the_smallest_case_hides_it(explained):
    """Find a causal mask, which the smallest case with one query does not show."""
    found = explained(not_causal_and_other_bias)
    assert found.smallest["query_len"] == 1
    assert found.first.operator == "Attention"
    assert not any("same numbers" in cause.sentence for cause in found.causes)


def renamed(graph: Graph) -> None:
    graph.model.graph.node[-1].output[0] = "out"
    graph.model.graph.output[0].name = "out"


def one_more(graph: Graph) -> None:
    value = onnx.helper.make_tensor_value_info("Attention.out", onnx.TensorProto.FLOAT, None)
    graph.model.graph.output.append(value)


def wider(graph: Graph) -> None:
    graph.after(graph.nodes[-1], "Cast", to=onnx.TensorProto.DOUBLE)
    graph.model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE


def another_shape(graph: Graph) -> None:
    axes = graph.constant([0], "planted_axes")
    graph.after(graph.nodes[-1], "Unsqueeze", axes)
    graph.model.graph.output[0].type.tensor_type.ClearField("shape")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (renamed, "gives the outputs out, present_key, present_value; the bundle has output"),
        (one_more, "gives the outputs output, present_key, present_value, Attention.out"),
        (wider, "output is float64, and should be float32"),
        (another_shape, "the shape of output is [1, 1, 1, 32], and should be [1, 1, 32]"),
    ],
)
def test_other_outputs_are_named_and_shown(explained, change: Change, says: str, tmp_path: Path):
    found = explained(change)
    assert found.causes[0].kind == WRONG_SIGNATURE
    assert says in found.sentence
    script = tmp_path / "explained" / "reproduce.py"
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert shown.returncode == 1, shown.stderr


def test_a_graph_that_cannot_be_read_is_refused_as_verify_does(bundle: Path, tmp_path: Path):
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(GraphError, match="is not an ONNX model"):
        explain(bundle, on("ort-cpu"), graph=tmp_path / "bad.onnx")


def test_one_runtime_is_explained_at_a_time(bundle: Path):
    with pytest.raises(UsageError, match="one runtime at a time"):
        explain(bundle, on("all"))


def test_options_that_explain_ignores_are_noted(bundle: Path):
    assert "--atol" in explain(bundle, on("ort-cpu")).notes[0]
