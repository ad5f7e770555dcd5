"""float16 and bfloat16: judged in their own precision, and in float32 first."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from conftest import small_spec
from onnx import TensorProto
from shared import bundle_of, extended
from torch import nn

from attn_export import Subject, build, verify
from attn_export.attention import onnx_attention
from attn_export.commands.main import run
from attn_export.results import Report

NARROW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
WIDE = "in float32"
FEATURES = {
    "plain": {},
    "a float mask, rotary, rms norm, window": {
        "attn_mask": "float[B,H,L,S]", "attn_weights": True,
        "rotary": "half", "qk_norm": "rms", "window_left": 3,
    },
    "alibi, relative bias, layer norm, sinks, softcap": {
        "alibi": True, "relative_buckets": 8, "relative_max_distance": 16, "qk_norm": "layer",
        "sinks": True, "softcap": 2.0,
    },
    "cross": {"cross": True, "causal": False, "cache": "none", "kdim": 24},
    "in place": {"cache": "in-place", "rotary": "half"},
}  # fmt: skip

both = pytest.mark.parametrize("dtype", NARROW)
of_one_bundle = pytest.mark.xdist_group("test_dtypes")


def graphs(report: Report) -> dict[str, int]:
    found: dict[str, int] = {}
    for verdict in report.verdicts:
        found[verdict.graph] = found.get(verdict.graph, 0) + 1
    return found


PAIRS = [(dtype, name) for dtype in NARROW for name in FEATURES]
ONCE = {
    ("bfloat16", "a float mask, rotary, rms norm, window"), ("float16", "cross"),
    ("float16", "alibi, relative bias, layer norm, sinks, softcap"), ("bfloat16", "in place"),
    ("float16", "plain"), ("float16", "a float mask, rotary, rms norm, window"),
    ("bfloat16", "alibi, relative bias, layer norm, sinks, softcap"),
    ("float16", "in place"), ("bfloat16", "plain"),
}  # fmt: skip
"""Features that the default tests run in the other type, in float32, or in bundles for kits."""


@pytest.mark.parametrize(("pair"), extended(PAIRS, lambda pair: pair not in ONCE), ids=str)
def test_a_feature_passes_in_few_bits_and_in_float32(pair: tuple[str, str], tmp_path: Path):
    dtype, feature = pair[0], FEATURES[pair[1]]
    whole = feature in (FEATURES["plain"], FEATURES["in place"])
    report = build(
        small_spec(dtype=dtype, **feature),
        tmp_path / "b",
        runtimes=["ort-cpu"],
        dialects=["all"] if whole else ["standard"],
    )
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    found = graphs(report)
    # A loud case may be no evidence in one of them.
    assert abs(found[WIDE] - found["model.onnx"]) <= 0.1 * found[WIDE]
    assert len(found) == (5 if whole else 2)


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
def test_its_golden_vectors_can_be_replayed(narrow_bundle):
    _, folder = narrow_bundle
    assert verify(folder, runtimes=["ort-cpu"]).passed


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
    report = build(small_spec(dtype=dtype), tmp_path / "b", **options)
    assert report.exit_code == 6
    failed = {v.graph for v in report.verdicts if v.status == "failed"}
    assert WIDE in failed
    # A graph of bfloat16 computes in float32, so its own outputs show it as well.
    assert dtype != "bfloat16" or "model.onnx" in failed


@both
def test_a_module_of_the_users_may_be_of_few_bits(dtype: str, tmp_path: Path):
    kind = getattr(torch, dtype)
    module = nn.Sequential(nn.Linear(16, 8), nn.GELU()).to(kind).eval()
    subject = Subject(
        module,
        {"input": torch.randn(2, 3, 16, dtype=kind)},
        {"input": {0: "batch", 1: "len"}},
        ["y"],
    )
    report = build(subject, tmp_path / "b", runtimes=["ort-cpu"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]


def test_the_command_line_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--embed-dim", "16", "--num-heads", "2", "--runtime", "ort-cpu"]
    assert run(["build", *sizes, "--dtype", "float16", "--output", str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "in float32" in said
    assert "model.onnx" in said
