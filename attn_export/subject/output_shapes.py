"""Which axes the outputs of a user's module have, found by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from attn_export.cases.draw import draw_inputs
from attn_export.cases.sizes import axis_names, with_sums
from attn_export.spec import Input, Shape

Run = Callable[[dict[str, np.ndarray]], Mapping[str, tuple[int, ...]]]
"""Runs the module and gives the shapes of its outputs."""


def infer_output_shapes(
    run: Run, inputs: Mapping[str, Input], relations: Mapping[str, str]
) -> dict[str, Shape]:
    """Name the axes of a module's outputs by running it at two sets of sizes.

    An axis is the one whose size it has both times; "" where it is none.
    """
    # Each axis has a size of its own that ends alike, so that a sum of two is no third.
    free = [name for name in axis_names(inputs, relations) if name not in relations]
    found: list[Mapping[str, tuple[int, ...]]] = []
    rounds: list[dict[str, int]] = []
    for base in (2, 3):
        sizes = {name: base * 2 + 1 + 5 * index * base for index, name in enumerate(free)}
        rounds.append(with_sums(sizes, relations))
        found.append(run(draw_inputs(inputs, rounds[-1], seed_words=("shapes",))))
    by_sizes = {(rounds[0][name], rounds[1][name]): name for name in rounds[0]}
    return {
        name: tuple(
            first if first == second else by_sizes.get((first, second), "")
            for first, second in zip(shape, found[1][name], strict=True)
        )
        for name, shape in found[0].items()
    }
