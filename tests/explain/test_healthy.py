"""Right results, which must not be reported as faults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import on
from graph_faults import SPECS, bundle_of
from shared import extended

from attn_export import build
from attn_export.bundle.manifest import read_manifest
from attn_export.commands.explain_bundle import explain
from attn_export.explain.comparison import Evidence
from attn_export.explain.graph_evaluation import evaluate_graph
from attn_export.explain.graph_run import (
    GoldenCase,
    GraphRunner,
    golden_cases,
    graph_files_to_examine,
)
from attn_export.explain.match import matches
from attn_export.float64.evaluate import Evaluation
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.protocol import Limits
from attn_export.spec import AttentionSpec

pytestmark = pytest.mark.xdist_group("healthy")  # each bundle is built once

HEALTHY = {
    **SPECS,
    "mha": AttentionSpec.from_dict({"embed_dim": 32, "num_heads": 4}),
    "half": AttentionSpec.from_dict({"embed_dim": 32, "num_heads": 4, "dtype": "float16"}),
    "weights": AttentionSpec.from_dict(
        {"embed_dim": 32, "num_heads": 4, "attn_weights": True, "attn_mask": "bool[L,S]"}
    ),
    "interleaved": AttentionSpec.from_dict(
        {"embed_dim": 32, "num_heads": 4, "causal": True, "rotary": "interleaved"}
    ),
}
IN_ALL_DIALECTS = {"gqa", "mha", "in-place"}
"""Specs whose `ort` graphs together have all contrib operators."""

DEFAULT = {"gqa", "in-place"}
"""Bundles of the default tests."""
RUNTIMES = ("ort-cpu", "onnx-reference", "openvino")
"""Runtimes. One bundle runs in all, every other one in one of them; with `--all`, each in all."""


@pytest.fixture(scope="module", params=extended(HEALTHY, lambda name: name in DEFAULT))
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in SPECS and request.param in IN_ALL_DIALECTS:
        return bundle_of(request.param)
    folder = tmp_path_factory.mktemp("healthy") / request.param
    dialects = ["all"] if request.param in IN_ALL_DIALECTS else ["standard"]
    report = build(
        HEALTHY[request.param], folder, name=request.param, runtimes=["ort-cpu"], dialects=dialects
    )
    assert report.passed
    return folder


@pytest.mark.every(4)
def test_a_right_bundle_has_no_cause(healthy: Path, need, request: pytest.FixtureRequest):
    spec = request.node.callspec.params["healthy"]
    alone = list(HEALTHY).index(spec) % len(RUNTIMES)
    in_all = spec == "gqa" or request.config.getoption("--all")
    for name in RUNTIMES if in_all else RUNTIMES[alone : alone + 1]:
        need(name)
        # OpenVINO has no TensorScatter.
        graph = "model.portable.onnx" if spec == "in-place" else "model.onnx"
        found = explain(healthy, on(name), graph=healthy / graph)
        assert (found.fault, found.causes) == ("none", ()), found.sentence
        assert found.cases > 10
        assert "nothing to explain" in found.sentence


def test_in_float64_every_graph_gives_the_reference(healthy: Path):
    """Check that contrib operators of the `ort` dialect give the reference, too."""
    cases = golden_cases(healthy, None)[::4]
    for form in graph_files_to_examine(read_manifest(healthy), None):
        runner = GraphRunner(healthy / form.name, form, runtime("ort-cpu"), {}, Limits.default())
        found = evaluate_graph(runner, cases)
        assert found.right, form.name
        assert not found.not_computed, form.name


def test_noise_is_no_known_fault(healthy: Path):
    evaluation = Evaluation.load(healthy / "model.onnx")
    random = np.random.default_rng(7)
    evidence = [evidence_of(evaluation, case, random) for case in golden_cases(healthy, None)[:8]]
    assert matches(evaluation, evidence) == []


def evidence_of(evaluation: Evaluation, case: GoldenCase, random: np.random.Generator) -> Evidence:
    """Return a case whose outputs have noise without a cause."""
    values = evaluation.values(case.inputs)
    right = evaluation.outputs_of(values)
    return Evidence(values, right, {n: noisy(a, random) for n, a in right.items()})


def noisy(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Add an error of about 3e-3 of the array's size."""
    size = float(np.sqrt(np.square(np.nan_to_num(array)).mean())) if array.size else 0.0
    return array + 3e-3 * size * random.standard_normal(array.shape)
