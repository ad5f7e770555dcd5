"""Faults that show at some sizes only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from mutants.mutant import Mutant, Setting
from mutants.planting import Make, Planter, Value, either, float_values, plant

Condition = tuple[str, str, int]
"""An axis, a comparison and a number."""

PAIRS: tuple[tuple[Condition, ...], ...] = (
    (("L", ">=", 17), ("P", ">=", 10)),
    (("B", ">=", 4), ("L", ">=", 6)),
    (("B", ">=", 8),),
    (("L", ">=", 49),),
    (("S", ">=", 69),),
)
BLOCKS = (64, 128, 256, 512, 1024)
MOST = {"B": 17, "L": 49, "P": 33, "S": 49}
"""The largest usual sizes of the golden vectors; a mutant's own inputs have up to twice these."""
BEYOND = {"B": 34, "L": 98, "P": 66, "S": 98}

LEAST = {"B": 1, "L": 1, "P": 0, "S": 1}
COMPARED = {">=": "GreaterOrEqual", "<=": "LessOrEqual", "==": "Equal"}
TABLE = "sizes of the table"
USUAL = ("query", "v_proj/Add.out", "out_proj/MatMul.out", "output")
RANDOM = 60
"""The number of random conditions of each kind."""


def holds(p: Planter, setting: Setting, condition: Condition) -> str:
    """Return whether the sizes of a call meet a condition, as a tensor of one element."""
    axis, compared, number = condition
    return p(COMPARED[compared], size_of(p, setting, axis), np.array([number]))


def size_of(p: Planter, setting: Setting, axis: str) -> str:
    """Return a size as a tensor of one element."""
    have = {given.name: given for given in setting.model.graph.input}
    if axis == "B":
        return p.size("query", 0)
    if axis == "L":
        return p.size("query", 1)
    if axis == "P":
        if "past_length" in have:
            return p("ReduceMax", "past_length", keepdims=1)
        return p.size("past_key", 2)
    if "key" in have:
        return p.size("key", 1)
    if "past_length" in have:
        return p.size("past_key", 2)
    if "past_key" in have:
        return p("Add", p.size("past_key", 2), p.size("query", 1))
    return p.size("query", 1)


def axes_of(setting: Setting) -> list[str]:
    """Return the axes that a graph has and may vary."""
    names = {given.name for given in setting.model.graph.input}
    found = ["B", *([] if setting.decodes else ["L"])]
    found += ["P"] if "past_key" in names else []
    return found + (["S"] if {"past_key", "key"} & names else [])


def wrong_where(setting: Setting, conditions: tuple[Condition, ...], how: str) -> Make:
    def make(p: Planter, x: str) -> str:
        at = either(p, [holds(p, setting, condition) for condition in conditions])
        return p("Where", at, WRONG[how](p, x), x)

    return make


def _last_row_lost(p: Planter, x: str) -> str:
    """Repeat the first row of the batch in place of the last."""
    rows = p("Range", np.int64(0), p.number(x, 0), np.int64(1))
    last = p("Sub", p.number(x, 0), np.int64(1))
    return p("Gather", x, p("Where", p("Equal", rows, last), np.int64(0), rows), axis=0)


WRONG: dict[str, Make] = {
    "times 1.01": lambda p, x: p("Mul", x, 1.01),
    "zeros": lambda p, x: p("Mul", x, 0.0),
    "last row of the batch is the first": _last_row_lost,
}


def shown(conditions: tuple[Condition, ...]) -> str:
    return " and ".join(f"{axis} {compared} {number}" for axis, compared, number in conditions)


def in_sizes(setting: Setting) -> Iterator[Mutant]:
    """Yield faults at sizes, each at a value drawn from all of the graph."""
    random = np.random.default_rng(0)
    values = [value for value in float_values(setting.model) if value.rank or value.path]
    usual = [value for value in values if value.name in USUAL]
    for row, kind, conditions in _conditions(setting, random):
        # Those of the table are planted where they matter for sure.
        places = usual if row == "d" or kind == TABLE else [values[random.integers(len(values))]]
        for value in places:
            how = list(WRONG)[0 if places is usual else random.choice(3, p=[0.6, 0.2, 0.2])]
            yield Mutant(
                kind, row, f"{how} where {shown(conditions)}: {value.name} ({value.operator})",
                _planted(setting, value, conditions, how),
            )  # fmt: skip


def _planted(setting: Setting, value: Value, conditions: tuple[Condition, ...], how: str):
    return lambda model: plant(model, value, wrong_where(setting, conditions, how))


def _conditions(
    setting: Setting, random: np.random.Generator
) -> Iterator[tuple[str, str, tuple[Condition, ...]]]:
    axes = axes_of(setting)
    for pair in PAIRS:
        if all(axis in axes for axis, *_ in pair):
            yield "c", TABLE, pair
    for axis, block in itertools.product(("L", "S"), BLOCKS):
        if axis in axes and not (axis == "L" and block > 512 and "S" in axes):
            yield "d", f"{axis} beyond a block", ((axis, ">=", block + 1),)

    def drawn(axis: str, compared: str, most: Mapping[str, int] = MOST) -> Condition:
        # Thresholds are spread over powers, as sizes that matter are.
        low, high = LEAST[axis] + 1, most[axis] + 1
        return axis, compared, int(np.exp(random.uniform(np.log(low), np.log(high))))

    for _ in range(RANDOM):
        axis = axes[random.integers(len(axes))]
        yield "c", "large", (drawn(axis, ">="),)
        if len(axes) > 1:
            one, other = random.choice(axes, 2, replace=False)
            yield "c", "large and large", (drawn(one, ">="), drawn(other, ">="))
            one, other = random.choice(axes, 2, replace=False)
            yield "c", "large and small", (drawn(one, ">="), drawn(other, "<="))
            one, other = random.choice(axes, 2, replace=False)
            yield "c2", "beyond both", (drawn(one, ">=", BEYOND), drawn(other, ">=", BEYOND))
        if len(axes) > 2:
            chosen = random.choice(axes, 3, replace=False)
            yield "c", "three are large", tuple(drawn(axis, ">=") for axis in chosen)
        axis = axes[random.integers(len(axes))]
        yield "c3", "one size alone", (drawn(axis, "=="),)
