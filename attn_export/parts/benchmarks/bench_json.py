"""JSON of benchmarks."""

from __future__ import annotations

import json
import math
from typing import Any

from attn_export.parts.benchmarks.measurements import BenchReport, Measured, WorkloadResult
from attn_export.report.data import finite

_BENCH_FORMAT = "attn-export-bench/1"


def bench_to_json(report: BenchReport) -> str:
    """Return the report as JSON text, with a newline at the end. Missing measurements are null."""
    return json.dumps(bench_to_dict(report), indent=1, allow_nan=False) + "\n"


def bench_to_dict(report: BenchReport) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "format": _BENCH_FORMAT,
        "name": report.name,
        "exit_code": report.exit_code,
        "threads": report.threads,
        "rounds": report.rounds,
        "environment": report.environment,
        "workloads": [workload_to_dict(workload) for workload in report.workloads],
        "left_out": [*report.left_out],
        "busy": report.busy,
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
        "peak_memory_bytes": measured.peak,
        "gflops": finite(measured.flops_per_second / 1e9),
        "gbs": finite(measured.bytes_per_second / 1e9),
        "ratio_to_best_peer": None if measured.role == "roof" else finite(workload.ratio(measured)),
        "fraction_of_roof": finite(workload.fraction(measured)),
    }
