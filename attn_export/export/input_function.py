"""Inputs that a function of the user draws for each case, checked against those of the example.

Such a function is needed for inputs that cannot be plain random numbers, such as offsets of packed
sequences, sorted ids or sparse masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attn_export.cases.draw import (
    TRACED_SIZES,
    Bounds,
    FunctionInputs,
    Sizes,
    add_sums,
    clamp_sizes,
    generator,
    seed_of,
)
from attn_export.errors import AttnExportError, ExportError, UsageError, one_line
from attn_export.export.nested import InputTree
from attn_export.export.trees import read_axes, to_numpy
from attn_export.interface import Input, axes_in
from attn_export.source_location import line_of
from attn_export.tensorfile import ArrayDict

InputFunction = Callable[[Mapping[str, int], np.random.Generator], Mapping[str, Any]]
"""A function ``inputs(sizes, rng)`` that returns the inputs of a module at some sizes."""

_FIRST_SIZE = 3
"""The least example size of an axis that is not in `TRACED_SIZES`."""


def draw_example(
    inputs: InputFunction, axes: Any, relations: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the inputs of the example, drawn by a function of the user."""
    named, bounds, _ = read_axes(axes)
    by_input = [dynamic for dynamic in dict(named).values() if isinstance(dynamic, Mapping)]
    labels = dict.fromkeys(str(label) for dynamic in by_input for label in dynamic.values())
    sizes = _example_sizes(list(labels), relations, bounds)
    return _call(inputs, sizes, generator("example"))


def _example_sizes(labels: list[str], relations: Mapping[str, str], bounds: Bounds) -> Sizes:
    """Return sizes for the example that are different for all axes, if bounds allow it."""
    terms = {axis for text in relations.values() for axis in axes_in(text)}
    free = dict.fromkeys([*labels, *sorted(terms)])
    sizes: dict[str, int] = {}
    for name in free:
        if name not in relations:
            taken = {*sizes.values(), *TRACED_SIZES.values()}
            unused = next(size for size in itertools.count(_FIRST_SIZE) if size not in taken)
            sizes[name] = TRACED_SIZES.get(name, unused)
    return add_sums(clamp_sizes(sizes, bounds), relations)


def inputs_of_function(
    function: InputFunction,
    inputs: Mapping[str, Input],
    tree: InputTree,
    axes: Mapping[str, Mapping[int, str]],
) -> FunctionInputs:
    """Return descriptions of inputs whose arrays a function of the user draws.

    The arrays must match the example: a case raises UsageError if they do not.
    """

    def draw(sizes: Sizes, rng: np.random.Generator) -> ArrayDict:
        drawn = InputTree.flatten(_call(function, sizes, rng))
        names = {at: name for name, at in tree.places.items()}
        # A number in an object, beside the example's tensors, is a constant.
        drawn = drawn.renamed(
            {at: names.get(at, at) for at, x in drawn.tensors.items() if at in names or x.dim()}
        )
        try:
            _check(drawn, tree, axes, sizes)
        except ValueError as error:
            raise UsageError(f"inputs(sizes, rng) at {_shown(sizes)}: {error}") from error
        # Copies in the types of the example, since cases change them in place.
        examples = to_numpy(tree.tensors)
        return {
            name: array.astype(examples[name].dtype)
            for name, array in to_numpy(drawn.tensors).items()
        }

    return FunctionInputs(inputs, draw)


def _call(function: InputFunction, sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(int(rng.integers(2**31))))
            inputs = function(dict(sizes), rng)
    except AttnExportError:
        raise
    except Exception as error:
        where = line_of(error)
        raise ExportError(
            f"inputs(sizes, rng) raised at {_shown(sizes)}{f' in {where}' if where else ''}: "
            f"{one_line(error)}"
        ) from error
    if not isinstance(inputs, Mapping):
        raise UsageError(
            f"inputs(sizes, rng) returns {type(inputs).__name__}; return a dict of inputs by name"
        )
    try:
        return {name: tree_map_only(np.ndarray, _tensor, value) for name, value in inputs.items()}
    except RecursionError as error:
        raise UsageError("inputs(sizes, rng) returns values nested without end") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"inputs(sizes, rng) returns an array: {one_line(error)}") from error


def _tensor(array: np.ndarray) -> Tensor:
    """Return a tensor of an array; float64, numpy's default, becomes float32."""
    native = array.dtype.newbyteorder("=")
    narrow = array.astype(np.float32 if native == np.float64 else native)
    return torch.from_numpy(np.ascontiguousarray(narrow).copy())


def _check(
    drawn: InputTree, example: InputTree, axes: Mapping[str, Mapping[int, str]], sizes: Sizes
) -> None:
    """Raise ValueError if inputs differ from the example in names, types, shapes or constants."""
    if (
        list(drawn.tensors) != list(example.tensors)
        or drawn.constants.keys() != example.constants.keys()
    ):
        shown = f"{', '.join(drawn.tensors)}, and in the example {', '.join(example.tensors)}"
        raise ValueError(f"it returns {shown}; return the same names, in the same order")
    if drawn.constants != example.constants:
        raise ValueError("a constant is not that of the example; pass what changes as a tensor")
    for name, tensor in drawn.tensors.items():
        of_example = example.tensors[name]
        both_floating = tensor.is_floating_point() and of_example.is_floating_point()
        if tensor.dtype != of_example.dtype and not both_floating:
            raise ValueError(f"{name} is {tensor.dtype}, and {of_example.dtype} in the example")
        labels = axes.get(name, {})
        shape = [sizes[labels[a]] if a in labels else s for a, s in enumerate(of_example.shape)]
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; return {shape}")


def _shown(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no axes"
