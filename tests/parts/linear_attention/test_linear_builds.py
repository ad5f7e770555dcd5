"""Bundles of linear attention, judged in ONNX Runtime 1.32 and in the installed release."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import onnx
import pytest
from agreement import right_graphs
from linear_specs import LINEAR_SPECS
from shared import extended

from attn_export import Subject, build, verify
from attn_export.results import Report
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.runtimes.protocol import known_limit
from attn_export.schema import GraphFile

NEWER = "ort-cpu==1.32.0"
GRAPHS = ("model.onnx", "model.portable.onnx", "model.ort.onnx")
WHOLE = "gated delta, gqa"
"""The spec that is built by default; of others the graphs are compared at a few sizes."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory):
    """Return what builds each spec once, in a process."""
    folder = tmp_path_factory.mktemp("linear")

    @functools.cache
    def build_once(name: str) -> tuple[Report, Path]:
        bundle = folder / name.replace(" ", "-")
        runtimes = ["ort-cpu", NEWER, "onnx-reference"]
        return build(LINEAR_SPECS[name], bundle, runtimes=runtimes), bundle

    return build_once


@pytest.mark.parametrize("name", LINEAR_SPECS)
@pytest.mark.every(4)
def test_graphs_for_the_installed_release_are_right(name: str):
    right_graphs(Subject.from_spec(LINEAR_SPECS[name]), "portable", "ort")


@pytest.mark.parametrize("name", extended(LINEAR_SPECS, WHOLE.__eq__))
@pytest.mark.xdist_group("linear")
def test_every_graph_passes_in_every_runtime_that_has_the_operators(name: str, built, need):
    need(NEWER)
    report, bundle = built(name)
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    ran = {(run.runtime, run.graph) for run in report.runs if run.outcome != "not run"}
    expected = {("ort-cpu", graph) for graph in GRAPHS[1:]} | {(NEWER, graph) for graph in GRAPHS}
    assert ran == expected | {("onnx-reference", graph) for graph in GRAPHS[:2]}
    assert {v.output for v in report.verdicts} == {*LINEAR_SPECS[name].output_shapes()}
    operators = {
        graph: {node.op_type for node in onnx.load(bundle / graph).graph.node} for graph in GRAPHS
    }
    assert "LinearAttention" in operators["model.onnx"] & operators["model.ort.onnx"]
    assert "Scan" in operators["model.portable.onnx"]
    entries = json.loads((bundle / "manifest.json").read_text())["graphs"]
    assert [entries[graph]["needs"]["opset"] for graph in GRAPHS] == [27, 18, 23]
    assert entries["model.onnx"]["needs"]["onnxruntime"] == "1.32"


@pytest.mark.xdist_group("linear")
def test_a_decode_of_300_tokens_is_judged_and_verified(built, need):
    need(NEWER)
    _, bundle = built(WHOLE)
    report = verify(bundle, runtimes=[NEWER])
    decoded = [v for v in report.verdicts if v.case == "decode_300"]
    assert {(v.graph, v.output) for v in decoded} == {
        (graph, output)
        for graph in GRAPHS
        for output in ("output", "present_state", "present_conv")
    }
    assert {v.status for v in decoded} == {"passed"}


# -- the state after each of 300 steps ------------------------------------------------------------


@pytest.mark.parametrize(("version", "runs"), [("1.31.1", False), ("1.32.0", True), ("2.0", True)])
def test_opset_27_is_refused_by_releases_that_lack_it(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(OrtCpu, "version", lambda _: version)
    said = known_limit(OrtCpu(), GraphFile("model.onnx", features=("LinearAttention", "opset 27")))
    refused = "ort-cpu 1.31.1 does not do opset 27: its newest opset is 26; 1.32 loads it"
    assert said == ("" if runs else refused)
