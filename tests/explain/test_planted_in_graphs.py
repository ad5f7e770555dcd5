"""Faults planted into graphs: `explain` names the true cause first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest
from conftest import on
from graph_faults import FAULTS, Planted, bundle_of
from graph_surgery import Graph
from hard_faults import HARD_FAULTS
from shared import extended

from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.commands.explain_bundle import explain
from attn_export.dialect_names import graph_name
from attn_export.runtimes.engines.ort_cpu import NO_TELEMETRY


def planted(fault: Planted, bundle: Path, folder: Path) -> Path:
    """Return the path of the bundle's graph with the fault."""
    source = graph_name(fault.dialect)
    graph = Graph(onnx.load(bundle / source))
    fault.change(graph)
    # A graph that is made for some sizes has its name.
    path = folder / (source if "decode" in source else f"{fault.name}.onnx")
    onnx.save(graph.model, path)
    return path


def of_each_kind(faults: Iterable[Planted]) -> set[str]:
    """Return the names of the first fault of each kind and of each dialect, in one bundle."""
    first: dict[object, str] = {}
    for fault in faults:
        if fault.spec == "gqa":
            first.setdefault(fault.kinds, fault.name)
            first.setdefault((fault.dialect, fault.runtime), fault.name)
    return set(first.values())


DEFAULT = of_each_kind([*FAULTS, *HARD_FAULTS])


@pytest.mark.parametrize(
    "fault",
    extended([*FAULTS, *HARD_FAULTS], lambda fault: fault.name in DEFAULT),
    ids=lambda fault: fault.name,
)
@pytest.mark.every(8)
def test_a_fault_in_a_graph_is_named_first(fault: Planted, tmp_path: Path):
    bundle = bundle_of(fault.spec)
    graph = planted(fault, bundle, tmp_path)
    found = explain(bundle, on(fault.runtime), graph=graph, seconds=20)
    assert found.fault == "graph"
    first = found.causes[0]
    assert first.kind in fault.kinds, found.sentence
    assert fault.says in first.sentence
    assert found.seconds < 60


OWN = {
    "scale_missing": ("scale", "become right if: the softmax scale is 1/sqrt(head_dim)"),
    "heads_not_moved": ("changed node", "in the wrong order, as by a reshape; Concat, Expand, "),
    "rounded_keys": ("precision lost", "Sub planted_"),
}
"""Faults of a bundle's own graph, which only graphs of other dialects can be compared with."""


@pytest.mark.parametrize("name", OWN)
def test_no_node_is_blamed_because_another_dialect_has_none(name: str, tmp_path: Path):
    fault = next(fault for fault in (*FAULTS, *HARD_FAULTS) if fault.name == name)
    bundle = shutil.copytree(bundle_of(fault.spec), tmp_path / "bundle")
    graph = planted(fault, bundle, tmp_path)
    graph.replace(bundle / graph_name(fault.dialect))
    write_manifest(bundle, manifest_content(bundle))
    first = explain(bundle, on(fault.runtime), seconds=20).causes[0]
    kind, says = OWN[name]
    assert first.kind == kind, first.sentence
    assert says in first.sentence
    assert "the right graph has no such node" not in first.sentence


def test_the_folder_shows_the_fault_and_none_after_its_correction(tmp_path: Path):
    bundle = bundle_of("gqa")
    fault = next(fault for fault in FAULTS if fault.name == "scale_3_percent_less")
    folder = tmp_path / "explained"
    found = explain(bundle, on("ort-cpu"), graph=planted(fault, bundle, tmp_path), output=folder)
    assert found.folder == folder
    # With two keys the error of the smallest failing case, which has no past, is one of rounding.
    assert dict(found.smallest) == {"batch": 1, "past_len": 0, "query_len": 3, "total_len": 3}
    assert json.loads((folder / "explanation.json").read_text())["sentence"] == found.sentence

    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home)}
    environment.pop(NO_TELEMETRY[0], None)

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, folder / "reproduce.py"]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment
        )

    shown = run()
    assert shown.returncode == 1, shown.stderr
    assert "output: relative error" in shown.stdout
    model = onnx.load(bundle / "model.onnx")
    onnx.save(model, folder / f"{fault.name}.onnx")
    assert run().returncode == 0
    assert list(home.rglob("*")) == [], "it sends no telemetry"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, cli):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    got = cli("explain", bundle_of("gqa"), "--runtime", "ort-cpu", "--output", "mine")
    assert got.returncode == 2
    assert got.stderr.endswith(
        "mine exists and is no explanation; choose another --output or remove it\n"
    )
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
