"""Verdicts over the releases of a runtime: defects, and the release that introduced one."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from attn_export.bundle.manifest import read_manifest
from attn_export.dialect_names import STANDARD
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.parts.sweeps.release import MARK, release_of
from attn_export.parts.sweeps.store import Row
from attn_export.parts.sweeps.tasks import verify_dialects
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.run_options import Progress

# -- defects: series of releases with wrong numbers ---------------------------------------------

WRONG: Final = "wrong numbers"
"""The cause of a defect that has no explanation."""


@dataclasses.dataclass(frozen=True)
class Defect:
    """Layers that one runtime computes wrong in the same consecutive releases.

    Only releases that the sweep ran count.

    Attributes:
        before: The release before `first` and its verdict, or "".
        right_after: The first release after `last` that passed, or "".
        layers: The number of pairs of a layer and a dialect that are wrong.
        causes: The causes of their failures: explained ones first, then the most frequent.
        example: The cell of release `last` whose layer has the shortest spec.
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
    """Return the defects by runtime, those of most layers first.

    `is_wrong`: Function that returns whether a cell shows a defect. A cell may also have neither
    passed nor a defect, as one that did not run.
    """
    histories: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        base, version = release_of(row.runtime)
        if version:
            histories.setdefault((base, row.source, row.dialect), []).append(row)
    cells_of: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for (base, _, _), history in histories.items():
        history.sort(key=lambda row: release_of(row.runtime))
        for start, end in _spans(history, is_wrong):
            earlier = history[start - 1] if start else None
            before = f"{_version(earlier)}: {earlier.verdict}" if earlier else ""
            later = (row for row in history[end:] if row.verdict == "passed")
            after = next((_version(row) for row in later), "")
            key = base, _version(history[start]), _version(history[end - 1]), before, after
            cells_of.setdefault(key, []).append(history[end - 1])
    unsorted = [
        Defect(*key, len(cells), _causes(cells), min(cells, key=lambda row: len(row.spec)))
        for key, cells in cells_of.items()
    ]
    return sorted(
        unsorted, key=lambda d: (d.runtime, -d.layers, release_of(f"{d.runtime}{MARK}{d.first}"))
    )


def _spans(history: Sequence[Row], is_wrong: Callable[[Row], bool]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end, which is exclusive, of each series of wrong releases."""
    for wrong, group in itertools.groupby(range(len(history)), lambda n: is_wrong(history[n])):
        if wrong:
            numbers = list(group)
            yield numbers[0], numbers[-1] + 1


def _version(row: Row) -> str:
    return row.runtime.partition(MARK)[2]


def _causes(cells: Iterable[Row]) -> tuple[str, ...]:
    """Return the causes, explained ones before others, then the most frequent first."""
    causes = [plain_cause(row.cause) for row in cells]
    counted = Counter(WRONG if text.startswith("relative error") else text for text in causes)
    return tuple(sorted(counted, key=lambda text: (text == WRONG, -counted[text], text)))


def plain_cause(cause: str) -> str:
    """Return the cause in a `Row` without the runtime, the file, and the position in the graph."""
    # Rows of earlier versions say "is not".
    text = re.sub(r"^\S+, \S+: (the graph is right, \S+ is (not|wrong): )?", "", cause)
    return re.sub(r",? at \S+( \S+)? \([^)]*\)(, by \S+)?| \([^)]*\)$", "", text)


# -- bisection: the release in which the verdict on a graph changed -----------------------------


@dataclasses.dataclass(frozen=True)
class _ReleaseVerdict:
    """The verdict on one release, as in a `Row`; `cause` is the reason unless it passed."""

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
    dialect: str | None = None,
    *,
    install: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> list[_ReleaseVerdict]:
    """Find where the verdict on a bundle's graph changed between the oldest and the newest release.

    `dialect`: That of the graph; by default standard, or that of the only graph.

    Returns:
        The releases that were run, the oldest first. They include two consecutive releases of
        which only one passes.
    """
    progress = progress or Progress()
    dialects = {file.dialect for file in read_manifest(bundle).graphs.values()}
    dialect = dialect or (next(iter(dialects)) if len(dialects) == 1 else STANDARD)
    if dialect not in dialects:
        raise UsageError(f"{bundle} has no graph in the dialect {dialect!r}")
    ordered = sorted(releases, key=release_of)
    if len(ordered) < 2:
        raise UsageError(
            f"there are {len(ordered)} releases to choose from, and it takes two; name them by "
            "--good and --bad, or install some by scripts/setup_runtimes NAME==VERSION"
        )
    progress.expect(2 + (len(ordered) - 1).bit_length())
    tried: dict[int, _ReleaseVerdict] = {}

    def run(number: int) -> _ReleaseVerdict:
        if number not in tried:
            progress.advance(ordered[number])
            tried[number] = _run(bundle, ordered[number], dialect, install)
        return tried[number]

    start, end = 0, len(ordered) - 1
    if run(start).passed == run(end).passed:
        verdicts = " and ".join(f"{tried[n].release} {tried[n].verdict}" for n in (start, end))
        raise UsageError(
            f"{verdicts}: name one that passes by --good, and one that does not by --bad"
        )
    while end - start > 1:
        middle = (start + end) // 2
        if run(middle).passed == tried[start].passed:
            start = middle
        else:
            end = middle
    return [tried[number] for number in sorted(tried)]


def _run(
    bundle: Path, release: str, dialect: str, install: Callable[[str], None] | None
) -> _ReleaseVerdict:
    if install is not None:
        install(release)
    if reason := runtime(release).unavailable():
        raise RuntimeFailure(f"{release}: {reason}")
    outcome = verify_dialects(bundle, release, [dialect])[dialect]
    return _ReleaseVerdict(release, outcome["verdict"], plain_cause(outcome["cause"]))


def change(tried: Sequence[_ReleaseVerdict]) -> tuple[_ReleaseVerdict, _ReleaseVerdict]:
    """Return the two releases between which the verdict changed, from the result of `bisect`."""
    return next(
        (older, newer) for older, newer in itertools.pairwise(tried) if older.passed != newer.passed
    )
