"""Advice on axes that must have a name, the same name, or be sums of others."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_export.cases.draw import add_sums, clamp_sizes
from attn_export.errors import ExportError, UsageError

if TYPE_CHECKING:
    from attn_export.export.subject import Subject

SIZES = ((3, 7, 12, 19, 29, 41, 57), (11, 5, 8, 23, 4, 31, 14))
"""Sizes of the axes in two runs: that of one axis, or of a sum of two, is that of no other."""

_MOST_CHANGES, _MOST_RUNS, _MOST_SECONDS = 4, 400, 10.0

_MOST_ADDED = 4
"""The largest number in a sum, such as that of learned keys."""

_Place = str | tuple[str, int]
"""A named axis that is free, or an axis of an input without a name."""

_TOTAL = "total_len"
"""The name that is proposed for a sum."""


def naming_advice(subject: Subject) -> str:
    """Return how to name axes so that a module runs at other sizes; "" if it does or never will."""
    if subject.spec is not None or subject.function is not None or _runs(subject):
        return ""
    options = list(_options(subject))
    until, runs = time.monotonic() + _MOST_SECONDS, 0
    for count in range(1, _MOST_CHANGES + 1):
        for changes in itertools.combinations(options, count):
            if len(dict(changes)) < count:
                continue
            runs += 1
            if runs > _MOST_RUNS or time.monotonic() > until:
                return ""
            changed = _changed(subject, dict(changes))
            sums = changed.sums.keys() - subject.sums.keys()
            if _runs(changed) and all(_is_forced(changed, label) for label in sums):
                return _described(subject, changed, dict(changes))
    return ""


def _unnamed(subject: Subject) -> dict[tuple[str, int], int]:
    """Return the sizes of the axes of inputs that have no name and may need one."""
    return {
        (name, axis): size
        for name, tensor in subject.inputs.items()
        for axis, size in enumerate(tensor.shape)
        if axis not in subject.axes[name] and size > 1
    }


def _new_name(place: tuple[str, int]) -> str:
    return f"{place[0].replace('.', '_')}_{place[1]}"


def _options(subject: Subject) -> Iterator[tuple[_Place, str]]:
    """Yield places, and the axis or sum of axes whose size each may have to have."""
    sizes = {n: s for n, s in subject.example_sizes.items() if n not in subject.sums}
    new = {_new_name(place): size for place, size in _unnamed(subject).items()}
    places: dict[_Place, int] = dict([*_unnamed(subject).items(), *sizes.items()])
    for place, size in places.items():
        yield from ((place, name) for name, same in sizes.items() if same == size and name != place)
    for place, size in places.items():
        for one, other in itertools.combinations(sizes, 2):
            more = size - sizes[one] - sizes[other]
            if 0 <= more <= _MOST_ADDED and place not in (one, other):
                yield place, f"{one} + {other}" + (f" + {more}" if more else "")
    for label, name in itertools.product(sizes, sizes):
        for other, size in new.items():
            if name != label and sizes[name] + size == sizes[label]:
                yield label, f"{name} + {other}"


def _changed(subject: Subject, changes: Mapping[_Place, str]) -> Subject:
    """Return a copy of a subject with changed names and relations."""
    changed = copy.copy(subject)
    changed.__dict__.pop("roles", None)
    changed.axes = {name: dict(axes) for name, axes in subject.axes.items()}
    sums, sizes = dict(subject.sums), dict(subject.example_sizes)
    new = {_new_name(place): place for place in _unnamed(subject)}
    for place, text in changes.items():
        for term in text.split(" + "):
            if term in new:
                name, axis = new[term]
                changed.axes[name][axis] = term
                sizes[term] = subject.inputs[name].shape[axis]
        label = place if isinstance(place, str) else text
        if not isinstance(place, str) and "+" in text:
            label = next((n for n, s in sums.items() if s == text), "") or (
                _TOTAL if _TOTAL not in {**sizes, **sums} else _new_name(place)
            )
        if label != text:
            sums[label] = text
        if not isinstance(place, str):
            changed.axes[place[0]][place[1]] = label
    changed.relations = changed.sums = sums
    changed.example_sizes = add_sums(sizes, sums)
    return changed


def _runs(subject: Subject) -> bool:
    """Return whether a module runs at two choices of sizes that tell its axes apart."""
    return all(_runs_at(subject, _sizes(subject, numbers)) for numbers in SIZES)


def _sizes(subject: Subject, numbers: Sequence[int]) -> dict[str, int]:
    """Return the sizes of all axes: those that are no sums have the numbers, within bounds."""
    free = [name for name in subject.example_sizes if name not in subject.sums]
    sizes = clamp_sizes(dict(zip(free, itertools.cycle(numbers), strict=False)), subject.bounds)
    return subject.sizes_with(sizes)


@torch.inference_mode()
def _runs_at(subject: Subject, sizes: Mapping[str, int]) -> bool:
    try:
        inputs = subject.draw(sizes, "names")
        # The quick kernels read beyond the ends of values that are shorter than keys.
        with sdpa_kernel(SDPBackend.MATH):
            subject.call(subject.module, inputs)
    except (ExportError, KeyError):  # KeyError: a sum of a sum
        return False
    except UsageError:
        return True  # it ran; what it returns is refused by the export
    return True


def _is_forced(subject: Subject, label: str) -> bool:
    """Return whether a module runs at no size of an axis but the sum: not at other even ones."""
    sizes = _sizes(subject, SIZES[0])
    others = [{**sizes, label: sizes[label] + more} for more in range(1, 9)]
    return not any(_runs_at(subject, other) for other in others)


def _described(subject: Subject, changed: Subject, changes: Mapping[_Place, str]) -> str:
    """Return what to write for changes that make a module run."""
    alike = {p: text for p, text in changes.items() if isinstance(p, str) and "+" not in text}
    parts = [f"give the equal axes {one!r} and {same!r} one name" for one, same in alike.items()]
    axes = {name: dict(sorted(changed.axes[name].items())) for name in changed.axes}
    named = {name: names for name, names in axes.items() if names != subject.axes[name]}
    if named:
        parts.append(f"name the axes of {', '.join(named)} that change: axes={named}")
    sums = {n: s for n, s in changed.sums.items() if n not in {**subject.sums, **alike}}
    if sums:
        parts.append(f"say which axis is a sum: relations={sums}")
    return ", and ".join(parts)
