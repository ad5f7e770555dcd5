"""Smaller cases that a failing case contains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from conftest import on
from graph_surgery import Graph
from shared import bundle_of

from attn_export.commands.explain_bundle import explain
from attn_export.explain.experiments import smaller_cases

AXES = {"x": ("batch", "query_len", 4)}
INPUTS = {"x": np.arange(2 * 5 * 4.0).reshape(2, 5, 4)}


def test_the_smallest_part_is_one_row_and_one_query_and_the_largest_the_case():
    parts = list(smaller_cases(INPUTS, AXES, {"batch": 2, "query_len": 5}))
    assert parts[0][0] == {"batch": 1, "query_len": 1}
    np.testing.assert_array_equal(parts[0][1]["x"], INPUTS["x"][:1, :1])
    assert max(part["x"].shape[1] for _, part in parts) == 5


def test_a_damaged_case_whose_inputs_have_other_sizes_stays_whole():
    for sizes in ({"batch": 2, "query_len": 8}, {"batch": 3, "query_len": 5}):
        ((found, part),) = smaller_cases(INPUTS, AXES, sizes)
        assert found == sizes
        np.testing.assert_array_equal(part["x"], INPUTS["x"])


def test_a_smaller_case_has_what_a_causal_mask_changes(tmp_path: Path):
    graph = Graph(onnx.load(bundle_of("in-place") / "model.onnx"))
    graph.set_attribute(graph.one("Attention"), "is_causal", 0)
    path = tmp_path / "changed.onnx"
    onnx.save(graph.model, path)
    found = explain(bundle_of("in-place"), on("ort-cpu"), graph=path, seconds=20)
    assert found.smallest["query_len"] == 2  # the least that a causal mask changes
