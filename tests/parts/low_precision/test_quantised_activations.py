"""Bundles whose activations are quantised: graphs, truth and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import on, small_spec
from onnx import numpy_helper
from shared import extended, judged_graphs, nodes_of, passed_bundle

from attn_export import Subject, verify
from attn_export.bundle.manifest import GOLDEN
from attn_export.commands.compare import compare
from attn_export.commands.main import run
from attn_export.graph.checks import check_graph
from attn_export.graph.load import load_model
from attn_export.results import WHOLE_DECODE
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import read_tensor

SPECS = {
    "cached": {"rotary": "half", "num_kv_heads": 4},  # tests/judge plants faults into it
    "in place": {"cache": "in-place", "packed_qkv": True},
    "cache of int4": {
        "cache": "in-place", "kv_dtype": "int4", "kv_scale": "per-channel", "rotary": "half",
    },
    "cross": {"cross": True, "causal": False, "cache": "none", "kdim": 24, "vdim": 16},
    "no bias": {"bias": "none", "qk_norm": "rms", "attn_weights": True},
    "sinks": {"sinks": True, "window_left": 3, "num_kv_heads": 4},
    "encoder": {"causal": False, "cache": "none", "softcap": 5.0, "attn_mask": "none"},
}  # fmt: skip
KEPT = ("cached", "in place")


def spec_of(name: str) -> AttentionSpec:
    return small_spec(weights_dtype="int8", activations="dynamic-int8", **SPECS[name])


def bundle_of(name: str) -> Path:
    return passed_bundle(f"quantised-activations/{name}", spec_of(name), "one scale for all tokens")


@pytest.mark.parametrize("name", extended(SPECS, lambda name: name in KEPT))
@pytest.mark.every(3)
def test_every_form_computes_what_its_integers_say(name: str):
    assert judged_graphs(bundle_of(name)) >= {
        "model.onnx",
        "model.portable.onnx",
        "model.ort.onnx",
    }


@pytest.mark.parametrize("name", KEPT)
def test_products_are_those_of_integers(name: str):
    folder, spec = bundle_of(name), spec_of(name)
    for path in folder.glob("*.onnx"):
        graph = load_model(path).graph
        held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        products = nodes_of(folder, path.name, "MatMulInteger")
        assert [node.input[1] for node in products] == list(spec.quantised_weights)
        assert all(held[node.input[1]].dtype == np.int8 for node in products)
        # q, k and v of one input share its integers
        rounded = nodes_of(folder, path.name, "DynamicQuantizeLinear")
        assert len(rounded) == (4 if spec.cross else 2)
        assert len({node.input[0] for node in products}) == len(rounded)


def test_integers_of_weights_are_those_of_the_module():
    module = Subject.from_spec(spec_of("cached")).module
    graph = load_model(bundle_of("cached") / "model.onnx").graph
    held = {t.name: numpy_helper.to_array(t).astype(float) for t in graph.initializer}
    for name in spec_of("cached").quantised_weights:
        meant = held[name] * held[f"{name}_scale"]
        assert np.array_equal(meant.T, module.get_parameter(name).detach().numpy())


@pytest.mark.parametrize("name", ["cached", "in place"])
def test_onnx_runtime_makes_one_node_of_each_product(name: str, tmp_path: Path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    written = tmp_path / "optimised.onnx"
    options.optimized_model_filepath = str(written)
    onnxruntime.InferenceSession(bundle_of(name) / "model.ort.onnx", options)
    graph = onnx.load(written, load_external_data=False).graph
    found = [node.op_type for node in graph.node]
    assert "MatMulInteger" not in found
    products = found.count("MatMulIntegerToFloat") + found.count("DynamicQuantizeMatMul")
    assert products == len(spec_of(name).quantised_weights)


def test_stored_integers_give_the_stored_truth():
    folder = bundle_of("in place")
    report = verify(folder, runtimes=["ort-cpu"], recompute=True)
    assert report.passed, str(report)
    assert any(verdict.graph == "golden" for verdict in report.verdicts)
    report = verify(folder, runtimes=["ort-cpu"], sizes=["batch=3,query_len=40,past_len=20"])
    assert report.passed, str(report)


def test_no_case_has_a_row_that_spoils_the_others_or_a_decode_in_steps():
    for name in ("cached", "in place"):
        folder = bundle_of(name) / GOLDEN
        index = json.loads((folder / "index.json").read_text())
        assert all(case["kind"] != WHOLE_DECODE for case in index["cases"])
        for case in index["cases"]:
            assert np.isfinite(read_tensor(folder / case["folder"] / "input_0.pb")[1]).all()


def test_the_distance_from_the_float_model_names_the_activations():
    report = verify(bundle_of("cached"), runtimes=["ort-cpu"])
    assert report.quality is not None
    parts = {part.part: part.sqnr for part in report.quality.weights}
    assert list(parts) == [*spec_of("cached").quantised_weights, "activations"]
    (output,) = (part for part in report.quality.outputs if part.part == "output")
    # 8 bits of each value, by one scale for all
    assert (
        30
        < output.sqnr
        < parts["activations"]
        < min(sqnr for part, sqnr in parts.items() if part != "activations")
    )
    assert [str(budget) for budget in report.quality.budgets] == ["sqnr>=30"]


def test_a_kit_passes_and_feeds_no_case_token_by_token(kit_says):
    assert "token by token" not in kit_says(bundle_of("cached"))


@pytest.mark.extended
@pytest.mark.parametrize("whose", ["the module", "the graph"])
def test_a_graph_is_judged_by_its_module_and_by_another_graph(whose: str):
    folder = bundle_of("cached")
    truth = Subject.from_spec(spec_of("cached")) if whose == "the module" else folder / "model.onnx"
    report = compare(truth, folder / "model.portable.onnx", on("ort-cpu"))
    assert report.passed, str(report)
    assert len({verdict.case for verdict in report.verdicts}) > 40


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_scale_that_is_none_is_refused_in_one_line(number: float, tmp_path: Path):
    model = load_model(bundle_of("cached") / "model.onnx")
    (scale,) = (t for t in model.graph.initializer if t.name == "v_proj.weight_scale")
    values = numpy_helper.to_array(scale).copy()
    values[2] = number
    scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    onnx.save(model, tmp_path / "model.onnx")
    findings = check_graph(tmp_path / "model.onnx")
    (found,) = (f.message for f in findings if f.check == "quantisation_scales")
    assert "1 of 32 scales in v_proj.weight_scale are not" in found


def test_weights_in_float_are_refused_in_one_line(tmp_path: Path, capsys):
    out = str(tmp_path / "b")
    words = ["build", "--variant", "gqa", "--activations", "dynamic-int8", "--output", out]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert 'set weights_dtype = "int8"' in said
