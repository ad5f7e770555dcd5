"""What a report says about one runtime with one graph, in a few figures."""

from __future__ import annotations

import dataclasses

from attn_export.nouns import Report, RuntimeRun, Verdict


@dataclasses.dataclass(frozen=True)
class Summary:
    """One row of the table.

    Attributes:
        cases: How many cases were tried.
        passed: How many of them passed with every output.
        worst: The largest error as a share of what is allowed.
        max_abs: The largest absolute difference from eager.
        max_rel: The largest relative difference from eager.
    """

    run: RuntimeRun
    cases: int
    passed: int
    worst: float
    max_abs: float
    max_rel: float


def summaries(report: Report) -> list[Summary]:
    """One summary for each runtime and graph."""
    return [_summary(run, verdicts_by_case(report, run)) for run in report.runs]


def problems(report: Report) -> list[Verdict]:
    """The verdicts that did not pass."""
    return [verdict for verdict in report.verdicts if verdict.status != "passed"]


def verdicts_by_case(report: Report, run: RuntimeRun) -> dict[str, list[Verdict]]:
    """The verdicts of one runtime and graph, by case."""
    found: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        if (verdict.runtime, verdict.graph) == (run.runtime, run.graph):
            found.setdefault(verdict.case, []).append(verdict)
    return found


def _summary(run: RuntimeRun, by_case: dict[str, list[Verdict]]) -> Summary:
    verdicts = [verdict for of_case in by_case.values() for verdict in of_case]
    return Summary(
        run,
        cases=len(by_case),
        passed=sum(all(v.status == "passed" for v in of_case) for of_case in by_case.values()),
        worst=max((v.worst or 0.0 for v in verdicts), default=0.0),
        max_abs=max((v.max_abs or 0.0 for v in verdicts), default=0.0),
        max_rel=max((v.max_rel or 0.0 for v in verdicts), default=0.0),
    )
