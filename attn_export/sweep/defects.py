"""Defects over the releases of a runtime: since when numbers are wrong, and until when."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from attn_export.runtimes.release import MARK, release_of
from attn_export.sweep.store import Row

WRONG: Final = "wrong numbers"
"""The cause where none is known."""


@dataclasses.dataclass(frozen=True)
class Defect:
    """Cells of one runtime that are wrong in the same releases, next to each other.

    Attributes:
        runtime: The runtime, without a release.
        first: The first release that is wrong, of those that were run.
        last: The last one.
        before: The release before `first` and its verdict, or "".
        right_after: The first release after `last` that passed, or "".
        layers: The number of layers and dialects that are wrong.
        causes: What is said of them, the most frequent first.
        example: The cell of the last release with the shortest list of fields.
    """

    runtime: str
    first: str
    last: str
    before: str
    right_after: str
    layers: int
    causes: tuple[str, ...]
    example: Row


def defects(rows: Iterable[Row], is_wrong: Callable[[Row], bool]) -> list[Defect]:
    """Return the defects of runtimes of which several releases were run, the widest first.

    Args:
        rows: The cells of a store.
        is_wrong: Returns whether a cell is wrong; others that did not pass are no defects.
    """
    histories: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        base, version = release_of(row.runtime)
        if version:
            histories.setdefault((base, row.source, row.dialect), []).append(row)
    found: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for (base, _, _), history in histories.items():
        history.sort(key=lambda row: release_of(row.runtime))
        for start, end in _spans(history, is_wrong):
            earlier = history[start - 1] if start else None
            before = f"{_version(earlier)}: {earlier.verdict}" if earlier else ""
            later = (row for row in history[end:] if row.verdict == "passed")
            after = next((_version(row) for row in later), "")
            place = base, _version(history[start]), _version(history[end - 1]), before, after
            found.setdefault(place, []).append(history[end - 1])
    listed = [
        Defect(*place, len(cells), _causes(cells), min(cells, key=lambda row: len(row.spec)))
        for place, cells in found.items()
    ]
    return sorted(
        listed, key=lambda d: (d.runtime, -d.layers, release_of(f"{d.runtime}{MARK}{d.first}"))
    )


def _spans(history: Sequence[Row], is_wrong: Callable[[Row], bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each series of wrong releases."""
    start = None
    for number, row in enumerate(history):
        if is_wrong(row):
            start = number if start is None else start
        elif start is not None:
            yield start, number
            start = None
    if start is not None:
        yield start, len(history)


def _version(row: Row) -> str:
    return row.runtime.partition(MARK)[2]


def _causes(cells: Iterable[Row]) -> tuple[str, ...]:
    """Return the causes, the most frequent first, and explained ones before others."""
    counted: dict[str, int] = {}
    for row in cells:
        text = plain_cause(row.cause)
        text = WRONG if text.startswith("relative error") else text
        counted[text] = counted.get(text, 0) + 1
    return tuple(sorted(counted, key=lambda text: (text == WRONG, -counted[text], text)))


def plain_cause(cause: str) -> str:
    """Return a cause without the names of the runtime and the file, and without places.

    Args:
        cause: Of a `Row`.
    """
    text = re.sub(r"^\S+, \S+: (the graph is right, \S+ is not: )?", "", cause)
    return re.sub(r",? at \S+( \S+)? \([^)]*\)(, by \S+)?| \([^)]*\)$", "", text)
