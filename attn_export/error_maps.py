"""Data classes of the places of errors in an output."""

from __future__ import annotations

import dataclasses
from typing import Literal

RelativeTo = Literal["row", "whole", "kind"]
"""The norm that divides an error: of its last-axis slice, of the output, or none (a wrong NaN)."""

Cells = tuple[tuple[float | None, ...], ...]
"""Rows of cells of a heat map. None: NaN, infinite, or wrong in kind."""


@dataclasses.dataclass(frozen=True)
class ErrorProfile:
    """Errors along one axis of an output: the largest at each place, over all other axes.

    Attributes:
        values: Errors of rows of the last axis, divided by the tolerance; None for a wrong NaN
            or zero. Where there are many, neighbours share a value.
    """

    axis: str
    values: tuple[float | None, ...]


@dataclasses.dataclass(frozen=True)
class ErrorMap:
    """Locations of the errors in one output.

    The heat maps are those of the last two axes at the worst element. A cell is the largest
    magnitude of its elements.

    Attributes:
        axes: The names of the output's axes.
        shape: The shape of the output.
        index: The index of the worst element.
        actual: The value of the worst element, to nine digits; it may be NaN or infinite.
        expected: The correct value of that element.
        relative_to: The norm by which errors are divided.
        cell: The row and column of the cell with the worst element.
        reference: Heat map of the correct values.
        runtime: Heat map of the runtime's values.
        difference: Heat map of the errors, divided by the tolerance.
        profiles: Errors along each axis but the last that has more than one place.
    """

    case: str
    output: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    actual: str
    expected: str
    relative_to: RelativeTo
    cell: tuple[int, int]
    truth: Cells
    runtime: Cells
    difference: Cells
    profiles: tuple[ErrorProfile, ...]
