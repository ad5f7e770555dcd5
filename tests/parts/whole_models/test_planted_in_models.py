"""Faults that `scripts/whole_model_faults` plants: they are faults, and their places are known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planted.config_faults import CONFIG_FAULTS
from planted.judging import EXPORTS, LEAST_GRAPH, RightGraph
from planted.node_faults import NODE_FAULTS
from planted.weight_faults import WEIGHT_FAULTS

GRAPH = RightGraph(EXPORTS / "llama" / "optimum" / "model.onnx")


def test_at_least_sixty_kinds_have_names_of_their_own():
    kinds = [kind.name for kind in (*CONFIG_FAULTS, *NODE_FAULTS, *WEIGHT_FAULTS)]
    assert len(set(kinds)) == len(kinds) >= 60


@pytest.mark.parametrize("fault", CONFIG_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_a_config_changes_one_field_of_some_config(fault):
    found = 0
    for path in EXPORTS.glob("*/checkpoint/config.json"):
        config = json.loads(path.read_text())
        changed = fault.change(config)
        if changed is not None:
            assert len([key for key in changed if changed[key] != config.get(key, "")]) == 1
            found += 1
        assert config == json.loads(path.read_text())
    assert found


def test_an_edit_says_its_place_and_moves_the_outputs():
    kind = next(fault for fault in WEIGHT_FAULTS if fault.name == "matrix: 1 % of scale")
    edited = GRAPH.edited()
    assert GRAPH.distance(edited.model) == 0
    names = list(kind.places(edited))[-2]()
    assert "/model/layers.1/mlp/down_proj/MatMul" in names
    assert edited.layers_at(names) == {1}
    assert LEAST_GRAPH < GRAPH.distance(edited.model) < 0.01


def test_a_graph_that_cannot_run_is_no_fault():
    edited = GRAPH.edited()
    name = edited.matrices()[0]
    edited.put(name, np.zeros((3, 5), np.float32))
    assert GRAPH.distance(edited.model) is None
