"""float16 and bfloat16: judged in their own precision, and in float32 first."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from conftest import small_spec
from onnx import TensorProto
from shared import bundle_of
from torch import nn

from attn_export import Subject, build
from attn_export.attention import onnx_attention

NARROW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
WIDE = "in float32"

both = pytest.mark.parametrize("dtype", NARROW)
of_one_bundle = pytest.mark.xdist_group("test_dtypes")


@pytest.fixture(scope="module", params=NARROW)
def narrow_bundle(request) -> tuple[str, Path]:
    return request.param, bundle_of(request.param)


@of_one_bundle
def test_weights_inputs_and_outputs_are_of_the_type(narrow_bundle):
    dtype, folder = narrow_bundle
    graph = onnx.load(folder / "model.onnx").graph
    wanted = NARROW[dtype]
    kinds = {
        value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)
    }
    others = {"attn_mask", "past_length"}
    assert {kind for name, kind in kinds.items() if name not in others} == {wanted}
    held = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert {held[f"{name}_proj.{part}"] for name in "qkv" for part in ("weight", "bias")} == {
        wanted
    }
    assert held["rotary.inv_freq"] == TensorProto.FLOAT
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["inputs"]["query"]["dtype"] == dtype


@of_one_bundle
def test_bfloat16_says_that_it_is_cast(narrow_bundle):
    dtype, folder = narrow_bundle
    notes = json.loads((folder / "report.json").read_text())["notes"]
    assert any("cast to float32 in the graph" in note for note in notes) == (dtype == "bfloat16")


@both
@pytest.mark.every(3)
def test_a_slightly_wrong_scale_is_caught_in_the_type_that_the_graph_computes_in(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = onnx_attention.attention_node

    def wrong(*inputs, scale, **options):
        return right(*inputs, scale=scale * 1.003, **options)

    monkeypatch.setattr(onnx_attention, "attention_node", wrong)
    options = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}
    spec = small_spec(dtype=dtype, cache="none", attn_mask="none")
    report = build(spec, tmp_path / "b", **options)
    assert report.exit_code == 6
    failed = {v.graph for v in report.verdicts if v.status == "failed"}
    assert WIDE in failed
    # A graph of bfloat16 computes in float32, so its own outputs show it as well.
    assert dtype != "bfloat16" or "model.onnx" in failed


def test_a_module_of_the_users_may_be_of_few_bits(tmp_path: Path):
    kind = torch.bfloat16
    module = nn.Sequential(nn.Linear(16, 8), nn.GELU()).to(kind).eval()
    subject = Subject(
        module,
        {"input": torch.randn(2, 3, 16, dtype=kind)},
        {"input": {0: "batch", 1: "len"}},
        ["y"],
    )
    report = build(subject, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
