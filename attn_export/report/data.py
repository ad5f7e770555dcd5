"""Reports, benchmarks and fingerprints as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_export.quality import Quality
from attn_export.results import Report

if TYPE_CHECKING:
    from attn_export.bench.measurements import BenchReport, Contest, Measured
    from attn_export.diagnose.findings import Fingerprint, ProbeFinding, ProbeRow

FORMAT = "attn-export-report/1"
LIST_OF_PLAIN = re.compile(r'\[\n[^][{}"]*\]')


def to_json(report: Report) -> str:
    """Return the report as JSON text, with a newline at the end. NaN and infinities become null."""
    content = {
        "format": FORMAT,
        "name": report.name,
        "passed": report.passed,
        "exit_code": report.exit_code,
        "environment": report.environment,
        "notes": report.notes,
        "explanations": report.explanations,
        "dimensions": dict(report.dimensions),
        "error": None if report.error is None else str(report.error),
        "runs": [dataclasses.asdict(run) for run in report.runs],
        "signature": None if report.signature is None else dataclasses.asdict(report.signature),
        "quality": None if report.quality is None else _quality(report.quality),
        "dry_runs": [dataclasses.asdict(one) for one in report.dry_runs],
        "best_graphs": _best_graphs(report),
        "verdicts": [_finite(dataclasses.asdict(verdict)) for verdict in report.verdicts],
    }
    text = json.dumps(content, indent=1, allow_nan=False)
    # A row of numbers is a line: no string holds a line break.
    return LIST_OF_PLAIN.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def _best_graphs(report: Report) -> list[dict[str, Any]]:
    if not report.dry_runs:
        return []
    from attn_export.runtimes.dry_run_results import best_graphs

    return [dataclasses.asdict(best) for best in best_graphs(report.dry_runs)]


def _quality(quality: Quality) -> dict[str, Any]:
    parts = {name: getattr(quality, name) for name in ("outputs", "heads", "weights", "splits")}
    return {
        **{name: [dataclasses.asdict(each) for each in found] for name, found in parts.items()},
        "budgets": [str(budget) for budget in quality.budgets],
        "missed": list(quality.missed),
        **({"logits": dataclasses.asdict(quality.logits)} if quality.logits else {}),
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


# -- results of a benchmark, as JSON and in words -----------------------------------------------


BENCH_FORMAT = "attn-export-bench/1"


def bench_to_json(report: BenchReport) -> str:
    """Return the report as JSON text, with a newline at the end. Missing measurements are null."""
    return json.dumps(bench_to_dict(report), indent=1, allow_nan=False) + "\n"


def bench_to_dict(report: BenchReport) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "format": BENCH_FORMAT,
        "name": report.name,
        "exit_code": report.exit_code,
        "threads": report.threads,
        "rounds": report.rounds,
        "environment": report.environment,
        "contests": [contest_to_dict(contest) for contest in report.contests],
    }


def contest_to_dict(contest: Contest) -> dict[str, Any]:
    """Return one contest as plain values."""
    return {
        "name": contest.name,
        "sizes": dict(contest.sizes),
        "gflops_roof": finite(contest.flops_roof / 1e9),
        "gbs_roof": finite(contest.bytes_roof / 1e9),
        "candidates": [_candidate(contest, measured) for measured in contest.measured],
    }


def _candidate(contest: Contest, m: Measured) -> dict[str, Any]:
    return {
        "name": m.name,
        "role": m.role,
        "outcome": m.outcome,
        "reason": m.reason,
        "runs": len(m.seconds),
        "median_ms": finite(m.median * 1e3),
        "p95_ms": finite(m.p95 * 1e3),
        "min_ms": finite(min(m.seconds, default=math.nan) * 1e3),
        "tokens_per_second": finite(m.tokens_per_second) if m.candidate.work.tokens else None,
        "peak_memory_growth_bytes": m.growth,
        "gflops": finite(m.flops_per_second / 1e9),
        "gbs": finite(m.bytes_per_second / 1e9),
        "ratio_to_best_peer": None if m.role == "roof" else finite(contest.ratio(m)),
        "fraction_of_roof": finite(contest.fraction(m)),
    }


def made_on(machine: Mapping[str, Any]) -> str:
    """Describe the machine and the versions of a measurement: `machine`."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}; {versions}"
    )


def finite(value: float) -> float | None:
    """Return the value to five digits; None for NaN and infinities."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# -- A fingerprint as JSON ----------------------------------------------------------------------


FINGERPRINT_FORMAT = "attn-export-fingerprint/1"


def probe_to_json(found: Fingerprint) -> str:
    """Return the fingerprint as JSON text, with a newline at the end."""
    content = {
        "format": FINGERPRINT_FORMAT,
        "runtime": found.runtime,
        "version": found.version,
        "environment": found.environment,
        "probes": [_row(row) for row in found.rows],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _row(row: ProbeRow) -> dict[str, Any]:
    return {
        "name": row.probe,
        "about": row.about,
        "reading": row.effective.reading,
        "differs_from": list(row.differs),
        "runtime": [_finding(each) for each in row.here],
        "onnx": {
            "says": row.says or None,
            "evaluator": None if row.evaluator is None else _finding(row.evaluator),
        },
        "pytorch": _finding(row.pytorch),
    }


def _finding(each: ProbeFinding) -> dict[str, str | None]:
    return {
        "form": each.dialect or None,
        "outcome": each.outcome,
        "reading": each.reading,
        "detail": each.detail or None,
    }
