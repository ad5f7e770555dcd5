"""`build` from end to end, with real runtimes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from conftest import ROOT, small_spec
from torch import nn

from attn_export import Subject, build, verify
from attn_export.bundle.golden import read_golden
from attn_export.bundle.manifest import read_bundle
from attn_export.errors import ExportError
from attn_export.graph.checks import check_graph
from attn_export.schema import TensorSignature

BOTH = ["ort-cpu", "onnx-reference"]


def test_a_bundle_holds_what_the_design_names(bundle: Path):
    names = {path.name for path in bundle.iterdir()}
    assert names == {
        "manifest.json",
        "spec.toml",
        "model.onnx",
        "golden",
        "report.json",
        "report.html",
    }
    manifest = json.loads((bundle / "manifest.json").read_text())
    needs = manifest["graphs"]["model.onnx"]["needs"]
    assert needs == {"opset": 23, "ir_version": 10, "onnxruntime": "1.28"}
    assert manifest["inputs"]["attn_mask"] == {
        "dtype": "bool",
        "shape": ["batch", 1, 1, "total_len"],
    }
    assert manifest["outputs"]["present_key"]["shape"] == ["batch", 2, "total_len", 8]
    nodes = manifest["graphs"]["model.onnx"]["nodes"]
    file, line = nodes["Attention"].split(":")
    assert file == "attention/module.py"
    source = (ROOT / "attn_export" / file).read_text().splitlines()
    assert "attend(q, k, v" in source[int(line) - 1]
    assert set(manifest["files"]) == {
        path.relative_to(bundle).as_posix()
        for path in bundle.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def test_names_and_axes_of_the_graph_are_the_public_contract(bundle: Path):
    graph = onnx.load(bundle / "model.onnx").graph

    def shapes(values) -> dict[str, list[str | int]]:
        return {
            v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in values
        }

    assert shapes(graph.input) == {
        "query": ["batch", "query_len", 32],
        "attn_mask": ["batch", 1, 1, "total_len"],
        "past_key": ["batch", 2, "past_len", 8],
        "past_value": ["batch", 2, "past_len", 8],
    }
    assert shapes(graph.output) == {
        "output": ["batch", "query_len", 32],
        "present_key": ["batch", 2, "total_len", 8],
        "present_value": ["batch", 2, "total_len", 8],
    }
    weights = {tensor.name for tensor in graph.initializer if "." in tensor.name}
    assert weights == {
        f"{part}_proj.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")
    }


def test_the_same_spec_and_seed_give_the_same_bytes(tmp_path: Path, bundle: Path):
    build(small_spec(), tmp_path / "b", name="small", runtimes=["ort-cpu"], dialects=["standard"])
    same, first = (dict(read_bundle(folder).files) for folder in (tmp_path / "b", bundle))
    # The reports have figures of this run and its date; everything else is the spec's.
    for report in ("report.json", "report.html"):
        first.pop(report), same.pop(report)
    assert same == first


def test_building_leaves_the_callers_random_state_alone(tmp_path: Path):
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    Subject.from_spec(small_spec(), seed=3)
    assert torch.equal(torch.rand(3), wanted)


def test_large_weights_lie_in_safetensors_and_the_bundle_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from attn_export.graph import save

    monkeypatch.setattr(save, "EXTERNAL_ABOVE", 100)
    assert build(linear(64), tmp_path / "b", runtimes=BOTH, dialects=["standard"]).passed
    assert (tmp_path / "b" / "weights.safetensors").is_file()
    (tmp_path / "b").rename(tmp_path / "moved")  # external data is found beside the graph
    assert verify(tmp_path / "moved", runtimes=BOTH).passed
    assert check_graph(tmp_path / "moved" / "model.onnx") == []


def linear(width: int = 8) -> Subject:
    return Subject(nn.Linear(width, 8).eval(), {"input": torch.randn(2, 6, width)},
                   {"input": {0: "batch", 1: "query_len"}}, ["y"])  # fmt: skip


def test_a_failed_build_leaves_the_earlier_bundle_and_keeps_its_own_beside_it(tmp_path: Path):
    place = tmp_path / "b"
    assert build(linear(), place, runtimes=["ort-cpu"]).passed
    before = read_bundle(place)
    report = build(linear(), place, runtimes=["onnx-reference"], atol=0.0)
    assert report.exit_code == 6
    assert any("outside --atol 0 --rtol 0 of eager" in v.message for v in report.verdicts)
    assert read_bundle(place) == before
    failed = tmp_path / "b.failed"
    read_bundle(failed)
    assert not json.loads((failed / "report.json").read_text())["passed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "b.failed"]


def test_a_module_of_the_users_is_built_with_its_own_names(tmp_path: Path):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, left, right):
            joined = torch.cat([left, right], dim=1)
            return self.linear(joined), joined.sum(dim=1)

    subject = Subject(
        Two().eval(),
        {"left": torch.randn(2, 3, 8), "right": torch.randn(2, 5, 8)},
        {"left": {0: "batch", 1: "a"}, "right": {0: "batch", 1: "b"}},
        ["mixed", "total"],
        relations={"both": "a + b"},
    )
    assert build(subject, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"]).passed
    manifest = read_bundle(tmp_path / "b")
    assert manifest.outputs == {
        "mixed": TensorSignature("float32", ("batch", "both", 4)),
        "total": TensorSignature("float32", ("batch", 8)),
    }
    assert len(read_golden(tmp_path / "b" / "golden")) >= 20


def test_an_input_that_changes_nothing_is_refused(tmp_path: Path):
    class Half(nn.Module):
        def forward(self, used, unused):
            return used * 2 + unused * 0

    subject = Subject(
        Half().eval(), {n: torch.randn(2, 3) for n in ("used", "unused")},
        {n: {0: "batch"} for n in ("used", "unused")}, ["y"],
    )  # fmt: skip
    with pytest.raises(ExportError, match="the input unused changes no output"):
        build(subject, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
