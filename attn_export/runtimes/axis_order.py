"""Conversion of inputs and outputs between the layout of the cases and that of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Layouts = Mapping[str, Sequence[int]]
"""The permutation of axes of each input or output that a graph has transposed; see `GraphFile`."""


def to_graph_layout(
    inputs: Mapping[str, np.ndarray], layouts: Layouts, dtypes: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Return inputs, transposed and cast to the layout and dtypes of a graph."""
    transposed = {
        name: np.ascontiguousarray(inputs[name].transpose(order))
        for name, order in layouts.items()
        if name in inputs
    }
    cast = {name: inputs[name].astype(dtype) for name, dtype in dtypes.items() if name in inputs}
    return {**inputs, **transposed, **cast}


def to_case_layout(outputs: Mapping[str, np.ndarray], layouts: Layouts) -> dict[str, np.ndarray]:
    """Return outputs of a graph, transposed back to the layout of the cases."""
    return {**outputs} | {
        name: outputs[name].transpose(np.argsort(order))
        for name, order in layouts.items()
        if name in outputs
    }
