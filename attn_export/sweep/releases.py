"""Verdicts over the releases of a runtime: defects, and the release that began one."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from attn_export.bundle import graph_files, read_manifest
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.report.progress import Progress
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.release import MARK, release_of
from attn_export.sweep.store import Row
from attn_export.sweep.tasks import verified

# -- defects: since when numbers are wrong, and until when --------------------------------------

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


# -- the release in which the verdict on a graph changed, found by halving ----------------------


@dataclasses.dataclass(frozen=True)
class Tried:
    """The verdict on one release.

    Attributes:
        release: The release: ``"ort-cpu==1.25.1"``.
        verdict: As in a `Row`.
        cause: The reason of another verdict than passed.
    """

    release: str
    verdict: str
    cause: str

    @property
    def passed(self) -> bool:
        """True if all outputs are right."""
        return self.verdict == "passed"


def bisect(
    bundle: Path,
    releases: Sequence[str],
    dialect: str,
    *,
    install: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> list[Tried]:
    """Find where the verdict on a bundle's graph changed between the oldest and the newest release.

    Args:
        bundle: The bundle's folder.
        releases: The releases of one runtime, in any order.
        dialect: The dialect of the graph.
        install: Installs a release before it runs. None expects it to be there.
        progress: Receiver of progress.

    Returns:
        The releases that were run, the oldest first. Of two next to each other there, and next to
        each other in `releases`, one passes and one does not.

    Raises:
        UsageError: If there are fewer than two releases, the bundle has no such graph, or both
            the oldest and the newest release pass, or neither.
        RuntimeFailure: If a release cannot run here.
    """
    progress = progress or Progress()
    if dialect not in {file.dialect for file in graph_files(read_manifest(bundle))}:
        raise UsageError(f"{bundle} has no graph in the dialect {dialect!r}")
    ordered = sorted(releases, key=release_of)
    if len(ordered) < 2:
        raise UsageError(
            f"there are {len(ordered)} releases to choose from, and it takes two; name them by "
            "--good and --bad, or install some by scripts/setup_runtimes NAME==VERSION"
        )
    progress.expect(2 + (len(ordered) - 1).bit_length())
    tried: dict[int, Tried] = {}

    def run(number: int) -> Tried:
        if number not in tried:
            progress.advance(ordered[number])
            tried[number] = _run(bundle, ordered[number], dialect, install)
        return tried[number]

    start, end = 0, len(ordered) - 1
    if run(start).passed == run(end).passed:
        said = " and ".join(f"{tried[at].release} {tried[at].verdict}" for at in (start, end))
        raise UsageError(f"{said}: name one that passes by --good, and one that does not by --bad")
    while end - start > 1:
        middle = (start + end) // 2
        if run(middle).passed == tried[start].passed:
            start = middle
        else:
            end = middle
    return [tried[number] for number in sorted(tried)]


def _run(bundle: Path, release: str, dialect: str, install: Callable[[str], None] | None) -> Tried:
    if install is not None:
        install(release)
    if reason := runtime(release).unavailable():
        raise RuntimeFailure(f"{release}: {reason}")
    outcome = verified(bundle, release, [dialect])[dialect]
    return Tried(release, outcome["verdict"], plain_cause(outcome["cause"]))


def change(tried: Sequence[Tried]) -> tuple[Tried, Tried]:
    """Return the two releases between which the verdict changed.

    Args:
        tried: What `bisect` returned.
    """
    return next(
        (older, newer) for older, newer in itertools.pairwise(tried) if older.passed != newer.passed
    )
