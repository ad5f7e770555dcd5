"""Caches of integers are recognised by value, and not by the look of their nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from small_graphs import exported

from attn_export.graph.ir_helpers import computed, constant_array, dims, ints, nodes_of, set_type
from attn_export.graph.lower.caches import QuantisedCache, quantised_cache
from attn_export.graph.lower.read import attentions_of

Edit = Callable[[ir.Model], None]


def model_of(kv_dtype: str, kv_scale: str = "per-tensor") -> ir.Model:
    fields = {"cache": "in-place", "attn_mask": "none", "rotary": "none"}
    return exported(kv_dtype=kv_dtype, kv_scale=kv_scale, **fields)[1].model.clone()


def cache_of(model: ir.Model) -> QuantisedCache | None:
    (attention,) = attentions_of(model)
    return quantised_cache(attention)


def other(op_type: str, new: str) -> Edit:
    def edit(model: ir.Model) -> None:
        for node in nodes_of(model, op_type):
            node.op_type = new

    return edit


def times(op_type: str, index: int, factor: float) -> Edit:
    """Multiply a constant input of the nodes of an operator."""

    def edit(model: ir.Model) -> None:
        for node in nodes_of(model, op_type):
            array = constant_array(node.inputs[index])
            if array is not None and array.size:
                changed = (array * factor).astype(array.dtype)
                node.replace_input_with(index, ir.val("forged", const_value=ir.tensor(changed)))

    return edit


def swapped_nibbles(model: ir.Model) -> None:
    for node in nodes_of(model, "Gather"):
        table = constant_array(node.inputs[0])
        if table is not None and table.shape == (256, 2):
            swapped = ir.tensor(np.ascontiguousarray(table[:, ::-1]))
            node.replace_input_with(0, ir.val("forged", const_value=swapped))


def after_reading(op_type: str, *numbers: int, length: str = "capacity") -> Edit:
    """Insert a node, with vectors of one number as its other inputs, between cache and node."""

    def edit(model: ir.Model) -> None:
        (attention,) = nodes_of(model, "Attention")
        for index in (1, 2):
            read = attention.inputs[index]
            assert read is not None
            node = ir.node(op_type, [read, *(ints(model, n) for n in numbers)])
            batch, heads, _, width = dims(read)
            out = set_type(node.outputs[0], read.dtype, ir.Shape([batch, heads, length, width]))
            out.name = f"forged_{index}"
            model.graph.insert_before(attention, node)
            attention.replace_input_with(index, out)

    return edit


def ties_go_up(model: ir.Model) -> None:
    for node in nodes_of(model, "Round"):
        half = ir.val("half", const_value=ir.tensor(np.float32(0.5)))
        add = ir.node("Add", [node.inputs[0], half])
        add.outputs[0].name = f"{node.name}_half"
        model.graph.insert_before(node, add)
        node.replace_input_with(0, add.outputs[0])
        node.op_type = "Floor"


def never_writes_30(model: ir.Model) -> None:
    numbers = [ir.val(f"n{n}", const_value=ir.tensor(np.int8(n))) for n in (30, 31)]
    for scatter in nodes_of(model, "TensorScatter"):
        rounded = scatter.inputs[1]
        assert rounded is not None
        equal = ir.node("Equal", [rounded, numbers[0]])
        where = ir.node("Where", [equal.outputs[0], numbers[1], rounded])
        for node in (equal, where):
            node.outputs[0].name = f"{scatter.name}_{node.op_type}"
            model.graph.insert_before(scatter, node)
        scatter.replace_input_with(1, set_type(where.outputs[0], rounded.dtype, rounded.shape))


FORGED: dict[str, tuple[str, Edit]] = {
    "it rounds down": ("int4", other("Round", "Floor")),
    "a lower end": ("int4", times("Max", 1, 0.5)),
    "another offset": ("int4", times("Min", 1, 0.9)),
    "swapped nibbles": ("int4", swapped_nibbles),
    "it reads by another scale": ("int8", times("DequantizeLinear", 1, 1.01)),
    "it writes by another scale": ("int8", times("QuantizeLinear", 1, 1.01)),
    "it never writes 30": ("int8", never_writes_30),
    "it rounds ties up": ("int4", ties_go_up),
    "another order of the batch": ("int8", after_reading("Slice", -1, -(2**62), 0, -1)),
    "a part of the capacity": ("int8", after_reading("Slice", 0, 256, 2, 1, length="some")),
}


@pytest.mark.parametrize(("kv_dtype", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("kv_scale", ["per-tensor", "per-channel"])
def test_a_cache_of_integers_is_found_with_its_scales(kv_dtype: str, bits: int, kv_scale: str):
    found = cache_of(model_of(kv_dtype, kv_scale))
    assert found is not None
    assert found.bits == bits
    assert found.k_scale.ndim == (0 if kv_scale == "per-tensor" else 3)
    assert found.cache.past_key.name == "past_key"


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_cache_is_not_taken_for_one(name: str):
    kv_dtype, edit = FORGED[name]
    model = model_of(kv_dtype)
    edit(model)
    assert cache_of(model) is None


def test_a_value_that_grows_is_not_computed():
    x = ir.val("x", ir.DataType.FLOAT, [1])
    shape = ir.val("shape", const_value=ir.tensor(np.array([10**6])))
    nodes = [ir.node("Expand", [x, shape], name="expand")]
    nodes.append(ir.node("ReduceMax", nodes[0].outputs, name="largest"))
    for node in nodes:
        node.outputs[0].name = f"{node.name}.out"
    ir.Graph([x], nodes[1].outputs, nodes=nodes, opset_imports={"": 23})
    array = np.ones(1, np.float32)
    assert computed(nodes[1].outputs[0], {nodes[0].outputs[0]: array}) is not None
    assert computed(nodes[1].outputs[0], {x: array}) is None
