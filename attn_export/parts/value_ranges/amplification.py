"""Nodes that make the rounding of what they read many times larger."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from attn_export.float64.evaluate import is_float
from attn_export.measures import measure
from attn_export.parts.value_ranges.lockstep import Lockstep
from attn_export.parts.value_ranges.range_rule import MOST_OF_ONE
from attn_export.parts.value_ranges.rounded_run import RoundedRun, Seen
from attn_export.tensorfile import Array


@dataclasses.dataclass(frozen=True)
class _Amplified:
    """A value whose rounding a node makes larger, by a factor."""

    value: str
    node: int
    factor: float


def amplified(
    lockstep: Lockstep, inputs: Mapping[str, Array], run: RoundedRun
) -> list[_Amplified]:  # fmt: skip
    """Return the values whose rounding in a run some node makes much larger, the worst first."""
    wide, eps = lockstep.wide(), lockstep.format.eps
    made: dict[str, Array] = {}
    errors: dict[str, float] = {}

    def observe(seen_in: RoundedRun, seen: Seen) -> None:
        if seen_in is wide:
            made[seen.name] = seen.made
        elif is_float(seen.made):
            errors[seen.name] = measure(seen.read, made.pop(seen.name)).row
        else:  # the rounding of a float decides it
            errors[seen.name] = float(not np.array_equal(seen.made, made.pop(seen.name)))

    lockstep.run(inputs, (wide, run), observe)
    found: dict[str, _Amplified] = {}
    for n, node in enumerate(lockstep.graph.nodes):
        after = max((errors.get(name, 0.0) for name in node.output), default=0.0)
        if not after > MOST_OF_ONE * eps:
            continue
        for name in lockstep.graph.reads[n]:
            factor = after / max(errors.get(name, 0.0), eps / 4)
            known = found.get(name)
            if lockstep.graph.dtypes.get(name) and (known is None or factor > known.factor):
                found[name] = _Amplified(name, n, factor)
    return sorted(
        (each for each in found.values() if each.factor > MOST_OF_ONE), key=lambda a: -a.factor
    )
