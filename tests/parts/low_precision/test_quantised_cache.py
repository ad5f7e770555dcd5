"""Bundles whose cache holds integers: their graphs, scales and truth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import small_spec
from onnx import numpy_helper
from shared import extended, judged_graphs, passed_bundle, report_of

from attn_export import DecodeSession, Subject, build, verify
from attn_export.commands.main import run
from attn_export.graph.load import load_model
from attn_export.graph.lower import lower

pytestmark = pytest.mark.xdist_group("test_quantised_cache")  # its bundles are shared

BY_BLOCK = {"kv_dtype": "int4", "kv_scale": "per-block"}
SPECS = {
    "per tensor": {"attn_mask": "none", "rotary": "half"},
    "by channel": {"kv_scale": "per-channel", "attn_weights": True, "num_kv_heads": 4},
    "with norms and sinks": {"qk_norm": "rms", "sinks": True, "softcap": 5.0},
    "with learned keys": {"add_bias_kv": True, "kv_scale": "per-channel", "causal": False},
    "narrow": {"attn_mask": "none", "head_dim": 4},
    "one head for each": {"num_kv_heads": 4},
    "mask of heads": {"attn_mask": "float[H,1,S]", "num_kv_heads": 4},
    "with quantised weights": {"weights_dtype": "int8", "window_left": 3, "packed_qkv": True},
    "int4": {"attn_mask": "none", "rotary": "half", "kv_dtype": "int4"},
    "int4 by channel": {
        "kv_dtype": "int4", "kv_scale": "per-channel", "attn_weights": True, "num_kv_heads": 4,
    },
    "int4 with sinks": {"kv_dtype": "int4", "sinks": True, "softcap": 5.0, "qk_norm": "rms"},
    "int4, narrow": {"kv_dtype": "int4", "attn_mask": "none", "head_dim": 6, "v_head_dim": 2},
    "int4, learned keys": {
        "kv_dtype": "int4", "kv_scale": "per-channel", "add_bias_kv": True, "causal": False,
    },
    "int4 by block": {**BY_BLOCK, "attn_mask": "none", "rotary": "half", "head_dim": 64},
    "int4 by block and a half": {**BY_BLOCK, "attn_mask": "none", "rotary": "half", "head_dim": 48},
    "int4 by block with sinks": {**BY_BLOCK, "sinks": True, "softcap": 5.0, "qk_norm": "rms"},
    "int4 by block, learned keys": {
        **BY_BLOCK, "add_bias_kv": True, "causal": False, "attn_weights": True, "v_head_dim": 2,
    },
    "int4 by block with int8 products": {
        **BY_BLOCK, "weights_dtype": "int8", "activations": "dynamic-int8", "attn_mask": "none",
    },
}  # fmt: skip
KEPT = ("per tensor", "by channel", "int4", "narrow", "int4 by block")
"""The specs whose bundles the default tests build."""

SCALED = ("per tensor", "by channel", "int4", "int4 by channel")
DECODE = "model.ort.decode.onnx"


def spec_of(name: str):
    return small_spec(**{"cache": "in-place", "kv_dtype": "int8", **SPECS[name]})


def bundle_of(name: str) -> Path:
    spec = spec_of(name)
    note = "" if spec.kv_scale == "per-block" else "from a seed"
    return passed_bundle(f"quantised-cache/{name}", spec, note)


@pytest.mark.parametrize("name", extended(SPECS, lambda name: name in KEPT))
def test_every_form_keeps_integers(name: str):
    folder = bundle_of(name)
    assert judged_graphs(folder) >= {"model.onnx", "model.portable.onnx", "model.ort.onnx"}
    for path in folder.glob("*.onnx"):
        ends = load_model(path).graph
        caches = [e for e in (*ends.input, *ends.output) if e.name.endswith(("_key", "_value"))]
        assert len(caches) == 4
        packed = spec_of(name).kv_dtype == "int4"
        stored = onnx.TensorProto.UINT8 if packed else onnx.TensorProto.INT8
        assert {e.type.tensor_type.elem_type for e in caches} == {stored}
        if packed:
            widths = [e.type.tensor_type.shape.dim[3].dim_value for e in caches]
            assert widths == [*spec_of(name).stored_widths] * 2


@pytest.mark.parametrize("name", extended(SCALED, lambda name: name in KEPT))
def test_scales_are_those_of_the_module(name: str):
    module = Subject.from_spec(spec_of(name)).module
    graph = load_model(bundle_of(name) / "model.onnx").graph
    held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    for part in ("k_scale", "v_scale"):
        scale = module.kv_scales.get_buffer(part).numpy()
        assert np.array_equal(held[f"kv_scales.{part}"], scale)
        assert scale.shape == ((4, 1, 8) if name.endswith("by channel") else ())
        assert (scale > 0).all()
        assert (scale != 1).all()


def test_the_cache_is_written_by_one_node_of_integers():
    graph = load_model(bundle_of("per tensor") / "model.onnx").graph
    made = {output: node for node in graph.node for output in node.output}
    for part in ("key", "value"):
        scatter = made[f"present_{part}"]
        assert scatter.op_type == "TensorScatter"
        assert scatter.input[0] == f"past_{part}"
        assert made[scatter.input[1]].op_type == "QuantizeLinear"
    (attention,) = (node for node in graph.node if node.op_type == "Attention")
    for name, scale in zip(attention.input[1:3], ("k_scale", "v_scale"), strict=True):
        product = made[name]
        assert (product.op_type, product.input[1]) == ("Mul", f"kv_scales.{scale}")
        assert made[product.input[0]].op_type == "DequantizeLinear"


def test_the_truth_of_the_stored_scales_is_the_stored_truth():
    folder = bundle_of("by channel")
    report = verify(folder, runtimes=["ort-cpu"], recompute=True)
    assert report.passed, str(report)
    report = verify(folder, runtimes=["ort-cpu"], sizes=["batch=3,query_len=40,past_len=50"])
    assert report.passed, str(report)


@pytest.mark.parametrize("dialect", ["standard", "portable", "ort"])
@pytest.mark.parametrize("name", ["per tensor", "int4", "int4 by block"])
def test_a_session_keeps_integers(name: str, dialect: str):
    folder = bundle_of(name)
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((2, 9, 32)).astype(np.float32)
    session = DecodeSession(folder, dialect=dialect, block=4)
    parts = [session.prefill(tokens[:, :5])["output"]]
    parts += [session.step(tokens[:, at : at + 1])["output"] for at in range(5, 9)]
    whole = DecodeSession(folder, dialect="standard").prefill(tokens)["output"]
    assert np.abs(np.concatenate(parts, 1) - whole).max() < 1e-5


def test_without_a_cache_in_place_one_line_says_what_to_do(tmp_path: Path, capsys):
    out = str(tmp_path / "b")
    assert run(["build", "--variant", "gqa", "--kv-dtype", "int8", "--output", out]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert 'set cache = "in-place"' in said


BITS = {"per tensor": 8, "narrow": None, "int4": 4, "int4, narrow": None}


@pytest.mark.parametrize("name", extended(BITS, lambda name: name in KEPT))
def test_onnx_runtime_writes_and_reads_integers_in_its_own_operator(name: str):
    bits = BITS[name]
    graph = load_model(bundle_of(name) / "model.ort.decode.onnx").graph
    kernels = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if bits is None:  # it takes heads of a multiple of 8
        assert not kernels
        return
    (kernel,) = kernels
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in kernel.attribute}
    assert attributes["kv_cache_bit_width"] == bits
    assert attributes["k_quant_type"] == attributes["v_quant_type"] == b"PER_TENSOR"
    assert list(kernel.input[3:5]) == ["past_key", "past_value"]
    assert list(kernel.output[1:]) == ["present_key", "present_value"]
    assert not {"QuantizeLinear", "DequantizeLinear", "Gather", "Round", "TensorScatter"} & {
        node.op_type for node in graph.node
    }
    held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    scales = Subject.from_spec(spec_of(name)).module.kv_scales
    for given, scale in zip(kernel.input[12:14], (scales.k_scale, scales.v_scale), strict=True):
        assert np.array_equal(held[given].reshape(scale.shape), scale.numpy())


@pytest.mark.parametrize("kv_dtype", ["int4", "int8"])
@pytest.mark.every(3)
def test_each_channel_has_its_scale_in_onnx_runtimes_operator(kv_dtype: str, tmp_path: Path):
    spec = small_spec(cache="in-place", kv_dtype=kv_dtype, kv_scale="per-channel", attn_mask="none")
    report = build(spec, tmp_path / "b", name="small", dialects=["ort"], runtimes=["ort-cpu"])
    assert report.passed, str(report)
    graph = load_model(tmp_path / "b" / "model.ort.decode.onnx").graph
    (kernel,) = (node for node in graph.node if node.op_type == "GroupQueryAttention")
    held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    assert [held[name].shape for name in kernel.input[12:14]] == [(1, 2, 1, 8)] * 2


@pytest.mark.parametrize("change", ["other scale to read", "zero point", "read twice"])
def test_a_cache_that_is_read_otherwise_is_no_cache_of_the_operator(change: str, tmp_path: Path):
    model = onnx.load(bundle_of("per tensor") / "model.onnx")
    reader = next(n for n in model.graph.node if n.op_type == "DequantizeLinear")
    if change == "other scale to read":
        reader.input[1] = "other"
        model.graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "other"))
    elif change == "zero point":
        reader.input[2] = "other"
        model.graph.initializer.append(numpy_helper.from_array(np.int8(1), "other"))
    else:
        more = onnx.helper.make_node("Identity", ["present_key"], ["again"], name="again")
        model.graph.node.append(more)
        ends = next(o for o in model.graph.output if o.name == "present_key")
        again = onnx.ValueInfoProto()
        again.CopyFrom(ends)
        again.name = "again"
        model.graph.output.append(again)
    for lowered in lower(ir.serde.deserialize_model(model), "ort").values():
        assert "GroupQueryAttention" not in {node.op_type for node in lowered.model.graph}


PACKED = {  # the place of a constant in a node, and another
    "seven for eight": ("Add", 1, np.int32(7)),
    "another factor of the second half": ("Mul", 1, np.int32(15)),
    "clipped at -7": ("Max", 1, np.float32(-7)),
    "clipped at 6": ("Min", 1, np.float32(6)),
    "another divisor": ("Div", 1, np.float32(0.5)),
    "other bytes": ("Gather", 0, np.zeros((256, 2), np.float32)),
    "every channel from 1 on": ("Slice", 1, np.array([1])),
    "every third": ("Slice", 4, np.array([3])),
}


@pytest.mark.parametrize("change", [None, *PACKED])
def test_a_cache_that_is_packed_otherwise_is_no_cache_of_the_operator(change: str | None):
    model = onnx.load(bundle_of("int4") / "model.onnx")
    if change is not None:
        op_type, place, array = PACKED[change]
        node = next(
            n for n in model.graph.node
            if n.op_type == op_type and ("kv_scales" in n.output[0] or op_type == "Gather")
        )  # fmt: skip
        node.input[place] = "other"
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), "other"))
    kernels = [
        node
        for lowered in lower(ir.serde.deserialize_model(model), "ort").values()
        for node in lowered.model.graph
        if node.op_type == "GroupQueryAttention"
    ]
    assert bool(kernels) == (change is None)


def test_the_report_says_how_far_integers_are_from_floats(tmp_path: Path):
    folder = tmp_path / "b"
    spec = small_spec(cache="in-place", kv_dtype="int8", weights_dtype="v=int8")
    report = build(spec, folder, name="small", dialects=["standard"], runtimes=["ort-cpu"])
    assert report.passed, str(report)
    quality = report.quality
    assert [str(budget) for budget in quality.budgets] == ["sqnr>=30"]
    (output,) = quality.outputs  # integers have no distance
    assert output.part == "output"
    assert 30 < output.sqnr < 45
    parts = [part.part for part in quality.weights]
    assert parts == ["v_proj.weight", "cache", "cached keys", "cached values"]
    assert all(part.sqnr > output.sqnr for part in quality.weights)
    again = verify(folder, runtimes=["ort-cpu"], budgets=["sqnr>=60"])
    assert again.quality.outputs == quality.outputs
    assert again.exit_code == 6
    assert not [verdict for verdict in again.verdicts if verdict.status != "passed"]


def test_a_cache_alone_has_a_budget_measured_without_a_past(tmp_path: Path):
    folder = tmp_path / "b"
    spec = small_spec(cache="in-place", kv_dtype="int8", kv_scale="per-channel")
    report = build(spec, folder, name="small", dialects=["standard"], runtimes=["ort-cpu"])
    assert [part.part for part in report.quality.weights] == ["cached keys", "cached values"]
    assert 30 < report.quality.outputs[0].sqnr < 45
    index = json.loads((folder / "golden" / "index.json").read_text())
    numbers = json.loads((folder / "golden" / "quality.json").read_text())["cases"]
    assert numbers
    assert {index["cases"][number]["sizes"]["past_len"] for number in numbers} == {0}


@pytest.mark.parametrize("name", extended(["int4", "int4 by channel"], lambda name: name in KEPT))
def test_the_default_budget_of_int4_is_smaller(name: str):
    quality = report_of(bundle_of(name))["quality"]
    assert quality["budgets"] == ["sqnr>=12"]
    assert 16 < quality["outputs"][0]["sqnr"] < 22


def test_bytes_hold_neighbours_the_first_in_the_lower_half():
    scales = Subject.from_spec(spec_of("int4")).module.kv_scales
    numbers = torch.tensor([[-8.0, 7.0, 0.0, -1.0, 2.0, -3.0]])
    held, _ = scales(numbers * scales.k_scale, numbers * scales.v_scale)
    assert held.tolist() == [[0xF0, 0x78, 0x5A]]
    found = scales.read(held, held, torch.float64)[0] / scales.k_scale
    assert torch.equal(found.round(), numbers.double())
