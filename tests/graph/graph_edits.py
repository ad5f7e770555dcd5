"""Small edits of a ModelProto, for graphs that are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Edit = Callable[[onnx.ModelProto], None]

ATTENDED = "Attention.out"


def by_name(values, name: str):
    """Return the protobuf message that has the name."""
    (found,) = (value for value in values if value.name == name)
    return found


def dims_of(model: onnx.ModelProto, name: str):
    """Return the declared axes of a value, to be changed."""
    graph = model.graph
    value = by_name((*graph.input, *graph.output, *graph.value_info), name)
    return value.type.tensor_type.shape.dim


def insert(model: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    """Insert nodes after the Attention node; its readers read the last one's output instead."""
    new = nodes[-1].output[0]
    (at,) = (i for i, node in enumerate(model.graph.node) if ATTENDED in node.output)
    for node in model.graph.node:
        node.input[:] = [new if name == ATTENDED else name for name in node.input]
    for offset, node in enumerate(nodes):
        model.graph.node.insert(at + 1 + offset, node)


def axis(value: str, index: int, size: str | int) -> Edit:
    """Declare another size or name for an axis; "" for neither."""

    def edit(model):
        dim = dims_of(model, value)[index]
        dim.Clear()
        if isinstance(size, int):
            dim.dim_value = size
        elif size:
            dim.dim_param = size

    return edit


def rename(old: str, new: str) -> Edit:
    """Rename a value everywhere."""

    def edit(model):
        for value in (*model.graph.input, *model.graph.output):
            if value.name == old:
                value.name = new
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]

    return edit


def opset(version: int) -> Edit:
    return lambda model: setattr(model.opset_import[0], "version", version)


def ir_version(version: int) -> Edit:
    return lambda model: setattr(model, "ir_version", version)


def after_attention(kind: str, *inputs: str, domain: str = "", **attributes: object) -> Edit:
    """Add one more node that reads the attention's result first."""

    def edit(model):
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))
        node = helper.make_node(
            kind, [ATTENDED, *inputs], ["extra"], name="extra", domain=domain, **attributes
        )
        insert(model, node)

    return edit


def constant(name: str, array: np.ndarray) -> Edit:
    """Add one more initialiser."""
    return lambda model: model.graph.initializer.append(numpy_helper.from_array(array, name))


def text(where: str, path: str) -> Edit:
    """Add a text with a path, as the exporter leaves it, at one location."""

    def edit(model):
        graph = model.graph
        holder = {
            "model": model,
            "graph": graph,
            "node": by_name(graph.node, "q_proj/MatMul"),
            "input": by_name(graph.input, "query"),
            "value": by_name(graph.value_info, "q_proj/Add.out"),
            "initializer": by_name(graph.initializer, "q_proj.weight"),
        }[where]
        holder.doc_string = f"made by {path}"
        holder.metadata_props.add(key="stack_trace", value=f'File "{path}", line 3, in forward')

    return edit


def external(**entries: str) -> Edit:
    """Declare that the values of `q_proj.weight` lie in a file."""

    def edit(model):
        tensor = by_name(model.graph.initializer, "q_proj.weight")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in ({"location": "weights.bin"} | entries).items():
            tensor.external_data.add(key=key, value=value)

    return edit


# -- edits that are too long for a line of the table ------------------------------------------


def node_after_its_reader(model):
    shape = by_name(model.graph.node, "Shape")
    model.graph.node.append(shape)
    model.graph.node.remove(shape)


def unknown_attribute(model):
    transpose = by_name(model.graph.node, "Transpose")
    transpose.attribute.append(helper.make_attribute("nonsense", 1))


def narrow_weight(model):
    by_name(model.graph.initializer, "q_proj.weight").dims[:] = [16, 64]
    declared = dims_of(model, "q_proj.weight")
    declared[0].dim_value, declared[1].dim_value = 16, 64


