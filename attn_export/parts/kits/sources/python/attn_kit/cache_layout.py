"""Inputs that are caches, whose axes may have another order in the graph than in the signature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attn_kit.settings import AXES, LAYOUTS, PRESENTS

Arrays = Mapping[str, np.ndarray]


def is_cache(name: str) -> bool:
    """Return whether an input is a cache of keys or values."""
    return name in PRESENTS


def to_graph(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return arrays with their axes in the order of the graph, instead of the signature."""
    return {name: _transpose(array, LAYOUTS.get(name)) for name, array in arrays.items()}


def from_graph(arrays: Arrays) -> dict[str, np.ndarray]:
    """Return arrays with their axes in the order of the signature, instead of the graph."""
    inverse = {name: list(map(int, np.argsort(order))) for name, order in LAYOUTS.items()}
    return {name: _transpose(array, inverse.get(name)) for name, array in arrays.items()}


def graph_axes(name: str) -> list[int | str]:
    """Return the axes of an input or output in the order of the graph."""
    return [AXES[name][axis] for axis in LAYOUTS.get(name, range(len(AXES[name])))]


def _transpose(array: np.ndarray, order: list[int] | None) -> np.ndarray:
    return array if order is None else np.ascontiguousarray(array.transpose(order))
