"""The release of a runtime in which the verdict on a graph changed, and what causes say."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from attn_export.bundle.manifest import read_manifest
from attn_export.dialect_names import STANDARD
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.parts.sweeps.release import release_of
from attn_export.parts.sweeps.tasks import verify_dialects
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.run_options import Progress


def plain_cause(cause: str) -> str:
    """Return the cause in a `Row` without the runtime, the file, and the position in the graph."""
    # Rows of earlier versions say "is not".
    text = re.sub(r"^\S+, \S+: (the graph is right, \S+ is (not|wrong): )?", "", cause)
    return re.sub(r",? at \S+( \S+)? \([^)]*\)(, by \S+)?| \([^)]*\)$", "", text)


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
