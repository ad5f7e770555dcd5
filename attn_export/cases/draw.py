"""Sizes of dynamic axes, the interface of a subject, and random inputs from seed words."""

from __future__ import annotations

import bisect
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attn_export.interface import (
    PAST,
    Input,
    Roles,
    Shape,
    Traits,
    axes_in,
    renamed,
    size_of,
    terms_of,
)
from attn_export.seeded_tensors import random_floats, visible_keys
from attn_export.tensorfile import ArrayDict, is_floating, numpy_dtype

# -- sizes of dynamic axes -----------------------------------------------------------------------

Sizes = Mapping[str, int]
"""The size of each dynamic axis, by name."""

MAX_SIZE = 2**31 - 1
"""The largest size of an axis."""

Bounds = Mapping[str, Sequence[int]]
"""The sizes that axes with bounds may have, ascending: a range, or a list."""

ANY: Sequence[int] = range(1, MAX_SIZE + 1)
"""The sizes of an axis without bounds."""

TRACED_SIZES: Sizes = {
    "batch": 2, "query_len": 5, "past_len": 7, "total_len": 12, "key_len": 9,
}  # fmt: skip
"""The sizes of the example that is traced: all different, all at least 2."""


def axis_names(inputs: Mapping[str, Input], sums: Mapping[str, str]) -> list[str]:
    """Return all names that need a size: axes of inputs, bounds of integers, and sums."""
    axes = {axis for input_ in inputs.values() for axis in input_.shape if isinstance(axis, str)}
    terms = {axis for text in sums.values() for axis in axes_in(text)}
    return sorted(axes | bounds(inputs) | set(sums) | terms)


def bounds(inputs: Mapping[str, Input]) -> set[str]:
    """Return the names of sizes that are the largest value of an integer input."""
    return {input_.high for input_ in inputs.values() if isinstance(input_.high, str)}


def is_within(sizes: Sizes, bounds: Bounds) -> bool:
    """Return whether all sizes are within their bounds."""
    return all(sizes.get(name, allowed[0]) in allowed for name, allowed in bounds.items())


def largest(allowed: Sequence[int]) -> int | None:
    """Return the largest size of an axis, or None if it has none."""
    is_endless = isinstance(allowed, range) and allowed.stop > MAX_SIZE
    return None if is_endless else allowed[-1]


def sizes_text(allowed: Sequence[int]) -> str:
    """Return the allowed sizes of an axis as text: ``8, 16 … 64``."""
    if not isinstance(allowed, range):
        return ", ".join(map(str, allowed))
    start = ", ".join(map(str, allowed[:2])) if allowed.step > 1 else str(allowed[0])
    between = " to " if allowed.step == 1 else " … "
    high = largest(allowed)
    return f"{start}{between}{high}" if high else f"{start} and so on"


