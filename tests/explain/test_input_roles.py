"""Roles of inputs with names of other people: masks, caches, positions and lengths."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from onnx import TensorProto, helper

from attn_export.explain.faults.inputs import IN_INPUTS
from attn_export.explain.input_roles import input_roles
from attn_export.explain.match import made_in
from attn_export.float64.evaluate import Evaluation

B, L, P = 2, 3, 4
SIZES: Mapping[str | int, int] = {"b": B, "t": L, "p": P, "s": P + L, 2: 2, 8: 8}
FLOAT, BOOL, INT = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
INPUTS: Mapping[str, tuple[int, list[str | int], str]] = {
    "hidden": (FLOAT, ["b", "t", 8], ""), "allow": (BOOL, ["b", "s"], "mask"),
    "bias": (FLOAT, ["b", 2, "t", "s"], "mask"), "where": (INT, ["b", "t"], "positions"),
    "seen": (INT, ["b"], "lengths"), "kbuf": (FLOAT, ["b", 2, "p", 8], "cache"),
    "kbuf_scale": (FLOAT, ["b", 2, "p"], ""), "new": (FLOAT, ["b", 2, "t", 8], ""),
    "attention_mask": (INT, ["b", "s"], "mask"), "past_k": (FLOAT, ["b", 2, "p", 8], "cache"),
}  # fmt: skip
"""The type, the axes and the role of each input."""


@pytest.fixture(scope="module")
def graph() -> Evaluation:
    nodes = [
        helper.make_node("Concat", ["kbuf", "new"], ["k_all"], name="keys", axis=2),
        helper.make_node("Concat", ["kbuf_scale", "kbuf_scale"], ["scales"], name="n", axis=2),
    ]
    inputs = [
        helper.make_tensor_value_info(name, kind, axes) for name, (kind, axes, _) in INPUTS.items()
    ]
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in ("k_all", "scales")]
    proto = helper.make_graph(nodes, "g", inputs, outputs)
    return Evaluation(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 23)]))


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    return {
        name: np.zeros([SIZES[axis] for axis in axes], helper.tensor_dtype_to_np_dtype(kind))
        for name, (kind, axes, _) in INPUTS.items()
    }


def test_roles_are_found_by_axes_and_readers(graph: Evaluation, values: dict[str, np.ndarray]):
    roles = {name: role for name, _, role in input_roles(graph, values)}
    assert roles == {name: role for name, (_, _, role) in INPUTS.items()}


def test_the_batch_of_a_mask_is_not_called_a_query(
    graph: Evaluation, values: dict[str, np.ndarray]
):
    effects = {made.effect for made in made_in(IN_INPUTS, graph, values)}
    assert "batch row 0 of allow is used for every batch row" in effects
    assert "query 0 of bias is used for every query" in effects
    assert not any(effect.startswith("query 0 of allow") for effect in effects)
    assert "kbuf is read as 0" in effects
