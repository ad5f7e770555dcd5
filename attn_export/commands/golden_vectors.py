"""Computation of the golden vectors of a job, while runtimes already run the cases.

For a quantised subject, its distance from the float model is measured and stored, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from attn_export.bundle.golden import Start, write_index, write_inputs, write_outputs
from attn_export.cases.influence import CLEARLY, check_influence, find_influence
from attn_export.cases.mask_patterns import MASKS
from attn_export.errors import ExportError, UsageError, counted, first_few
from attn_export.optional_parts import hooks
from attn_export.quality import Budget
from attn_export.results import BASE, CHANGED, Case, Golden, TensorNames
from attn_export.runtimes.run_options import Progress
from attn_export.tensorfile import mapped

if TYPE_CHECKING:
    from attn_export.cases.plan import Plan
    from attn_export.export.subject import Subject
    from attn_export.reference.tolerance import BaseOracle


def golden_vectors(
    folder: Path,
    plan: Plan,
    oracle: BaseOracle,
    start: Start,
    progress: Progress,
    *,
    has_narrow_dtypes: bool,
    names: TensorNames | None = None,
) -> tuple[list[Golden], tuple[str, ...]]:
    """Write the cases, start the runtimes on them, and compute the reference meanwhile.

    `has_narrow_dtypes`: Whether the subject has types narrower than float32.

    Returns:
        The cases with their reference, under the graph's names; and notes for the report.
    """
    computed, usable, notes = dict[str, Golden](), list(plan.cases), list[str]()
    if not plan.is_settled:
        computed, usable, notes = _usable_cases(plan, oracle, has_narrow_dtypes=has_narrow_dtypes)
    renamed = (names.case(case) if names else case for case in usable)
    stored = [write_inputs(folder, number, case) for number, case in enumerate(renamed)]
    for case, at in zip(usable, stored, strict=True):
        # In place, since the plan has these cases, too, and would keep the arrays in memory.
        cast("dict[str, np.ndarray]", case.inputs).update(mapped(at.folder, "input", case.inputs))
    runs = start(stored)
    progress.expect(len(usable) + runs)
    # Some file systems take longer to create files than the reference of a small case takes.
    with ThreadPoolExecutor(max_workers=1) as writer:
        written, unnamed = [], list[Golden]()
        left = [case for case in usable if case.name not in computed]
        rest = oracle.goldens(left, progress.phase)
        for number, case in enumerate(usable):
            golden = computed.pop(case.name, None) or next(rest)
            named = names.golden(golden) if names else golden
            written.append(writer.submit(write_outputs, folder, number, named))
            progress.advance(f"float64 reference: {case.name}")
            if not plan.is_settled:
                unnamed.append(golden)
            del golden, named  # of which the writer returns one that takes less memory
    goldens = [future.result() for future in written]
    if unnamed:
        check_influence(unnamed, _clearly(has_narrow_dtypes))
    write_index(folder, goldens)
    return goldens, tuple(notes)


def _clearly(has_narrow_dtypes: bool) -> float:
    # With narrow types the tolerance is large; the check was also made in float32.
    return 1.0 if has_narrow_dtypes else CLEARLY


# -- the planned cases that are usable as evidence ----------------------------------------------

LOUD = "since the module overflows or amplifies rounding there"
_AMPLIFYING = f"left out, {LOUD}"
_TIED = "left out, since equal or nearly equal values decide an output there"
_UNSETTLED = "left out, since the integers that values round to depend on the runtime"
_UNDEFINED = "left out, since the module gives NaN where all keys are masked"
_RAISING = "left out, since the module raises where inputs are NaN or infinite"
_SPREADING = "left out, since NaN of a batch element reaches others in the module itself"
SCALED = f"with inputs that were scaled down, {LOUD}"
"""The starts of notes on planned cases that are left out or changed."""

_MOST_SETS = 3
"""The number of cases in which a part looks for values that leave float16."""


def overflow_notes(graph: Path, planned: Sequence[Case], notes: Sequence[str]) -> tuple[str, ...]:
    """Return what a part says on the values that leave float16, if a note says that some do.

    `planned`: The cases, some of which are left out.
    """
    if not graph.exists() or not any(LOUD in note for note in notes):
        return ()
    from attn_export.bundle.quality_vectors import is_plain  # few builds need it

    sets = [case.inputs for case in planned if is_plain(case)][:_MOST_SETS]
    return tuple(note for of_part in hooks("overflow_notes") for note in of_part(graph, sets))


def _usable_cases(
    plan: Plan, oracle: BaseOracle, *, has_narrow_dtypes: bool
) -> tuple[dict[str, Golden], list[Case], list[str]]:
    """Select the planned cases that are usable as evidence, before they are run.

    Large inputs with which the module overflows are scaled down. Cases with contents that the
    module does not support are left out. This needs the reference of the cases in question.

    Returns:
        The reference computed so far, by the names of cases; the cases to run; and notes for the
        reader of a report.
    """
    delicate = has_narrow_dtypes or oracle.is_narrower or oracle.has_short_rows()

    def golden_of(case: Case) -> Golden:
        return oracle.usable(case) if case.may_overflow or delicate else oracle.golden(case)

    cases: Sequence[Case] = plan.cases
    is_own_layer = plan.interface.traits.is_attention
    known: dict[str, Golden] = {}
    if not is_own_layer:
        clearly = _clearly(has_narrow_dtypes)
        cases, known = find_influence(cases, plan.interface, golden_of, clearly)
    computed: dict[str, Golden] = {}
    selected: list[Case] = []
    names = {
        note: list[str]()
        for note in (
            _AMPLIFYING,
            _TIED,
            _UNSETTLED,
            _UNDEFINED,
            _RAISING,
            _SPREADING,
            SCALED,
        )
    }
    for planned in cases:
        case = oracle.move_off_ties(planned)
        if case is None:
            names[_UNSETTLED].append(planned.name)
            continue
        if is_own_layer and not (case.may_overflow or delicate):
            selected.append(case)
            continue
        golden = _reference_of(case, known, golden_of, oracle)
        reason = _reason_to_leave_out(case, golden, is_own_layer=is_own_layer)
        if golden is None or reason:
            names[reason].append(case.name)
            continue
        computed[case.name] = golden
        selected.append(golden.case)
        if golden.case.about != case.about:
            names[SCALED].append(case.name)
    notes = [
        f"{note}: {counted(len(of_note), 'case')}, {first_few(of_note)}"
        for note, of_note in names.items()
        if of_note
    ]
    return computed, selected, notes


def _reference_of(
    case: Case, known: Mapping[str, Golden], golden_of: Callable[[Case], Golden],
    oracle: BaseOracle,
) -> Golden | None:  # fmt: skip
    """Return the reference of a case; None if the module raises at NaN or infinite inputs."""
    try:
        golden = known.get(case.name) or golden_of(case)
    except ExportError:
        if not case.ignored_rows:
            raise
        return None
    is_movable = golden.tied and not golden.uncompared and not _is_fixed(case)
    return oracle.usable(case) if is_movable else golden


def _reason_to_leave_out(case: Case, golden: Golden | None, *, is_own_layer: bool) -> str:
    """Return the start of the note on a case that is not compared; "" if it is usable."""
    if golden is None:
        return _RAISING
    if golden.tied and not _is_fixed(case) and (case.contents or not golden.uncompared):
        return _TIED
    if golden.uncompared and case.contents:
        return _AMPLIFYING
    if is_own_layer:
        return ""
    if case.ignored_rows and _spreads(case, golden):
        return _SPREADING
    return _UNDEFINED if _is_undefined(case, golden) else ""


def _is_fixed(case: Case) -> bool:
    """Return whether golden vectors must contain the case unchanged."""
    return case.name == BASE or case.name.startswith(CHANGED)


def _spreads(case: Case, golden: Golden) -> bool:
    """Return whether an output is NaN in batch elements whose inputs are finite.

    So it is where a module takes the maximum of a whole batch. Runtimes differ in what the maximum
    of NaN is.
    """
    others = (
        np.delete(reference.astype(np.float64), case.ignored_rows, 0)
        for reference in golden.expected.values()
        if reference.ndim and len(reference) > max(case.ignored_rows)
    )
    return any(np.isnan(other).any() for other in others)


def _is_undefined(case: Case, golden: Golden) -> bool:
    """Return whether a user's module gives NaN in a case that changes only masks."""
    masked = {content.name for content in MASKS} & set(case.contents)
    arrays = golden.expected.values()
    return bool(masked) and any(np.isnan(array.astype(np.float64)).any() for array in arrays)


# -- quantised subjects: distance from the float model, and budgets -----------------------------


def budgets_of(subject: Subject, budgets: Sequence[Budget]) -> tuple[Budget, ...]:
    """Return the budgets of a build: those of the user, or the default of a quantised subject."""
    if subject.budget is not None:
        return tuple(budgets) or (subject.budget,)
    if budgets:
        raise UsageError(
            f"budget {budgets[0]} needs quantised weights; leave it out, or set weights_dtype"
        )
    return ()