def sizes_from(low: int, allowed: Sequence[int]) -> Sequence[int]:
    """Return the allowed sizes of an axis with another least size."""
    if isinstance(allowed, range):
        return range(-(-low // allowed.step) * allowed.step, allowed.stop, allowed.step)
    return [size for size in allowed if size >= low]


_MOST_WORK = 2**30
"""The largest number of weights times the product of all sizes of a run that only tries sizes."""

MOST_SCORES = 2**25
"""The largest product of all sizes and the longest, as scores of attention have, of such a run. In
float64, 8 heads of them take 2 GiB."""


def may_try(weights: int, sizes: Sizes, sums: Mapping[str, str]) -> bool:
    """Return whether a run is small enough to find out whether these sizes are accepted."""
    product = math.prod(size for axis, size in sizes.items() if axis not in sums)
    scores = product * max(sizes.values(), default=1)
    if not has_few_scores(sizes, sums):
        return False
    return weights * product <= _MOST_WORK and scores <= MOST_SCORES


def has_few_scores(sizes: Sizes, sums: Mapping[str, str]) -> bool:
    """Return whether tokens of a grid, as side*side, are few enough to have scores."""
    for axis, text in sums.items():
        if axis in sizes and any(len(factors) > 1 for factors in terms_of(text)):
            terms = {axis, *sums, *axes_in(text)}
            others = math.prod(size for name, size in sizes.items() if name not in terms)
            if others * sizes[axis] ** 2 > MOST_SCORES:
                return False
    return True


_MOST_ROWS = 2**36
"""The largest number of weights times rows of an input in runs beside those that are judged."""


def is_quick(subject: Any, sizes: Sizes) -> bool:
    """Return whether a subject runs at these sizes within seconds."""
    rows = (math.prod(sizes[axis] for axis in named.values()) for named in subject.axes.values())
    weights: int = sum(parameter.numel() for parameter in subject.module.parameters())
    return weights * max(rows, default=1) <= _MOST_ROWS


def clamp_sizes(sizes: Sizes, bounds: Bounds) -> dict[str, int]:
    """Return the sizes, of axes with bounds the next one that these allow."""
    allowed = {name: bounds.get(name, [size]) for name, size in sizes.items()}
    return {
        name: allowed[name][min(bisect.bisect_left(allowed[name], size), len(allowed[name]) - 1)]
        for name, size in sizes.items()
    }


def add_sums(sizes: Sizes, sums: Mapping[str, str]) -> dict[str, int]:
    """Return the sizes, with those of the axes that are sums of others."""
    return {**sizes} | {name: size_of(text, sizes) for name, text in sums.items()}


def fixed_shape(shape: Shape, fixed: Sizes) -> Shape:
    """Return a shape with the sizes of fixed axes in place of their names.

    `shape`: Sizes, and names of dynamic axes.
    """
    return tuple(fixed.get(axis, axis) if isinstance(axis, str) else axis for axis in shape)


# -- the interface of a subject -----------------------------------------------------------------


class FunctionInputs(dict[str, Input]):
    """Descriptions of inputs, by name, whose arrays come from a function of the user."""

    def __init__(
        self,
        inputs: Mapping[str, Input],
        function: Callable[[Sizes, np.random.Generator], ArrayDict],
    ) -> None:
        super().__init__(inputs)
        self.function = function


@dataclasses.dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a subject, from which its cases are planned.

    Attributes:
        output_shapes: The shape of every output.
        traits: What is known of the subject.
        sums: The axes that are sums of others, with their terms.
    """

    inputs: Mapping[str, Input]
    output_shapes: Mapping[str, Shape]
    traits: Traits = dataclasses.field(default_factory=Traits)
    sums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bounds: Bounds = dataclasses.field(default_factory=dict)
    roles: Roles = dataclasses.field(default_factory=Roles)

    @property
    def axes(self) -> list[str]:
        """The names of all sizes that a case has, see `axis_names`."""
        return axis_names(self.inputs, self.sums)

    @property
    def all_bounds(self) -> dict[str, Sequence[int]]:
        """The bounds of axes that have any, and of those that act as a past."""
        least = self.roles.least.items()
        found = {axis: sizes_from(low, self.bounds.get(axis, ANY)) for axis, low in least}
        return {**self.bounds, **found}

    def case_bytes(self, sizes: Sizes) -> int:
        """Return the size in bytes of a case on disk, whose outputs are there twice."""
        dtypes = {name: numpy_dtype(input_.dtype) for name, input_ in self.inputs.items()}
        # The element size of outputs is that of the widest floating input.
        floating = [dtype.itemsize for dtype in dtypes.values() if is_floating(dtype)]
        itemsize = max(floating or [dtype.itemsize for dtype in dtypes.values()])
        input_bytes = sum(
            dtypes[name].itemsize * math.prod(concrete_shape(input_.shape, sizes))
            for name, input_ in self.inputs.items()
        )
        # An axis of unknown size ("") counts as the longest one.
        known = {**sizes, "": max(sizes.values(), default=1)}
        shapes = self.output_shapes.values()
        output_elements = sum(math.prod(concrete_shape(shape, known)) for shape in shapes)
        return input_bytes + 2 * itemsize * output_elements


def by_role(interface: Interface) -> Interface:
    """Return an interface whose axes have the names of their roles, with the bounds of pasts."""
    roles, sums = interface.roles, interface.sums
    bounds = {roles.name(axis): sizes for axis, sizes in interface.all_bounds.items()}
    if bounds.get(PAST) == range(MAX_SIZE + 1):
        del bounds[PAST]  # 0 is among its usual sizes
    if not roles.names:
        return dataclasses.replace(interface, bounds=bounds)
    inputs: dict[str, Input] = {
        name: dataclasses.replace(
            input_, shape=roles.shape(input_.shape),
            high=roles.name(input_.high) if isinstance(input_.high, str) else input_.high,
        )
        for name, input_ in interface.inputs.items()
    }  # fmt: skip
    if isinstance(interface.inputs, FunctionInputs):
        draw = interface.inputs.function
        inputs = FunctionInputs(inputs, lambda sizes, rng: draw(roles.sizes(sizes), rng))
    return dataclasses.replace(
        interface, inputs=inputs, bounds=bounds, roles=Roles(),
        output_shapes={name: roles.shape(s) for name, s in interface.output_shapes.items()},
        sums={roles.name(axis): renamed(text, roles.name) for axis, text in sums.items()},
    )  # fmt: skip


# -- random input arrays ------------------------------------------------------------------------


def seed_of(*words: str | int) -> int:
    """Return a seed that depends only on the words."""
    return zlib.crc32(repr(words).encode())


def generator(*words: str | int) -> np.random.Generator:
    """Return a random generator that depends only on the words."""
    return np.random.default_rng(seed_of(*words))


def concrete_shape(shape: Shape, sizes: Sizes) -> tuple[int, ...]:
    """Return a shape with the sizes of dynamic axes in place of their names.

    `shape`: Sizes, and names of dynamic axes.
    """
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in shape)


def limits(input_: Input, sizes: Sizes) -> tuple[int, int]:
    """Return the least and the largest value of an integer input."""
    high = sizes[input_.high] if isinstance(input_.high, str) else input_.high
    return input_.low, high


def draw_inputs(
    inputs: Mapping[str, Input], sizes: Sizes, *, seed_words: tuple[str | int, ...]
) -> ArrayDict:
    """Return a random array for every input.

    Floating inputs are drawn from a normal distribution, integers from their range. In masks each
    key is visible with probability `VISIBLE`. Key 0 is visible in every row, so that only patterns
    make fully masked rows.
    """
    if isinstance(inputs, FunctionInputs):
        # Patterns are written into views of the arrays, and a view needs rows that follow closely.
        drawn = inputs.function(sizes, generator(*seed_words))
        return {name: np.require(array, requirements=("C", "W")) for name, array in drawn.items()}
    return {
        name: _draw(name, input_, sizes, generator(*seed_words, name))
        for name, input_ in inputs.items()
    }


def _draw(name: str, input_: Input, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    shape, dtype = concrete_shape(input_.shape, sizes), numpy_dtype(input_.dtype)
    if dtype == np.bool_:
        # A last axis of 1 that does not count keys may be False everywhere.
        any_value = input_.first is None or input_.shape[-1:] == (1,)
        mask = visible_keys(rng, shape, with_first=not any_value)
        return mask if input_.first is not False else ~mask
    if np.issubdtype(dtype, np.integer):
        if input_.first and (input_.low, input_.high) == (0, 1):  # a mask
            return np.asarray(visible_keys(rng, shape, with_first=True).astype(dtype))
        return rng.integers(*limits(input_, sizes), shape, dtype, endpoint=True)
    if not is_floating(dtype):
        raise ValueError(f"cannot draw values for {name} of type {dtype}")
    return random_floats(rng, shape, dtype, is_mask=name == "attn_mask" or bool(input_.hides))
