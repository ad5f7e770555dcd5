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
    return [_summary(run, _verdicts(report, run)) for run in report.runs]


def problems(report: Report) -> list[Verdict]:
    """The verdicts that did not pass."""
    return [verdict for verdict in report.verdicts if verdict.status != "passed"]


def _verdicts(report: Report, run: RuntimeRun) -> list[Verdict]:
    return [v for v in report.verdicts if (v.runtime, v.graph) == (run.runtime, run.graph)]


def _summary(run: RuntimeRun, verdicts: list[Verdict]) -> Summary:
    names = {verdict.case for verdict in verdicts}
    broken = {verdict.case for verdict in verdicts if verdict.status != "passed"}
    return Summary(
        run,
        cases=len(names),
        passed=len(names - broken),
        worst=max((v.worst or 0.0 for v in verdicts), default=0.0),
        max_abs=max((v.max_abs or 0.0 for v in verdicts), default=0.0),
        max_rel=max((v.max_rel or 0.0 for v in verdicts), default=0.0),
    )
