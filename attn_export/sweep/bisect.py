"""The release of a runtime in which the verdict on a graph changed, found by halving."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from attn_export.bundle import graph_files, read_manifest
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.report.progress import Progress
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.release import release_of
from attn_export.sweep.defects import plain_cause
from attn_export.sweep.tasks import verified


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
