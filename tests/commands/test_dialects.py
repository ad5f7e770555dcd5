"""Bundles with several dialects: the graphs share weights and golden vectors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import small_spec
from msgspec.structs import replace
from shared import report_of, swapped_bundle
from torch import Tensor, nn

from attn_export import Subject, build, verify
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.check import check
from attn_export.commands.main import run
from attn_export.dialect_names import DIALECTS
from attn_export.errors import GraphError, UsageError
from attn_export.graph import Graph
from attn_export.graph.checks import check_graph
from attn_export.graph.load import load_graph
from attn_export.graph.lower.dialects import REWRITES
from attn_export.optional_parts import parts
from attn_export.schema import GraphFile
from attn_export.tensorfile import read_tensors, write_tensors

FILES = {"model.onnx", "model.portable.onnx", "model.ort.onnx", "model.ort.decode.onnx"}


@pytest.fixture
def whole() -> Path:
    """Return a bundle with every dialect and a cache in place."""
    return swapped_bundle()


def manifest_of(bundle: Path) -> dict:
    return json.loads((bundle / "manifest.json").read_text())


def test_the_names_of_the_dialects_are_those_that_lower_knows():
    lowered = (*REWRITES, *(name for part in parts() for name in part.dialects))
    assert lowered == DIALECTS[: len(lowered)]


def test_every_dialect_is_there_and_checked(whole: Path):
    assert {path.name for path in whole.glob("*.onnx")} == FILES
    graphs = manifest_of(whole)["graphs"]
    assert {name: entry["dialect"] for name, entry in graphs.items()} == {
        "model.onnx": "standard", "model.portable.onnx": "portable",
        "model.ort.onnx": "ort", "model.ort.decode.onnx": "ort",
    }  # fmt: skip
    assert {name: entry["needs"]["opset"] for name, entry in graphs.items()} == {
        "model.onnx": 24, "model.portable.onnx": 18,
        "model.ort.onnx": 24, "model.ort.decode.onnx": 24,
    }  # fmt: skip
    for name in FILES:
        assert check(whole / name) == []


def test_weights_lie_once_beside_all_graphs(whole: Path):
    (weights,) = whole.glob("*.safetensors")
    for name in FILES:
        graph = onnx.load(whole / name, load_external_data=False).graph
        places = {t.name: {e.key: e.value for e in t.external_data}
                  for t in graph.initializer if t.external_data}  # fmt: skip
        assert {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"} <= set(places)
        assert {place["location"] for place in places.values()} == {weights.name}
        assert (whole / name).stat().st_size < 16_000


def test_the_manifest_says_how_the_graphs_for_onnx_runtime_differ(whole: Path):
    graphs = manifest_of(whole)["graphs"]
    for name, entry in graphs.items():
        turned = {n: [0, 1, 3, 2] for n in ("past_value", "present_value")}
        assert entry["layouts"] == (turned if entry["dialect"] == "ort" else {})
        assert entry["bound"] == {"present_key": "past_key", "present_value": "past_value"}
        assert entry["fixed"] == ({"query_len": 1} if name == "model.ort.decode.onnx" else {})
        assert any(origin.startswith("attention/module.py:") for origin in entry["nodes"].values())


def test_a_graph_for_single_queries_gets_the_cases_that_have_one(whole: Path):
    verdicts = report_of(whole)["verdicts"]
    cases = {name: {v["case"] for v in verdicts if v["graph"] == name} for name in FILES}
    assert cases["model.onnx"] == cases["model.portable.onnx"] == cases["model.ort.onnx"]
    singles = {case for case in cases["model.ort.decode.onnx"] if case.startswith("shape_")}
    assert len(singles) >= 5
    assert all("_L1" in case for case in singles)


def test_a_graph_of_the_bundle_that_was_changed_is_still_run_as_what_it_is(
    whole: Path, tmp_path: Path
):
    shutil.copytree(whole, tmp_path / "b")
    name = "model.ort.decode.onnx"
    model = onnx.load(tmp_path / "b" / name)
    onnx.save(model, tmp_path / name)
    assert verify(whole, graph=tmp_path / name, runtimes=["ort-cpu"]).passed
    (weight,) = [t for t in model.graph.initializer if t.name == "v_proj.weight"]
    changed = onnx.numpy_helper.to_array(weight).copy()
    changed[0, 0] += 0.1
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))
    onnx.save(model, tmp_path / name)
    assert verify(whole, graph=tmp_path / name, runtimes=["ort-cpu"]).exit_code == 6


def test_a_check_sees_a_foreign_operator_and_a_wrong_axis(whole: Path, tmp_path: Path):
    shutil.copytree(whole, tmp_path / "b")
    portable, decode = (tmp_path / "b" / f"model.{x}.onnx" for x in ("portable", "ort.decode"))
    model = onnx.load(portable, load_external_data=False)
    model.graph.node[0].domain = "com.microsoft"
    onnx.save(model, portable)
    assert any("not in the portable dialect" in found.message for found in check(portable))
    model = onnx.load(decode, load_external_data=False)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "query_len"
    onnx.save(model, decode)
    assert any("query" in found.message for found in check(decode))
    assert check_graph(whole / "model.ort.onnx") == []


@pytest.mark.parametrize(
    ("dialects", "files"),
    [
        (["portable"], {"model.portable.onnx"}),
        (["ort", "ort"], {"model.ort.onnx", "model.ort.decode.onnx"}),
        (["portable", "standard"], {"model.portable.onnx", "model.onnx"}),
    ],
)
def test_only_what_is_named_is_built(dialects: list[str], files: set[str], whole: Path):
    exported = Graph(load_graph(whole / "model.onnx"), GraphFile("model.onnx"))
    assert {graph.file.name for graph in lower_all(exported, dialects)[0]} == files


class Swish(nn.Module):
    """Module with an operator of opset 24 that has no form in opset 18."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x), approximate="tanh")


