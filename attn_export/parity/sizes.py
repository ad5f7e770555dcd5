"""Sizes of dynamic axes: those of the example, and sums of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attn_export.spec import Input, Shape

Sizes = Mapping[str, int]

MOST = 2**31 - 1
"""The largest size of an axis."""

Bounds = Mapping[str, tuple[int, int]]
"""The least and the largest size of axes that have bounds."""

TRACED_SIZES: Sizes = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 9,
}  # fmt: skip
"""The sizes of the example that is traced: all different, all at least 2."""


def axis_names(inputs: Mapping[str, Input], relations: Mapping[str, str]) -> list[str]:
    """Return the dynamic axes of inputs, the bounds of their integers, and the sums of axes.

    Args:
        inputs: Descriptions of the inputs, by name.
        relations: The axes that are sums of others.
    """
    found = {axis for wanted in inputs.values() for axis in wanted.shape if isinstance(axis, str)}
    return sorted(found | bounds(inputs) | set(relations))


def bounds(inputs: Mapping[str, Input]) -> set[str]:
    """Return the sizes that bound integer inputs."""
    return {wanted.high for wanted in inputs.values() if isinstance(wanted.high, str)}


def is_within(sizes: Sizes, bounds: Bounds) -> bool:
    """Return whether all sizes are within their bounds.

    Args:
        sizes: The size of every axis.
        bounds: The bounds of axes that have any.
    """
    return all(low <= sizes.get(name, low) <= high for name, (low, high) in bounds.items())


def into_bounds(sizes: Sizes, limits: Bounds) -> dict[str, int]:
    """Return the sizes, each of which is the nearest within its bounds.

    Args:
        sizes: The size of every axis.
        limits: The bounds of axes that have any.
    """
    return {
        name: min(max(size, limits[name][0]), limits[name][1]) if name in limits else size
        for name, size in sizes.items()
    }


def with_sums(sizes: Sizes, relations: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes, completed by the axes that are sums of others.

    Args:
        sizes: Sizes of the axes, by name.
        relations: The axes that are sums of others.
    """
    return {**sizes} | {
        name: sum(int(t) if t.isdigit() else sizes[t] for t in terms.replace(" ", "").split("+"))
        for name, terms in relations.items()
    }


def solved(fixed: Sizes, relations: Mapping[str, str]) -> dict[str, int]:
    """Return fixed sizes, completed by those that sums of one unknown term leave no choice.

    Args:
        fixed: The sizes of axes.
        relations: Axes that are sums of others.
    """
    found = dict(fixed)
    for name, terms in relations.items():
        parts = terms.replace(" ", "").split("+")
        unknown = [part for part in parts if not part.isdigit() and part not in found]
        if name in found and len(unknown) == 1:
            rest = (int(p) if p.isdigit() else found[p] for p in parts if p not in unknown)
            found[unknown[0]] = found[name] - sum(rest)
    return found


def fixed_shape(shape: Shape, fixed: Sizes) -> Shape:
    """Return a shape with the sizes of fixed axes in place of their names.

    Args:
        shape: Sizes, and names of dynamic axes.
        fixed: The sizes of axes.
    """
    return tuple(fixed.get(axis, axis) if isinstance(axis, str) else axis for axis in shape)


def fixed_inputs(inputs: Mapping[str, Input], fixed: Sizes) -> dict[str, Input]:
    """Return inputs with the sizes of fixed axes in place of their names.

    Args:
        inputs: Every input by name.
        fixed: The sizes of axes.
    """
    return {
        name: dataclasses.replace(
            wanted,
            shape=fixed_shape(wanted.shape, fixed),
            high=fixed.get(wanted.high, wanted.high)
            if isinstance(wanted.high, str)
            else wanted.high,
        )
        for name, wanted in inputs.items()
    }


def fixed_relations(relations: Mapping[str, str], fixed: Sizes) -> dict[str, str]:
    """Return sums with the sizes of fixed axes in place of their names.

    Args:
        relations: Axes that are sums of others.
        fixed: The sizes of axes.
    """
    return {
        name: " + ".join(str(fixed.get(term, term)) for term in terms.replace(" ", "").split("+"))
        for name, terms in relations.items()
        if name not in fixed
    }
