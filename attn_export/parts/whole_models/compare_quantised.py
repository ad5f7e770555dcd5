"""`attn-export compare --module … --budget`: a quantised graph of a user's module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attn_export.bundle.quality_vectors import is_plain
from attn_export.cases.plan import Plan
from attn_export.errors import UsageError
from attn_export.export.subject import Subject
from attn_export.parts.whole_models.integer_weights import quantised_operators, strict_judgement
from attn_export.quality import Budget
from attn_export.reference.oracle import Oracle
from attn_export.reference.reference import Reference, of_subject
from attn_export.results import BASE, Report
from attn_export.runtimes.run_options import RunOptions


def compare_quantised(
    compare: Callable[..., Report], load: Callable[[], Subject], graph: Path, run: RunOptions, *,
    names: Mapping[str, str] | None = None, inputs: Sequence[str] = (),
    output: Path | None = None,
) -> Report:  # fmt: skip
    """Judge a quantised graph twice: by budgets, and by the module with the graph's own integers.

    `compare`: Judges one graph, as `compare` of the command.
    `load`: Returns the subject with the float module.
    `names`, `inputs`, `output`: as for `compare`; each judgement has a bundle in `output`.
    """
    operators = quantised_operators(graph)
    if not operators:
        raise UsageError(f"a budget of {run.budgets[0]}: {graph} is not quantised; leave it out")
    run.progress.phase("importing torch")
    subject = load()
    judge = functools.partial(compare, names=names, inputs=inputs)
    place = functools.partial(_place, output)
    reports = dict[str, Report]()
    with strict_judgement(subject.module, graph) as (changed, path, note):
        if changed is not None:
            own, plain = subject.having(module=changed), dataclasses.replace(run, budgets=())
            reports[graph.stem] = judge(own, path, plain, output=place(graph.stem))
    name = f"{graph.stem}-budget"
    reports[name] = judge(
        lambda: _of_float(subject, run.budgets), graph, run, output=place(name)
    )  # fmt: skip
    joined = Report.joined(graph.stem, reports)
    return dataclasses.replace(joined, notes=(note, *joined.notes))


def _place(output: Path | None, name: str) -> Path | None:
    return output and output / name


def _of_float(subject: Subject, budgets: tuple[Budget, ...]) -> Reference:
    """Return the reference of budgets: random inputs, without the contents that show faults."""
    reference = of_subject(subject)

    def plan() -> Plan:
        planned = reference.plan()
        plain = tuple(case for case in planned.cases if is_plain(case) or case.name == BASE)
        return dataclasses.replace(planned, cases=plain, is_settled=True)

    return dataclasses.replace(
        reference, plan=plan, is_float_model=True,
        oracle=functools.partial(Oracle, subject, budgets=budgets),
    )  # fmt: skip
