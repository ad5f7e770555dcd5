"""Common properties of failing cases, and the location of the error in an output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from attn_export.cases.draw import Sizes
from attn_export.errors import counted
from attn_export.explain.graph_run import GoldenCase, GraphRun
from attn_export.judge.judge import judge
from attn_export.measures import element_errors
from attn_export.tensorfile import Array

_WRONG_SHARE = 0.1
"""An element is wrong if its error is at least this share of the largest in the output."""

_STRICT_WRONG_SHARE = 0.01
"""The same share for the claim that no other element is wrong."""

_SIZE_CONDITIONS: tuple[tuple[str, Callable[[Sizes], bool]], ...] = (
    ("with a batch of more than 1", lambda s: s.get("batch", 1) > 1),
    ("with a past", lambda s: s.get("past_len", 0) > 0),
    ("without a past", lambda s: s.get("past_len", 0) == 0),
    ("with one query", lambda s: s.get("query_len", 0) == 1),
    ("with several queries", lambda s: s.get("query_len", 0) > 1),
    (
        "with a past and several queries",
        lambda s: s.get("past_len", 0) > 0 and s.get("query_len", 0) > 1,
    ),
)
"""Conditions on the sizes of a case on which faults may depend."""

TOTAL = "total_len"
_MULTIPLES = (64, 32, 16, 8, 4, 2)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Sentences on common properties of failing cases.

    Attributes:
        sizes: Sizes that separate all failing from all passing cases.
        places: Locations outside of which no failing case has an error.
    """

    sizes: tuple[str, ...]
    places: tuple[str, ...]
    lines: tuple[str, ...]


def pattern_of(trial: GraphRun, axes: Mapping[str, Sequence[object]]) -> Pattern:
    """Return the common properties of the failing cases."""
    failed = [case.sizes for case in trial.failed]
    passed = [case.sizes for case in trial.passed]
    # Cases with special contents may pass because masks or values hide the error.
    plain = [case.sizes for case in trial.passed if not case.golden.case.contents]
    sizes = tuple(separating_conditions(failed, plain))
    always_right, locations, wrong = set(axes), list[str](), dict[str, set[str]]()
    for case in trial.failed:
        outputs = trial.ran.outputs.get(case.name, {})
        verdicts = judge("", "", case.golden, outputs)
        wrong[case.name] = {v.output for v in verdicts if v.status != "passed"}
        newly_wrong = wrong[case.name] & always_right
        locations += _error_locations(case, outputs, axes, newly_wrong)
        always_right -= newly_wrong
    places = tuple(_common_locations(trial, axes, wrong))
    lines = [
        *_common_properties(failed, passed),
        *(f"the cases that fail are those {condition}" for condition in sizes),
        *places,
        *locations,
        *(f"{name} is right in every case" for name in axes if name in always_right),
    ]
    return Pattern(sizes, places, tuple(lines))


def _common_properties(failed: Sequence[Sizes], passed: Sequence[Sizes]) -> Iterator[str]:
    """Yield sentences on the number of failures, and on properties shared by all of them.

    Some, but not all, of the passing cases have these properties, too.
    """
    total = len(failed) + len(passed)
    yield (
        f"{len(failed)} of {counted(total, 'case')} fail"
        if passed or total == 1
        else f"all {total} cases fail"
    )
    for description, holds in _SIZE_CONDITIONS:
        passing = sum(map(holds, passed))
        if 0 < passing < len(passed) and failed and all(map(holds, failed)):
            yield f"all cases that fail are {description}; {passing} of these pass"


def separating_conditions(failed: Sequence[Sizes], passed: Sequence[Sizes]) -> Iterator[str]:
    """Yield conditions on sizes that separate all failing from all passing cases, by axis.

    If no single axis separates them, two together are tried.
    """
    if not failed or not passed:
        return
    is_separated = False
    for axis in sorted(failed[0], key=lambda axis: axis == TOTAL):
        if all(axis in sizes for sizes in (*failed, *passed)):
            if axis == TOTAL and is_separated:
                continue  # a sum of axes that have a condition already
            sentences = _axis_condition(axis, {s[axis] for s in failed}, {s[axis] for s in passed})
            is_separated |= bool(sentences)
            yield from sentences
    if not is_separated:
        for condition, holds in _SIZE_CONDITIONS:
            if all(map(holds, failed)) and not any(map(holds, passed)):
                yield condition


