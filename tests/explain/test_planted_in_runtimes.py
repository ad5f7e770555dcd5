"""Faults of runtimes with wrong settings, which must not be attributed to the graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import on

from attn_export.commands.explain_bundle import explain
from attn_export.errors import RuntimeFailure, UsageError

LOW = "INFERENCE_PRECISION_HINT"
EXPLAINED: Mapping[str, str] = {"BF16": "bfloat16", "FP16": "10 bits"}
"""Low precisions by their names in OpenVINO, with their names in explanations."""

FAULTS: Mapping[str, tuple[str, ...]] = {"bf16": ("BF16",), "f16": ("FP16", "BF16")}
"""The precisions that each hint may select; OpenVINO takes the first that the processor has."""


def computes_in(hint: str) -> str:
    """Return the low precision that a hint selects; "" if the processor has none."""
    import openvino

    found: list[str] = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return next((precision for precision in FAULTS[hint] if precision in found), "")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.every(3)
def test_low_precision_is_named_with_its_remedy(name: str, bundle: Path, need):
    need("openvino")
    precision = computes_in(name)
    found = explain(bundle, on("openvino"), options={LOW: name})
    if not precision and found.fault == "none":  # the hint changes nothing, or is emulated
        return
    assert found.fault == "runtime"
    kind = found.causes[0].kind
    assert kind in ("low precision", "precision pinned to f32"), found.sentence
    assert kind != "low precision" or EXPLAINED.get(precision, "") in found.sentence
    assert f"it passes with precision pinned to f32 ({LOW}=f32)" in found.sentence
    assert found.first is not None
    assert found.first.operator == "MatMul"
    tried = {experiment.name: experiment.passed for experiment in found.experiments}
    assert tried["one thread"] is False
    assert tried["the same graph in ort-cpu"] is True


def test_options_that_an_engine_does_not_have_are_named(bundle: Path):
    found = explain(bundle, on("ort-cpu"), options={"graph_optimization_level": "fast"})
    assert found.fault == "did not run"
    assert "choose from disable_all" in found.sentence
    found = explain(bundle, on("ort-cpu"), options={"graph_optimisation_level": "disable_all"})
    assert found.fault == "did not run"
    assert "there is no option 'graph_optimisation_level'" in found.sentence
    with pytest.raises(UsageError, match="onnx-reference takes no options"):
        explain(bundle, on("onnx-reference"), options={"a": "b"})


def test_a_runtime_that_is_not_here_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    from attn_export.runtimes.engines.ort_cuda import OrtCuda

    monkeypatch.setattr(OrtCuda, "unavailable", lambda _: "there is no GPU")
    with pytest.raises(RuntimeFailure, match="ort-cuda cannot run here: there is no GPU"):
        explain(bundle, on("ort-cuda"))


def test_an_unknown_case_is_refused(bundle: Path):
    with pytest.raises(UsageError, match="there is no case 'x'; choose from shape_B1_P0_L1"):
        explain(bundle, on("ort-cpu"), case="x")


def test_a_time_that_is_no_number_is_refused(bundle: Path):
    with pytest.raises(UsageError, match="seconds must be a number; got nan"):
        explain(bundle, on("ort-cpu"), seconds=float("nan"))
