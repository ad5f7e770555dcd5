"""The inputs and outputs of a graph at given sizes."""

from __future__ import annotations

from collections.abc import Mapping

from attn_export.bench.arrays import Feed
from attn_export.errors import UsageError
from attn_export.spec import Input, Shape

Sizes = Mapping[str, int]


def feeds_of(inputs: Mapping[str, Input], sizes: Sizes) -> dict[str, Feed]:
    """Return the feed of each input.

    Masks hide nothing, `past_length` is full, positions are those after the past.

    Raises:
        UsageError: If an axis has no size.
    """
    return {
        name: Feed(shape_at(wanted.shape, sizes), wanted.dtype, _fill(name, wanted, sizes))
        for name, wanted in inputs.items()
    }


def known_feeds(outputs: Mapping[str, Shape], sizes: Sizes) -> dict[str, Feed]:
    """Return feeds for the outputs of known sizes; the graph determines their types."""
    return {
        name: Feed(shape_at(shape, sizes))
        for name, shape in outputs.items()
        if all(axis in sizes for axis in shape if isinstance(axis, str))
    }


def shape_at(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """Replace the names in a shape by sizes.

    Raises:
        UsageError: If a name has no size.
    """
    unknown = [axis for axis in shape if isinstance(axis, str) and axis not in sizes]
    if unknown:
        raise UsageError(
            f"no size is known for the axis {unknown[0]!r}; bench knows {', '.join(sizes)}"
        )
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)


def _fill(name: str, wanted: Input, sizes: Sizes) -> float | None:
    if wanted.dtype == "bool":
        return 1
    if name in ("past_length", "position_ids"):
        return sizes.get("past_len", 0)
    if name == "attn_mask" or not wanted.dtype.startswith(("float", "bfloat")):
        return 0
    return None
