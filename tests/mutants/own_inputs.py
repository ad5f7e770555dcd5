"""Inputs of the mutants' own: other numbers, other sizes and other contents than the golden ones.

A mutant is a fault if these show it. Their sizes go up to twice those of the golden vectors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from attn_export.cases.conditions import free_axes, tried_sizes
from attn_export.cases.draw import Interface, add_sums, axis_names, draw_inputs, generator
from attn_export.cases.input_patterns import DrawnCase
from attn_export.cases.plan import Groups
from attn_export.export.subject import Subject
from attn_export.interface import QUERIES
from attn_export.results import Case

USUAL, ONE_QUERY, LONG = 70, 50, 6
"""The number of cases of usual sizes, with one query, and of sizes beyond blocks."""

MOST_SCORES = 40_000
"""The largest number of scores of one head in a case of usual sizes."""

PLAIN, CHANGED, LOUDER = 0.35, 0.75, 0.9
"""Below which a random number asks for random inputs, usual contents, and louder ones."""

LONGEST = {"query_len": 1030, "past_len": 2060, "key_len": 2060, "total_len": 2060}


def own_cases(subject: Subject) -> Iterator[Case]:
    """Yield the cases of a subject."""
    random = generator("mutants")
    axes = free_axes(axis_names(subject.input_descriptions(), subject.sums), list(subject.sums))
    for number in range(USUAL + ONE_QUERY):
        one_query = number >= USUAL
        while True:
            sizes = {axis: _drawn(axis, random) for axis in axes}
            if one_query:
                sizes[QUERIES] = 1
            if math.prod(max(size, 1) for size in sizes.values()) <= MOST_SCORES:
                break
        yield _case(subject, number, add_sums(sizes, subject.sums), random)
    for number in range(LONG):
        sizes = dict.fromkeys(axes, 1)
        axis = [axis for axis in axes if axis != "batch"][number % (len(axes) - 1)]
        sizes[axis] = LONGEST.get(axis, 1) >> (number // (len(axes) - 1))
        yield _case(subject, 1000 + number, add_sums(sizes, subject.sums), random, plain=True)


def _drawn(axis: str, random: np.random.Generator) -> int:
    low, high = min(tried_sizes(axis)), 2 * max(tried_sizes(axis))
    return low - 1 + int(np.exp(random.uniform(0, np.log(high - low + 2))))


def _case(
    subject: Subject,
    number: int,
    sizes: dict[str, int],
    random: np.random.Generator,
    *,
    plain: bool = False,
) -> Case:
    inputs, traits = subject.input_descriptions(), subject.traits
    name = f"own_{number}_" + "_".join(f"{axis}{size}" for axis, size in sorted(sizes.items()))
    drawn = DrawnCase(
        draw_inputs(inputs, sizes, seed_words=("mutants", number)), inputs, traits, sizes,
        generator("mutants", number),
    )  # fmt: skip
    case = Case(name, "shape", sizes, drawn.inputs, "")
    kind = 0.0 if plain else random.uniform()
    if kind < PLAIN:
        return case
    if kind < CHANGED:
        combinations = Groups.of(Interface(inputs, {}, traits)).combinations()
        for content in combinations[random.integers(len(combinations))]:
            content.change(drawn)
    elif kind < LOUDER:
        _louder(drawn, random)
    elif sizes.get("batch", 1) > 1:
        row = int(random.integers(sizes["batch"]))
        for value in drawn.value_names():
            if inputs[value].shape[0] == "batch":
                drawn.inputs[value][row] = random.choice([np.nan, np.inf])
        return dataclasses.replace(case, ignored_rows=(row,))
    return case


def _louder(drawn: DrawnCase, random: np.random.Generator) -> None:
    """Multiply all inputs, or set single elements, by what the golden inputs do not hold."""
    narrow = any(array.dtype == np.float16 for array in drawn.inputs.values())
    factor = float(random.choice([4.0, 14.0, 10.0 if narrow else 40.0]))
    single = float(random.choice([100.0, 300.0] if narrow else [300.0, 1000.0, 3000.0, 1e4]))
    whole = random.uniform() < 0.5
    for name in drawn.value_names():
        array = drawn.inputs[name]
        if whole:
            array *= np.asarray(factor, array.dtype)
        elif array.size:
            array.reshape(-1)[random.integers(array.size)] = single
