"""`attn-export compare --module … --budget`: a quantised graph of a user's module."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attn_export.bundle.quality_vectors import is_plain
from attn_export.cases.plan import plan_cases
from attn_export.commands.compare import compare
from attn_export.commands.reference import Reference, of_subject
from attn_export.errors import UsageError
from attn_export.export.subject import Subject
from attn_export.parts.whole_models.integer_weights import (
    integers_note,
    quantised_operators,
    read_integers,
    with_float_products,
    with_integers,
)
from attn_export.parts.whole_models.model_oracle import budgeted
from attn_export.quality import Budget
from attn_export.results import BASE, Case, Golden, Report
from attn_export.runtimes.run_options import RunOptions
from attn_export.truth.oracle import Oracle


class _FloatOracle(Oracle):
    """The source of the truth of a float module, from which budgets limit the distance."""

    def __init__(self, subject: Subject, least_eps: float, budgets: tuple[Budget, ...]) -> None:
        super().__init__(subject, least_eps)
        self._budgets = budgets

    def golden(self, case: Case) -> Golden:
        """Return the case with its truth, which allows any error."""
        with self._threads_for(case):
            return budgeted(self, case, self._budgets)


def compare_quantised(
    load: Callable[[], Subject], graph: Path, run: RunOptions, *,
    names: Mapping[str, str] | None = None, inputs: Sequence[str] = (),
    output: Path | None = None,
) -> Report:  # fmt: skip
    """Judge a quantised graph twice: by budgets, and by the module with the graph's own integers.

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
    stored = read_integers(graph)
    changed, problem = (
        (None, stored.problem) if stored.problem else with_integers(subject.module, stored)
    )
    reports, notes = dict[str, Report](), [f"judged by the budget alone: {problem}"]
    if changed is not None:
        notes = [f"judged by the module with the integers of {integers_note(stored)}"]
        own, plain = copy.copy(subject), dataclasses.replace(run, budgets=())
        own.module = changed
        if stored.rounds_inputs:
            notes.append("in a copy of the graph with accuracy_level 1, as kernels may round more")
            with with_float_products(graph) as exact:
                reports[graph.stem] = judge(own, exact, plain, output=place(graph.stem))
        else:
            reports[graph.stem] = judge(own, graph, plain, output=place(graph.stem))
    name = f"{graph.stem}-budget"
    reports[name] = judge(
        lambda: _of_float(subject, run.budgets), graph, run, output=place(name)
    )  # fmt: skip
    joined = Report.joined(graph.stem, reports)
    return dataclasses.replace(joined, notes=(*notes, *joined.notes))


def _place(output: Path | None, name: str) -> Path | None:
    return output and output / name


def _of_float(subject: Subject, budgets: tuple[Budget, ...]) -> Reference:
    """Return the reference of budgets: random inputs, without the contents that show faults."""
    reference = of_subject(subject, subject.interface())
    plan = plan_cases(reference.interface, reference.takes, reference.weights)
    plain = tuple(case for case in plan.cases if is_plain(case) or case.name == BASE)
    return dataclasses.replace(
        reference, plan=dataclasses.replace(plan, cases=plain, is_settled=True),
        oracle=functools.partial(_float_oracle, subject, budgets), is_float_model=True,
    )  # fmt: skip


def _float_oracle(subject: Subject, budgets: tuple[Budget, ...], least_eps: float) -> Oracle:
    return _FloatOracle(subject, least_eps, budgets)
