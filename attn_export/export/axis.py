"""Dynamic axes with bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attn_export.errors import UsageError
from attn_export.parity.sizes import MOST, Bounds
from attn_export.spec import Shape


@dataclasses.dataclass(frozen=True)
class Axis:
    """Name of a dynamic axis, with the sizes that it may have.

    `torch.export.Dim` with the same arguments is taken as well.

    Attributes:
        name: The name of the axis; axes of one name have one size.
        min: The least size.
        max: The largest size; None if there is none.
    """

    name: str
    min: int = 1
    max: int | None = None


def read_axes(axes: Any) -> tuple[Any, Bounds]:
    """Return axes by name, and the bounds of those that have any.

    Args:
        axes: For each input its dynamic axes: a name, an `Axis` or a `torch.export.Dim` by number.

    Returns:
        The names as `Subject` has them; what is no axis is left for `check_inputs` to refuse.

    Raises:
        UsageError: If bounds are no sizes, or differ for one name.
    """
    bounds: dict[str, tuple[int, int]] = {}
    if not isinstance(axes, Mapping):
        return axes, bounds
    names: dict[Any, Any] = {}
    for name, dynamic in axes.items():
        names[name] = dynamic
        if isinstance(dynamic, Mapping):
            names[name] = {number: _name_of(axis, bounds) for number, axis in dynamic.items()}
    return names, {label: limits for label, limits in bounds.items() if limits != (1, MOST)}


def _name_of(axis: Any, bounds: dict[str, tuple[int, int]]) -> object:
    low, high = getattr(axis, "min", None), getattr(axis, "max", None)
    if isinstance(axis, str) or low is None:
        return axis
    # Dim has an infinity of its own for no bound above, and 0 for none below.
    high = high if isinstance(high, int) else None
    name, low = (axis.name, low) if isinstance(axis, Axis) else (axis.__name__, low or 1)
    limits = (low, MOST if high is None else high)
    if not isinstance(low, int) or not 1 <= low < limits[1]:
        raise UsageError(f"Axis({name!r}) must have 1 <= min < max; got min {low} and max {high}")
    if bounds.setdefault(name, limits) != limits:
        raise UsageError(
            f"axis {name!r} is {bounds[name][0]} to {bounds[name][1]} in one place and {limits[0]} "
            f"to {limits[1]} in another; give it the same bounds everywhere"
        )
    return name


def named_axes(shape: Shape) -> dict[int, str]:
    """Return the names of the dynamic axes of a shape by their numbers."""
    return {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
