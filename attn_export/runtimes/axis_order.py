"""Inputs and outputs in the order of axes and the types of a graph, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Layouts = Mapping[str, Sequence[int]]
"""Axis orders by name, as in `GraphFile`."""


def laid_out(
    inputs: Mapping[str, np.ndarray], layouts: Layouts, dtypes: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Return inputs in the graph's order of axes, and of its types.

    Args:
        inputs: The inputs, by name.
        layouts: The order of axes, for each name that differs.
        dtypes: The type of integers, for each name that differs.
    """
    turned = {
        name: np.ascontiguousarray(inputs[name].transpose(order))
        for name, order in layouts.items()
        if name in inputs
    }
    cast = {name: inputs[name].astype(dtype) for name, dtype in dtypes.items() if name in inputs}
    return {**inputs, **turned, **cast}


def in_order(outputs: Mapping[str, np.ndarray], layouts: Layouts) -> dict[str, np.ndarray]:
    """Return outputs in their usual order of axes.

    Args:
        outputs: The outputs, by name.
        layouts: The order of axes, for each name that differs.
    """
    return {**outputs} | {
        name: outputs[name].transpose(np.argsort(order))
        for name, order in layouts.items()
        if name in outputs
    }
