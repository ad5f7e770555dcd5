"""Inputs of a graph that are fixed to a value, and the branches that remain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants

from attn_export.errors import UsageError, printable
from attn_export.graph.ir_helpers import every_node
from attn_export.graph.load import load_graph
from attn_export.graph.save import replace_graph

_BOOLS = {"0": False, "1": True, "false": False, "true": True}

_PARSERS: Mapping[str, Callable[[str], object]] = {
    "b": lambda text: _BOOLS[text.lower()], "i": int, "u": int, "f": float,
}  # fmt: skip
"""Functions that read the text of a value, by numpy's kind of type."""


def fix_inputs(path: str, output: str, values: dict[str, str]) -> None:
    """Write a graph with fixed inputs, where an `If` on one is its branch."""
    model = load_graph(Path(path))
    graph = model.graph
    read_before = _read(graph)
    given = {str(value.name): value for value in graph.inputs}
    for name, text in values.items():
        value = given[name]
        value.const_value = ir.tensor(_array(value, text), value.dtype, name=name)
        graph.inputs.remove(value)
        graph.initializers.pop(name, None)  # in old files, an initialiser is an input's default
        graph.register_initializer(value)
    # Other constants are left as the exporter wrote them: the file is judged as it is.
    followers = {given[name] for name in values}
    for node in every_node(graph):
        if followers.intersection(node.inputs):
            followers.update(node.outputs)
    fold_constants(
        model, onnx_shape_inference=False,
        should_fold=lambda node: None if followers.intersection(node.inputs) else False,
    )  # fmt: skip
    common.RemoveUnusedNodesPass()(model)
    # Removed branches still count as readers in `Value.uses`.
    unread = read_before - _read(graph)
    for value in unread.intersection(graph.inputs):
        graph.inputs.remove(value)
    for value in unread.intersection(graph.initializers.values()):
        graph.initializers.pop(str(value.name))
    replace_graph(model, Path(output), beside=False)


def _read(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that nodes read, and the outputs."""
    inside = {value for node in every_node(graph) for value in node.inputs if value is not None}
    return inside.union(graph.outputs)


def _array(value: ir.Value, text: str) -> np.ndarray:
    """Return the array of one element that a text means for an input."""
    name, dtype = printable(str(value.name), 60), value.dtype
    shape = None if value.shape is None else list(value.shape)
    if shape is None or any(size != 1 for size in shape):
        raise UsageError(
            f"--fix-input {name}: its shape is {'unknown' if shape is None else value.shape}, and "
            "only a scalar or a tensor of one element can be fixed"
        )
    kind = "" if dtype is None else dtype.numpy().kind
    if dtype is None or kind not in _PARSERS:
        raise UsageError(f"--fix-input {name}: it is no bool, integer or float; feed it instead")
    try:
        with np.errstate(over="raise"):
            array = np.array(_PARSERS[kind](text), None if kind == "f" else dtype.numpy())
            return array.astype(dtype.numpy()).reshape([1] * len(shape))
    except (ValueError, KeyError, OverflowError, FloatingPointError):
        raise UsageError(
            f"--fix-input {name}: {printable(text, 60)!r} is not of its type "
            f"{dtype.name.lower()}; write {'1 or 0' if kind == 'b' else 'a number of that type'}"
        ) from None
