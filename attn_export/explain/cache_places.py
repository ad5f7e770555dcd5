"""Places in caches of keys and values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import onnx

from attn_export.explain.faults.fault import (
    Changes,
    GraphPlace,
    array_of,
    together,
)
from attn_export.float64.attention_steps import Steps
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array


def _scatters(evaluation: Evaluation) -> dict[str, onnx.NodeProto]:
    """Return the nodes that write a cache: a TensorScatter by ``"keys"``, another by ``"values"``.

    Return an empty dict unless there is exactly one of each.
    """
    scatters = {}
    for name, past in (("keys", "past_key"), ("values", "past_value")):
        found = [n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past]
        if len(found) == 1:
            scatters[name] = found[0]
    return scatters if len(scatters) == 2 else {}


def cache_writes(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield where a cache is written: steps are ``value``, the lengths, and ``written``."""
    parts = [
        (name, scatter.name, functools.partial(_write, evaluation, scatter))
        for name, scatter in _scatters(evaluation).items()
    ]
    if parts:
        both = together([compute for *_, compute in parts])
        yield GraphPlace("keys and values", parts[0][1], given={"tags": {"both"}}, compute=both)
    for name, node, compute in parts:
        yield GraphPlace(name, node, given={"tags": set()}, compute=compute)


def _write(
    evaluation: Evaluation, node: onnx.NodeProto, values: Values, changes: Changes
) -> Mapping[str, Array]:
    past, _, lengths = (array_of(values, name) for name in node.input[:3])
    at = Steps(changes, {"past": past})
    moved = {**values, node.input[2]: at.set("value", lengths)}
    name = node.output[0]
    return {name: at.set("written", evaluation.compute_node(node, moved)[name])}
