"""The distance of a quantised model by tensor, split by rounding and clipping, and `explain`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import on, small_spec
from report_schema import validator
from shared import few_bits_bundle, few_bits_report

from attn_export import Subject, build, verify
from attn_export.bundle.manifest import GOLDEN, manifest_content, write_manifest
from attn_export.commands.explain_bundle import explain
from attn_export.commands.main import run
from attn_export.report.data import to_json
from attn_export.results import Report
from attn_export.truth.quality_oracle import split

ONLY = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}


@pytest.fixture(scope="module")
def bundle() -> Path:
    return few_bits_bundle()


@pytest.fixture(scope="module")
def report() -> Report:
    return few_bits_report()


def test_errors_up_to_half_a_step_are_rounding_and_the_rest_is_clipping():
    error = torch.tensor([0.2, -0.25, 0.6, -2.25], dtype=torch.float64)
    found = split(error, torch.tensor(0.5))
    assert found["rounding"].tolist() == [0.2, -0.25, 0.25, -0.25]
    torch.testing.assert_close(found["clipped"], torch.tensor([0, 0, 0.35, -2.0]).double())
    assert torch.equal(found["all"], error)


def test_weights_are_rounded_and_not_clipped(bundle: Path, report: Report):
    splits = {each.part: each for each in report.quality.splits}
    alone = {each.part: each.sqnr for each in report.quality.weights}
    assert set(splits) == set(alone)
    for part, each in splits.items():
        assert (each.rounding, each.clipped, each.share) == (alone[part], None, 0.0)
    said = explain(bundle, on("ort-cpu")).distance
    sqnr = report.quality.outputs[0].sqnr
    assert said[0].startswith(f"output: {sqnr:.1f} dB after quantising; of the kernel alone 1")
    assert f"q_proj.weight: rounding {alone['q_proj.weight']:.1f} dB, clipping nothing" in said


@pytest.mark.parametrize(("v_scale", "clips"), [(0.001, True), (0.05, False)])
@pytest.mark.every(2)
def test_scales_that_are_too_small_clip_values_of_the_cache(
    v_scale: float, clips: bool, tmp_path: Path, capsys
):
    path = tmp_path / "scales.npz"
    np.savez(path, k_scale=np.float32(0.05), v_scale=np.float32(v_scale))
    spec = small_spec(cache="in-place", kv_dtype="int8", attn_mask="none")
    subject = Subject.from_spec(spec, kv_scales=path)
    report = build(subject, tmp_path / "b", name="b", budgets=["sqnr>=1"], **ONLY)
    assert report.passed, str(report)
    keys, values = report.quality.splits
    assert (keys.part, values.part) == ("cached keys", "cached values")
    assert (keys.clipped, keys.share) == (None, 0.0)
    if not clips:
        assert values.clipped is None
        return
    assert values.share > 0.5
    assert values.clipped < 10 < values.rounding
    validator().validate(json.loads(to_json(report)))
    assert run(["explain", str(tmp_path / "b"), "--runtime", "ort-cpu"]) == 0
    said = capsys.readouterr().out
    assert (
        f"cached values: rounding {values.rounding:.1f} dB, clipping {values.clipped:.1f} dB"
        in said
    )
    failed = verify(tmp_path / "b", runtimes=["ort-cpu"], budgets=["sqnr>=30", "row<=1"])
    assert failed.exit_code == 6
    (missed,) = (said for said in failed.quality.missed if said.startswith("output: sqnr"))
    assert "budget sqnr>=30; the worst head is attention head" in missed
    assert "most matters cached values" in missed


def test_both_parts_add_up_to_the_errors_of_blocks(tmp_path: Path):
    spec = small_spec(
        cache="in-place", kv_dtype="int4", kv_scale="per-block", head_dim=64, attn_mask="none"
    )
    report = build(spec, tmp_path / "b", name="b", budgets=["sqnr>=20"], **ONLY)
    assert report.passed, str(report)
    for each in report.quality.splits:
        assert each.clipped is None or each.rounding < each.clipped
        assert each.share < 0.02


def test_a_bundle_without_splits_is_read(bundle: Path, tmp_path: Path):
    folder = tmp_path / "b"
    shutil.copytree(bundle, folder)
    path = folder / GOLDEN / "quality.json"
    content = json.loads(path.read_text())
    del content["splits"]
    path.write_text(json.dumps(content))
    write_manifest(folder, manifest_content(folder))
    assert verify(folder, runtimes=["ort-cpu"]).quality.splits == ()
