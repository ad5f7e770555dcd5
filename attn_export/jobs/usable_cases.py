"""The planned cases that are evidence for a subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attn_export.parity.mask_contents import MASKS
from attn_export.results import Case, Golden

if TYPE_CHECKING:
    from attn_export.export.subject import Subject
    from attn_export.parity.oracle import Oracle


def usable_cases(
    subject: Subject, cases: Sequence[Case], oracle: Oracle
) -> tuple[dict[str, Golden], list[Case], list[str]]:
    """Return the truth of cases that may be no evidence, all cases that are, and notes.

    It must be known before they are run: loud inputs are scaled down where they must be, and
    contents that a module does not take are left out.

    Args:
        subject: The module.
        cases: The cases that were planned.
        oracle: Computes the truth of the module.

    Returns:
        The truth by name, of some cases; the cases to run; and notes for the reader of a report.
    """
    delicate = bool(subject.narrow_dtypes()) or oracle.has_short_rows
    known: dict[str, Golden] = {}
    kept: list[Case] = []
    amplifying, undefined, scaled = [], [], []
    for case in cases:
        if case.is_loud or delicate:
            golden = oracle.usable(case)
        elif subject.spec is None:
            golden = oracle.golden(case)
        else:
            kept.append(case)
            continue
        if golden.unusable and case.contents:
            amplifying.append(case.name)
            continue
        if subject.spec is None and _is_undefined(case, golden):
            undefined.append(case.name)
            continue
        known[case.name] = golden
        kept.append(golden.case)
        if golden.case.about != case.about:
            scaled.append(case.name)
    loud = "since the module overflows or amplifies rounding there"
    notes = [
        f"{len(names)} cases {done}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        for done, names in (
            (f"are left out, {loud}", amplifying),
            ("are left out, since the module gives NaN where all keys are masked", undefined),
            (f"have inputs that were scaled down, {loud}", scaled),
        )
        if names
    ]
    return known, kept, notes


def _is_undefined(case: Case, golden: Golden) -> bool:
    """Return whether a user's module gives NaN for finite inputs with other masks."""
    masked = {content.name for content in MASKS} & set(case.contents)
    return bool(masked) and any(
        bool(np.isnan(t.astype(np.float64)).any()) for t in golden.expected.values()
    )
