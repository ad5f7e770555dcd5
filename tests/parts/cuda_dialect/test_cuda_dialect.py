"""The `cuda` dialect: one operator for one query, if it is equivalent to the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from conftest import on, small_spec
from shared import extended, passed_bundle, report_of

from attn_export import build, verify
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.explain_bundle import explain
from attn_export.dialect_names import CUDA, STANDARD
from attn_export.errors import GraphError
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph import IrGraph
from attn_export.graph.lower import DECODE, PREFILL, lower
from attn_export.graph.lower.read import read_attention
from attn_export.parts.cuda_dialect.cuda import window_of
from attn_export.results import BASE

IN_PLACE: dict[str, Any] = {
    "embed_dim": 64, "cache": "in-place", "dtype": "float16", "attn_mask": "none",
}  # fmt: skip
BFLOAT16 = {"dtype": "bfloat16"}
GRAPHS = ("model.cuda.onnx", "model.cuda.decode.onnx", "model.cuda.prefill.onnx")
INT32 = ir.DataType.INT32
ROTARY, NORMS = {"do_rotary": 1}, {"qk_norm_epsilon": 1e-6}

FORMS: dict[str, tuple[dict[str, Any], dict[str, float], bool]] = {
    "plain": ({}, {}, True),
    "shared by all": ({"num_kv_heads": 1}, {}, True),
    "no bias": ({"bias": False}, {}, True),
    "a bias of some": ({"bias": "q,v"}, {}, False),
    "packed already": ({"packed_qkv": True}, {}, True),
    "rotary": ({"rotary": "half"}, ROTARY, True),
    "rotary yarn": (
        {"rotary": "half", "rotary_scaling": "yarn", "rotary_factor": 4.0,
         "rotary_original_len": 32}, ROTARY, True,
    ),
    "rotary, narrow heads": ({"rotary": "half", "embed_dim": 32}, {}, False),
    "rotary of a part": ({"rotary": "half", "rotary_dim": 4}, {}, False),
    "rotary interleaved": ({"rotary": "interleaved"}, {}, False),
    "rotary by length": (
        {"rotary": "half", "rotary_scaling": "dynamic", "rotary_factor": 2.0,
         "rotary_original_len": 20}, {}, False,
    ),
    "positions of the caller": ({"rotary": "half", "position_ids": True}, {}, False),
    "norms": ({"qk_norm": "rms"}, NORMS, True),
    "norms, rotary": ({"qk_norm": "rms", "rotary": "half"}, NORMS | ROTARY, True),
    "layer norms": ({"qk_norm": "layer"}, {}, False),
    "window": ({"window_left": 3}, {"local_window_size": 4}, True),
    "window, rotary": (
        {"window_left": 6, "rotary": "half"}, ROTARY | {"local_window_size": 7}, True,
    ),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}, True),
    "scale": ({"scale": 0.5}, {"scale": 0.5}, True),
}  # fmt: skip
"""Spec, attributes beside heads and scale, and whether one product makes queries, keys, values."""

NO_FORM: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": "float32"}, "in float32"),
    "bfloat16": ({"dtype": "bfloat16"}, "in float32"),  # its canonical graph is computed so
    "an appending cache": ({"cache": "append"}, "written in place"),
    "a mask of the caller": ({"attn_mask": "bool[B,1,1,S]"}, "no mask but a window"),
    "alibi": ({"alibi": True}, "no mask but a window"),
    "weights": ({"attn_weights": True}, "no Attention node has a KV cache"),
    "other widths of values": ({"v_head_dim": 24}, "no Attention node has a KV cache"),
}


def exported(fields: dict[str, Any]) -> ir.Model:
    return export(Subject.from_spec(small_spec(**(IN_PLACE | fields)))).model


def in_bfloat16(fields: dict[str, Any]) -> ir.Model:
    exporting = export(Subject.from_spec(small_spec(**(IN_PLACE | fields | BFLOAT16)))).in_bfloat16
    assert exporting is not None
    return exporting()


def as_float16(model: ir.Model) -> list[str]:
    """Return nodes, ends and weights of a graph as text, bfloat16 written as float16."""
    code = {"to": {ir.DataType.BFLOAT16: int(ir.DataType.FLOAT16)}}
    lines = [f"{x.name} {x.dtype} {x.shape}" for x in (*model.graph.inputs, *model.graph.outputs)]
    lines += [f"{x.name} {x.dtype} {x.shape}" for x in model.graph.initializers.values()]
    for node in model.graph:
        held = {n: code.get(n, {}).get(a.value, a.value) for n, a in node.attributes.items()}
        ends = [x and x.name for x in (*node.inputs, *node.outputs)]
        lines.append(f"{node.domain} {node.op_type} {ends} {held}")
    return [line.replace("BFLOAT16", "FLOAT16") for line in lines]


def model_width(fields: dict[str, Any]) -> int:
    """Return the width of a head."""
    return (IN_PLACE | fields)["embed_dim"] // 4


def operator_of(model: ir.Model) -> ir.Node:
    (node,) = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    return node


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.every(4)
def test_the_operator_does_what_it_has_the_meaning_of(name: str):
    fields, attributes, packed = FORMS[name]
    forms = lower(exported(fields), CUDA)
    assert set(forms) == {"", DECODE, PREFILL}
    assert "Attention" in {node.op_type for node in forms[""].model.graph}
    for phase in (DECODE, PREFILL):
        check_operator(forms[phase], fields, attributes, packed)
    assert forms[DECODE].file.fixed == {"query_len": 1}
    assert forms[PREFILL].file.fixed == {"batch": 1}
    assert not forms[""].file.dtypes


def check_operator(
    form: IrGraph, fields: dict[str, Any], attributes: dict[str, float], packed: bool
) -> None:
    node = operator_of(form.model)
    found = {key: held.value for key, held in node.attributes.items()}
    usual = {
        "num_heads": 4,
        "kv_num_heads": found["kv_num_heads"],
        "scale": model_width(fields) ** -0.5,
    }
    assert found == pytest.approx(usual | attributes)
    assert (node.inputs[1] is None) == packed
    assert form.file.bound == {"present_key": "past_key", "present_value": "past_value"}
    lengths = next(x for x in form.model.graph.inputs if x.name == "past_length")
    assert form.file.dtypes == ({"past_length": "int32"} if lengths.dtype == INT32 else {})
    assert lengths.dtype == INT32 or "rotary" in fields  # which takes positions from them


@pytest.mark.parametrize("name", extended(FORMS, lambda name: name == "window, rotary"))
def test_the_form_in_bfloat16_is_the_one_in_float16_which_the_judge_takes(name: str):
    fields, *_ = FORMS[name]
    half, other = lower(exported(fields), CUDA), lower(in_bfloat16(fields), CUDA)
    for phase in ("", DECODE, PREFILL):
        assert as_float16(other[phase].model) == as_float16(half[phase].model)
        assert {x.dtype for x in other[phase].model.graph.outputs} == {ir.DataType.BFLOAT16}


def test_no_weight_is_stored_twice():
    model = exported({"rotary": "half"})
    stored = set(model.graph.initializers)
    new = lower(model, CUDA)[DECODE].model.graph.initializers
    sizes = {name: value.const_value.size for name, value in new.items() if name not in stored}
    assert max(sizes.values()) <= 4


@pytest.mark.parametrize("name", NO_FORM)
def test_a_graph_that_gains_nothing_is_refused_with_the_reason(name: str):
    fields, says = NO_FORM[name]
    with pytest.raises(GraphError, match=says):
        lower(exported(fields), CUDA)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"window_left": 0}, 1),
        ({"window_left": 17}, 18),
        ({"window_left": 2, "alibi": True}, None),
        ({"alibi": True}, None),
        ({}, None),
    ],
)
def test_a_window_is_known_by_its_values(fields: dict[str, Any], window: int | None):
    model = exported(fields)
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    assert window_of(model, read_attention(node)) == window


JUDGED = IN_PLACE | {"rotary": "half", "window_left": 4}


def test_the_judge_takes_it():
    bundle = passed_bundle(small_spec(**JUDGED))
    outcomes = {run["graph"]: run["outcome"] for run in report_of(bundle)["runs"]}
    assert outcomes["model.cuda.decode.onnx"] == "ran"
    kept = json.loads((bundle / "manifest.json").read_text())["graphs"]
    assert set(kept) >= set(GRAPHS)


def test_of_bfloat16_only_the_placement_is_known(tmp_path: Path):
    spec, folder = small_spec(**(IN_PLACE | BFLOAT16)), tmp_path / "b"
    report = build(spec, folder, runtimes=["ort-cpu"], dialects=[STANDARD, CUDA])
    assert report.passed
    runs = {run.graph: run for run in report.runs}
    for name in GRAPHS:
        assert runs[name].outcome == "not run"
        assert "only the placement on CUDA in a dry run is known" in runs[name].reason
        assert (folder / name).exists()
    assert any("only a GPU can prove their numbers" in note for note in report.notes)
    assert verify(folder).passed
    explanation = explain(folder, on("ort-cpu"), case=BASE)
    assert explanation.graph == "model.onnx"
    assert sum("dry run" in note for note in explanation.notes) == len(GRAPHS)


def test_all_leaves_it_out_without_a_note_where_it_does_not_fit():
    graphs, notes = lower_all(export(Subject.from_spec(small_spec())), ("all",))
    assert not any(CUDA in graph.file.name for graph in graphs)
    assert not any("dialect" in note for note in notes)
