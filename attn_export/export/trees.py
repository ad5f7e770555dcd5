"""Shapes of named inputs and outputs: dynamic axes with bounds, arrays and tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.cases.draw import ANY, MAX_SIZE, Bounds, Sizes, add_sums, sizes_from, sizes_text
from attn_export.errors import UsageError
from attn_export.interface import Shape, axes_in, size_of
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
            allowed = limits.get(name, ANY)
            sizes[name] = allowed[(base * 2 + 5 * index * base) % len(allowed)]
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
    # Of narrower types, operations that are written out round more often than fused ones.
    rounding = 4 * torch.finfo(b.dtype).eps if b.is_floating_point() else 0.0
    rtol, atol = max(1e-4, rounding), max(1e-5, rounding) * size
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


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
        multiple_of: A number that divides all sizes.
        sizes: The only sizes that it may have, in place of the others.
    """

    name: str
    min: int | None = None
    max: int | None = None
    multiple_of: int = 1
    sizes: tuple[int, ...] = ()


def read_axes(
    axes: Any, relations: Mapping[str, str] | None = None
) -> tuple[Any, Bounds, set[str]]:
    """Return the names of axes, the sizes of those with bounds, and which have a least size.

    Returns:
        The names, see `Subject`; the sizes, by name; and the names of axes whose least size is
        given. Objects that are no axes stay as they are; `check_arguments` raises an error for
        them.
    """
    limits: dict[str, Axis] = {}
    if not isinstance(axes, Mapping):
        return axes, {}, set()
    names: dict[Any, Any] = {}
    for name, dynamic in axes.items():
        names[name] = dynamic
        if isinstance(dynamic, Mapping):
            names[name] = {number: _name_of(axis, limits) for number, axis in dynamic.items()}
    bounds = {n: allowed_by(axis) for n, axis in limits.items() if axis != Axis(n)}
    for name, text in (relations or {}).items():
        if str(text).startswith(_AT_LEAST):
            bounds[f"{name}{_SPARE}"] = range(MAX_SIZE + 1)
    given = {n for n, axis in limits.items() if axis.min is not None or axis.sizes}
    return names, bounds, given


def allowed_by(axis: Axis) -> Sequence[int]:
    """Return the sizes that an axis may have."""
    if axis.sizes:
        return tuple(sorted(set(axis.sizes)))
    most = MAX_SIZE if axis.max is None else axis.max
    all_sizes = range(0, most + 1, axis.multiple_of)
    return sizes_from(1 if axis.min is None else axis.min, all_sizes)


def _name_of(axis: Any, limits: dict[str, Axis]) -> object:
    if isinstance(axis, str) or not hasattr(axis, "min"):
        return axis
    if not isinstance(axis, Axis):
        # Without bounds, a Dim has 0 as its minimum and an object for infinity as its maximum.
        most = axis.max if isinstance(axis.max, int) else None
        axis = Axis(axis.__name__, axis.min or None, most)
    numbers = (axis.min or 0, axis.max or 0, axis.multiple_of, *axis.sizes)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or (
        axis.multiple_of < 1 or len(allowed_by(axis)) < 2
    ):
        raise UsageError(
            f"{axis_text(axis)} must allow two sizes or more: 0 <= min < max, a multiple_of of 1 "
            "or more, or sizes=(…)"
        )
    if (before := limits.setdefault(axis.name, axis)) != axis:
        shown, other = (sizes_text(allowed_by(each)) for each in (before, axis))
        raise UsageError(
            f"axis {axis.name!r} is {shown} in one place and {other} in another; give it the same "
            "bounds everywhere"
        )
    return axis.name


def axis_text(axis: Axis) -> str:
    """Return the code for an axis with bounds."""
    fields = {f.name: getattr(axis, f.name) for f in dataclasses.fields(axis)[1:]}
    shown = [
        f"{n}={v!r}"
        for n, v in fields.items()
        if v not in (None, ()) and (n, v) != ("multiple_of", 1)
    ]
    return f"Axis({', '.join([repr(axis.name), *shown])})"


def named_axes(shape: Shape) -> dict[int, str]:
    """Return the names of the dynamic axes of a shape by their numbers."""
    return {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}


def check_bounds(sizes: Sizes, bounds: Bounds, relations: Mapping[str, str]) -> None:
    """Check that the example obeys the bounds of its axes, and that cases can be drawn in them."""
    for name, allowed in bounds.items():
        if name in relations and getattr(allowed, "step", 0) != 1:
            raise UsageError(
                f"axis {name!r} has both a relation and multiple_of or sizes; give these to the "
                f"axes of relations[{name!r}] = {relations[name]!r}"
            )
        if sizes[name] not in allowed:
            raise UsageError(
                f"axis {name!r} is {sizes[name]} in the example, and {sizes_text(allowed)} by its "
                "bounds; give an example within them"
            )


# -- relations ------------------------------------------------------------------------------------

_AT_LEAST, _MULTIPLE_OF = ">=", "multiple of"
"""What relations start with whose axis is no less than a sum, or a multiple of an axis, but free
otherwise."""

_SPARE = "_spare"
"""What the name of such an axis gets for the name of what is free in it: what it has beyond that
sum, or how many of that axis it is."""


def _without_start(text: str) -> str:
    return text.removeprefix(_AT_LEAST).removeprefix(_MULTIPLE_OF).strip()


def check_relations(relations: Mapping[str, str], known: Sizes) -> None:
    """Check that sums consist of known axes or whole numbers, and that the example obeys them."""
    for name, text in relations.items():
        expression = _without_start(str(text))
        for term in axes_in(expression):
            if term not in known or term in relations or term == name:
                raise UsageError(
                    f"relations[{name!r}] = {text!r}: {term!r} is not an axis of an input; "
                    f"write a sum of {', '.join(sorted(known.keys() - relations.keys()))}"
                )
        total = size_of(expression, known)
        size = known.get(name, total)
        is_more = text.startswith(_AT_LEAST) and size > total
        is_multiple = text.startswith(_MULTIPLE_OF) and size % total == 0
        if size != total and not is_more and not is_multiple:
            raise UsageError(
                f"relations[{name!r}] = {text!r} is {total} in the example, where {name!r} "
                f"is {known[name]}; give an example that obeys it"
            )


def with_spares(relations: Mapping[str, str]) -> dict[str, str]:
    """Return relations as sums: an axis that may be larger than one has a spare size of its own."""
    sums = dict(relations)
    for name, text in relations.items():
        if str(text).startswith(_AT_LEAST):
            sums[name] = f"{_without_start(text)} + {name}{_SPARE}"
        if str(text).startswith(_MULTIPLE_OF):
            sums[name] = f"{_without_start(text)}*{name}{_SPARE}"
    return sums


def spares_of(sums: Mapping[str, str], sizes: Sizes) -> dict[str, int]:
    """Return the spare sizes in an example, by name."""
    found = {}
    for name, text in sums.items():
        if (spare := f"{name}{_SPARE}") in axes_in(text) and spare not in sizes:
            none, one = (size_of(text, {**sizes, spare: number}) for number in (0, 1))
            found[spare] = (sizes[name] - none) // (one - none)
    return found
