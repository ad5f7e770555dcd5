"""Conditions on sizes that a captured program ignores, and sizes that break them."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Sequence

from torch.export import ExportedProgram

from attn_export.cases.draw import Sizes, is_within
from attn_export.export.subject import Subject

SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
"""An expression for a size of an input in the code of a guard."""

_ORDINARY, _LARGEST = (1, 2, 3, 5, 16, 33, 64, 100), 1 << 20
"""Sizes to try for any guard, and the largest product of the varied ones."""

_MOST_COMBINATIONS = 2**13
"""The largest number of combinations of sizes to try for a guard, the smallest first."""


def broken_guards(subject: Subject, program: ExportedProgram) -> Iterator[Sizes]:
    """Yield for each guard the smallest sizes that break it, if any of those to try do."""
    for guard in getattr(program, "_guards_code", []):
        code, axes = _with_variables(guard, subject)
        sizes = _breaking_sizes(code, axes, subject) if axes and "L[" not in code else None
        if sizes is not None:
            yield sizes


def _with_variables(guard: str, subject: Subject) -> tuple[str, dict[str, str]]:
    """Replace the sizes in the code of a guard; return the code, and the variable of each axis."""
    variables: dict[str, str] = {}

    def replacement(match: re.Match[str]) -> str:
        name, axis = subject.tree.keywords.get(match[1], ""), int(match[2])
        if (label := subject.axes.get(name, {}).get(axis)) is not None:
            return variables.setdefault(label, f"s{len(variables)}")
        shape = subject.inputs[name].shape if name in subject.inputs else ()
        return str(shape[axis]) if axis < len(shape) else match[0]

    return SIZE.sub(replacement, guard), variables


def _breaking_sizes(code: str, axes: dict[str, str], subject: Subject) -> Sizes | None:
    """Return the smallest sizes for which a guard, a Python expression, is false, or None."""
    numbers = {int(n) for n in re.findall(r"\d+", re.sub(r"\bs\d+\b", "", code)) if len(n) < 7}
    near = {n + step for n in numbers for step in (-1, 0, 1)} | {math.isqrt(n) + 1 for n in numbers}
    tried = sorted({n for n in near if 1 <= n <= _LARGEST} | set(_ORDINARY))
    free = [label for label in subject.example_sizes if label not in subject.relations]
    varied = [label for label in free if label in axes or set(axes) & subject.relations.keys()]
    guard = compile(code.strip(), "guard", "eval")
    for chosen in _by_product(tried, len(varied)):
        sizes = subject.sizes_with(dict(zip(varied, chosen, strict=True)))
        if not is_within(sizes, subject.bounds):
            continue
        values = {variable: sizes[label] for label, variable in axes.items()}
        try:
            holds = eval(guard, {"__builtins__": {}, "math": math, "min": min, "max": max}, values)
        except Exception:
            return None  # the guard uses functions of torch
        if not holds:
            return sizes
    return None


def _by_product(tried: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """Yield so many sizes in all combinations, those of the smallest product first, up to a limit.

    Beyond the limit follow those in which one size, or all, are other than the smallest.
    """
    heap, seen = [(tried[0] ** count, (0,) * count)], {(0,) * count}
    for _ in range(_MOST_COMBINATIONS):
        if not heap:
            return
        product, indices = heapq.heappop(heap)
        yield tuple(tried[index] for index in indices)
        for at, index in enumerate(indices):
            following = (*indices[:at], index + 1, *indices[at + 1 :])
            if index + 1 == len(tried) or following in seen:
                continue
            seen.add(following)
            larger = product // tried[index] * tried[index + 1]
            if larger <= _LARGEST:
                heapq.heappush(heap, (larger, following))
    least = (tried[0],) * count
    ends = ((*least[:at], size, *least[at + 1 :]) for size in tried for at in range(count))
    equal = ((size,) * count for size in tried)
    yield from (sizes for sizes in (*ends, *equal) if math.prod(sizes) <= _LARGEST)
