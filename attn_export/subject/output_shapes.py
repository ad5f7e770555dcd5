"""Axes of the outputs of a user's module, inferred by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attn_export.cases.sizes import Sizes, with_sums
from attn_export.spec import Shape

Run = Callable[[Sizes], Mapping[str, tuple[int, ...]]]
"""Runs the module at these sizes and gives the shapes of its outputs."""


def infer_output_shapes(
    run: Run, axes: Iterable[str], relations: Mapping[str, str]
) -> dict[str, Shape]:
    """Name the axes of a module's outputs by running it at two sets of sizes.

    An axis is the one whose size it has both times; "" where it is none.

    Args:
        run: Returns the shapes of the outputs at some sizes.
        axes: The names of all dynamic axes.
        relations: Axes that are sums of others.
    """
    # Each axis has a size of its own that ends alike, so that a sum of two is no third.
    free = sorted(set(axes) - relations.keys())
    found: list[Mapping[str, tuple[int, ...]]] = []
    rounds: list[dict[str, int]] = []
    for base in (2, 3):
        sizes = {name: base * 2 + 1 + 5 * index * base for index, name in enumerate(free)}
        rounds.append(with_sums(sizes, relations))
        found.append(run(rounds[-1]))
    by_sizes = {(rounds[0][name], rounds[1][name]): name for name in rounds[0]}
    return {
        name: tuple(
            first if first == second else by_sizes.get((first, second), "")
            for first, second in zip(shape, found[1][name], strict=True)
        )
        for name, shape in found[0].items()
    }
