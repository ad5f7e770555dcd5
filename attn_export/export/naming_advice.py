"""Advice on axes that must have a name, a relation or bounds, found by runs of the module.

It only proposes what to write, after an export has failed: a module may run at sizes for which it
was not meant, so what is found is never taken by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attn_export.export.size_trials import SIZES, Statement, TooManyRunsError, Trials, joint_sizes
from attn_export.export.trees import Axis, axis_text
from attn_export.interface import axes_in, terms_of

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
    for kind in _changes(trials, now) if left else ():
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


# -- names, relations and bounds to be tried ----------------------------------------------------

_Place = str | tuple[str, int]
"""A named axis that is free, or an axis of an input without a name."""

_MOST_ADDED = 4
"""The largest number in a sum, such as that of learned keys."""

_SCANNED, _FEW, _LISTED = 48, 3, 8
"""The least size up to which each size of an axis is tried, how many of them must run, and how many
are listed if they are no multiples."""

_TOTAL = "total_len"
"""The name that is proposed for a sum."""


def _changes(trials: Trials, now: Statement) -> Iterator[Iterator[Statement]]:
    """Yield statements with one thing more, by kinds; those of the first kinds are likelier."""
    places = _Places(trials, now)
    yield places.equal()
    yield places.equal_pairs()
    yield places.sums()
    yield places.at_least()
    yield places.bounds()


def _unnamed(subject: Subject, axes: Mapping[str, Mapping[int, str]]) -> dict[str, tuple[str, int]]:
    """Return the axes of inputs that have no name and may need one, by a name for each."""
    return {
        f"{name.replace('.', '_')}_{axis}": (name, axis)
        for name, tensor in subject.inputs.items()
        for axis, size in enumerate(tensor.shape)
        if axis not in axes[name] and size > 1
    }


class _Places:
    """The axes that may get a name, a relation or bounds beside those of a statement."""

    def __init__(self, trials: Trials, now: Statement) -> None:
        self.trials, self.now, self.subject = trials, now, now.of(trials.subject)
        shapes = {name: tensor.shape for name, tensor in self.subject.inputs.items()}
        self.new = _unnamed(self.subject, now.axes)
        self.new_sizes = {label: shapes[n][axis] for label, (n, axis) in self.new.items()}
        named = {axis for axes in now.axes.values() for axis in axes.values()}
        sums = self.subject.sums
        self.sizes = {n: s for n, s in self.subject.example_sizes.items() if n in named}
        self.free = {n: s for n, s in self.sizes.items() if n not in sums}
        used = {axis for text in sums.values() for axis in axes_in(text)}
        self.places: dict[_Place, int] = {self.new[n]: s for n, s in self.new_sizes.items()}
        self.places |= {n: s for n, s in self.free.items() if n not in used}

    def equal(self) -> Iterator[Statement]:
        """Yield statements by which one axis is another of the same size in the example."""
        for place, name in self._equalities():
            if self._is_fixed(place):
                yield self._with(self.now, place, name)

    def equal_pairs(self) -> Iterator[Statement]:
        """Yield statements by which two axes without names are others, as of a square mask."""
        new = [(place, name) for place, name in self._equalities() if not isinstance(place, str)]
        for (one, name), (other, other_name) in itertools.combinations(new, 2):
            if one != other and one[0] == other[0]:
                yield self._with(self._with(self.now, one, name), other, other_name)

    def sums(self) -> Iterator[Statement]:
        """Yield statements by which one axis is a sum or product of others."""
        for place, size in self.places.items():
            others = {name: same for name, same in self.free.items() if name != place}
            texts = list(_expressions(size, others))
            if isinstance(place, str):
                # That two lengths differ by a number in the example may be by chance.
                texts = [text for text in texts if "*" in text or len(axes_in(text)) > 1]
                more = _expressions(size, {**others, **self.new_sizes})
                texts += [t for t in more if len(axes_in(t)) > 1 or "*" in t if t not in texts]
            # An axis is more likely than a number.
            texts.sort(key=lambda text: () in terms_of(text))
            if texts and self._is_fixed(place):
                yield from (self._with(self.now, place, text) for text in texts)

    def at_least(self) -> Iterator[Statement]:
        """Yield statements by which one axis is no less than one or two others together."""
        for place, size in self.places.items():
            if not isinstance(place, str) or not all(
                self._runs({place: n}) for n in (2 * size, size + 1)
            ):
                continue
            # It depends on those that cannot be larger alone.
            others = [n for n in self.free if n != place]
            others = [n for n in others if not self._runs({n: 2 * size + 1})]
            for some in itertools.chain(*(itertools.combinations(others, n) for n in (1, 2))):
                if sum(self.free[name] for name in some) <= size:
                    yield self._with(self.now, place, f">= {' + '.join(some)}")

    def bounds(self) -> Iterator[Statement]:
        """Yield statements by which one axis has only the sizes at which the module runs."""
        for name in self.free.keys() - self.subject.bounds.keys():
            most = max(_SCANNED, 3 * self.free[name])
            runs = [n for n in range(2, most + 1) if self._runs({name: n})]
            if _FEW <= len(runs) < most - 1:
                bounds = {**self.now.bounds, name: _axis_of(name, runs, most)}
                yield dataclasses.replace(self.now, bounds=bounds)

    def _equalities(self) -> Iterator[tuple[_Place, str]]:
        for place, size in self.places.items():
            for name, same in self.sizes.items():
                is_sum = isinstance(place, str) and name in self.subject.sums
                if same == size and name != place and not is_sum:
                    yield place, name

    def _runs(self, sizes: Mapping[str, int]) -> bool:
        return self.trials.runs_at(self.subject, self.subject.sizes_with(sizes))

    def _is_fixed(self, place: _Place) -> bool:
        """Return whether an axis may have no other size if no other axis has one."""
        size, subject = self.places[place], self.subject
        if not isinstance(place, str):
            name, axis = place
            axes = {**self.now.axes, name: {**self.now.axes[name], axis: (label := "alone")}}
            subject = dataclasses.replace(self.now, axes=axes).of(self.trials.subject)
        else:
            label = place
        others = (size + 1, size - 1, size + 2, 2 * size, 3 * size)
        return not any(
            self.trials.runs_at(subject, subject.sizes_with({label: n})) for n in others if n > 1
        )  # 1 may be broadcast

    def _with(self, now: Statement, place: _Place, text: str) -> Statement:
        """Return a statement by which a place has the size of an axis or expression."""
        axes = {name: dict(named) for name, named in now.axes.items()}
        relations = dict(now.relations)
        for term in axes_in(text.removeprefix(">=")):
            if term in self.new:
                name, axis = self.new[term]
                axes[name][axis] = term
        label, is_axis = place, text in self.sizes
        if not isinstance(place, str):
            name, axis = place
            label = text
            if not is_axis:
                known = (n for n, other in relations.items() if other == text)
                own = next(n for n, other in self.new.items() if other == place)
                is_total = "+" in text and _TOTAL not in {*self.sizes, *relations}
                label = next(known, _TOTAL if is_total else own)
            axes[name][axis] = label
        if label != text:
            relations[str(label)] = text
        return dataclasses.replace(now, axes=axes, relations=relations)


def _expressions(size: int, axes: Mapping[str, int]) -> Iterator[str]:
    """Yield sums and products of axes that have a size."""
    for one, other in itertools.combinations(axes, 2):
        more = size - axes[one] - axes[other]
        if 0 <= more <= _MOST_ADDED:
            yield f"{one} + {other}" + (f" + {more}" if more else "")
        if axes[one] * axes[other] == size:
            yield f"{one}*{other}"
    for name in axes:
        for factor in range(1, size // axes[name] + 2):
            more = size - factor * axes[name]
            if more and factor == 1 and -1 <= more <= _MOST_ADDED:
                yield f"{name} - 1" if more < 0 else f"{name} + {more}"
            elif factor > 1 and abs(more) <= 1:
                yield f"{factor}*{name}" + ("", " + 1", " - 1")[more]


def _axis_of(name: str, runs: Sequence[int], most: int) -> Axis:
    """Return an axis with the sizes at which a module runs, of those up to some."""
    step = functools.reduce(math.gcd, runs)
    if list(runs) != [*range(runs[0], runs[-1] + 1, step)]:
        return Axis(name, sizes=tuple(runs[:_LISTED]))
    least = None if runs[0] == max(step, 2) else runs[0]
    return Axis(name, least, None if runs[-1] + step > most else runs[-1], step)
