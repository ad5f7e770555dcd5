"""Guards: conditions on sizes under which a captured program computes the same as its module.

`torch.export` records them, but the program ignores them. For each guard, outputs are compared at
sizes that break it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from torch.export import ExportedProgram

from attn_export.cases.draw import Sizes, is_within
from attn_export.export.subject import Subject

SIZE = re.compile(r"L((?:\['?[^\]]+'?\])+)\.size\(\)\[(\d+)\]")
"""An expression for a size of an input in the code of a guard."""

ORDINARY = (1, 2, 3, 5, 16, 33, 64, 100)
"""Sizes to try for any guard."""

LARGEST = 1 << 20
"""The largest product of the varied sizes that are tried to break a guard."""


def broken_guards(subject: Subject, program: ExportedProgram) -> Iterator[Sizes]:
    """Yield for each guard the smallest sizes that break it, if any of those to try do."""
    for guard in getattr(program, "_guards_code", []):
        code, axes = _with_variables(guard, subject)
        if axes and "L[" not in code:
            sizes = _breaking_sizes(code, axes, subject)
            if sizes is not None:
                yield sizes


def _with_variables(guard: str, subject: Subject) -> tuple[str, dict[str, str]]:
    """Replace the sizes in the code of a guard; return the code, and the variable of each axis."""
    variables: dict[str, str] = {}

    def replacement(match: re.Match[str]) -> str:
        keys = re.findall(r"\['?([^\]']+)'?\]", match[1])
        name, axis = ".".join(keys), int(match[2])
        label = subject.axes.get(name, {}).get(axis)
        if label is not None:
            return variables.setdefault(label, f"s{len(variables)}")
        shape = subject.inputs[name].shape if name in subject.inputs else ()
        return str(shape[axis]) if axis < len(shape) else match[0]

    return SIZE.sub(replacement, guard), variables


def _breaking_sizes(code: str, axes: dict[str, str], subject: Subject) -> Sizes | None:
    """Return the smallest sizes for which a guard, a Python expression, is false, or None."""
    numbers = {int(n) for n in re.findall(r"\d+", re.sub(r"\bs\d+\b", "", code)) if len(n) < 7}
    near = {n + step for n in numbers for step in (-1, 0, 1)} | {math.isqrt(n) + 1 for n in numbers}
    tried = sorted({n for n in near if 1 <= n <= LARGEST} | set(ORDINARY))
    free = [label for label in subject.example_sizes if label not in subject.relations]
    varied = [label for label in free if label in axes or set(axes) & subject.relations.keys()]
    combinations = [
        dict(zip(varied, sizes, strict=True))
        for sizes in itertools.product(tried, repeat=len(varied))
        if math.prod(sizes) <= LARGEST
    ]
    for changed in sorted(combinations, key=lambda sizes: math.prod(sizes.values())):
        sizes = subject.sizes_with(changed)
        if not is_within(sizes, subject.bounds):
            continue
        values = {variable: sizes[label] for label, variable in axes.items()}
        try:
            holds = eval(code, {"__builtins__": {}, "math": math, "min": min, "max": max}, values)
        except Exception:
            return None  # the guard uses functions of torch
        if not holds:
            return sizes
    return None
