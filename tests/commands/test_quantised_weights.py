"""Bundles with weights of 4 and 8 bits: their graphs, their weights, and their reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import small_spec
from onnx import numpy_helper
from shared import extended, judged_graphs, passed_bundle, passed_graphs

from attn_export import Subject, build, verify
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.main import run
from attn_export.errors import BundleError
from attn_export.export.export import export
from attn_export.graph.checks import check_graph
from attn_export.graph.load import load_model
from attn_export.reference import oracle

pytestmark = pytest.mark.xdist_group("test_quantised_weights")  # its bundles are shared

SPECS = {
    "int4, in place": {"weights_dtype": "int4", "rotary": "half", "cache": "in-place"},
    "int4, cross": {"weights_dtype": "int4", "cross": True, "causal": False, "cache": "none",
                    "kdim": 64, "vdim": 48},
    "int8, packed": {"weights_dtype": "int8", "packed_qkv": True, "attn_weights": True},
    "int8, norm, no bias": {"weights_dtype": "int8", "qk_norm": "rms", "bias": "none"},
}  # fmt: skip
KEPT = ("int4, in place", "int8, packed")


def bundle_of(name: str) -> Path:
    return passed_bundle(small_spec(**SPECS[name]))


@pytest.mark.parametrize("name", extended(SPECS, "int4, in place".__eq__))
def test_every_form_computes_what_its_integers_say(name: str):
    files = judged_graphs(bundle_of(name))
    # opset 18 has neither blocks nor 4 bits
    assert ("model.portable.onnx" in files) == ("int4" not in name)


@pytest.mark.parametrize("name", extended(SPECS, lambda name: name in KEPT))
def test_integers_in_the_graph_are_the_weights_of_the_module(name: str):
    spec = small_spec(**SPECS[name])
    subject = Subject.from_spec(spec)
    (lowered,), _ = lower_all(export(subject), ["standard"])
    stored = lowered.model.graph.initializers
    graph = {name: value.const_value.numpy() for name, value in stored.items()}
    places = subject.linears.places.items()
    names = [f"{path}.{name}" for path, of in places for _, name in of]
    assert len(names) == (2 if spec.packed_qkv else 4)
    with subject.linears.as_before():
        floats = [subject.module.get_parameter(name).detach().numpy() for name in names]
    for weight, before in zip(names, floats, strict=True):
        integers = graph[weight].astype(float)
        assert onnx.helper.np_dtype_to_tensor_dtype(graph[weight].dtype) == getattr(
            onnx.TensorProto, spec.weights_dtype.upper()
        )
        scales = np.atleast_2d(graph[f"{weight}_scale"]).astype(float)
        meant = integers * scales.repeat(len(integers) // len(scales), 0)
        module = subject.module.get_parameter(weight).detach().numpy()
        assert (meant == module.T).all(), weight
        assert not (module == before).all(), weight


def test_the_reference_of_stored_integers_is_the_stored_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(oracle, "GOLDEN_BYTES", 200 << 10)  # not even a row of each case is stored
    bundle, spec = tmp_path / "b", small_spec(**SPECS["int4, cross"])
    report = build(spec, bundle, runtimes=["ort-cpu"], dialects=["standard"])
    assert any(note.startswith("stored evidence") for note in report.notes), str(report)
    again = verify(bundle, runtimes=["ort-cpu"], recompute=True)
    assert again.quality == report.quality
    report = again
    assert report.passed, str(report)
    assert "golden" in passed_graphs(report)


SCALES = {"NaN": np.nan, "infinite": np.inf, "zero": 0.0, "negative": -1.0}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_that_is_none_is_refused_in_one_line(name: str, tmp_path: Path):
    model = load_model(bundle_of("int4, cross") / "model.onnx")
    (scale,) = (t for t in model.graph.initializer if t.name == "v_proj.weight_scale")
    values = numpy_helper.to_array(scale).copy()
    values[1, 2] = SCALES[name]
    scale.CopyFrom(numpy_helper.from_array(values, scale.name))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    found = [f.message for f in check_graph(path) if f.check == "quantisation_scales"]
    # Other quantisers write negative scales, and zeros for blocks of zeros.
    assert len(found) == (not np.isfinite(SCALES[name]))
    assert all(
        f"1 of {values.size} scales in v_proj.weight_scale are not" in message for message in found
    )
    with pytest.raises(BundleError, match="not positive and finite") as error:
        Subject.from_graph(small_spec(**SPECS["int4, cross"]), path)
    assert "\n" not in str(error.value)


def test_onnx_runtime_unpacks_weights_as_it_multiplies():
    model = load_model(bundle_of("int4, in place") / "model.ort.onnx")
    found = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    numbers = [{a.name: a.i for a in node.attribute} for node in found]
    assert [n["bits"] for n in numbers] == [4] * 4
    # Level 1 keeps the inputs in float32; by default they may be rounded to 8 bits.
    assert {n["accuracy_level"] for n in numbers} == {1}
    assert "DequantizeLinear" not in {node.op_type for node in model.graph.node}


def test_the_reason_that_opset_18_is_left_out_is_in_the_report(tmp_path: Path, capsys):
    spec = tmp_path / "layer.toml"
    spec.write_text(small_spec(**SPECS["int4, cross"]).to_toml(), encoding="utf-8")
    assert run(["build", str(spec), "--dialect", "portable", "--output", str(tmp_path / "b")]) == 4
    said = capsys.readouterr().err
    assert (
        "DequantizeLinear has neither blocks nor numbers of 4 bits nor float8 in opset 18" in said
    )
    assert not (tmp_path / "b").exists()
