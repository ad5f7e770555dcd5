"""Inputs of graphs, sums of sizes, and what is known of subjects and of their axes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

MASK_FLOOR = -1e30
"""The least finite value of a float mask; lower ones are clamped to it. Below it runtimes differ:
ONNX Runtime reads finfo.min as masked, PyTorch does not."""

# -- `Input`: description of one input of a graph -----------------------------------------------


Shape = tuple[str | int, ...]
"""The axes of a tensor: a size, or the name of a dynamic axis."""


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """Description of one input of a graph, from which test cases draw values.

    Attributes:
        shape: The axes: a size, or the name of a dynamic axis.
        dtype: The type, as numpy names it, or ``"bfloat16"``.
        high: The largest value of an integer input, inclusive, or the name of a size that is the
            largest value.
        first: The first value of every last-axis row of a bool input or of a mask of 0 and 1: True
            if True means "may attend", False if it means "hidden". None if rows differ.
        hides: Whether a floating point input other than `attn_mask` is a mask with -inf.
    """

    shape: Shape
    dtype: str = "float32"
    low: int = 0
    high: int | str = 0
    first: bool | None = True
    hides: bool = False


# -- sums of products of sizes, as text: ``2*query_len - 1`` ------------------------------------

_BETWEEN = re.compile(r"(\s*(?:\+|\*|(?<=\s)-(?=\s*\d))\s*)")
_SIGN = re.compile(r"\s*(\+|(?<=\s)-(?=\s*\d))\s*")  # a name may have a hyphen


def terms_of(text: str) -> dict[tuple[str, ...], int]:
    """Return the terms of a sum of products: the number before the axes of each product.

    A number alone has the key ``()``. Equal sums have equal terms.
    """
    signs = ["+", *_SIGN.findall(text.strip())]
    terms: dict[tuple[str, ...], int] = {}
    for sign, product in zip(signs, _SIGN.split(text.strip())[::2], strict=True):
        factors = [factor.strip() for factor in product.split("*")]
        axes = tuple(sorted(factor for factor in factors if not _is_number(factor)))
        number = math.prod(int(factor) for factor in factors if _is_number(factor))
        terms[axes] = terms.get(axes, 0) + (number if sign == "+" else -number)
    return terms


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def axes_in(text: str) -> list[str]:
    """Return the names of the axes in a sum of products."""
    return list(dict.fromkeys(axis for axes in terms_of(text) for axis in axes))


def size_of(text: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products at some sizes."""
    terms = terms_of(text).items()
    return sum(number * math.prod(sizes[axis] for axis in axes) for axes, number in terms)


def renamed(text: str, name: Callable[[str], str]) -> str:
    """Return a sum of products with other names of its axes."""
    parts = _BETWEEN.split(text.strip())
    return "".join(part if index % 2 else name(part) for index, part in enumerate(parts))


# -- `Traits`: what is known of how a subject computes ----------------------------------------


class Threshold(NamedTuple):
    """What changes beyond a distance; "" if only numbers become inexact.

    `most_bytes`: The largest size of a case that reaches it; None for that of all long cases.
    """

    about: str
    most_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Traits:
    """What is known of how a subject computes. Of a user's module nothing is.

    Attributes:
        is_attention: It is attention alone, whose inputs are those of `Attention`. No norm or
            residual makes extreme values mean something else, and batch elements are independent.
        hides_future: A query does not see later keys.
        has_latent: Keys and values are read from one array.
        has_softmax: Its weights are a softmax of scores.
        has_cache: Its caches of keys and values are inputs.
        in_place: Such a cache is written in place, after `past_length` keys.
        decodes: Decoding token by token gives what a run of the whole sequence gives.
        thresholds: What changes with the distance of a key, by the distance in positions.
    """

    is_attention: bool = False
    hides_future: bool = False
    has_latent: bool = False
    has_softmax: bool = True
    has_cache: bool = False
    in_place: bool = False
    decodes: bool = False
    thresholds: Mapping[int, Threshold] = dataclasses.field(default_factory=dict)


# -- `Roles`: what the axes of a graph do -------------------------------------------------------


BATCH, QUERIES, PAST, KEYS = "batch", "query_len", "past_len", "key_len"
"""The roles: names of axes in plans, which are also the names in our own layers."""

KNOWN = (BATCH, QUERIES, PAST, KEYS)

TOTAL = "total_len"
"""The name in manifests of the axis that is the sum of the past and the queries."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles of dynamic axes and caches. By default axes have the names of their roles.

    Attributes:
        names: The name in plans of each axis that has another one there: its role, or for an axis
            that is only called like a role, a name that is none.
        least: The least size of axes for which the user states none: of each that acts as a past 0,
            or 1 where the module raises or gives NaN without a past, and of others where it raises
            at 1.
        caches: The input that takes what an output gave in the step before, by output.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    least: Mapping[str, int] = dataclasses.field(default_factory=dict)
    caches: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def name(self, axis: str) -> str:
        """Return the name of an axis in plans."""
        return self.names.get(axis, axis)

    def axis(self, role: str) -> str:
        """Return the axis that has a role; the role, or "", which are then no axes, if none has."""
        missing = "" if role in self.names else role
        return next((axis for axis, name in self.names.items() if name == role), missing)

    def with_total(self, sums: Mapping[str, str]) -> dict[str, str]:
        """Return `names`, and that of the axis which is the sum of the past and the queries."""
        for axis, terms in sums.items():
            is_total = terms_of(renamed(terms, self.name)) == {(PAST,): 1, (QUERIES,): 1}
            if is_total and axis not in (TOTAL, "capacity"):
                return {**self.names, axis: TOTAL}
        return dict(self.names)

    def shape(self, shape: Shape, end: str = "") -> Shape:
        """Return a shape with the names of plans; axes of an output without names get ``end.1``.

        `shape`: The shape.
        """
        named = (f"{end}.{at}" if axis == "" and end else axis for at, axis in enumerate(shape))
        return tuple(self.name(axis) if isinstance(axis, str) else axis for axis in named)

    def sizes(self, planned: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of a plan by the names of the axes."""
        axes = {name: axis for axis, name in self.names.items()}
        return {axes.get(name, name): size for name, size in planned.items()}

    def notes(self) -> Iterator[str]:
        """Yield notes for the reader of a report."""
        found = [f"{axis} is {role}" for axis, role in self.names.items() if role in KNOWN]
        if found:
            yield f"axes by what they do: {', '.join(found)}"
        for axis, least in self.least.items():
            if least:
                why = f"at {least - 1} the module raises or gives NaN"
                yield f"{axis} is tried from {least} on: {why}"
