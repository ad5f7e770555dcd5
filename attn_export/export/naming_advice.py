"""Advice on axes that must have a name, a relation or bounds, found by runs of the module.

It only proposes what to write, after an export has failed: a module may run at sizes for which it
was not meant, so what is found is never taken by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from attn_export.export.size_changes import changes
from attn_export.export.size_trials import (
    SIZES,
    Statement,
    TooManyRunsError,
    Trials,
    joint_sizes,
)
from attn_export.export.trees import axis_text

if TYPE_CHECKING:
    from attn_export.export.subject import Subject

_CHANGES, _WIDTH = (1, 2, 6), 3
"""The numbers of changes that are tried, one after the other, and how many ways are followed."""


def naming_advice(subject: Subject) -> str:
    """Return what to write of axes so that a module runs at other sizes; "" if nothing helps."""
    if subject.traits.is_attention or subject.function is not None:
        return ""
    trials, now = Trials(subject), Statement(subject.axes)
    with contextlib.suppress(TooManyRunsError):
        failures = trials.failures_of(now)
        tries = (_search(trials, now, failures, count) for count in _CHANGES)
        found = next(filter(None, tries), None) if failures else None
        if found is not None:
            found = _without_needless(trials, found)
            # The least or largest size alone is found, and said, by the capture.
            is_more = found.relations or found.axes != subject.axes
            is_more = is_more or any(a.sizes or a.multiple_of > 1 for a in found.bounds.values())
            if is_more and all(_is_forced(trials, found, label) for label in found.relations):
                return _described(subject, found)
    return ""


def _search(trials: Trials, now: Statement, failures: float, left: int) -> Statement | None:
    """Return a statement with more changes that leads to no failure of the module, or None."""
    if not failures:
        return now
    for kind in changes(trials, now) if left else ():
        better: list[tuple[float, int, Statement]] = []
        for changed in kind:
            if (fewer := trials.failures_of(changed, failures)) < failures - 1e-9:
                better.append((fewer, len(better), changed))
        for fewer, _, changed in sorted(better, key=lambda each: each[:2])[:_WIDTH]:
            if found := _search(trials, changed, fewer, left - 1):
                return found
    return None


def _without_needless(trials: Trials, found: Statement) -> Statement:
    """Return a statement without relations and bounds that the module runs without."""
    for name in (*found.relations, *found.bounds):
        less = dataclasses.replace(
            found,
            relations={n: text for n, text in found.relations.items() if n != name},
            bounds={n: axis for n, axis in found.bounds.items() if n != name},
        )
        if not trials.failures_of(less, 1e-9):
            found = less
    return found


def _is_forced(trials: Trials, found: Statement, label: str) -> bool:
    """Return whether a module runs at no size of an axis that its relation excludes."""
    subject = found.of(trials.subject)
    for numbers in SIZES:
        sizes = joint_sizes(subject, numbers)
        if found.relations[label].startswith(">="):
            sizes |= {name: 0 for name in sizes if name.startswith(f"{label}_")}
            least = subject.sizes_with(sizes)[label]
            others = [n for n in (least - 1, least - 2, least // 2) if n > 1]
        else:
            others = [subject.sizes_with(sizes)[label] + more for more in range(1, 9)]
        if any(trials.runs_at(subject, {**subject.sizes_with(sizes), label: n}) for n in others):
            return False
    return True


def _described(before: Subject, after: Statement) -> str:
    """Return what to write for a statement with which a module runs."""
    relations = dict(after.relations)
    alike = {n: text for n, text in relations.items() if n in before.example_sizes
             and text in before.example_sizes}  # fmt: skip
    parts = [f"give the equal axes {one!r} and {same!r} one name" for one, same in alike.items()]
    axes = {name: dict(sorted(named.items())) for name, named in after.axes.items()}
    new = {name: named for name, named in axes.items() if named != before.axes[name]}
    if new:
        parts.append(f"name the axes of {', '.join(new)} that change: axes={new}")
    if sums := {name: text for name, text in relations.items() if name not in alike}:
        parts.append(f"write relations={sums}")
    if after.bounds:
        written = ", ".join(map(axis_text, after.bounds.values()))
        parts.append(f"write {written} for the name of that axis")
    return ", and ".join(parts)