def gelu() -> Subject:
    return Subject(Swish().eval(), {"x": torch.randn(2, 5, 8)},
                   {"x": {0: "batch", 1: "query_len"}}, ["y"])  # fmt: skip


def test_a_dialect_that_does_not_fit_is_left_out_with_a_note_or_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_model):
        raise GraphError("Gelu: no form in opset 18; keep the standard dialect")

    monkeypatch.setitem(REWRITES, "portable", refuse)
    report = build(gelu(), tmp_path / "b", runtimes=["ort-cpu"])
    assert report.passed
    assert not (tmp_path / "b" / "model.portable.onnx").exists()
    assert any("not in the portable dialect: Gelu: no form" in note for note in report.notes)
    with pytest.raises(GraphError, match="Gelu: no form in opset 18"):
        build(gelu(), tmp_path / "c", runtimes=["ort-cpu"], dialects=["portable", "all"])
    assert not (tmp_path / "c").exists()


def test_an_unknown_dialect_is_refused_before_any_work(tmp_path: Path, capsys):
    with pytest.raises(UsageError, match="unknown dialect 'coreml'"):
        build(small_spec(), tmp_path / "b", dialects=["coreml"])
    assert run(["build", "--variant", "mqa", "--dialect", "coreml"]) == 2
    assert "choose from standard, portable, ort, cuda, all" in capsys.readouterr().err


def test_outputs_in_another_order_of_axes_would_be_seen(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Remove `layouts` from the manifest, without which the graph fails."""
    from attn_export.commands import verify as job

    manifest = job.read_manifest(whole)
    plain = replace(manifest.graphs["model.ort.onnx"], layouts={})
    changed = replace(manifest, graphs={"model.ort.onnx": plain})
    monkeypatch.setattr(job, "read_manifest", lambda _: changed)
    assert verify(whole, runtimes=["ort-cpu"]).exit_code != 0


def test_a_case_in_another_layout_is_the_same_case(tmp_path: Path):
    """Check that the runtime receives the transposed array, contiguous."""
    from attn_export.runtimes.worker import to_case_layout, to_graph_layout

    array = np.arange(24.0, dtype=np.float32).reshape(1, 2, 3, 4)
    write_tensors(tmp_path, "input", {"v": array})
    job = {"layouts": {"v": [0, 2, 3, 1]}}
    read = read_tensors(tmp_path, "input", ["v"])
    turned = to_graph_layout(read, job["layouts"], {})
    assert turned["v"].shape == (1, 3, 4, 2)
    assert turned["v"].flags.c_contiguous
    assert np.array_equal(to_case_layout(turned, job["layouts"])["v"], array)