def _axis_condition(axis: str, failed: set[int], passed: set[int]) -> list[str]:
    """Return at most one sentence on the sizes of one axis."""
    least, most = min(failed), max(failed)
    if failed & passed:
        return []
    if most <= 1 and least == most:
        return [f"where {axis} is {least}"]
    if least > max(passed):
        return [f"from {axis} {least} up ({axis} {max(passed)} passes)"]
    if most < min(passed):
        return [f"up to {axis} {most} ({axis} {min(passed)} passes)"]
    if not any(least < size < most for size in passed):
        return [f"where {axis} is {least}" if least == most else f"with {axis} {least} to {most}"]
    for factor in _MULTIPLES:
        if all(size % factor == 0 for size in failed) and all(size % factor for size in passed):
            return [f"where {axis} is a multiple of {factor}"]
        if all(size % factor for size in failed) and all(size % factor == 0 for size in passed):
            return [f"where {axis} is no multiple of {factor}"]
    return []


def _common_locations(
    trial: GraphRun, axes: Mapping[str, Sequence[object]], wrong: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield sentences on outputs that in every case are wrong only at one end of an axis."""
    for name, axis_names in axes.items():
        observations: dict[str, list[bool]] = {}
        for case in trial.failed:
            distance = _distance(case, trial.ran.outputs.get(case.name, {}), name)
            if name not in wrong[case.name] or distance is None:
                continue
            is_wrong = distance >= _STRICT_WRONG_SHARE * distance.max()
            for location, holds in _one_sided_locations(is_wrong, axis_names, case.sizes):
                observations.setdefault(location, []).append(holds)
        common = [
            location for location, holds in observations.items() if len(holds) > 1 and all(holds)
        ]
        if common:
            yield f"{name} is wrong {common[0]} alone, wherever there are several"


def _one_sided_locations(
    wrong: Array, axes: Sequence[object], sizes: Sizes
) -> Iterator[tuple[str, bool]]:
    """Yield each end of each axis of several elements, and whether all wrong elements are there."""
    for number, axis in enumerate(axes):
        size = wrong.shape[number]
        if not isinstance(axis, str) or size <= 1:
            continue
        indices = _wrong_indices(wrong, number)
        first, last = int(indices[0]), int(indices[-1])
        past = sizes.get("past_len", 0) if axis == TOTAL else 0
        yield f"at the first {axis}", last == 0
        yield f"at the last {axis}", first == size - 1
        yield "at keys of the past", 0 < past < size and last < past
        yield "at new keys", 0 < past < size and first >= past


def _wrong_indices(wrong: Array, axis: int) -> Array:
    """Return the indices along an axis at which any element is wrong."""
    others = tuple(other for other in range(wrong.ndim) if other != axis)
    return np.flatnonzero(wrong.any(axis=others))


def _distance(case: GoldenCase, outputs: Mapping[str, Array], name: str) -> Array | None:
    """Return the error of each element of an output; None if it is undefined."""
    expected, output = case.golden.expected.get(name), outputs.get(name)
    if expected is None or output is None or output.shape != expected.shape or not expected.size:
        return None
    distance = element_errors(output.astype(np.float64), expected.astype(np.float64))
    if distance.ndim:
        distance[list(case.golden.case.ignored_rows)] = 0.0
    return distance


def _error_locations(
    case: GoldenCase,
    actual: Mapping[str, Array],
    axes: Mapping[str, Sequence[object]],
    wrong: Collection[str],
) -> Iterator[str]:
    """Yield sentences on the location of the error in the wrong outputs of one case."""
    for name, reference in case.golden.expected.items():
        distance = _distance(case, actual, name)
        if name not in wrong or distance is None:
            continue
        output = actual[name]
        is_wrong = distance >= _WRONG_SHARE * distance.max()
        nan = int((np.isnan(output) > np.isnan(reference)).sum()) if output.dtype.kind == "f" else 0
        nan_note = f"; {nan} are NaN" if nan else ""
        yield f"{name} in {case.name}: {_describe_location(is_wrong, axes.get(name, ()))}{nan_note}"


def _describe_location(wrong: Array, axes: Sequence[object]) -> str:
    """Describe the affected part of each axis."""
    parts = []
    for axis, size in enumerate(wrong.shape):
        wrong_indices = _wrong_indices(wrong, axis)
        name = axes[axis] if axis < len(axes) else axis
        if isinstance(name, int) and axis == wrong.ndim - 1:
            continue  # elements of a head mean nothing to a reader
        if size > 1 and len(wrong_indices) < size:
            label = name if isinstance(name, str) else f"axis {axis}:"
            parts.append(f"{label} {_format_ranges(wrong_indices)} of {size}")
    share = f"{int(wrong.sum())} of {counted(wrong.size, 'element')}"
    return f"{share}; {', '.join(parts)}" if parts else f"{share}, all over it"


def _format_ranges(indices: Array) -> str:
    """Format indices as ranges: ``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs = np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1)
    shown = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:4]]
    return ", ".join(shown) + (", …" if len(runs) > 4 else "")
