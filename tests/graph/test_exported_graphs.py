"""Exports of small specs: the number of nodes of each operator, and their names."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from conftest import small_spec
from small_graphs import PLAIN, exported, operators
from torch import nn

from attn_export.attention import onnx_attention
from attn_export.errors import ExportError
from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.checks import check_graph
from attn_export.graph.save import save_graph

CROSS = {"cross": True, "causal": False, "cache": "none"}
IN_PLACE = {"cache": "in-place", "attn_mask": "none"}

PROJECTIONS = {"MatMul": 4, "Add": 4, "Reshape": 4, "Transpose": 4, "Attention": 1}
SPREAD = {"Shape": 1, "Concat": 1, "Expand": 1}
"""Operators that expand a mask of one query to all L."""
CLAMP = {"Clip": 1, "Equal": 1, "Where": 1}
"""Operators that clamp the finite values of a float mask to -1e30."""

WRITTEN = {"TensorScatter": 2, "Shape": 1, "Squeeze": 1, "Add": 5}
"""Operators of a cache in place, and of the number of valid keys, past_length + L."""

COUNTS = [
    ("gqa", {}, PROJECTIONS | SPREAD),
    ("mha", {"num_kv_heads": 4}, PROJECTIONS | SPREAD),
    ("mqa", {"num_kv_heads": 1}, PROJECTIONS | SPREAD),
    ("gqa without mask and cache", PLAIN, PROJECTIONS),
    ("mqa without mask", {"num_kv_heads": 1, "attn_mask": "none"}, PROJECTIONS),
    ("no biases", {"bias": False, **PLAIN}, {**PROJECTIONS, "Add": 0}),
    ("weights", {"attn_weights": True}, PROJECTIONS | SPREAD),
    ("a full float mask", {"attn_mask": "float[B,H,L,S]"}, PROJECTIONS | CLAMP),
    ("a float mask of one row", {"attn_mask": "float[1,1,1,S]"}, PROJECTIONS | SPREAD | CLAMP),
    ("a mask of rank 3", {"attn_mask": "bool[H,L,S]"}, PROJECTIONS | {"Unsqueeze": 1}),
    ("in place", IN_PLACE, PROJECTIONS | WRITTEN),
    ("in place, masked", {"cache": "in-place"}, PROJECTIONS | WRITTEN | SPREAD),
    ("cross", {**CROSS, "kdim": 24, "vdim": 40}, PROJECTIONS | SPREAD),
]


@pytest.mark.parametrize(("changes", "counts"), [row[1:] for row in COUNTS],
                         ids=[row[0] for row in COUNTS])  # fmt: skip
@pytest.mark.every(3)
def test_the_operators_of_an_exported_graph_are_pinned(changes, counts):
    assert operators(**changes) == {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    "changes", [{}, {"bias": False, **PLAIN}, {**CROSS, "kdim": 24, "vdim": 40}]
)
def test_weights_keep_the_names_of_the_module_and_nothing_else_has_a_dot(changes):
    subject, graph = exported(**changes)
    initializers = graph.model.graph.initializers
    assert {name for name in initializers if "." in name} == set(subject.module.state_dict())


def test_linear_weights_are_stored_as_matmul_reads_them():
    subject, graph = exported()
    for name, tensor in subject.module.state_dict().items():
        stored = graph.model.graph.initializers[name].const_value.numpy()
        assert (stored == tensor.numpy().T).all()


def test_every_node_knows_its_line_in_the_module_and_none_the_machine():
    graph = exported()[1]
    named = {node.name for node in graph.model.graph}
    assert set(graph.origins) <= named
    assert {"q_proj/MatMul", "out_proj/Add", "Attention"} <= set(graph.origins)
    assert all(origin.startswith("attention/module.py:") for origin in graph.origins.values())


@pytest.mark.parametrize(
    ("changes", "outputs"),
    [
        ({}, ["Attention.out", "present_key", "present_value"]),
        (PLAIN, ["Attention.out"]),
        ({"attn_weights": True}, ["Attention.out", "present_key", "present_value", "attn_weights"]),
    ],
)
def test_the_attention_node_has_the_outputs_that_the_spec_asks_for(changes, outputs):
    (node,) = (n for n in exported(**changes)[1].model.graph if n.op_type == "Attention")
    assert [output.name for output in node.outputs] == outputs
    assert ("qk_matmul_output_mode" in node.attributes) == ("attn_weights" in outputs)


def test_a_cache_in_place_is_two_scatters_and_one_attention_that_counts_keys():
    model = exported(**IN_PLACE)[1].model
    scatters = [n for n in model.graph if n.op_type == "TensorScatter"]
    for name, scatter in zip(("key", "value"), scatters, strict=True):
        past, _, places = scatter.inputs
        assert (past.name, places.name) == (f"past_{name}", "past_length")
        assert scatter.outputs[0].name == f"present_{name}"
        assert scatter.attributes.get_string("mode") == "linear"
        assert scatter.attributes.get_int("axis") == -2
    (attention,) = (n for n in model.graph if n.op_type == "Attention")
    names = [None if value is None else value.name for value in attention.inputs]
    assert names[1:6] == ["present_key", "present_value", None, None, None]
    assert attention.inputs[6].producer().inputs[0].name == "past_length"
    assert attention.attributes.get_int("is_causal") == 1
    assert {node.version for node in (*scatters, attention)} == {24}


def test_a_capacity_that_is_not_free_is_refused(monkeypatch: pytest.MonkeyPatch):
    right = onnx_attention.append

    def narrow(past, new, past_length):
        torch._check(past.shape[2] >= 4)  # L and P of at least 2 would explain it, were it a sum
        return right(past, new, past_length)

    monkeypatch.setattr(onnx_attention, "append", narrow)
    subject = Subject.from_spec(small_spec(**IN_PLACE))
    with pytest.raises(ExportError, match=r"axis 'capacity' \(past_key.shape\[2\]\) was narrowed"):
        export(subject)


@pytest.mark.parametrize("changes", [IN_PLACE, {**IN_PLACE, "sinks": True}, {}], ids=str)
def test_only_a_cache_in_place_takes_opset_24(changes):
    model = exported(**changes)[1].model
    assert model.opset_imports == {"": 24 if changes else 23}
    assert model.ir_version == 10
    assert sum(node.op_type == "Attention" for node in model.graph) == 1


def test_exporting_twice_gives_the_same_bytes():
    subject, first = exported(**PLAIN)
    again = export(subject)
    assert again.origins == first.origins
    serialized = [ir.to_proto(graph.model).SerializeToString() for graph in (first, again)]
    assert serialized[0] == serialized[1]


# -- modules of the user's --------------------------------------------------------------------

AXES = {"x": {0: "batch", 1: "query_len"}}


class Scaled(nn.Module):
    """A parameter of the module itself, not of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return x * self.gain


class Shared(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.proj(self.proj(x).relu())


class Longer(nn.Module):
    """An output axis that is no input's."""

    def forward(self, x):
        return torch.cat([x, x[:, :1]], dim=1)


def test_a_parameter_of_the_module_itself_keeps_its_name():
    subject = Subject(Scaled().eval(), {"x": torch.ones(2, 5, 4)}, AXES, ["y"])
    assert list(export(subject).model.graph.initializers) == ["gain"]


def test_a_weight_that_is_used_twice_keeps_its_name():
    subject = Subject(Shared().eval(), {"x": torch.ones(2, 5, 8)}, AXES, ["y"])
    assert list(export(subject).model.graph.initializers) == ["proj.weight"]


def test_an_output_axis_that_is_no_inputs_is_no_finding(tmp_path):
    subject = Subject(Longer().eval(), {"x": torch.ones(2, 5, 4)}, AXES, ["y"])
    path = tmp_path / "model.onnx"
    save_graph(export(subject).model, path)
    assert check_graph(path, subject.expected()) == []
