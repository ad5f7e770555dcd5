"""Replaying a bundle: on other graphs, after damage, without torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attn_export import verify
from attn_export.errors import BundleError, GraphError
from attn_export.nouns import Report


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def failed_cases(report: Report) -> set[str]:
    return {verdict.case for verdict in report.verdicts if verdict.status == "failed"}


def changed_graph(bundle: Path, target: Path, change) -> Path:
    model = onnx.load(bundle / "model.onnx")
    change(model.graph)
    onnx.save(model, target)
    return target


def attention_of(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == "Attention")


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def wrong_scale(graph: onnx.GraphProto) -> None:
    attribute(attention_of(graph), "scale").f = 1 / np.sqrt(9)  # D is 8


def not_causal(graph: onnx.GraphProto) -> None:
    attribute(attention_of(graph), "is_causal").i = 0


def without_mask(graph: onnx.GraphProto) -> None:
    attention_of(graph).input[3] = ""


def bias_of_one_head_missing(graph: onnx.GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "v_proj.bias")
    values = numpy_helper.to_array(tensor).copy()
    values[:8] = 0
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def nan_weight(graph: onnx.GraphProto) -> None:
    tensor = next(t for t in graph.initializer if t.name == "out_proj.bias")
    values = numpy_helper.to_array(tensor).copy()
    values[0] = np.nan
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def one_output_less(graph: onnx.GraphProto) -> None:
    del graph.output[2]


def test_a_bundle_verifies_on_every_engine(bundle: Path):
    report = verify(bundle, runtimes=["ort-cpu", "onnx-reference"])
    assert report.passed
    assert report.exit_code == 0
    assert all(v.max_abs is not None for v in report.verdicts)


@pytest.mark.parametrize(
    "change",
    [wrong_scale, not_causal, without_mask, bias_of_one_head_missing, nan_weight, one_output_less],
)
def test_another_graph_with_a_planted_fault_is_a_mismatch(change, bundle: Path, tmp_path: Path):
    graph = changed_graph(bundle, tmp_path / "other.onnx", change)
    report = verify(bundle, graph=graph, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    assert failed_cases(report)
    assert all(v.graph == "other.onnx" for v in report.verdicts)


def test_another_graph_that_is_the_same_passes(bundle: Path, tmp_path: Path):
    graph = changed_graph(bundle, tmp_path / "same.onnx", lambda _: None)
    assert verify(bundle, graph=graph, runtimes=["ort-cpu"]).passed


@pytest.mark.parametrize("content", [b"", b"not onnx", None], ids=["empty", "text", "truncated"])
def test_a_graph_that_cannot_be_read_is_a_graph_error(content, bundle: Path, tmp_path: Path):
    graph = tmp_path / "broken.onnx"
    whole = (bundle / "model.onnx").read_bytes()
    graph.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(GraphError, match=r"broken\.onnx") as caught:
        verify(bundle, graph=graph, runtimes=["ort-cpu"])
    assert "\n" not in str(caught.value)


def test_a_graph_that_does_not_exist_is_a_graph_error(bundle: Path, tmp_path: Path):
    with pytest.raises(GraphError, match="no such file"):
        verify(bundle, graph=tmp_path / "no.onnx")


FILES = [
    "model.onnx", "manifest.json", "report.json", "spec.toml", "golden/index.json",
    "golden/test_data_set_0/input_0.pb", "golden/test_data_set_3/output_1.pb",
    "golden/test_data_set_7/eager_0.pb",
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.01, 0.5, 0.99])
def test_a_changed_byte_anywhere_is_a_damaged_bundle(name: str, where: float, copy: Path):
    content = bytearray((copy / name).read_bytes())
    content[int(len(content) * where)] ^= 0x01
    (copy / name).write_bytes(content)
    with pytest.raises(BundleError) as caught:
        verify(copy, runtimes=["ort-cpu"])
    assert Path(name).name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_damaged_bundle(name: str, copy: Path):
    (copy / name).unlink()
    with pytest.raises(BundleError):
        verify(copy, runtimes=["ort-cpu"])


def test_a_manifest_of_another_format_or_edited_by_hand_is_refused(copy: Path):
    manifest = json.loads((copy / "manifest.json").read_text())
    for change in ({"format": "attn-export-bundle/0"}, {"name": "another"}):
        (copy / "manifest.json").write_text(json.dumps({**manifest, **change}, indent=1) + "\n")
        with pytest.raises(BundleError):
            verify(copy)


def test_a_file_beside_the_bundles_own_is_no_damage(copy: Path):
    (copy / "notes.txt").write_text("mine")
    assert verify(copy, runtimes=["ort-cpu"]).passed


def test_a_folder_that_is_no_bundle_is_a_bundle_error(tmp_path: Path):
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(BundleError, match="no bundle"):
            verify(place)


def test_a_gate_of_the_users_only_tightens(bundle: Path, tmp_path: Path):
    assert verify(bundle, runtimes=["ort-cpu"], atol=1e-3).passed
    assert verify(bundle, runtimes=["ort-cpu"], atol=1e-12).exit_code == 6
    wrong = changed_graph(bundle, tmp_path / "wrong.onnx", wrong_scale)
    assert verify(bundle, graph=wrong, runtimes=["ort-cpu"], atol=10.0).exit_code == 6


def test_the_report_has_the_difference_from_eager_and_from_the_truth(bundle: Path):
    report = verify(bundle, runtimes=["ort-cpu"])
    worst = max(report.verdicts, key=lambda verdict: verdict.worst or 0)
    assert 0 < (worst.worst or 0) < 1
    assert 0 < max(verdict.max_abs or 0 for verdict in report.verdicts) < 1e-4
    facts = report.runs[0].facts
    assert facts["threads"]
    assert facts["seconds_limit"]
    assert facts["version"]
    assert "torch" not in sys.modules or report.environment["versions"]
