"""Shapes of named inputs and outputs: dynamic axes with bounds, arrays and tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.cases.draw import MAX_SIZE, Bounds, Sizes, add_sums
from attn_export.errors import UsageError
from attn_export.spec import Shape
from attn_export.tensorfile import numpy_dtype

# -- axes of the outputs of a user's module, inferred by running it -----------------------------


def infer_output_shapes(
    run: Callable[[Sizes], Mapping[str, tuple[int, ...]]],
    axes: Iterable[str],
    relations: Mapping[str, str],
    limits: Bounds,
) -> dict[str, Shape]:
    """Return the shapes of a module's outputs, with names for dynamic axes.

    The module runs at two sets of sizes. An axis whose size changes has the name of the dynamic
    axis with both its sizes, or "" if there is none.

    `run`: A function that runs the module at some sizes and returns its outputs' shapes.
    """
    free = sorted(set(axes) - relations.keys())

    def sizes_of_run(base: int) -> dict[str, int]:
        # All sizes are different and have the same remainder, so that the sum of two is no third.
        sizes = {}
        for index, name in enumerate(free):
            low, high = limits.get(name, (1, MAX_SIZE))
            size = base * 2 + 1 + 5 * index * base
            sizes[name] = low + (size - low if size >= low else size) % (high - low + 1)
        return add_sums(sizes, relations)

    first_sizes, second_sizes = sizes_of_run(2), sizes_of_run(3)
    names = {(first_sizes[name], second_sizes[name]): name for name in first_sizes}
    first_shapes, second_shapes = run(first_sizes), run(second_sizes)
    return {
        output: tuple(
            first if first == second else names.get((first, second), "")
            for first, second in zip(shape, second_shapes[output], strict=True)
        )
        for output, shape in first_shapes.items()
    }


# -- arrays and tensors of the same values, bfloat16 included -----------------------------------

_HUGE = 1e4
"""The size of numbers that stand for infinity in masks of any floating type."""


def to_torch(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors of the same values."""
    return {name: _tensor(array) for name, array in arrays.items()}


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return arrays of the same values."""
    return {name: _array(tensor.detach().cpu()) for name, tensor in tensors.items()}


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # torch does not convert numpy's bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    array: np.ndarray = tensor.numpy()
    return array


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two runs of the same operations may give these results, of any shape."""
    if a.shape != b.shape:
        return False
    usual = b[b.abs() < _HUGE] if b.is_floating_point() else b.new_zeros(0)
    size = max(1.0, float(usual.abs().max())) if usual.numel() else 1.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, shared ones under each of their names."""
    state: dict[str, Tensor] = {}
    state.update(module.named_parameters(remove_duplicate=False))
    state.update(module.named_buffers(remove_duplicate=False))
    return state


# -- dynamic axes with bounds -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    """Name of a dynamic axis, with the sizes that it may have.

    A `torch.export.Dim` may be used in its place.

    Attributes:
        name: The name of the axis; axes of one name have one size.
        min: The least size. Default: 1, or 0 for an axis that acts as a past.
        max: The largest size; None if there is none.
    """

    name: str
    min: int | None = None
    max: int | None = None


def read_axes(axes: Any) -> tuple[Any, Bounds, set[str]]:
    """Return the names of axes, the bounds of those that have any, and which have a least size.

    Returns:
        The names, see `Subject`; the bounds, by name; and the names of axes whose least size is
        given. Objects that are no axes stay as they are; `check_arguments` raises an error for
        them.
    """
    limits: dict[str, tuple[int | None, int | None]] = {}
    if not isinstance(axes, Mapping):
        return axes, {}, set()
    names: dict[Any, Any] = {}
    for name, dynamic in axes.items():
        names[name] = dynamic
        if isinstance(dynamic, Mapping):
            names[name] = {number: _name_of(axis, limits) for number, axis in dynamic.items()}
    bounds = {n: _bounds_of(*ends) for n, ends in limits.items() if ends != (None, None)}
    return names, bounds, {name for name, (low, _) in limits.items() if low is not None}


def _bounds_of(low: int | None = None, high: int | None = None) -> tuple[int, int]:
    return 1 if low is None else low, MAX_SIZE if high is None else high


def _name_of(axis: Any, limits: dict[str, tuple[int | None, int | None]]) -> object:
    if isinstance(axis, str) or not hasattr(axis, "min"):
        return axis
    # Without bounds, a Dim has 0 as its minimum and an object for infinity as its maximum.
    high = axis.max if isinstance(axis.max, int) else None
    own = isinstance(axis, Axis)
    name, low = (axis.name, axis.min) if own else (axis.__name__, axis.min or None)
    least, most = _bounds_of(low, high)
    if not isinstance(least, int) or not 0 <= least < most:
        raise UsageError(f"Axis({name!r}) must have 0 <= min < max; got min {low} and max {high}")
    if limits.setdefault(name, (low, high)) != (low, high):
        before = _bounds_of(*limits[name])
        raise UsageError(
            f"axis {name!r} is {before[0]} to {before[1]} in one place and {least} to {most} in "
            "another; give it the same bounds everywhere"
        )
    return name


def named_axes(shape: Shape) -> dict[int, str]:
    """Return the names of the dynamic axes of a shape by their numbers."""
    return {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
