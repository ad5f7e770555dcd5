"""The least set of cases that golden vectors must hold; docs/parity.md is its definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attn_export.errors import BundleError, counted
from attn_export.results import BASE, CHANGED, Case
from attn_export.spec import Shape

LEAST_SIZES = 3
"""The least number of sizes that each dynamic axis of an input must have."""

SMALLEST = {"batch": 1, "query_len": 1, "past_len": 0}
"""Sizes that there must be a case with, and one without."""

OF_MASKS = ("fully_masked_rows", "one_visible_key", "left_padding", "right_padding")
"""Contents that there must be where a layer of ours has a mask."""


def check_evidence(inputs: Mapping[str, Shape], cases: Sequence[Case], *, ours: bool) -> None:
    """Refuse golden vectors that hold fewer cases than evidence takes.

    Args:
        inputs: The shape of every input; dynamic axes by name.
        cases: The cases.
        ours: Whether they are of a layer of ours.

    Raises:
        BundleError: If a case is missing.
    """
    missing = next(_missing(inputs, cases, ours=ours), "")
    if missing:
        raise BundleError(
            f"the golden vectors are no evidence: of {counted(len(cases), 'case')}, {missing}; "
            "build the bundle again"
        )


def tried_note(cases: Sequence[Case]) -> str:
    """Return the range of each dynamic axis that was tried, for the reader of a report."""
    found: dict[str, list[int]] = {}
    for case in cases:
        for name, size in case.sizes.items():
            found.setdefault(name, []).append(size)
    ranges = [f"{name} {min(sizes)}-{max(sizes)}" for name, sizes in found.items()]
    return f"sizes: {', '.join(ranges) or 'one, since no axis is dynamic'}"


def fixed_note(inputs: Mapping[str, Shape]) -> tuple[str, ...]:
    """Return a note on the axes of a user's inputs that have one size in the graph, if any.

    Args:
        inputs: The shapes by name: sizes, and names of dynamic axes.
    """
    fixed = {
        name: shape for name, shape in inputs.items() if any(isinstance(a, int) for a in shape)
    }
    shown = ", ".join(f"{name} [{', '.join(map(str, s))}]" for name, s in fixed.items())
    return (f"no other size was tried of axes that are numbers: {shown}",) if fixed else ()


def _missing(inputs: Mapping[str, Shape], cases: Sequence[Case], *, ours: bool) -> Iterator[str]:
    names = {case.name for case in cases}
    for name in (BASE, *(f"{CHANGED}{each}" for each in inputs)):
        if name not in names:
            yield f"none is {name!r}"
    for axis in {axis for shape in inputs.values() for axis in shape if isinstance(axis, str)}:
        sizes = {case.sizes.get(axis, 0) for case in cases}
        if len(sizes) < LEAST_SIZES:
            yield f"{axis} has {len(sizes)} sizes, not {LEAST_SIZES} or more"
        smallest = SMALLEST.get(axis)
        if smallest is not None and smallest not in sizes:
            yield f"none has {axis} {smallest}"
    contents = {name for case in cases for name in case.contents}
    for content in OF_MASKS if ours and "attn_mask" in inputs else ():
        if content not in contents:
            yield f"none has {content}"
