"""Validity of the graphs of probes, and of the inputs for them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from attn_export.parts.probe.probe_graphs import ORT, PORTABLE, STANDARD, write_graph
from attn_export.parts.probe.run_probes import probes
from attn_export.tensorproto import DTYPES

PROBES = probes()
GRAPHS = {probe.graph.name: probe.graph for probe in PROBES}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=lambda g: g.name)
@pytest.mark.parametrize("dialect", [STANDARD, PORTABLE, ORT])
def test_a_graph_is_valid_in_the_dialects_that_can_say_it(graph, dialect: str, tmp_path: Path):
    path = write_graph(graph, dialect, tmp_path)
    is_portable = graph.operator == "Attention" and graph.opset < 25  # 25 has windows
    has = {graph.dialect, *([PORTABLE] if is_portable else [])}
    assert (path is not None) == (dialect in has)
    if path is None:
        return
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    kinds = {node.op_type for node in model.graph.node}
    assert (graph.operator in kinds) == (dialect == graph.dialect)


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_inputs_are_those_of_the_graph_in_its_order(probe, tmp_path: Path):
    path = write_graph(probe.graph, probe.graph.dialect, tmp_path)
    declared = onnx.load(path).graph.input
    assert [end.name for end in declared] == list(probe.inputs)
    for end in declared:
        kind, array = end.type.tensor_type, probe.inputs[end.name]
        assert DTYPES[kind.elem_type] == array.dtype.name
        assert len(kind.shape.dim) == array.ndim
        for dim, size in zip(kind.shape.dim, array.shape, strict=True):
            assert not dim.dim_value or dim.dim_value == size


def test_a_name_is_of_one_graph_and_its_probes_have_the_same_inputs_in_the_same_order():
    for probe in PROBES:
        assert probe.graph == GRAPHS[probe.graph.name]
    for graph in GRAPHS:
        assert len({tuple(probe.inputs) for probe in PROBES if probe.graph.name == graph}) == 1
