"""Explanations of the failures in a report, by a limited number of trial runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import AttnExportError, counted
from attn_export.explain.explanation import SECONDS
from attn_export.interruption import ctrl_c_raises
from attn_export.results import Report, Verdict
from attn_export.runtimes.catalogue import runtime
from attn_export.runtimes.run_options import RunOptions

if TYPE_CHECKING:
    from attn_export.explain.eager_values import ValueReference

RUNTIMES = 2
"""The number of runtimes whose failures are explained: most often, others have the same cause."""


def explain_failures(
    report: Report,
    bundle: Path,
    graph: Path | None = None,
    *,
    run: RunOptions | None = None,
    seconds: float = SECONDS,
    reference: ValueReference | None = None,
    reproduction: Path | None = None,
) -> Report:
    """Return the report with a sentence on the cause for runtimes whose outputs are wrong."""
    # Errors of single cases are explained if the runtime ran to its end. Otherwise the reason of
    # its end is in the report.
    ran = {(r.runtime, r.graph) for r in report.runs if r.outcome == "ran"}
    failed = dict.fromkeys(
        v.runtime
        for v in report.verdicts
        if v.status == "failed" or (v.status == "error" and (v.runtime, v.graph) in ran)
    )
    sentences = _tie_sentences(report.verdicts)
    if not failed or (reference is not None and reference.is_float_model):
        return dataclasses.replace(report, explanations=(*sentences,)) if sentences else report
    from attn_export.commands.explain_bundle import explain
    from attn_export.explain.explanation import ENDED_EARLY, SearchWork

    run = RunOptions.of(run)
    more = "attn-export explain" if reference is None else "--search-more"
    work = SearchWork(math.inf if run.search_more else seconds, more)
    for number, name in enumerate(list(failed)[:RUNTIMES]):
        if work.is_over(0.0):
            break
        try:
            with ctrl_c_raises():
                explanation = explain(
                    bundle, dataclasses.replace(run, runtimes=(runtime(name),)), graph=graph,
                    seconds=work, reference=reference,
                    output=None if number else reproduction,
                )  # fmt: skip
        except AttnExportError as error:
            sentences.append(f"{name}: not explained: {error}")
            continue
        except KeyboardInterrupt:  # the report must be printed nevertheless
            sentences.append(f"{name}: not explained: interrupted")
            break
        if explanation.fault != "none":  # "none" if only a gate or a baseline fails
            sentences.append(explanation.sentence)
            ended = next((x for x in explanation.notes if x.startswith(ENDED_EARLY)), None)
            sentences += [f"{name}: {ended}"] if ended else []
            report = dataclasses.replace(
                report, reproduction=report.reproduction or explanation.folder
            )
    return dataclasses.replace(report, explanations=(*sentences,))


def _tie_sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence on each output that the order of equal values decides."""
    from attn_export.rule import TIES, TIES_ADVICE  # imports numpy

    cases: dict[str, set[str]] = {}
    for verdict in verdicts:
        if verdict.status == "unusable" and verdict.message.startswith(f"{TIES}:"):
            cases.setdefault(verdict.output, set()).add(verdict.case)
    return [
        f"{TIES}: in {counted(len(names), 'case')}, the order of equal values decides {output}; "
        f"{TIES_ADVICE}"
        for output, names in cases.items()
    ]
