"""The graph's attention part as a grid, which the browser lays out.

A column for each input of `Attention`, from top to bottom. Steps that neighbouring columns have in
common are one wide box.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_export.graph.drawing_steps import Step
    from attn_export.graph.neighbourhood import Lane, Neighbourhood

BELOW = {"output": "key", "present_key": "past_key", "present_value": "past_value"}
"""Input under whose column an output stands."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A step in the grid; rows and columns count from 1, as in CSS.

    Attributes:
        rows: The number of rows that it covers: a line leads through those after its own.
        columns: The number of columns that it covers.
        step: The step; None for a line without a box.
    """

    row: int
    column: int
    rows: int
    columns: int
    step: Step | None


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The grid: boxes, and the node between those above and below.

    Attributes:
        columns: The number of columns.
        row: The row of the node.
        inputs: The columns of the inputs, in their order.
        outputs: The columns of the outputs, in their order.
        boxes: The steps, and lines from a short lane down to the node.
    """

    columns: int
    row: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    boxes: tuple[Box, ...]


def draw_attention(found: Neighbourhood) -> Drawing:
    """Return the grid of the surroundings of an attention node."""
    outputs = _output_columns(found)
    node = 1 + max((len(lane.steps) for lane in found.before), default=0)
    below = [
        Box(node + number, column, 1, 1, dataclasses.replace(step, gives=()))
        for lane, column in zip(found.after, outputs, strict=True)
        for number, step in enumerate(lane.steps, start=1)
    ]
    inputs = tuple(range(1, len(found.before) + 1))
    return Drawing(
        max((*inputs, *outputs)), node, inputs, outputs, (*_above(found.before, node), *below)
    )


def _above(lanes: Sequence[Lane], node: int) -> Iterator[Box]:
    for row in range(node - 1):
        for first, last in _runs(lanes, row):
            yield Box(row + 1, first + 1, 1, last - first + 1, lanes[first].steps[row])
    for column, lane in enumerate(lanes, start=1):
        if missing := node - 1 - len(lane.steps):
            yield Box(len(lane.steps) + 1, column, missing, 1, None)


def _runs(lanes: Sequence[Lane], row: int) -> Iterator[tuple[int, int]]:
    """Yield first and last column of each box in a row: equal columns are merged."""
    first = 0
    for column in range(1, len(lanes) + 1):
        same = column < len(lanes) and (
            lanes[first].steps[: row + 1] == lanes[column].steps[: row + 1]
        )
        if not same:
            if row < len(lanes[first].steps):
                yield first, column - 1
            first = column


def _output_columns(found: Neighbourhood) -> tuple[int, ...]:
    inputs = {lane.role: column for column, lane in enumerate(found.before, start=1)}
    taken: list[int] = []
    for lane in found.after:
        wanted = inputs.get(BELOW.get(lane.role, ""), 1)
        taken.append(next(c for c in (wanted, *range(1, len(taken) + 3)) if c not in taken))
    return tuple(taken)
