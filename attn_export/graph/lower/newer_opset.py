"""Conversion of graphs of opset 11 and later to a newer opset, such as that of `Attention`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import constant, dims, optional_input

_FIRST = 11
"""The oldest opset. Before it, Clip, Pad and Resize are other operators."""


def raise_opset(model: ir.Model, opset: int) -> None:
    """Convert the nodes of a graph to a newer opset, and declare it; an older one changes nothing.

    https://github.com/onnx/onnx/blob/main/docs/Changelog.md: from opset 11 to 24, most operators
    only get more types, and attributes with the old meaning as default. The others are here.
    """
    old = model.graph.opset_imports.get("", opset)
    if old >= opset:
        return
    if old < _FIRST:
        raise GraphError(f"the graph has opset {old}; export it at opset {_FIRST} or later")
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain in ("", "ai.onnx"):
            _raise(model, node, old, opset)
    model.graph.opset_imports[""] = opset
    model.ir_version = max(model.ir_version, 10)


def _raise(model: ir.Model, node: ir.Node, old: int, new: int) -> None:
    if not onnx.defs.has(node.op_type):
        raise GraphError(f"{node.name}: there is no operator {node.op_type}; export it again")
    schema = onnx.defs.get_schema(node.op_type, new)
    for name in {"axes", "split"} & node.attributes.keys() - schema.attributes.keys():
        numbers = constant(model, np.array(node.attributes.pop(name).as_ints(), np.int64))
        node.resize_inputs(2)
        node.replace_input_with(1, numbers)
    differs = _DIFFERS.get(node.op_type)
    if schema.deprecated or (differs is not None and differs(node) and schema.since_version > old):
        raise GraphError(
            f"{node.name}: {node.op_type} of opset {old} means something else in opset {new}; "
            "export it at a newer opset"
        )
    set_attribute = SET.get(node.op_type)
    if set_attribute is not None:
        set_attribute(node, old)


def _number_outputs(node: ir.Node, _: int) -> None:
    if optional_input(node, 1) is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _align_corners(node: ir.Node, old: int) -> None:
    name = "coordinate_transformation_mode"
    if old < 16:
        node.attributes[name] = ir.AttrString(name, "output_half_pixel")


def _name_mode(node: ir.Node, _: int) -> None:
    names = {"bilinear": "linear", "bicubic": "cubic"}
    mode = node.attributes.get_string("mode", "linear")
    node.attributes["mode"] = ir.AttrString("mode", names.get(mode, mode))


def _set_last_axis(node: ir.Node, old: int) -> None:
    if old < 13:  # where the default is 1
        node.attributes["axis"] = ir.AttrInt64("axis", -1)


def _is_not_over_last_axis(node: ir.Node) -> bool:
    rank = len(dims(node.inputs[0])) if node.inputs[0] is not None else 0
    return node.attributes.get_int("axis", 1) not in (-1, rank - 1)


def _drop_ratio(node: ir.Node, _: int) -> None:
    node.attributes.pop("ratio", None)  # which is for training


SET: dict[str, Callable[[ir.Node, int], None]] = {
    "Dropout": _drop_ratio, "GridSample": _name_mode, "Hardmax": _set_last_axis,
    "LogSoftmax": _set_last_axis,
    "RoiAlign": _align_corners, "Softmax": _set_last_axis, "Split": _number_outputs,
}  # fmt: skip
"""Functions that state in attributes what older opsets do without them."""

_DIFFERS: dict[str, Callable[[ir.Node], bool]] = {
    "AveragePool": lambda node: bool(node.attributes.get_int("ceil_mode", 0)),
    "BatchNormalization": lambda node: len(node.outputs) > 1,
    "GroupNormalization": lambda _: True,
    "Hardmax": _is_not_over_last_axis,
    "LogSoftmax": _is_not_over_last_axis,
    "Resize": lambda node: (
        node.attributes.get_string("coordinate_transformation_mode", "") == "tf_half_pixel_for_nn"
    ),
    "Softmax": _is_not_over_last_axis,
}
"""Operators of which some nodes have another meaning in newer opsets, with the test for these."""