def without_mask(model):
    by_name(model.graph.node, "Attention").input[3] = ""
    for name in ("Shape", "Concat", "Expand"):
        model.graph.node.remove(by_name(model.graph.node, name))
    for values, name in (
        (model.graph.input, "attn_mask"),
        (model.graph.initializer, "int64[1]_1"),
        (model.graph.value_info, "Expand.out"),
    ):
        values.remove(by_name(values, name))


def reversed_inputs(model):
    inputs = list(model.graph.input)
    del model.graph.input[:]
    model.graph.input.extend(reversed(inputs))


def without_attention(model):
    """Replace attention by two Concat nodes for the cache, with the query as the result."""
    without_mask(model)
    attention = by_name(model.graph.node, "Attention")
    at = list(model.graph.node).index(attention)
    model.graph.node.remove(attention)
    for past, new, present in (
        ("past_key", "Transpose_2.out", "present_key"),
        ("past_value", "Transpose_3.out", "present_value"),
    ):
        node = helper.make_node("Concat", [past, new], [present], axis=2)
        model.graph.node.insert(at, node)
    model.graph.node.insert(at, helper.make_node("Add", ["Transpose.out"] * 2, [ATTENDED]))


def through_float64(model):
    there = helper.make_node("Cast", [ATTENDED], ["wide"], name="up", to=TensorProto.DOUBLE)
    back = helper.make_node("Cast", ["wide"], ["narrow"], to=TensorProto.FLOAT)
    insert(model, there, back)


def declared_float64(model):
    through_float64(model)
    shape = ["batch", 4, "query_len", 8]
    model.graph.value_info.append(helper.make_tensor_value_info("wide", TensorProto.DOUBLE, shape))


def float64_constant(model):
    constant("half", np.full(8, 0.5))(model)
    through_float64(model)
    up = by_name(model.graph.node, "up")
    up.op_type, up.input[:] = "CastLike", [ATTENDED, "half"]
    del up.attribute[:]


def dead_node(model):
    model.graph.node.append(helper.make_node("Shape", ["query"], ["dead"], name="dead"))


def constant_twice(model):
    constant("another_one", np.ones(1, np.int64))(model)
    by_name(model.graph.node, "Concat").input[0] = "another_one"


def scale(value: float, operator: str = "DequantizeLinear") -> Edit:
    """Return the edit that quantises a weight, with one scale of this value."""

    def edit(model):
        weight = by_name(model.graph.initializer, "q_proj.weight")
        scales = np.full(weight.dims[1], 0.5, np.float32)
        scales[3] = value
        constant("scales", scales)(model)
        if operator == "DequantizeLinear":
            weight.CopyFrom(numpy_helper.from_array(np.ones(weight.dims, np.int8), "integers"))
            by_name(model.graph.node, "q_proj/MatMul").input[1] = "scaled"
        else:
            scaled = helper.make_tensor_value_info("scaled", TensorProto.UINT8, weight.dims)
            model.graph.output.append(scaled)
        inputs = [weight.name, "scales"]
        node = helper.make_node(operator, inputs, ["scaled"], name="DQ", axis=1)
        model.graph.node.insert(0, node)

    return edit


def long_range(count: int) -> Edit:
    """Return the edit that adds a chain of nodes over a range with so many elements."""

    def edit(model):
        for name, value in (("start", 0), ("limit", count), ("step", 1)):
            constant(name, np.int64(value))(model)
        model.graph.node.extend(
            [
                helper.make_node("Range", ["start", "limit", "step"], ["long"]),
                helper.make_node("Cast", ["long"], ["mean_of"], to=TensorProto.FLOAT),
                helper.make_node("ReduceMean", ["mean_of"], ["mean"], keepdims=0),
            ]
        )
        model.graph.output.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, []))

    return edit


def unread_input(model: onnx.ModelProto) -> None:
    """Add an input that no node reads."""
    model.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, ["batch"]))
