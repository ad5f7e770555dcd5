"""Optional outputs, names and metadata of the canonical form."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from ir_graphs import model_of, node_of, value, weight

from attn_export.graph import canonical
from attn_export.graph.axis_names import name_axes


def attention(*wanted: int) -> ir.Model:
    """Return an Attention with all four outputs, of which only some leave the graph."""
    inputs = [value(name, "batch", 2, "query_len", 8) for name in "qkv"]
    outputs = [value(f"out_{i}", "batch", 2, "query_len", 8) for i in range(4)]
    node = ir.node("Attention", inputs, {"qk_matmul_output_mode": 3}, outputs=outputs)
    return model_of(inputs, [outputs[i] for i in wanted], [node])


@pytest.mark.parametrize(
    ("wanted", "names", "mode"),
    [
        ((0,), ["out_0"], False),
        ((0, 1), ["out_0", "out_1"], False),
        ((0, 1, 2), ["out_0", "out_1", "out_2"], False),
        ((0, 2), ["out_0", "", "out_2"], False),
        ((0, 3), ["out_0", "", "", "out_3"], True),
        ((3,), ["", "", "", "out_3"], True),
    ],
)
def test_optional_outputs_that_are_not_read_are_left_out(wanted, names, mode):
    model = attention(*wanted)
    canonical.drop_unused_outputs(model)
    node = node_of(model, "Attention")
    assert [output.name for output in node.outputs] == names
    assert ("qk_matmul_output_mode" in node.attributes) == mode


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (np.array([1]), "int64[1]_1"),
        (np.array([0, 0, 4, 8]), "int64[4]_0_0_4_8"),
        (np.array(-np.inf, np.float32), "float[]_-inf"),
        (np.array([[True, False]]), "bool[1x2]_1_0"),
        (np.array([0.5, -1e30], np.float32), "float[2]_0.5_-1e+30"),
        (np.zeros(17), "val_3"),
    ],
)
def test_small_constants_are_named_by_what_they_hold(array, name):
    model = model_of([], [], [], [weight("val_3", array)])
    canonical.name_constants(model, keep=set())
    assert list(model.graph.initializers) == [name]
    assert model.graph.initializers[name].const_value.numpy().tolist() == array.tolist()


def test_weights_keep_the_names_of_the_module():
    own = [weight(name, np.zeros(4, np.float32)) for name in ("q_proj.bias", "gain", "val_3")]
    model = model_of([], [], [], own)
    canonical.name_constants(model, keep={"q_proj.bias", "gain"})
    assert list(model.graph.initializers) == ["q_proj.bias", "gain", "float[4]_0_0_0_0"]


def test_constants_that_look_alike_keep_names_of_their_own():
    near = [weight(f"val_{i}", np.array([2.0**24 + i])) for i in range(2)]
    model = model_of([], [], [], near)
    canonical.name_constants(model, keep=set())
    held = {n: v.const_value.numpy().item() for n, v in model.graph.initializers.items()}
    assert held == {"double[1]_1.67772e+07": 2**24, "val_1": 2**24 + 1}


def test_the_remainder_of_torch_is_that_of_onnx_ir():
    x, y = value("x", "s7"), value("y", "s7 + PythonMod(-s7, 4)")
    model = model_of([x], [y], [ir.node("Pad", [x], outputs=[y])])
    name_axes(model, {"x": {0: "length"}})
    assert y.shape is not None
    assert [y.shape[0].evaluate({"length": n}) for n in (3, 4, 5)] == [4, 4, 8]


def scoped(*scopes: str) -> ir.Model:
    """Return a chain of Relu nodes, each with the exporter's name scopes."""
    values = [value(f"val_{i}", "n") for i in range(len(scopes) + 1)]
    nodes = [ir.node("Relu", [values[i]], outputs=[values[i + 1]]) for i in range(len(scopes))]
    for node, scope in zip(nodes, scopes, strict=True):
        node.metadata_props[canonical.NAME_SCOPES] = scope
    return model_of([values[0]], [values[-1]], nodes)


