"""Checks beside the judge's rule: the user's tolerances, and the errors or failures of another run.

They can only make a verdict fail. A runtime that starts to compute in a narrower type may stay
within the tolerance, but not near its own earlier error: on the same processor and version, a
graph gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.errors import UsageError, one_line, why_unread
from attn_export.output_folder import write_errors, write_whole
from attn_export.results import Golden, Report, RuntimeRun, Verdict
from attn_export.schema import BaselineFile, ReportFile
from attn_export.system_info import processor
from attn_export.untrusted_files import checked, parse_json, read_text

# -- the baseline: errors of an earlier run -----------------------------------------------------

FORMAT = "attn-export-baseline/1"
_FACTOR = 4.0
"""The largest factor by which an error may grow. Another order of additions makes about 2."""

FLOOR = 0.02
"""The share of the tolerance below which errors count as equal: they are a few roundings."""


def read_baseline(path: Path) -> BaselineFile:
    """Read a file that `write_baseline` wrote."""
    try:
        content = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise UsageError(f"there is no baseline {path}; --update makes one") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the baseline {path}: {one_line(error)}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path} is not a baseline of the format {FORMAT}; --update makes one")
    try:
        return checked(content, BaselineFile)
    except ValueError as error:
        raise UsageError(f"the baseline {path} was changed: {error}") from error


def failed_in(path: Path) -> list[str]:
    """Return the names of the cases that did not pass in a report."""
    try:
        report = checked(parse_json(read_text(path)), ReportFile)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the report {path}: {why_unread(error)}") from error
    failed = (each.case for each in report.verdicts if each.status != "passed")
    names = dict.fromkeys(filter(None, failed))
    if not names:
        raise UsageError(f"no case failed in {path}; leave --last-failed out")
    return [*names]


def apply_baseline(report: Report, baseline: BaselineFile) -> Report:
    """Return a report in which verdicts with larger errors than in the baseline fail."""
    versions = {_run_key(run): _version(run) for run in report.runs}
    verdicts = tuple(_compared(v, baseline, versions) for v in report.verdicts)
    unknown = dict.fromkeys(_run_key(v) for v in report.verdicts if _before(v, baseline) is None)
    notes = report.notes
    if unknown:
        notes = (*notes, f"not in the baseline: {', '.join(unknown)}; --update adds it")
    return dataclasses.replace(report, verdicts=verdicts, notes=notes)


def write_baseline(path: Path, report: Report) -> None:
    """Write the errors of this run; the file's entries for other runtimes and graphs stay."""
    before = read_baseline(path) if path.exists() else BaselineFile(FORMAT, {}, {})
    errors: dict[str, dict[str, float]] = {}
    for verdict in report.verdicts:
        if verdict.worst is not None:
            of_run = errors.setdefault(_run_key(verdict), {})
            of_run[_output_key(verdict)] = verdict.worst
    versions = {_run_key(run): _version(run) for run in report.runs if _run_key(run) in errors}
    content: dict[str, Any] = {
        "format": FORMAT,
        "versions": {**before.versions, **versions},
        "errors": {**before.errors, **errors},
    }
    with write_errors(path):
        write_whole(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _compared(verdict: Verdict, baseline: BaselineFile, versions: Mapping[str, str]) -> Verdict:
    before, now = _before(verdict, baseline), verdict.worst
    if verdict.status != "passed" or before is None or now is None:
        return verdict
    if now <= _FACTOR * max(before, FLOOR):
        return verdict
    key = _run_key(verdict)
    was, is_ = baseline.versions.get(key, "?"), versions.get(key, "?")
    since = f"{verdict.runtime} {was} before, {is_} now" if was != is_ else f"{is_} as before"
    message = (
        f"error / tolerance is {now:.3g} and was {before:.3g} in the baseline: more than "
        f"{_FACTOR:g} times worse; {since}"
    )
    return dataclasses.replace(verdict, status="failed", message=message)


def _before(verdict: Verdict, baseline: BaselineFile) -> float | None:
    errors = baseline.errors.get(_run_key(verdict), {})
    return errors.get(_output_key(verdict))


def _run_key(result: RuntimeRun | Verdict) -> str:
    return f"{result.runtime}/{result.graph}"


def _output_key(verdict: Verdict) -> str:
    return f"{verdict.case}/{verdict.output}"


def _version(run: RuntimeRun) -> str:
    version = str(run.facts.get("version", "?"))
    # The name of an emulated processor is part of the runtime's name.
    return version if "@" in run.runtime else f"{version} on {processor()}"


# -- processors that are less exact than others -------------------------------------------------

TIMES = 3.0
"""Ratio of errors above which a processor is reported as less exact."""


def cpu_notes(verdicts: Iterable[Verdict], goldens: Sequence[Golden]) -> tuple[str, ...]:
    """Return a note on each processor that is much less exact than the most exact one."""
    from attn_export.runtimes.catalogue import runtime

    worst: dict[str, dict[str, float]] = {}
    for verdict in verdicts:
        if verdict.worst is not None and verdict.runtime.partition("@")[0] == "ort-cpu":
            of_graph = worst.setdefault(verdict.graph, {})
            known = of_graph.get(verdict.runtime, 0.0)
            of_graph[verdict.runtime] = max(known, verdict.worst)
    dtypes = {array.dtype.name for golden in goldens for array in golden.expected.values()}
    notes = []
    for name in dict.fromkeys(name for of_graph in worst.values() for name in of_graph):
        ratio, text = max(_ratio(of_graph, name) for of_graph in worst.values())
        if "@" in name and ratio > TIMES:
            cause = runtime(name).float16_sums if "float16" in dtypes else ""
            notes.append(f"{name} {text}{cause and f'; {cause}'}")
    return tuple(notes)


def _ratio(worst: Mapping[str, float], name: str) -> tuple[float, str]:
    """Return the ratio of a runtime's error to the smallest error, and a text that states it."""
    if name not in worst:
        return 0.0, ""
    best = min(worst, key=worst.__getitem__)
    ratio = worst[name] / max(worst[best], FLOOR)
    text = (
        f"has {ratio:.1f} times the error of {best}: "
        f"error / tolerance {worst[name]:.2f}, against {worst[best]:.2f}"
    )
    return ratio, text
