"""Figures from known samples."""

from __future__ import annotations

import math

import pytest

from attn_export.parts.benchmarks.bench_report import bench_to_dict, three_digits
from attn_export.parts.benchmarks.measurements import (
    BenchReport,
    Candidate,
    Measured,
    Work,
    WorkloadResult,
)
from attn_export.report.tables import UNMEASURED, in_mib

WORK = Work(flops=4e9, bytes=1e9, tokens=8)


def measured(name: str, role: str, seconds: list[float], work: Work = WORK, **more) -> Measured:
    candidate = Candidate(name, role, "graph", {}, work)
    outcome = "ran" if seconds else "refused"
    return Measured(candidate, tuple(seconds), outcome=outcome, **more)


RESULT = WorkloadResult(
    "one",
    {"batch": 8},
    (
        measured("ours", "ours", [0.2, 0.1, 0.3], growth=3 << 20),
        measured("slow", "peer", [0.8]),
        measured("quick", "peer", [0.4, 0.5, 0.3]),
        measured("absent", "peer", [], reason="it said no"),
        measured("gemm a", "roof", [1.0], Work(flops=40e9)),
        measured("gemm b", "roof", [1.0], Work(flops=30e9)),
        measured("read", "roof", [0.1], Work(bytes=1e9)),
    ),
)


def test_median_p95_and_rates_are_those_of_the_samples():
    many = measured("many", "ours", [float(x) for x in range(1, 101)])
    assert (many.median, many.p95) == (50.5, 95.0)
    assert measured("one", "ours", [7.0]).p95 == 7.0
    ours = RESULT.named("ours")
    assert ours.median == 0.2
    assert ours.tokens_per_second == pytest.approx(40)
    assert ours.flops_per_second == pytest.approx(20e9)
    assert ours.bytes_per_second == pytest.approx(5e9)


@pytest.mark.parametrize(
    ("seconds", "busy"),
    [
        ([1.0] * 18 + [2.0, 2.0], False),
        ([1.0] * 18 + [2.1, 2.1], True),
        ([1.0] * 19 + [9.0], False),  # one run is no sign
        ([1.0, 9.0, 9.0], False),  # too few runs
    ],
)
def test_a_busy_machine_is_told_by_the_spread_of_the_times(seconds: list[float], busy: bool):
    result = WorkloadResult("one", {}, (RESULT.measured[0], measured("it", "peer", seconds)))
    report = BenchReport("name", (result,), 1, 5, {})
    assert ("p95 of 1 of 2 measurements" in report.busy) == busy
    assert bench_to_dict(report)["busy"] == report.busy


def test_the_ratio_is_to_the_fastest_peer_or_to_those_named():
    ours = RESULT.named("ours")
    assert RESULT.best_peer().name == "quick"
    assert RESULT.ratio(ours) == pytest.approx(0.5)
    assert RESULT.ratio(ours, "slow") == pytest.approx(0.25)
    assert math.isnan(RESULT.ratio(ours, "absent"))
    assert RESULT.named("absent") is None


def test_the_fraction_is_of_the_roof_that_limits():
    assert RESULT.flops_roof == pytest.approx(40e9)
    assert RESULT.bytes_roof == pytest.approx(10e9)
    # 4 GFLOP need 0.1 s, 1 GB needs 0.1 s; it took 0.2 s.
    assert RESULT.fraction(RESULT.named("ours")) == pytest.approx(0.5)
    assert math.isnan(
        WorkloadResult("no roof", {}, RESULT.measured[:3]).fraction(RESULT.measured[0])
    )


def test_a_candidate_that_did_not_run_is_null_with_its_reason():
    report = BenchReport("r", (RESULT,), 2, 5, {})
    found = bench_to_dict(report)
    assert found["format"] == "attn-export-bench/1"
    (workload,) = found["workloads"]
    by_name = {candidate["name"]: candidate for candidate in workload["candidates"]}
    assert by_name["absent"]["median_ms"] is None
    assert by_name["absent"]["reason"] == "it said no"
    assert by_name["ours"]["ratio_to_best_peer"] == 0.5
    assert by_name["ours"]["peak_memory_growth_bytes"] == 3 << 20
    assert by_name["gemm a"]["ratio_to_best_peer"] is None
    assert by_name["gemm a"]["tokens_per_second"] is None
    assert report.exit_code == 0


def test_a_graph_of_ours_that_did_not_run_is_exit_code_5():
    failed = WorkloadResult("two", {}, (measured("ours", "ours", [], reason="broken"),))
    assert BenchReport("r", (RESULT, failed), 2, 5, {}).exit_code == 5
    assert BenchReport("r", (), 2, 5, {}).exit_code == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (12.345, "12.3"), (0.12345, "0.123"), (0.00001, "0.0000"), (0, "0"),
     (math.nan, UNMEASURED)],
)  # fmt: skip
def test_numbers_have_about_three_digits(value: float, text: str):
    assert three_digits(value) == text


def test_memory_is_in_mib():
    assert (in_mib(3 << 20), in_mib(None)) == ("3", UNMEASURED)
