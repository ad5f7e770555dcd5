"""Conditions on sizes under which a captured program is the module.

`torch.export` keeps the module's conditions on sizes as guards, and drops them in the program. Each
is broken here once, on purpose: if the program is still the module there, it did not matter.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from torch.export import ExportedProgram

from attn_export.cases.sizes import Sizes
from attn_export.subject import Subject

SIZE = re.compile(r"L((?:\['?[^\]]+'?\])+)\.size\(\)\[(\d+)\]")
ORDINARY = (1, 2, 3, 5, 16, 33, 64, 100)
LARGEST = 1 << 20
"""How many elements of the dynamic axes together a size that breaks a guard may have."""


def broken_guards(subject: Subject, program: ExportedProgram) -> Iterator[Sizes]:
    """Yield, for every guard, the least of the tried sizes that break it, if one does.

    Args:
        subject: Whose axes give the guard its words, and whose example the sizes not in it.
        program: The captured program.
    """
    for guard in getattr(program, "_guards_code", []):
        axes: dict[str, str] = {}

        def worded(found: re.Match[str], axes: dict[str, str] = axes) -> str:
            keys = re.findall(r"\['?([^\]']+)'?\]", found[1])
            name, axis = ".".join(keys), int(found[2])
            label = subject.axes.get(name, {}).get(axis)
            if label is None:
                shape = subject.inputs[name].shape if name in subject.inputs else ()
                return str(shape[axis]) if axis < len(shape) else found[0]
            axes[label] = f"s{len(axes)}" if label not in axes else axes[label]
            return axes[label]

        code = SIZE.sub(worded, guard)
        if axes and "L[" not in code:
            found = _breaking(code, axes, subject)
            if found is not None:
                yield found


def _breaking(code: str, axes: dict[str, str], subject: Subject) -> Sizes | None:
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
        values = {variable: sizes[label] for label, variable in axes.items()}
        try:
            holds = eval(code, {"__builtins__": {}, "math": math, "min": min, "max": max}, values)
        except Exception:
            return None  # written in words of torch's own
        if not holds:
            return sizes
    return None