def test_nodes_are_named_by_submodule_and_operator_and_values_after_them():
    model = scoped(
        "['', 'q_proj', 'linear']", "['', 'relu']", "['', 'q_proj', 'linear_1']",
        "['', 'blocks.0', 'attn', 'x']",
    )  # fmt: skip
    canonical.name_nodes(model)
    names = [node.name for node in model.graph]
    assert names == ["q_proj/Relu", "Relu", "q_proj/Relu_2", "blocks.0/attn/Relu"]
    values = [node.outputs[0].name for node in model.graph]
    assert values == ["q_proj/Relu.out", "Relu.out", "q_proj/Relu_2.out", "val_4"]
    assert model.graph.inputs[0].name == "val_0"


def test_further_outputs_are_named_by_their_index_and_omitted_ones_not_at_all():
    model = attention(0)
    node = node_of(model, "Attention")
    relu = ir.node("Relu", [node.outputs[2]], outputs=[value("y", "n")])
    model.graph.append(relu)
    model.graph.outputs[0] = relu.outputs[0]
    node.outputs[1].name = ""
    canonical.name_nodes(model)
    assert [output.name for output in node.outputs] == [
        "Attention.out", "", "Attention.2", "Attention.3",
    ]  # fmt: skip


TRACE = """File "/home/ada/run.py", line 7, in <module>
    main()
File "/home/ada/shop/attention.py", line 42, in forward
    return self.q_proj(x)
File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 130, in forward
    return F.linear(input, self.weight, self.bias)
"""


@pytest.mark.parametrize(
    ("trace", "origin"),
    [
        (TRACE, {"Relu": "shop/attention.py:42"}),
        (TRACE.replace("ada/shop", "ada/my shop"), {"Relu": "my shop/attention.py:42"}),
        ('File "/usr/lib/dist-packages/torch/nn/functional.py", line 3, in f', {}),
        ("", {}),
    ],
)  # fmt: skip
def test_an_origin_is_the_innermost_line_outside_of_torch(trace, origin):
    model = scoped("[]")
    canonical.name_nodes(model)
    model.graph[0].metadata_props[canonical.STACK_TRACE] = trace
    assert canonical.node_origins(model) == origin


def test_an_origin_may_lie_in_a_folder_named_torch():
    model = scoped("[]")
    canonical.name_nodes(model)
    trace = 'File "/home/ada/torch/experiments/attention.py", line 42, in forward'
    model.graph[0].metadata_props[canonical.STACK_TRACE] = trace
    assert canonical.node_origins(model) == {"Relu": "experiments/attention.py:42"}


HOLDERS = {
    "model": lambda model: model,
    "graph": lambda model: model.graph,
    "node": lambda model: model.graph[0],
    "input": lambda model: model.graph.inputs[0],
    "output": lambda model: model.graph.outputs[0],
    "value": lambda model: model.graph[0].outputs[0],
    "initializer": lambda model: model.graph.initializers["w"],
    "tensor": lambda model: model.graph.initializers["w"].const_value,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_no_metadata_is_left(holder):
    model = scoped("['', 'relu']", "['', 'relu']")
    model.graph.register_initializer(weight("w", np.zeros(20, np.float32)))
    HOLDERS[holder](model).metadata_props["stack_trace"] = TRACE
    canonical.strip_metadata(model)
    assert "ada" not in str(ir.to_proto(model))


@pytest.mark.parametrize("holder", HOLDERS)
def test_no_doc_string_is_left(holder):
    model = scoped("['', 'relu']", "['', 'relu']")
    model.graph.register_initializer(weight("w", np.zeros(20, np.float32)))
    HOLDERS[holder](model).doc_string = TRACE
    canonical.strip_metadata(model)
    assert "ada" not in str(ir.to_proto(model))


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("((8*s0)//s0)", 8), ("(8*s0)//s0", 8), ("8*s0", "8*batch"),
        ("(8*s0)//s1", "(8*batch)//s1"),
        ("(8*s0 + 1)//s0", "(8*batch + 1)//batch"),
    ],
)  # fmt: skip
def test_an_axis_in_which_a_name_cancels_has_its_size(written: str, size: int | str):
    x = value("x", "s0", 3)
    y = value("y", written, 3)
    model = model_of([x], [y], [ir.node("Identity", [x], outputs=[y])])
    name_axes(model, {"x": {0: "batch"}})
    found = y.shape[0]
    assert getattr(found, "value", found) == size
