"""Data classes of the places of errors in an output."""

from __future__ import annotations

import dataclasses
from typing import Literal

RelativeTo = Literal["row", "whole", "kind"]
"""The norm that divides an error: of its last-axis slice, of the output, or none (a wrong NaN)."""


@dataclasses.dataclass(frozen=True)
class ErrorMapPanel:
    """A heat map of errors, in which a cell is the largest error of its elements.

    Attributes:
        rows: The axes along the rows, such as ``"batch x head"``; empty if there is one row.
        columns: The axis along the columns, such as ``"query_len"``.
        sizes: The number of rows and columns before they were merged into cells.
        worst: The row and column of the cell with the worst element.
        values: Rows of errors, divided by the error allowed; None for a wrong NaN or zero.
    """

    rows: str
    columns: str
    sizes: tuple[int, int]
    worst: tuple[int, int]
    values: tuple[tuple[float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class ErrorMap:
    """Locations of the errors in one output.

    Attributes:
        axes: The names of the output's axes.
        shape: The shape of the output.
        index: The index of the worst element.
        actual: The value of the worst element, to nine digits; it may be NaN or infinite.
        expected: The correct value of that element.
        relative_to: The norm by which errors are divided.
        panels: A heat map with one element for each slice along the last axis, and one of the last
            two axes at the worst element. A heat map with a single cell is left out.
    """

    case: str
    output: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    index: tuple[int, ...]
    actual: str
    expected: str
    relative_to: RelativeTo
    panels: tuple[ErrorMapPanel, ...]
