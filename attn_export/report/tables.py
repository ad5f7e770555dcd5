"""Tables and figures of all reports: one model for the terminal, for markdown and for pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from attn_export.bench.measurements import Measured

# -- tables -------------------------------------------------------------------------------------

Style = Literal["", "bold", "dim", "green", "red", "yellow"]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        right: Whether its cells are aligned to the right, as figures are.
        width: The number of characters of a column that is folded; None for one that never is.
        wraps: Whether a cell may be broken between words where the terminal is narrow.
    """

    name: str
    right: bool = False
    width: int | None = None
    wraps: bool = False


@dataclasses.dataclass(frozen=True)
class Styled:
    """The text of a cell with the style that it has in the terminal."""

    text: str
    style: Style = ""


Row = Sequence[str | Styled]


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows of plain text: each renderer escapes what it shows.

    Attributes:
        columns: The columns.
        rows: For each row a cell of every column.
        gap: The number of spaces between two columns in the terminal.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    gap: int = 2


def markdown_table(columns: Iterable[str | Column], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table in markdown.

    Args:
        columns: The headings, as markdown; of a `Column` its alignment as well.
        rows: For each row its cells, as markdown.
    """
    known = [Column(each) if isinstance(each, str) else each for each in columns]
    rules = ("---:" if column.right else "---" for column in known)
    lines = [_line(column.name for column in known), f"|{'|'.join(rules)}|"]
    return lines + [_line(row) for row in rows]


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# -- figures ------------------------------------------------------------------------------------

UNMEASURED = "–"  # noqa: RUF001 (a dash is what it is)


def shown(figure: float | None, digits: str) -> str:
    """Return a figure as text: what was not measured is a dash, and NaN is NaN.

    Args:
        figure: As `largest` gives it.
        digits: The format of a finite one: ``".3g"``.
    """
    if figure is None:
        return UNMEASURED
    return "NaN" if math.isnan(figure) else f"{figure:{digits}}"


def shown_share(figure: float | None) -> str:
    """Return an error over the error allowed as text, in a column of such."""
    return shown(figure, ".3f" if figure is None or figure < 1000 else ".1e")


def three_digits(value: float) -> str:
    """Format a number with about three digits, without an exponent; NaN is a dash."""
    if not math.isfinite(value):
        return UNMEASURED
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 4)}f}"


def in_ms(m: Measured | None) -> str:
    """Format the median in milliseconds with three digits, or a dash."""
    return UNMEASURED if m is None or not m.ran else three_digits(m.median * 1e3)


def in_mib(size: int | None) -> str:
    """Format bytes as MiB, or a dash."""
    return UNMEASURED if size is None else f"{size / 2**20:.0f}"
