"""What faults of quantised layers are: changes of graphs, with the cause that is named for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from graph_surgery import Graph

from attn_export.float64.evaluate import Evaluation
from attn_export.results import Arrays

Array = np.ndarray[Any, Any]
Run = Callable[[Arrays], Mapping[str, Array]]
Edit = Callable[[Graph], None]
Faults = Mapping[str, tuple[str | None, Edit]]
"""The kind of the cause and the fault, by name; the cause is "" if no known fault has these
outputs, and None if it depends on values near a tie."""


def run_with(edit: Edit | None, model: onnx.ModelProto) -> Run:
    """Return what computes a graph with a fault in float64."""
    graph = Graph(onnx.ModelProto())
    graph.model.CopyFrom(model)
    if edit is not None:
        edit(graph)
        assert graph.model != model, "no change"
    evaluation = Evaluation(graph.model)
    return lambda inputs: evaluation.outputs_of(evaluation.values(inputs))


def digits(count: int) -> Callable[[Array], Array]:
    """Return the rounding to so many binary digits."""
    return lambda x: np.ldexp(np.rint(np.frexp(x)[0] * 2**count) / 2**count, np.frexp(x)[1])


def neighbours(x: Array) -> Array:
    """Swap elements 2i and 2i + 1 of rows, as two that share a byte may be."""
    return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


def both(*edits: Edit) -> Edit:
    def edit(graph: Graph) -> None:
        for each in edits:
            each(graph)

    return edit
