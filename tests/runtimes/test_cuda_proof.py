"""Proof of CUDA: a session that requests CUDA and runs on the CPU does not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export import verify
from attn_export.runtimes.engines import ort_cuda
from attn_export.runtimes.engines.ort_cuda import CudaEngine, OrtCuda, no_cuda_device
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import RunOptions

without_gpu = pytest.mark.xfail(
    not no_cuda_device(), reason="this machine has a GPU: nothing falls back here", strict=True
)


@without_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # onnxruntime's own, about the fallback
def test_onnxruntime_itself_builds_a_cuda_session_on_the_cpu_without_an_error(bundle: Path):
    # The hazard. When this fails, onnxruntime has begun to raise, and the proof can go.
    engine = OrtCuda().load(bundle / "model.onnx", threads=1)
    assert engine.facts()["providers"] == ["CPUExecutionProvider"]


@without_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_engine_objects_when_attention_was_placed_on_the_cpu(bundle: Path):
    engine = OrtCuda().load(bundle / "model.onnx", threads=1)
    assert "Attention on CPUExecutionProvider" in engine.objection()


@pytest.mark.parametrize(
    ("placed", "objection"),
    [
        ({"CUDAExecutionProvider": {"Attention": 1, "MatMul": 4}}, ""),
        (
            {"CUDAExecutionProvider": {"Attention": 1}, "CPUExecutionProvider": {"Shape": 2}},
            "",
        ),
        (
            {"CUDAExecutionProvider": {"MatMul": 4}, "CPUExecutionProvider": {"Attention": 1}},
            "attention did not run on CUDA: Attention on CPUExecutionProvider",
        ),
        (
            {"CUDAExecutionProvider": {"Add": 1}},
            "attention did not run on CUDA: no node of it was placed there",
        ),
        ({}, "attention did not run on CUDA: no node of it was placed there"),
    ],
)
def test_only_attention_on_cuda_counts_while_shapes_may_stay_on_the_cpu(
    placed: dict[str, dict[str, int]], objection: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CudaEngine, "_operators_by_provider", lambda _: placed)
    assert CudaEngine.__new__(CudaEngine).objection() == objection


@without_gpu
def test_without_a_gpu_ort_cuda_is_left_out_where_nobody_asked_for_it(bundle: Path):
    report = verify(bundle)
    assert {run.runtime for run in report.runs} == {"ort-cpu"}
    assert report.exit_code == 0


@without_gpu
@pytest.mark.parametrize("how", [{"runtimes": ["ort-cuda"]}, {"require": ["ort-cuda"]}])
def test_a_missing_runtime_that_is_named_is_exit_code_5(bundle: Path, how: dict[str, list[str]]):
    report = verify(bundle, **how)
    assert report.exit_code == 5
    reasons = [run.reason for run in report.runs if run.runtime == "ort-cuda"]
    assert reasons
    assert all("driver" in reason or "GPU" in reason for reason in reasons)


@without_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_fallback_to_the_cpu_fails_every_case_even_though_all_numbers_are_right(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    # As on a machine whose driver works and whose CUDA libraries do not.
    monkeypatch.setattr(ort_cuda, "no_cuda_device", lambda: "")
    report = verify(bundle, runtimes=["ort-cuda"], limits=Limits(1, 60, None))
    assert report.exit_code == 5
    assert {verdict.status for verdict in report.verdicts} == {"error"}
    assert {run.outcome for run in report.runs} == {"refused"}


def test_ort_cpu_is_always_required_and_ort_cuda_only_when_named():
    assert RunOptions.of().required == {"ort-cpu"}
    assert "ort-cuda" in RunOptions.of(runtimes=["ort-cuda"]).required
    assert "onnx-reference" in RunOptions.of(require=["onnx-reference"]).required
