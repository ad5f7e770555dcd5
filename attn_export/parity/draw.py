"""Random input arrays: the same seed words give the same arrays on every machine."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from attn_export.parity.sizes import Sizes
from attn_export.results import Case
from attn_export.spec import Input, Shape
from attn_export.tensorfile import ArrayDict, is_floating, numpy_dtype

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
