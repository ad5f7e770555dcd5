"""The golden vectors of a job: the cases that are evidence, written, run and computed.

Of a quantised subject also how far it is from what it was before, and what verifies that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from attn_export.errors import ExportError, UsageError, counted
from attn_export.parity.mask_contents import MASKS
from attn_export.parity.measures import measure
from attn_export.quality import Budget, Quality
from attn_export.report.progress import Progress
from attn_export.results import BASE, CHANGED, Case, Golden, StoredCase
from attn_export.spec.low_precision import BY_BLOCK, FLOAT16

if TYPE_CHECKING:
    from attn_export.export.subject import Subject
    from attn_export.graph.signature_check import EndNames
    from attn_export.results import Golden

# -- the golden vectors of a job: written, run and computed at the same time --------------------

Start = Callable[[Sequence[StoredCase]], int]
"""Starts the runtimes on stored cases; returns how many they run in all."""


def golden_vectors(
    folder: Path,
    cases: Sequence[Case],
    oracle: TruthSource,
    start: Start,
    progress: Progress,
    *,
    ours: bool,
    narrow: bool,
    names: EndNames | None = None,
) -> tuple[list[Golden], tuple[str, ...]]:
    """Write the cases, start the runtimes on them, and compute the truth meanwhile.

    Args:
        folder: The folder to write to.
        cases: The cases that were planned.
        oracle: Computes their truth.
        start: Starts the runtimes.
        progress: Receiver of progress.
        ours: Whether the truth is of a layer of ours.
        narrow: Whether its types are narrower than float32.
        names: The names of inputs and outputs in the graph, where they differ.

    Returns:
        The cases with their truth, as the graph names them; and notes for the reader.

    Raises:
        ExportError: If an input changes no output, or an output reacts to no input.
    """
    from attn_export.parity.golden import write_golden, write_inputs

    known, usable, notes = usable_cases(cases, oracle, ours=ours, narrow=narrow)
    shown = [names.case(case) for case in usable] if names else usable
    expected = start([write_inputs(folder, number, case) for number, case in enumerate(shown)])
    progress.expect(len(usable) + expected)
    goldens = []
    for case in usable:
        goldens.append(known.get(case.name) or oracle.golden(case))
        progress.advance(f"float64 truth: {case.name}")
    # In few bits the allowed error is a large part of all: the wide run has settled it.
    check_influence(goldens, *([1.0] if narrow else []))
    if names:
        goldens = [names.golden(golden) for golden in goldens]
    write_golden(folder, goldens)
    return goldens, (*notes, *near_ties_note(goldens))


def near_ties_note(goldens: Sequence[Golden]) -> tuple[str, ...]:
    """Return a note for the reader on cases in which rounding decides what is kept of values."""
    found = [golden.rows_near_ties for golden in goldens if golden.rows_near_ties]
    if not found:
        return ()
    rows = sum(math.prod(next(iter(g.expected.values())).shape[:-1]) for g in goldens)
    return (
        f"in {counted(len(found), 'case')} of {len(goldens)}, values of {sum(found)} of {rows} "
        "tokens lie so near a tie that either neighbour is right: the error allowed is larger by "
        "that",
    )


# -- the planned cases that are evidence for a subject ------------------------------------------


class TruthSource(Protocol):
    """Computation of the truth of cases: of a module, or of a graph."""

    @property
    def has_short_rows(self) -> bool:
        """Return whether an output has rows so short that they may nearly vanish."""

    def golden(self, case: Case) -> Golden:
        """Return a case with its truth."""

    def usable(self, case: Case) -> Golden:
        """Return a case with its truth, its inputs changed as far as evidence requires."""

    def move_off_ties(self, case: Case) -> Case | None:
        """Return a case whose integers are certain; None if there is none near it."""


def usable_cases(
    cases: Sequence[Case], oracle: TruthSource, *, ours: bool, narrow: bool
) -> tuple[dict[str, Golden], list[Case], list[str]]:
    """Return the truth of cases that may be no evidence, all cases that are, and notes.

    It must be known before they are run: loud inputs are scaled down where they must be, and
    contents that a module does not take are left out.

    Args:
        cases: The cases that were planned.
        oracle: Computes their truth.
        ours: Whether it is of a layer of ours.
        narrow: Whether its types are narrower than float32.

    Returns:
        The truth by name, of some cases; the cases to run; and notes for the reader of a report.
    """
    delicate = narrow or oracle.has_short_rows
    known: dict[str, Golden] = {}
    kept: list[Case] = []
    amplifying, undefined, scaled, tied, unsettled = [], [], [], [], []
    for planned in cases:
        case = oracle.move_off_ties(planned)
        if case is None:
            unsettled.append(planned.name)
            continue
        if case.may_overflow or delicate:
            golden = oracle.usable(case)
        elif not ours:
            golden = oracle.golden(case)
        else:
            kept.append(case)
            continue
        if golden.tied and not golden.unusable and not _is_fixed(case):
            golden = oracle.usable(case)
        if golden.tied and not _is_fixed(case) and (case.contents or not golden.unusable):
            tied.append(case.name)
            continue
        if golden.unusable and case.contents:
            amplifying.append(case.name)
            continue
        if not ours and _is_undefined(case, golden):
            undefined.append(case.name)
            continue
        known[case.name] = golden
        kept.append(golden.case)
        if golden.case.about != case.about:
            scaled.append(case.name)
    loud = "since the module overflows or amplifies rounding there"
    notes = [
        f"{done}: {counted(len(names), 'case')}, {', '.join(names[:3])}"
        + (" …" if len(names) > 3 else "")
        for done, names in (
            (f"left out, {loud}", amplifying),
            ("left out, since equal or nearly equal values decide an output there", tied),
            ("left out, since the integers that values round to depend on the runtime", unsettled),
            ("left out, since the module gives NaN where all keys are masked", undefined),
            (f"with inputs that were scaled down, {loud}", scaled),
        )
        if names
    ]
    return known, kept, notes


def _is_fixed(case: Case) -> bool:
    """Return whether golden vectors must have the case, as it is."""
    return case.name == BASE or case.name.startswith(CHANGED)


def _is_undefined(case: Case, golden: Golden) -> bool:
    """Return whether a user's module gives NaN for finite inputs with other masks."""
    masked = {content.name for content in MASKS} & set(case.contents)
    return bool(masked) and any(
        bool(np.isnan(t.astype(np.float64)).any()) for t in golden.expected.values()
    )


