"""Every check, alone, on a graph with one fault; a healthy graph has no findings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import graph_edits as edit
import numpy as np
import onnx
import pytest
from broken_graphs import FAULTS, Fault
from onnx import TensorProto, helper, numpy_helper
from small_graphs import PLAIN, exported, saved, tiny_model

from attn_export.graph.check_structure import CheckFinding, shape_of
from attn_export.graph.checks import CHECKS, check_graph


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """Return the canonical graph of a small spec. Read it."""
    return saved(tmp_path_factory.mktemp("healthy"))


def findings_of(model: onnx.ModelProto, folder: Path, expected=None) -> list[CheckFinding]:
    path = folder / "model.onnx"
    # Not onnx.save, which would look for external data.
    path.write_bytes(model.SerializeToString())
    return check_graph(path, expected)


def findings_of_fault(fault: Fault, healthy: Path, folder: Path) -> list[CheckFinding]:
    model = onnx.load(healthy)
    fault.edit(model)
    if fault.beside is not None:
        (folder / "weights.bin").write_bytes(b"\0" * fault.beside)
    expected = dataclasses.replace(exported()[0].expected(), exact=fault.exact)
    return findings_of(model, folder, expected if fault.known else None)


def checks_that_find(model: onnx.ModelProto, folder: Path) -> list[str]:
    return [finding.check for finding in findings_of(model, folder)]


# -- a healthy graph --------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["with everything", "plain"])
def test_an_exported_graph_has_no_findings(changes, tmp_path):
    path = saved(tmp_path, **changes)
    assert check_graph(path, exported(**changes)[0].expected()) == []


def test_a_graph_of_unknown_origin_is_held_to_what_needs_no_spec(healthy):
    assert check_graph(healthy) == []


# -- every fault in the table -----------------------------------------------------------------


def test_every_check_appears_in_the_table():
    assert {fault.check for fault in FAULTS} == {check.__name__ for check in CHECKS}


def test_every_check_says_what_it_is_for():
    assert all(check.__doc__ for check in CHECKS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_by_its_check_and_by_no_unrelated_one(fault, healthy, tmp_path):
    findings = findings_of_fault(fault, healthy, tmp_path)
    assert {finding.check for finding in findings} == {fault.check, *fault.also}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_message_names_the_thing_and_what_to_do_in_one_line(fault, healthy, tmp_path):
    findings = findings_of_fault(fault, healthy, tmp_path)
    messages = [finding.message for finding in findings if finding.check == fault.check]
    assert any(all(words in message for words in fault.message) for message in messages), messages
    assert all("\n" not in finding.message for finding in findings)
    assert all(len(finding.message) < 450 for finding in findings)


@pytest.mark.parametrize(("ours", "checks"), [(True, ["no_unread_inputs"]), (False, [])])
def test_only_a_users_module_may_ignore_an_input(ours, checks, healthy, tmp_path):
    model = onnx.load(healthy)
    edit.unread_input(model)
    expected = exported()[0].expected()
    inputs = {**expected.inputs, "extra": ("batch",)}
    expected = dataclasses.replace(expected, inputs=inputs, ours=ours)
    assert [finding.check for finding in findings_of(model, tmp_path, expected)] == checks


# -- what the onnx checker does not see -------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "checks"),
    [("Attention.out", ["declared_shapes", "empty_axes"]), ("present_key", ["empty_axes"])],
)
def test_an_axis_declared_0_passes_the_onnx_checker_only(value, checks, healthy, tmp_path):
    model = onnx.load(healthy)
    edit.axis(value, 2, 0)(model)
    onnx.checker.check_model(model, full_check=True)
    assert checks_that_find(model, tmp_path) == checks


def test_an_opset_of_the_future_passes_the_onnx_checker_and_not_this_one(tmp_path):
    model = tiny_model()
    model.opset_import[0].version = 999
    onnx.checker.check_model(model, full_check=True)
    assert checks_that_find(model, tmp_path) == ["opset_version"]


# -- paths of the machine, and texts that are none --------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "q_proj/MatMul", "attention/module.py:68", "and/or", "1 / sqrt(D)", "[B, H/Hkv, L]",
        "https://onnx.ai/onnx/operators/", "['', 'q_proj', 'linear']", "/", "a: b",
    ],
)  # fmt: skip
def test_a_text_without_a_path_of_the_machine_is_no_finding(text, tmp_path):
    model = tiny_model()
    model.doc_string = text
    assert findings_of(model, tmp_path) == []


@pytest.mark.parametrize(
    "path",
    [
        "/home/ada/model.py", "'/usr/lib/python3/x.py'", "(/srv/data/x)", "path=/opt/a/b",
        "D:\\x.py", "file:///tmp/x", "/home/jörg/x.py",
        "C:/Users/ada/model.py", "\\\\server\\share\\model.py", "source:/home/ada/x.py",
        "[/home/ada/x.py]", "`/home/ada/x.py`", "</home/ada/x.py>",
    ],
)  # fmt: skip
def test_a_path_of_the_machine_is_found_however_it_is_written(path, tmp_path):
    model = tiny_model()
    model.doc_string = f"made from {path}"
    assert checks_that_find(model, tmp_path) == ["no_host_paths"]


# -- faults that hide, and what only looks like one -------------------------------------------


def ones(name: str, *shape: int, dtype: type = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape or 4, dtype), name)


def test_a_dead_node_with_an_omitted_output_is_dead(tmp_path):
    model = tiny_model(
        helper.make_node("Clip", ["x", "", "top"], ["y"]),
        helper.make_node("Dropout", ["x"], ["dead", ""]),
        initializers=(numpy_helper.from_array(np.array(1, np.float32), "top"),),
    )
    assert checks_that_find(model, tmp_path) == ["no_dead_nodes"]


def test_the_same_values_in_two_encodings_are_duplicates(tmp_path):
    model = tiny_model(
        helper.make_node("Add", ["x", "raw"], ["z"]),
        helper.make_node("Add", ["z", "typed"], ["y"]),
        initializers=(ones("raw"), helper.make_tensor("typed", TensorProto.FLOAT, [4], [1.0] * 4)),
    )
    assert checks_that_find(model, tmp_path) == ["no_duplicate_initializers"]


def through_a_float64_constant() -> onnx.ModelProto:
    return tiny_model(
        helper.make_node("Constant", [], ["c"], value=ones("c", dtype=np.float64)),
        helper.make_node("CastLike", ["x", "c"], ["wide"]),
        helper.make_node("Mul", ["wide", "c"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    )


def test_our_own_module_has_no_float64_inside(tmp_path):
    ours = dataclasses.replace(exported()[0].expected(), ours=True)
    found = findings_of(through_a_float64_constant(), tmp_path, ours)
    assert "no_float64" in {finding.check for finding in found}


def test_other_graphs_may_compute_in_float64_inside(tmp_path):
    assert checks_that_find(through_a_float64_constant(), tmp_path) == []


VALID = {
    "a constant without elements": tiny_model(
        helper.make_node("Constant", [], ["scalar"], value=ones("scalar", 0, dtype=np.int64)),
        helper.make_node("Reshape", ["half", "scalar"], ["c"]),
        helper.make_node("Mul", ["x", "c"], ["y"]),
        initializers=(ones("half", 1),),
    ),
    "an output without elements": tiny_model(
        helper.make_node("Slice", ["x", "four", "four", "one"], ["none"]),
        helper.make_node("Concat", ["none", "x"], ["y"], axis=1),
        initializers=(
            numpy_helper.from_array(np.array([4]), "four"),
            numpy_helper.from_array(np.array([1]), "one"),
        ),
    ),
}
"""Graphs of other exporters: each axis of 0 is right, and declared by shape inference."""


@pytest.mark.parametrize("name", VALID)
def test_a_value_that_has_no_elements_is_valid(name, tmp_path):
    model = onnx.shape_inference.infer_shapes(VALID[name])
    assert any(0 in shape_of(value) for value in model.graph.value_info)
    assert findings_of(model, tmp_path) == []


def test_an_input_that_has_no_elements_is_a_warning(tmp_path):
    model = tiny_model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 0
    assert [(f.check, f.is_warning) for f in findings_of(model, tmp_path)] == [("empty_axes", True)]


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_other_quantisers_may_write_scales_that_are_not_positive(scale, healthy, tmp_path):
    model = onnx.load(healthy)
    edit.scale(scale)(model)
    assert checks_that_find(model, tmp_path) == []


def test_a_long_range_that_memory_holds_takes_no_time(tmp_path):
    model = tiny_model()
    edit.long_range(2**36)(model)
    assert checks_that_find(model, tmp_path) == []


def test_a_dynamic_axis_that_a_value_declares_fixed_is_a_contradiction(healthy, tmp_path):
    model = onnx.load(healthy)
    edit.axis("Attention.out", 2, 5)(model)
    assert checks_that_find(model, tmp_path) == ["declared_shapes"]


def test_equal_values_of_another_shape_are_no_duplicates(tmp_path):
    model = tiny_model(
        helper.make_node("Add", ["x", "flat"], ["z"]),
        helper.make_node("Add", ["z", "row"], ["y"]),
        initializers=(ones("flat"), ones("row", 1, 4)),
    )
    assert findings_of(model, tmp_path) == []


def test_a_value_that_only_a_subgraph_reads_is_read(tmp_path):
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["sum"])], "then", [],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["n", 4])],
    )  # fmt: skip
    model = tiny_model(
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
        initializers=(ones("c"), numpy_helper.from_array(np.array(True), "yes")),
    )
    assert findings_of(model, tmp_path) == []


@pytest.mark.parametrize(
    "entries",
    [{"offset": "abc"}, {"offset": "-4096", "length": "4096"}, {"offset": "64"}, {"length": "99"}],
    ids=["no number", "negative", "no length", "another length"],
)
def test_external_data_at_an_impossible_offset_is_a_finding(entries, healthy, tmp_path):
    model = onnx.load(healthy)
    edit.external(**entries)(model)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
    assert "external_data" in checks_that_find(model, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(
            lambda tensor: tensor.ClearField("raw_data"), id="no values",
        ),
        pytest.param(lambda tensor: setattr(tensor, "raw_data", b"1234"), id="few values"),
        pytest.param(lambda tensor: setattr(tensor, "data_type", 0), id="no type"),
        pytest.param(lambda tensor: setattr(tensor, "data_type", 127), id="unknown type"),
        pytest.param(lambda tensor: tensor.dims.append(-1), id="negative size"),
    ],
)  # fmt: skip
def test_a_damaged_initializer_is_a_finding(damage, healthy, tmp_path):
    model = onnx.load(healthy)
    damage(edit.by_name(model.graph.initializer, "q_proj.weight"))
    assert findings_of(model, tmp_path)


@pytest.mark.parametrize("kind", [0, 127])
def test_external_data_of_an_unknown_type_is_a_finding(kind, healthy, tmp_path):
    model = onnx.load(healthy)
    edit.external(length="4096")(model)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
    edit.by_name(model.graph.initializer, "q_proj.weight").data_type = kind
    assert findings_of(model, tmp_path)
