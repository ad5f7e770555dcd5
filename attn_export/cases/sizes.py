"""Sizes of dynamic axes: those of the example, and sums of others."""

from __future__ import annotations

from collections.abc import Mapping

from attn_export.spec import Input

Sizes = Mapping[str, int]

TRACED_SIZES: Sizes = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 9,
}  # fmt: skip
"""The sizes of the example that is traced: all different, all at least 2."""


def axis_names(inputs: Mapping[str, Input], relations: Mapping[str, str]) -> list[str]:
    """The dynamic axes of some inputs, what bounds their integers, and sums of them."""
    found = {axis for wanted in inputs.values() for axis in wanted.shape if isinstance(axis, str)}
    return sorted(found | bounds(inputs) | set(relations))


def bounds(inputs: Mapping[str, Input]) -> set[str]:
    """The sizes up to which integers go."""
    return {wanted.high for wanted in inputs.values() if isinstance(wanted.high, str)}


def with_sums(sizes: Sizes, relations: Mapping[str, str]) -> dict[str, int]:
    """Sizes with those of the axes that others add up to."""
    return {**sizes} | {
        name: sum(int(t) if t.isdigit() else sizes[t] for t in terms.replace(" ", "").split("+"))
        for name, terms in relations.items()
    }