# -- every input must matter: a case that cannot tell two inputs apart proves nothing -----------

CLEARLY = 100
"""Change of an output, in allowed errors, from which an input matters to it."""

ENOUGH = 0.1
"""Share of the output that is enough where `CLEARLY` would require more."""


def check_influence(goldens: Sequence[Golden], clearly: float = CLEARLY) -> None:
    """Compare the truth of the base case with that of the cases that change one input.

    Args:
        goldens: All cases with their truth.
        clearly: The least change of an output, as a multiple of the allowed error.

    Raises:
        ExportError: If an input changes no output, or an output reacts to no input.
    """
    by_name = {golden.case.name: golden for golden in goldens}
    base = by_name[BASE]
    reacting: set[str] = set()
    for name in base.case.inputs:
        moved = {
            out for out in base.expected if _moves(base, by_name[f"{CHANGED}{name}"], out, clearly)
        }
        if not moved:
            raise ExportError(
                f"the input {name} changes no output, so no case could show a mistake with it; "
                "remove it from the inputs"
            )
        reacting |= moved
    for out in base.expected:
        if out not in reacting:
            raise ExportError(
                f"the output {out} reacts to no input, so comparing it proves nothing; "
                "remove it from the outputs"
            )


def _moves(base: Golden, changed: Golden, output: str, clearly: float) -> bool:
    allowed = base.allowed[output]
    before, after = base.expected[output], changed.expected[output]
    if before.shape != after.shape:
        raise ExportError(
            f"the shape of {output} depends on values: {list(before.shape)} and "
            f"{list(after.shape)} for inputs of the same sizes; give it a shape of its own"
        )
    if allowed is None:
        return bool((before != after).any())
    if not before.any():
        return bool(after.any())
    # No output moves by much more than all of itself.
    enough = min(clearly * allowed.whole, max(ENOUGH, allowed.whole))
    return measure(after, before).whole > enough


# -- of a quantised subject: its distance from the float model, and budgets for it --------------

LEAST_SQNR = {"int8": 30.0, "int4": 12.0}
"""The default budget in dB by the narrowest type. docs/low-precision.md has the measured ones."""

LEAST_SQNR_OF_CACHE = {
    "none": math.inf, FLOAT16: 60.0, "int8": 30.0, "int4": 12.0, BY_BLOCK: 16.0,
}  # fmt: skip
"""The same by the type of a cache, or by its scales; the smaller of the two holds."""


def limits_of(subject: Subject, budgets: Sequence[Budget]) -> tuple[Budget, ...]:
    """Return the budgets of a build: as given, or the default where something is quantised.

    Args:
        subject: The subject.
        budgets: As given.

    Raises:
        UsageError: If there are budgets, and nothing is quantised or no weights in float are known.
    """
    spec = subject.spec
    if budgets and not (spec and (spec.quantised_weights or spec.kv_dtype != "none")):
        raise UsageError(
            f"a budget of {budgets[0]} without quantised weights or cache, which it is about; "
            "leave it out, or set weights_dtype or kv_dtype"
        )
    if budgets and not _has_both(subject):
        raise UsageError(
            f"a budget of {budgets[0]}, and the checkpoint holds integers only: there are no "
            "weights in float to compare with; leave it out"
        )
    if budgets or not _has_both(subject):
        return tuple(budgets)
    assert spec is not None
    least = [LEAST_SQNR[dtype] for dtype in spec.quantised_weights.values()]
    of_cache = LEAST_SQNR_OF_CACHE[BY_BLOCK if spec.kv_scale == BY_BLOCK else spec.kv_dtype]
    return (Budget("sqnr", min([*least, of_cache])),)


def write_measured(
    folder: Path, subject: Subject, goldens: Sequence[Golden], budgets: Sequence[Budget]
) -> Quality | None:
    """Measure a quantised subject against what it was before, and write what verifies it.

    Args:
        folder: The folder `golden/`.
        subject: The subject; nothing is done if it is not quantised.
        goldens: All golden vectors.
        budgets: The limits.
    """
    if not _has_both(subject):
        return None
    from attn_export.parity.quality_oracle import measure_quality
    from attn_export.parity.quality_vectors import quality_cases, write_quality

    keeps_integers = subject.spec is not None and subject.spec.kv_dtype != "none"
    cases = [golden.case for golden in goldens]
    numbers = quality_cases(cases, without_past=keeps_integers)
    quality, floats = measure_quality(subject, [goldens[number] for number in numbers], budgets)
    write_quality(folder, numbers, floats, quality)
    return quality


def _has_both(subject: Subject) -> bool:
    """Return whether a subject is quantised, and what it was before is known."""
    module = subject.module
    keeps_integers = getattr(module, "kv_scales", None) is not None
    return keeps_integers or bool(getattr(module, "float_weights", None))
