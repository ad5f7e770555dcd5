"""JSON of reports, benchmarks and fingerprints."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from attn_export.quality import Quality
from attn_export.results import Report

if TYPE_CHECKING:
    from attn_export.bench.measurements import BenchReport, Measured, WorkloadResult

FORMAT = "attn-export-report/1"
LIST_OF_PLAIN = re.compile(r'\[\n[^][{}"]*\]')
"""Pattern of a list without strings, lists and objects in indented JSON."""


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
        "reproduction": None if report.reproduction is None else str(report.reproduction),
        "dimensions": dict(report.dimensions),
        "error": None if report.error is None else str(report.error),
        "runs": [dataclasses.asdict(run) for run in report.runs],
        "signature": None if report.signature is None else dataclasses.asdict(report.signature),
        "quality": None if report.quality is None else _quality(report.quality),
        "verdicts": [_without_nan(dataclasses.asdict(verdict)) for verdict in report.verdicts],
    }
    text = json.dumps(content, indent=1, allow_nan=False)
    # Put lists of numbers on one line. No string matches, because JSON escapes line breaks.
    return LIST_OF_PLAIN.sub(lambda match: " ".join(match[0].split()), text) + "\n"


def _quality(quality: Quality) -> dict[str, Any]:
    content: dict[str, Any] = {
        name: [asdict(value) for value in getattr(quality, name)]
        for name in ("outputs", "heads", "weights", "splits")
    }
    content["budgets"] = [str(budget) for budget in quality.budgets]
    content["missed"] = list(quality.missed)
    if quality.logits:
        content["logits"] = dataclasses.asdict(quality.logits)
    return content


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities by None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


# -- benchmarks ---------------------------------------------------------------------------------


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
        "workloads": [workload_to_dict(workload) for workload in report.workloads],
    }


def workload_to_dict(workload: WorkloadResult) -> dict[str, Any]:
    """Return one workload as plain values."""
    return {
        "name": workload.name,
        "sizes": dict(workload.sizes),
        "gflops_roof": finite(workload.flops_roof / 1e9),
        "gbs_roof": finite(workload.bytes_roof / 1e9),
        "candidates": [_candidate(workload, measured) for measured in workload.measured],
    }


def _candidate(workload: WorkloadResult, measured: Measured) -> dict[str, Any]:
    has_tokens = bool(measured.candidate.work.tokens)
    return {
        "name": measured.name,
        "role": measured.role,
        "outcome": measured.outcome,
        "reason": measured.reason,
        "runs": len(measured.seconds),
        "median_ms": finite(measured.median * 1e3),
        "p95_ms": finite(measured.p95 * 1e3),
        "min_ms": finite(min(measured.seconds, default=math.nan) * 1e3),
        "tokens_per_second": finite(measured.tokens_per_second) if has_tokens else None,
        "peak_memory_growth_bytes": measured.growth,
        "gflops": finite(measured.flops_per_second / 1e9),
        "gbs": finite(measured.bytes_per_second / 1e9),
        "ratio_to_best_peer": None if measured.role == "roof" else finite(workload.ratio(measured)),
        "fraction_of_roof": finite(workload.fraction(measured)),
    }


def finite(value: float) -> float | None:
    """Return a value with five significant digits, or None for NaN and infinities."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# -- fingerprints -------------------------------------------------------------------------------
