"""The cache as the graph holds it, whose axes may be in another order than the signature's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attn_kit.settings import AXES, LAYOUTS

Arrays = Mapping[str, np.ndarray]


def to_graph(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return arrays of the signature as the graph takes them."""
    return {name: _ordered(array, LAYOUTS.get(name)) for name, array in arrays.items()}


def from_graph(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return arrays of the graph as the signature has them."""
    inverse = {name: list(map(int, np.argsort(order))) for name, order in LAYOUTS.items()}
    return {name: _ordered(array, inverse.get(name)) for name, array in arrays.items()}


def graph_axes(name: str) -> list[int | str]:
    """Return the axes of an input or output in the order of the graph."""
    return [AXES[name][axis] for axis in LAYOUTS.get(name, range(len(AXES[name])))]


def _ordered(array: np.ndarray, order: list[int] | None) -> np.ndarray:
    return array if order is None else np.ascontiguousarray(array.transpose(order))
