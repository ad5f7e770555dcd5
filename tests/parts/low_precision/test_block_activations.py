"""Bundles whose activations have a scale for each block: graphs, truth and limits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from conftest import small_spec
from shared import extended, judged_graphs, nodes_of, passed_bundle

from attn_export import verify
from attn_export.bundle.manifest import GOLDEN
from attn_export.graph.ir_helpers import set_type
from attn_export.graph.load import load_model
from attn_export.graph.quantised_weights import read_block_rounding
from attn_export.results import WHOLE_DECODE
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import read_tensor

SPECS = {
    "cached": {"rotary": "half", "num_kv_heads": 4},  # tests/judge plants faults into it
    "in place": {"cache": "in-place", "packed_qkv": True, "attn_mask": "none"},
    "cache of int4": {
        "cache": "in-place", "kv_dtype": "int4", "kv_scale": "per-channel", "rotary": "half",
    },
    "cross": {"cross": True, "causal": False, "cache": "none", "kdim": 32, "vdim": 96},
    "no bias": {"bias": "none", "qk_norm": "rms", "attn_weights": True, "scheme": "asymmetric"},
    "sinks": {"sinks": True, "window_left": 3, "num_kv_heads": 4},
}  # fmt: skip
KEPT = ("cached", "in place")


def spec_of(name: str) -> AttentionSpec:
    return small_spec(
        embed_dim=64, weights_dtype="int4", activations="dynamic-int8-per-block", **SPECS[name]
    )


def bundle_of(name: str) -> Path:
    return passed_bundle(f"block-activations/{name}", spec_of(name), "a scale for each block")


@pytest.mark.parametrize("name", extended(SPECS, lambda name: name in KEPT))
@pytest.mark.every(3)
def test_every_form_computes_what_its_integers_say(name: str):
    assert judged_graphs(bundle_of(name)) >= {"model.onnx", "model.ort.onnx"}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.every(2)
def test_the_graph_rounds_each_input_once_and_ort_leaves_it_to_the_operator(name: str):
    folder, spec = bundle_of(name), spec_of(name)
    products = len(spec.quantised_weights)
    inputs = 4 if spec.cross else 2  # q, k and v of one input share its rounding
    assert len(nodes_of(folder, "model.onnx", "Round")) == inputs
    assert len(nodes_of(folder, "model.onnx", "DequantizeLinear")) == products
    for path in folder.glob("model.ort*.onnx"):
        found = nodes_of(folder, path.name, "MatMulNBits")
        levels = {a.i for n in found for a in n.attribute if a.name == "accuracy_level"}
        assert (len(found), levels) == (products, {4})
        assert not nodes_of(folder, path.name, "Abs")
        assert len({node.input[0] for node in found}) == inputs


def test_a_token_that_is_not_finite_spoils_no_other_and_a_decode_may_go_in_steps():
    folder = bundle_of("in place") / GOLDEN
    cases = json.loads((folder / "index.json").read_text())["cases"]
    assert any(case["kind"] == WHOLE_DECODE for case in cases)
    spoilt = next(case for case in cases if case["name"] == "nan_in_rows")
    assert np.isnan(read_tensor(folder / spoilt["folder"] / "input_0.pb")[1]).any()


def test_the_distance_from_the_float_model_names_the_activations():
    report = verify(bundle_of("cached"), runtimes=["ort-cpu"])
    assert report.quality is not None
    parts = {part.part: part.sqnr for part in report.quality.weights}
    assert list(parts) == [*spec_of("cached").quantised_weights, "activations"]
    # 8 bits for each 32 values lose less than one scale for all, and much less than 4 bits
    assert parts["activations"] > 42
    assert parts["activations"] > max(n for part, n in parts.items() if part != "activations")
    assert [str(budget) for budget in report.quality.budgets] == ["sqnr>=12"]


def test_stored_integers_give_the_stored_truth():
    report = verify(bundle_of("in place"), runtimes=["ort-cpu"], recompute=True)
    assert report.passed, str(report)
    assert any(verdict.graph == "golden" for verdict in report.verdicts)


def test_a_kit_passes_token_by_token(kit_says):
    assert "token by token" in kit_says(bundle_of("in place"))


def rounded_input() -> tuple[ir.Model, ir.Value]:
    """Return a graph, and the first value in it that is rounded by block."""
    model = ir.serde.deserialize_model(load_model(bundle_of("cached") / "model.onnx"))
    product = next(node for node in model.graph if node.op_type == "MatMul")
    assert product.inputs[0] is not None
    return model, product.inputs[0]


def test_the_rounding_of_a_graph_is_read_back():
    model, value = rounded_input()
    found = read_block_rounding(value)
    assert found is not None
    assert (found[0].name, found[1]) == ("query", 32)
    assert read_block_rounding(model.graph.inputs[0]) is None


OTHERS = {
    # operator, of its nodes the one with this number, and its change
    "a floor": ("Round", 0, lambda node: setattr(node, "op_type", "Floor")),
    "a mean": ("ReduceMax", 0, lambda node: setattr(node, "op_type", "ReduceMean")),
    "a signed largest": ("Abs", 0, lambda node: setattr(node, "op_type", "Identity")),
    "another axis": (
        "ReduceMax", 0, lambda node: node.replace_input_with(1, constant(np.array([2]))),
    ),
    "one scale for all batch elements": (
        "ReduceMax", 0, lambda node: node.replace_input_with(1, constant(np.array([0, 3]))),
    ),
    "ties go up": ("Round", 0, lambda node: round_ties_up(node)),
    "a width that blocks do not divide": (
        "Reshape", 0, lambda node: set_type(node.inputs[0], None, ir.Shape(["B", "L", 65])),
    ),
    "6 bits": ("Div", 0, lambda node: node.replace_input_with(1, constant(np.float32(31)))),
    "128": ("Div", 0, lambda node: node.replace_input_with(1, constant(np.float32(128)))),
    "a larger least scale": (
        "Max", 0, lambda node: node.replace_input_with(1, constant(np.float32(1e-3))),
    ),
    "other values": ("Div", 1, lambda node: node.replace_input_with(0, constant(np.float32(1)))),
    "another scale": ("Mul", 0, lambda node: node.replace_input_with(1, constant(np.float32(1)))),
    "blocks in another order": (
        "Reshape", 0, lambda node: node.replace_input_with(1, constant(np.array([0, 0, 32, 2]))),
    ),
}  # fmt: skip


def round_ties_up(node: ir.Node) -> None:
    assert node.graph is not None
    add = ir.node("Add", [node.inputs[0], constant(np.float32(0.5))])
    add.outputs[0].name = "increased"
    set_type(add.outputs[0], ir.DataType.FLOAT, node.outputs[0].shape)
    node.graph.insert_before(node, add)
    node.replace_input_with(0, add.outputs[0])
    node.op_type = "Floor"


def constant(array: np.ndarray | np.generic) -> ir.Value:
    return ir.val("other", const_value=ir.tensor(np.asarray(array)))


@pytest.mark.parametrize("name", OTHERS)
def test_another_rounding_is_not_taken_for_it(name: str):
    model, value = rounded_input()
    op_type, number, change = OTHERS[name]
    nodes = [node for node in model.graph if node.op_type == op_type]
    change(nodes[number])
    found = read_block_rounding(value)
    assert found is None or found[1] != 32
