"""Sizes of dynamic axes, and random inputs: the same seed words give the same arrays anywhere."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from attn_export.results import Case
from attn_export.spec import Input, Shape
from attn_export.tensorfile import ArrayDict, is_floating, numpy_dtype

# -- sizes of dynamic axes: those of the example, and sums of others ----------------------------

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


# -- random input arrays ------------------------------------------------------------------------

VISIBLE = 0.7
"""The share of True, or of finite values, in a random mask."""


class FunctionInputs(dict[str, Input]):
    """Descriptions of inputs by name, which a function of the user's draws.

    Args:
        inputs: The descriptions.
        function: Returns the arrays at some sizes.
    """

    def __init__(
        self,
        inputs: Mapping[str, Input],
        function: Callable[[Sizes, np.random.Generator], ArrayDict],
    ) -> None:
        super().__init__(inputs)
        self.function = function


def seed_of(*words: str | int) -> int:
    """Return a seed that depends only on the words."""
    return zlib.crc32(repr(words).encode())


def generator(*words: str | int) -> np.random.Generator:
    """Return a random generator that depends only on the words."""
    return np.random.default_rng(seed_of(*words))


def concrete(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """Replace the names of dynamic axes in a shape by sizes.

    Args:
        shape: Sizes or names of axes.
        sizes: Sizes of the axes, by name.
    """
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)


Limit = int | np.ndarray
"""The least or the largest value: of all elements, or of each along the last axis."""


def limits(wanted: Input, sizes: Sizes) -> tuple[Limit, Limit]:
    """Return the range of an integer input at some sizes.

    Args:
        wanted: The description of the input.
        sizes: Sizes of the axes, by name.
    """
    low = wanted.low
    high = sizes[wanted.high] if isinstance(wanted.high, str) else wanted.high
    if not wanted.columns:
        return low, high
    (width,) = concrete(wanted.shape[-1:], sizes)
    lows, highs = np.full(width, low), np.full(width, high)
    for start, least, largest in wanted.columns:
        lows[start:], highs[start:] = least, largest
    return lows, highs


def draw_inputs(
    inputs: Mapping[str, Input], sizes: Sizes, *, seed_words: tuple[str | int, ...]
) -> ArrayDict:
    """Draw every input: normal floats, integers of its range, masks with 70 % visible keys.

    Key 0 is visible in every row of a mask, so that a masked row comes only from a probe.

    Args:
        inputs: Every input by name.
        sizes: The size of every dynamic axis.
        seed_words: The same words give the same arrays.

    Raises:
        ValueError: If a dtype is neither floating point nor integer nor bool.
    """
    if isinstance(inputs, FunctionInputs):
        return inputs.function(sizes, generator(*seed_words))
    return {
        name: _draw(name, wanted, sizes, generator(*seed_words, name))
        for name, wanted in inputs.items()
    }


def _draw(name: str, wanted: Input, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    size, dtype = concrete(wanted.shape, sizes), numpy_dtype(wanted.dtype)
    if dtype == np.bool_:
        # A last axis of 1 that is no number of keys may as well be all False.
        mixed = wanted.first is None or wanted.shape[-1:] == (1,)
        drawn = _visible(rng, size, with_first=not mixed)
        return drawn if wanted.first is not False else ~drawn
    if np.issubdtype(dtype, np.integer):
        if wanted.first and (wanted.low, wanted.high) == (0, 1):  # a mask
            return np.asarray(_visible(rng, size, with_first=True).astype(dtype))
        return rng.integers(*limits(wanted, sizes), size, dtype, endpoint=True)
    if not is_floating(dtype):
        raise ValueError(f"cannot draw values for {name} of type {dtype}")
    values = rng.standard_normal(size)
    if name == "attn_mask" or wanted.hides:
        values = np.where(_visible(rng, size, with_first=True), values, -np.inf)
    return np.asarray(values.astype(dtype))


def scaled(inputs: Mapping[str, np.ndarray], factor: float) -> ArrayDict:
    """Return inputs with all floating values multiplied, but for those of `attn_mask`.

    Args:
        inputs: The inputs, by name; of any shape.
        factor: The factor.
    """
    return {
        name: (array * factor).astype(array.dtype)
        if name != "attn_mask" and is_floating(array.dtype)
        else array
        for name, array in inputs.items()
    }


def scaled_case(case: Case, factor: float) -> Case:
    """Return a case with its floating inputs multiplied.

    Args:
        case: The case.
        factor: The factor.
    """
    about = f"{case.about}; inputs times {factor:g}"
    return dataclasses.replace(case, inputs=scaled(case.inputs, factor), about=about)


def with_other_signs(case: Case, number: int) -> Case:
    """Return a case with the signs of its floating inputs drawn anew, but for `attn_mask`.

    Args:
        case: The case.
        number: Of the draw: each gives others.
    """
    rng = generator("signs", case.name, number)
    inputs = {
        name: array * rng.choice(np.array([-1, 1], array.dtype), array.shape)
        if name != "attn_mask" and is_floating(array.dtype)
        else array
        for name, array in case.inputs.items()
    }
    return dataclasses.replace(case, inputs=inputs)


def _visible(rng: np.random.Generator, size: tuple[int, ...], *, with_first: bool) -> np.ndarray:
    mask = np.asarray(rng.random(size) < VISIBLE)
    if with_first and mask.ndim:
        mask[..., 0] = True
    return mask
