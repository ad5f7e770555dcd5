"""The builder of nodes: equal constants are shared, different ones are not."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from ir_graphs import model_of, value

from attn_export.graph.lower.node_builder import Builder


def builder() -> tuple[Builder, ir.Model]:
    x, y = value("x", "n"), value("y", "n")
    node = ir.node("Relu", [x], outputs=[y], name="relu")
    model = model_of([x], [y], [node])
    return Builder(model, node), model


def test_a_constant_is_held_once():
    op, model = builder()
    assert op.ints(1, 2) is op.ints(1, 2)
    assert op.scalar(0.5, ir.DataType.FLOAT) is op.scalar(0.5, ir.DataType.FLOAT)
    assert len(model.graph.initializers) == 2


def test_numbers_that_look_alike_are_not_taken_for_each_other():
    op, _ = builder()
    first, second = (op.scalar(x, ir.DataType.FLOAT) for x in (0.35355339, 0.35355358))
    assert first is not second
    held = [x.const_value.numpy().item() for x in (first, second)]
    assert held == [np.float32(0.35355339), np.float32(0.35355358)]
    assert op.scalar(0.35355358, ir.DataType.FLOAT) is second


def test_nodes_go_before_theirs_under_names_of_their_own():
    op, model = builder()
    source = model.graph.inputs[0]
    op("Neg", op("Neg", source))
    assert [node.name for node in model.graph] == ["relu/Neg", "relu/Neg_2", "relu"]


@pytest.mark.parametrize("axis", [0, -1])
def test_a_size_is_that_of_one_axis_from_either_end(axis: int):
    op, _ = builder()
    shape = op.size(op("Identity", value("z", "n", "m")), axis).producer()
    start, end = (shape.attributes.get(name) for name in ("start", "end"))
    sizes = [3, 5]
    assert sizes[start.value : None if end is None else end.value] == [sizes[axis]]
