"""How a run of a graph rounds, and what is seen in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set

from attn_export.tensorfile import Array

RoundsTo = Callable[[Array, Array], Array]
"""A function that returns a float64 array as it is rounded, from it and its `FloatFormat.rounded`.
"""


def full(_: Array, rounded: Array) -> Array:
    """Return an array as the format holds it."""
    return rounded


@dataclasses.dataclass(frozen=True, eq=False)
class RoundedRun:
    """How a run rounds.

    Attributes:
        rounding: What it does with a value that has the narrow format.
        kept: The indices of the nodes that read and make float32.
        narrow: Values that have the narrow format though nodes around them are kept.
        clipped: Weights whose elements are limited to the largest number before they are rounded.
        base: The run that gives what does not differ.
    """

    rounding: RoundsTo
    kept: Set[int] = frozenset()
    narrow: Set[str] = frozenset()
    clipped: Set[str] = frozenset()
    base: RoundedRun | None = None


@dataclasses.dataclass(frozen=True)
class Seen:
    """A value that was made in a run.

    Attributes:
        name: Its name.
        node: The index of the node that makes it; -1 for inputs and weights.
        made: The array, as the node makes it.
        read: The array as nodes in the narrow format read it.
    """

    name: str
    node: int
    made: Array
    read: Array
