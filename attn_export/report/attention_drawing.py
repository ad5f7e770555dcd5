"""Layout of a drawing of the graph's attention: boxes, arrows and their texts.

A column for each input of `Attention`, from top to bottom; steps that columns next to each other
have in common are one wide box. All lengths are in CSS pixels.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attn_export.graph.drawing_steps import Step
    from attn_export.graph.neighbourhood import Lane, Neighbourhood

COLUMN, GAP, MARGIN = 126, 8, 4
LINE, PAD = 16, 7
ARROW = 24
"""Between two rows."""

LETTERS = {"name": 16, "plain": 18, "shape": 19}
"""In a line of a box, by the style of the text; a letter is 6 to 7 pixels wide."""

SQUEEZED = 1.3
"""Factor by which a word may be longer: it is drawn narrower. Longer ones are broken."""

BELOW = {"output": "key", "present_key": "past_key", "present_value": "past_value"}
"""Under which input's column an output stands."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A line of text; `x` is its middle and `y` its foot.

    Attributes:
        style: ``"name"``, ``"plain"`` or ``"shape"``.
        text_length: The width to draw; None for the natural width.
    """

    x: float
    y: float
    text: str
    style: str
    text_length: float | None = None


@dataclasses.dataclass(frozen=True)
class Box:
    """A step, or the node itself.

    Attributes:
        kind: As of a step; ``"attention"`` for the node.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str
    texts: tuple[Text, ...]


@dataclasses.dataclass(frozen=True)
class Arrow:
    """Straight down at `x`."""

    x: float
    top: float
    bottom: float


@dataclasses.dataclass(frozen=True)
class Drawing:
    """All of it, back to front."""

    width: float
    height: float
    arrows: tuple[Arrow, ...]
    boxes: tuple[Box, ...]


def drawn(found: Neighbourhood) -> Drawing:
    """Lay out the surroundings of an attention node."""
    below = _columns_below(found)
    columns = max([len(found.before), *(column + 1 for column in below)])
    above, arrows, y = _above(found.before)
    texts = _attention_texts(found, below, columns, y)
    height = texts[-1].y + PAD - y
    node = Box(MARGIN, y, _width(columns), height, "attention", tuple(texts))
    boxes, more = _below(found.after, below, y + height)
    bottom = max((box.y + box.height for box in boxes), default=y + height)
    return Drawing(
        _width(columns) + 2 * MARGIN,
        bottom + MARGIN,
        (*arrows, *more),
        (*above, node, *boxes),
    )


def _above(lanes: Sequence[Lane]) -> tuple[list[Box], list[Arrow], float]:
    """Return the boxes and arrows above the node, and the position of its top."""
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    feet = [float(MARGIN)] * len(lanes)  # of each column, so far
    y = float(MARGIN)
    for row in range(max((len(lane.steps) for lane in lanes), default=0)):
        for first, last in _runs(lanes, row):
            box = _box(lanes[first].steps[row], first, last, y)
            if row:
                arrows.append(Arrow(box.x + box.width / 2, feet[first], y))
            feet[first : last + 1] = [y + box.height] * (last - first + 1)
            boxes.append(box)
        y = max(box.y + box.height for box in boxes) + ARROW
    arrows += [Arrow(_middle(column), foot, y) for column, foot in enumerate(feet) if foot < y]
    return boxes, arrows, y


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


def _below(
    lanes: Sequence[Lane], columns: Sequence[int], top: float
) -> tuple[list[Box], list[Arrow]]:
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    for lane, column in zip(lanes, columns, strict=True):
        y = top
        for step in lane.steps:
            box = _box(dataclasses.replace(step, gives=()), column, column, y + ARROW)
            arrows.append(Arrow(_middle(column), y, box.y))
            boxes.append(box)
            y = box.y + box.height
    return boxes, arrows


def _columns_below(found: Neighbourhood) -> list[int]:
    """Return a column for each output."""
    inputs = {lane.role: column for column, lane in enumerate(found.before)}
    taken: list[int] = []
    for lane in found.after:
        wanted = inputs.get(BELOW.get(lane.role, ""), 0)
        taken.append(next(c for c in (wanted, *range(len(taken) + 2)) if c not in taken))
    return taken


def _attention_texts(
    found: Neighbourhood, below: Sequence[int], columns: int, y: float
) -> list[Text]:
    """Return roles of inputs along the top, roles of outputs along the bottom, the name between."""
    middle = MARGIN + _width(columns) / 2
    many = f" (the first of {found.count})" if found.count > 1 else ""
    y += PAD + LINE - 4
    texts = [
        Text(_middle(column), y, lane.role, "plain") for column, lane in enumerate(found.before)
    ]
    texts.append(Text(middle, y + 1.6 * LINE, f"Attention{many}", "name"))
    texts.append(Text(middle, y + 2.6 * LINE, ", ".join(found.facts), "plain"))
    y += 4.2 * LINE
    roles = zip(below, found.after, strict=True)
    return texts + [Text(_middle(column), y, lane.role, "plain") for column, lane in roles]


def _box(step: Step, first: int, last: int, y: float) -> Box:
    columns = last - first + 1
    x, width = MARGIN + first * (COLUMN + GAP), _width(columns)
    notes = [", ".join(step.operators)]
    if step.beside:
        notes.append(f"with {', '.join(step.beside)}")
    if step.gives:
        notes.append(f"gives {', '.join(step.gives)}")
    parts = [("name", step.name), *(("plain", note) for note in notes), ("shape", step.shape)]
    lines = [
        (line, style, len(line) > LETTERS[style] * columns)
        for style, text in parts
        for line in _wrapped(text, LETTERS[style] * columns)
    ]
    texts = tuple(
        Text(x + width / 2, y + PAD + LINE * number - 4, line, style, width - 8 if long else None)
        for number, (line, style, long) in enumerate(lines, start=1)
    )
    return Box(x, y, width, 2 * PAD + LINE * len(lines), step.kind, texts)


def _wrapped(text: str, letters: int) -> list[str]:
    longest = max(map(len, text.split()), default=0)
    return textwrap.wrap(
        text,
        letters,
        break_long_words=longest > SQUEEZED * letters,
        break_on_hyphens=False,
        max_lines=4,
        placeholder=" …",
    )


def _width(columns: int) -> float:
    return columns * (COLUMN + GAP) - GAP


def _middle(column: int) -> float:
    return MARGIN + column * (COLUMN + GAP) + COLUMN / 2
