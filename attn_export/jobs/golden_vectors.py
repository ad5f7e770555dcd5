"""The golden vectors of a job: written, run and computed at the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import counted
from attn_export.report.progress import Progress
from attn_export.results import StoredCase

if TYPE_CHECKING:
    from attn_export.graph.signature_check import EndNames
    from attn_export.jobs.usable_cases import TruthSource
    from attn_export.results import Case, Golden

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
    from attn_export.jobs.usable_cases import usable_cases
    from attn_export.parity.golden import write_golden, write_inputs
    from attn_export.parity.influence import check_influence

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
    """Return a note for the reader on cases whose quantised activations depend on rounding."""
    found = [golden.rows_near_ties for golden in goldens if golden.rows_near_ties]
    if not found:
        return ()
    rows = sum(math.prod(next(iter(g.expected.values())).shape[:-1]) for g in goldens)
    return (
        f"in {counted(len(found), 'case')} of {len(goldens)}, activations of {sum(found)} of "
        f"{rows} rows lie near a tie: the error allowed is larger by a step of these",
    )
