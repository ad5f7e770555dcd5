"""Gates beside the judge's rule, which only tighten it: the user's tolerances, and earlier errors.

An engine that starts to compute in fewer bits may stay within the error allowed, and not within
its own earlier error: on one processor and version the same graph gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import OutputError, UsageError, one_line
from attn_export.output_folder import write_whole
from attn_export.results import Golden, Report, RuntimeRun, Verdict
from attn_export.schema import BaselineFile
from attn_export.system_info import processor
from attn_export.untrusted_files import checked, parse_json, read_text

# -- the baseline: errors of an earlier run -----------------------------------------------------

FORMAT = "attn-export-baseline/1"
FACTOR = 4.0
"""Factor by which a run may be worse. Another order of additions is worth about 2."""

FLOOR = 0.02
"""Errors below this share of what is allowed are not compared: they are a few roundings."""

Shares = dict[str, dict[str, float]]
"""Error over allowed by ``runtime/graph`` and ``case/output``."""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Content of a baseline file.

    Attributes:
        versions: By ``runtime/graph``, the version and processor that each error was seen with.
        shares: The errors.
    """

    versions: Mapping[str, str]
    shares: Mapping[str, Mapping[str, float]]


def read_baseline(path: Path) -> Baseline:
    """Read a file that `write_baseline` wrote.

    Raises:
        UsageError: If there is none, or it is something else.
    """
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise UsageError(f"there is no baseline {path}; --update makes one") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the baseline {path}: {one_line(error)}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path} is no baseline of the format {FORMAT}; --update makes one")
    try:
        found = checked(content, BaselineFile)
    except ValueError as error:
        raise UsageError(f"the baseline {path} was changed: {error}") from error
    return Baseline(found.versions, found.errors)


def against(report: Report, baseline: Baseline, factor: float = FACTOR) -> Report:
    """Return a report in which results worse than the baseline failed.

    Args:
        report: Of this run.
        baseline: The errors of earlier runs.
        factor: The allowed growth of an error.
    """
    versions = {_place(run): _version(run) for run in report.runs}
    verdicts = tuple(_compared(v, baseline, versions, factor) for v in report.verdicts)
    unknown = dict.fromkeys(_place(v) for v in report.verdicts if _before(v, baseline) is None)
    notes = report.notes
    if unknown:
        notes = (*notes, f"not in the baseline: {', '.join(unknown)}; --update adds it")
    return dataclasses.replace(report, verdicts=verdicts, notes=notes)


def write_baseline(path: Path, report: Report) -> None:
    """Write the errors of this run, and keep the file's entries of others.

    Args:
        path: The file; it is replaced whole or not at all.
        report: A report that passed.

    Raises:
        OutputError: If it cannot be written.
        UsageError: If the file that is there is no baseline.
    """
    before = read_baseline(path) if path.exists() else Baseline({}, {})
    errors: Shares = {}
    for verdict in report.verdicts:
        if verdict.worst is not None:
            place = errors.setdefault(_place(verdict), {})
            place[_name(verdict)] = verdict.worst
    versions = {_place(run): _version(run) for run in report.runs if _place(run) in errors}
    content: dict[str, Any] = {
        "format": FORMAT,
        "versions": {**before.versions, **versions},
        "errors": {**before.shares, **errors},
    }
    _replace(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _compared(
    verdict: Verdict, baseline: Baseline, versions: Mapping[str, str], factor: float
) -> Verdict:
    before, now = _before(verdict, baseline), verdict.worst
    if verdict.status != "passed" or before is None or now is None:
        return verdict
    if now <= factor * max(before, FLOOR):
        return verdict
    place = _place(verdict)
    was, is_ = baseline.versions.get(place, "?"), versions.get(place, "?")
    since = f"{verdict.runtime} {was} before, {is_} now" if was != is_ else f"{is_} as before"
    message = (
        f"error {now:.3g} of allowed was {before:.3g} in the baseline: more than {factor:g} times "
        f"worse; {since}"
    )
    return dataclasses.replace(verdict, status="failed", message=message)


def _before(verdict: Verdict, baseline: Baseline) -> float | None:
    errors = baseline.shares.get(_place(verdict), {})
    return errors.get(_name(verdict))


def _place(of: RuntimeRun | Verdict) -> str:
    return f"{of.runtime}/{of.graph}"


def _name(verdict: Verdict) -> str:
    return f"{verdict.case}/{verdict.output}"


def _version(run: RuntimeRun) -> str:
    version = str(run.facts.get("version", "?"))
    # The name of an emulated processor is part of the runtime's.
    return version if "@" in run.runtime else f"{version} on {processor()}"


def _replace(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


# -- processors that are less exact than others -------------------------------------------------

TIMES = 3.0
"""Ratio of errors above which a processor is reported as less exact."""


def cpu_notes(verdicts: Iterable[Verdict], goldens: Sequence[Golden]) -> tuple[str, ...]:
    """Return a note on each processor that is much less exact than the most exact one.

    Args:
        verdicts: Those of a report.
        goldens: The cases; their outputs tell whether the graphs compute in float16.
    """
    worst: dict[str, dict[str, float]] = {}
    for verdict in verdicts:
        if verdict.worst is not None and verdict.runtime.partition("@")[0] == "ort-cpu":
            of_graph = worst.setdefault(verdict.graph, {})
            known = of_graph.get(verdict.runtime, 0.0)
            of_graph[verdict.runtime] = max(known, verdict.worst)
    dtypes = {array.dtype.name for golden in goldens for array in golden.expected.values()}
    notes = []
    for name in dict.fromkeys(name for of_graph in worst.values() for name in of_graph):
        times, said = max(_times(of_graph, name) for of_graph in worst.values())
        if "@" in name and times > TIMES:
            notes.append(f"{name} {said}{_cause(name) if 'float16' in dtypes else ''}")
    return tuple(notes)


def _cause(name: str) -> str:
    from attn_export.runtimes.emulated_cpu import cpus

    added = cpus()[name.partition("@")[2]].float16
    if added == "none":
        return ""
    return f"; it adds {added} products of float16 in half precision, where others use float32"


def _times(worst: Mapping[str, float], name: str) -> tuple[float, str]:
    """Return how many times the least error that of a runtime is, and a phrase for it."""
    if name not in worst:
        return 0.0, ""
    best = min(worst, key=worst.__getitem__)
    times = worst[name] / max(worst[best], FLOOR)
    said = (
        f"has {times:.1f} times the error of {best}: "
        f"{worst[name]:.2f} of what is allowed, against {worst[best]:.2f}"
    )
    return times, said


# -- the user's tolerances ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gate:
    """A gate of the user's beside the rule: |r − e| ≤ atol + rtol·|e|. It only tightens.

    Attributes:
        atol: Absolute part; None with rtol None for no gate.
        rtol: Relative part.
    """

    atol: float | None = None
    rtol: float | None = None

    def __post_init__(self) -> None:
        for name in ("atol", "rtol"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} has to be a finite number, at least 0; got {value}")

    @property
    def is_set(self) -> bool:
        """Return whether there is a gate."""
        return self.atol is not None or self.rtol is not None
