"""Graphs with the branches that a case takes in place of their `If` nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from attn_export.explain.graph_evaluation import EvaluatedGraph
from attn_export.explain.graph_run import GoldenCase
from attn_export.float64.evaluate import Evaluation
from attn_export.tensorfile import Array


def in_one_branch(
    suspect: EvaluatedGraph, counterpart: EvaluatedGraph, cases: Sequence[GoldenCase]
) -> tuple[EvaluatedGraph, EvaluatedGraph, list[GoldenCase]]:
    """Return two graphs without `If` nodes, and the cases that take the branches that they have."""
    graphs, chosen = [], list(cases)
    for graph in (suspect, counterpart):
        taken = {
            case.name: [bool(values[node.input[0]]) for node in _branching(graph.evaluation)]
            for case in chosen
            if (values := graph.values(case)) is not None
        }
        if not any(taken.values()):  # there is no such node, or no case can be computed
            graphs.append(graph)
            continue
        first = next(case for case in chosen if case.name in taken)
        chosen = [case for case in chosen if taken.get(case.name) == taken[first.name]]
        inputs = graph.runner.to_graph_layout(first.inputs)
        inlined = dataclasses.replace(graph, evaluation=_inlined(graph.evaluation, inputs))
        graphs.append(inlined)
    return graphs[0], graphs[1], chosen


def _branching(evaluation: Evaluation) -> list[onnx.NodeProto]:
    return [node for node in evaluation.nodes if node.op_type == "If"]


def _inlined(evaluation: Evaluation, inputs: Mapping[str, Array]) -> Evaluation:
    """Return a graph with the branches that it takes with some inputs, nested ones too."""
    if not _branching(evaluation):
        return evaluation
    values = evaluation.values(inputs)
    model = onnx.ModelProto()
    model.CopyFrom(evaluation.proto)
    del model.graph.node[:]
    for node in evaluation.nodes:
        if node.op_type != "If":
            model.graph.node.append(node)
            continue
        taken = "then_branch" if values[node.input[0]] else "else_branch"
        branch = next(a.g for a in node.attribute if a.name == taken)
        model.graph.initializer.extend(branch.initializer)
        model.graph.node.extend(branch.node)
        for inner, name in zip(branch.output, node.output, strict=True):
            identity = helper.make_node("Identity", [inner.name], [name], f"{node.name}.{name}")
            model.graph.node.append(identity)
    return _inlined(Evaluation(model), inputs)
