"""Conversion of graphs of opset 13 and later to a newer opset, such as that of `Attention`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from attn_export.errors import GraphError
from attn_export.graph.ir_helpers import constant, optional_input

FIRST = 13
"""The oldest opset. Before it, Softmax, Squeeze and Unsqueeze are other operators."""


def raise_opset(model: ir.Model, opset: int) -> None:
    """Convert the nodes of a graph to a newer opset, and declare it; an older one changes nothing.

    https://github.com/onnx/onnx/blob/main/docs/Changelog.md: from opset 13 to 24, most operators
    only get more types, and attributes with the old meaning as default. The others are here.

    Args:
        model: The graph; changed in place.
        opset: The opset.

    Raises:
        GraphError: If a node means something else in the newer opset.
    """
    old = model.graph.opset_imports.get("", opset)
    if old >= opset:
        return
    if old < FIRST:
        raise GraphError(f"the graph has opset {old}; export it at opset {FIRST} or later")
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain in ("", "ai.onnx"):
            _raise(model, node, old, opset)
    model.graph.opset_imports[""] = opset
    model.ir_version = max(model.ir_version, 10)


def _raise(model: ir.Model, node: ir.Node, old: int, new: int) -> None:
    if not onnx.defs.has(node.op_type):
        raise GraphError(f"{node.name}: there is no operator {node.op_type}; export it again")
    schema = onnx.defs.get_schema(node.op_type, new)
    if node.op_type.startswith("Reduce") and "axes" in node.attributes:
        axes = constant(model, np.array(node.attributes.pop("axes").as_ints(), np.int64))
        node.resize_inputs(2)
        node.replace_input_with(1, axes)
    set_attribute = SET.get(node.op_type)
    if set_attribute is not None:
        set_attribute(node, old)
    differs = DIFFERS.get(node.op_type)
    if schema.deprecated or (differs is not None and differs(node) and schema.since_version > old):
        raise GraphError(
            f"{node.name}: {node.op_type} of opset {old} means something else in opset {new}; "
            "export it at a newer opset"
        )


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


SET: dict[str, Callable[[ir.Node, int], None]] = {
    "GridSample": _name_mode, "RoiAlign": _align_corners, "Split": _number_outputs,
}  # fmt: skip
"""Functions that state in attributes what older opsets do without them."""

DIFFERS: dict[str, Callable[[ir.Node], bool]] = {
    "AveragePool": lambda node: bool(node.attributes.get_int("ceil_mode", 0)),
    "BatchNormalization": lambda node: len(node.outputs) > 1,
    "GroupNormalization": lambda _: True,
    "Resize": lambda node: (
        node.attributes.get_string("coordinate_transformation_mode", "") == "tf_half_pixel_for_nn"
    ),
}
"""Operators of which some nodes have another meaning in newer opsets, with the test for these."""
