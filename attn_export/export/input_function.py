"""Inputs that a function of the user's draws for each case, checked against those of the example.

For what random numbers cannot say: offsets of packed sequences, sorted ids, sparse masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attn_export.errors import AttnExportError, ExportError, UsageError, one_line
from attn_export.export.trees import InputTree, read_axes, to_numpy
from attn_export.parity.draw import (
    TRACED_SIZES,
    Bounds,
    Sizes,
    add_sums,
    clamp_sizes,
    generator,
    seed_of,
)
from attn_export.source_location import line_of
from attn_export.tensorfile import ArrayDict

InputFunction = Callable[[Mapping[str, int], np.random.Generator], Mapping[str, Any]]
"""Returns the inputs of a module at some sizes: ``inputs(sizes, rng)``."""

FIRST_SIZE = 3
"""The least size in the example of an axis whose name says nothing."""


def example_of(inputs: InputFunction, axes: Any, relations: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the inputs of the example, as a function of the user's draws them.

    Args:
        inputs: The user's function.
        axes: The dynamic axes of each input, as of `Subject`.
        relations: Axes that others add up to.

    Raises:
        UsageError: If it returns no inputs by name.
        ExportError: If it raises; names the line.
    """
    named, bounds = read_axes(axes)
    parts = [dynamic for dynamic in dict(named).values() if isinstance(dynamic, Mapping)]
    labels = dict.fromkeys(str(label) for dynamic in parts for label in dynamic.values())
    sizes = _example_sizes(list(labels), relations, bounds)
    return _called(inputs, sizes, generator("example"))


def _example_sizes(labels: list[str], relations: Mapping[str, str], bounds: Bounds) -> Sizes:
    """Return sizes of the example, different for all axes."""
    terms = {t.strip() for sum_of in relations.values() for t in str(sum_of).split("+")}
    free = dict.fromkeys([*labels, *sorted(t for t in terms if not t.isdigit())])
    sizes: dict[str, int] = {}
    for name in free:
        if name not in relations:
            taken = {*sizes.values(), *TRACED_SIZES.values()}
            unused = next(
                n for n in range(FIRST_SIZE, len(taken) + 2 + FIRST_SIZE) if n not in taken
            )
            sizes[name] = TRACED_SIZES.get(name, unused)
    return add_sums(clamp_sizes(sizes, bounds), relations)


def draw_by(
    function: InputFunction, tree: InputTree, axes: Mapping[str, Mapping[int, str]]
) -> Callable[[Sizes, np.random.Generator], ArrayDict]:
    """Return a function that draws arrays by name, and checks each.

    Args:
        function: The user's function.
        tree: The inputs of the example.
        axes: The names of the dynamic axes of each input.
    """

    def drawn(sizes: Sizes, rng: np.random.Generator) -> ArrayDict:
        found = InputTree.of(_called(function, sizes, rng))
        try:
            _check(found, tree, axes, sizes)
        except ValueError as error:
            raise UsageError(f"inputs(sizes, rng) at {_shown(sizes)}: {error}") from error
        # Own copies in the types of the example: cases change them in place.
        return {
            name: array.astype(wanted.dtype)
            for (name, array), wanted in zip(
                to_numpy(found.tensors).items(), to_numpy(tree.tensors).values(), strict=True
            )
        }

    return drawn


def _called(function: InputFunction, sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(int(rng.integers(2**31))))
            found = function(dict(sizes), rng)
    except AttnExportError:
        raise
    except Exception as error:
        where = line_of(error)
        raise ExportError(
            f"inputs(sizes, rng) raised at {_shown(sizes)}{f' in {where}' if where else ''}: "
            f"{one_line(error)}"
        ) from error
    if not isinstance(found, Mapping):
        raise UsageError(
            f"inputs(sizes, rng) returns {type(found).__name__}; return a dict of inputs by name"
        )
    return {name: tree_map_only(np.ndarray, _tensor, value) for name, value in found.items()}


def _tensor(array: np.ndarray) -> Tensor:
    """Return the tensor of an array; numpy's own float64 is taken for float32."""
    narrow = array.astype(np.float32) if array.dtype == np.float64 else array
    return torch.from_numpy(np.ascontiguousarray(narrow).copy())


def _check(
    found: InputTree, example: InputTree, axes: Mapping[str, Mapping[int, str]], sizes: Sizes
) -> None:
    if list(found.tensors) != list(example.tensors) or found.structure != example.structure:
        shown = f"{', '.join(found.tensors)}, and in the example {', '.join(example.tensors)}"
        raise ValueError(f"it returns {shown}; return the same names, in one order")
    others = zip(found.names, found.constants, example.constants, strict=True)
    if any(name is None and one != other for name, one, other in others):
        raise ValueError("a constant is not that of the example; pass what changes as a tensor")
    for name, tensor in found.tensors.items():
        known = example.tensors[name]
        both = tensor.is_floating_point() and known.is_floating_point()
        if tensor.dtype != known.dtype and not both:
            raise ValueError(f"{name} is {tensor.dtype}, and {known.dtype} in the example")
        labels = axes.get(name, {})
        wanted = [sizes[labels[a]] if a in labels else s for a, s in enumerate(known.shape)]
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; return {wanted}")


def _shown(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"
