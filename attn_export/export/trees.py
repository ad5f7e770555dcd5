"""Named inputs and outputs: nested ones as flat tensors, dynamic axes, arrays and tensors.

Nested inputs and outputs are the containers that `torch.utils._pytree` knows. `torch.export`
flattens the same ones, and libraries register their caches and outputs there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_export.cases.draw import MAX_SIZE, Bounds, Sizes, add_sums
from attn_export.errors import UsageError, counted
from attn_export.spec import Shape
from attn_export.tensorfile import numpy_dtype

# -- nested inputs and outputs (tuples, dicts, caches) as flat, named tensors -------------------

CONSTANTS = (bool, int, float, str, type(None))
"""Types of constants in inputs. A constant becomes a part of the exported module."""


@dataclasses.dataclass(frozen=True)
class InputTree:
    """Nested arguments of a module, flattened.

    Attributes:
        tensors: The tensors by name: ``cache.0.1`` is ``cache[0][1]``.
        names: The name of each leaf that is a tensor, and None for each constant.
        constants: All leaves; those that are no tensors are the constants.
        structure: The structure, from which `rebuild` makes the arguments.
    """

    tensors: Mapping[str, Tensor]
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def flatten(cls, inputs: Mapping[str, Any]) -> Self:
        """Flatten arguments."""
        leaves, structure = pytree.tree_flatten_with_path(dict(inputs))
        tensors: dict[str, Tensor] = {}
        names: list[str | None] = []
        for path, leaf in leaves:
            name = ".".join(_step(key) for key in path)
            if isinstance(leaf, Tensor):
                tensors[name] = leaf
            elif not isinstance(leaf, CONSTANTS):
                raise UsageError(
                    f"{name} is {type(leaf).__name__}; inputs are tensors, tuples, lists and dicts "
                    "of them, and plain constants"
                )
            names.append(name if isinstance(leaf, Tensor) else None)
        return cls(tensors, tuple(names), tuple(leaf for _, leaf in leaves), structure)

    def rebuild(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested arguments in which values, by name, replace the tensors."""
        leaves = [
            values[name] if name is not None else constant
            for name, constant in zip(self.names, self.constants, strict=True)
        ]
        rebuilt: dict[str, Any] = pytree.tree_unflatten(leaves, self.structure)
        return rebuilt

    def dynamic_shapes(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the argument ``dynamic_shapes`` of `torch.export` for dynamic shapes by name.

        `torch.export` expects the contents of a class that is no builtin container, such as a
        cache, as the flat list of its children.
        """
        leaves = iter([shapes[name] if name is not None else None for name in self.names])
        built: dict[str, Any] = _replace_leaves(self.rebuild(self.tensors), leaves)
        return built


def is_named(returned: Any, names: Sequence[str]) -> bool:
    """Return whether a returned object is a dict whose keys are the names, in any order."""
    return isinstance(returned, Mapping) and set(returned) == set(names)


def name_outputs(returned: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors that a module returned, by name.

    If `is_named` holds, the keys of the dict are the names. Else the tensors get the names in their
    order.
    """
    if is_named(returned, names):
        leaves = [returned[name] for name in names]
    else:
        leaves = [leaf for leaf in pytree.tree_leaves(returned) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"the module returns {type(leaf).__name__} in {type(returned).__name__}; it must "
                "return a tensor, or tuples, lists or dicts of tensors"
            )
    if len(leaves) != len(names):
        raise UsageError(
            f"the module returns {counted(len(leaves), 'tensor')}, but outputs names {len(names)}: "
            f"{', '.join(names)}"
        )
    return dict(zip(names, leaves, strict=True))


def _replace_leaves(node: Any, leaves: Iterator[Any]) -> Any:
    """Return nested containers with other leaves; other classes become lists of their children."""
    node_type = pytree._get_node_type(node)
    if node_type not in pytree.SUPPORTED_NODES:
        return next(leaves)
    definition = pytree.SUPPORTED_NODES[node_type]
    children, context = definition.flatten_fn(node)
    replaced = type(children)(_replace_leaves(child, leaves) for child in children)
    is_builtin = node_type in pytree.BUILTIN_TYPES
    return definition.unflatten_fn(replaced, context) if is_builtin else replaced


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# -- axes of the outputs of a user's module, inferred by running it -----------------------------


def infer_output_shapes(
    run: Callable[[Sizes], Mapping[str, tuple[int, ...]]],
    axes: Iterable[str],
    relations: Mapping[str, str],
    limits: Bounds,
) -> dict[str, Shape]:
    """Return the shapes of a module's outputs, with names for dynamic axes.

    The module runs at two sets of sizes. An axis whose size changes has the name of the dynamic
    axis with both its sizes, or "" if there is none.

    `run`: A function that runs the module at some sizes and returns its outputs' shapes.
    """
    free = sorted(set(axes) - relations.keys())

    def sizes_of_run(base: int) -> dict[str, int]:
        # All sizes are different and have the same remainder, so that the sum of two is no third.
        sizes = {}
        for index, name in enumerate(free):
            low, high = limits.get(name, (1, MAX_SIZE))
            size = base * 2 + 1 + 5 * index * base
            sizes[name] = low + (size - low if size >= low else size) % (high - low + 1)
        return add_sums(sizes, relations)

    first_sizes, second_sizes = sizes_of_run(2), sizes_of_run(3)
    names = {(first_sizes[name], second_sizes[name]): name for name in first_sizes}
    first_shapes, second_shapes = run(first_sizes), run(second_sizes)
    return {
        output: tuple(
            first if first == second else names.get((first, second), "")
            for first, second in zip(shape, second_shapes[output], strict=True)
        )
        for output, shape in first_shapes.items()
    }


# -- arrays and tensors of the same values, bfloat16 included -----------------------------------

_HUGE = 1e4
"""The size of numbers that stand for infinity in masks of any floating type."""


def to_torch(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors of the same values."""
    return {name: _tensor(array) for name, array in arrays.items()}


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return arrays of the same values."""
    return {name: _array(tensor.detach().cpu()) for name, tensor in tensors.items()}


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # torch does not convert numpy's bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    array: np.ndarray = tensor.numpy()
    return array


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two runs of the same operations may give these results, of any shape."""
    if a.shape != b.shape:
        return False
    usual = b[b.abs() < _HUGE] if b.is_floating_point() else b.new_zeros(0)
    size = max(1.0, float(usual.abs().max())) if usual.numel() else 1.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, shared ones under each of their names."""
    state: dict[str, Tensor] = {}
    state.update(module.named_parameters(remove_duplicate=False))
    state.update(module.named_buffers(remove_duplicate=False))
    return state


# -- dynamic axes with bounds -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    """Name of a dynamic axis, with the sizes that it may have.

    A `torch.export.Dim` may be used in its place.

    Attributes:
        name: The name of the axis; axes of one name have one size.
        min: The least size. Default: 1, or 0 for an axis that acts as a past.
        max: The largest size; None if there is none.
    """

    name: str
    min: int | None = None
    max: int | None = None


def read_axes(axes: Any) -> tuple[Any, Bounds, set[str]]:
    """Return the names of axes, the bounds of those that have any, and which have a least size.

    Returns:
        The names, see `Subject`; the bounds, by name; and the names of axes whose least size is
        given. Objects that are no axes stay as they are; `check_arguments` raises an error for
        them.
    """
    limits: dict[str, tuple[int | None, int | None]] = {}
    if not isinstance(axes, Mapping):
        return axes, {}, set()
    names: dict[Any, Any] = {}
    for name, dynamic in axes.items():
        names[name] = dynamic
        if isinstance(dynamic, Mapping):
            names[name] = {number: _name_of(axis, limits) for number, axis in dynamic.items()}
    bounds = {n: _bounds_of(*ends) for n, ends in limits.items() if ends != (None, None)}
    return names, bounds, {name for name, (low, _) in limits.items() if low is not None}


def _bounds_of(low: int | None = None, high: int | None = None) -> tuple[int, int]:
    return 1 if low is None else low, MAX_SIZE if high is None else high


def _name_of(axis: Any, limits: dict[str, tuple[int | None, int | None]]) -> object:
    if isinstance(axis, str) or not hasattr(axis, "min"):
        return axis
    # Without bounds, a Dim has 0 as its minimum and an object for infinity as its maximum.
    high = axis.max if isinstance(axis.max, int) else None
    own = isinstance(axis, Axis)
    name, low = (axis.name, axis.min) if own else (axis.__name__, axis.min or None)
    least, most = _bounds_of(low, high)
    if not isinstance(least, int) or not 0 <= least < most:
        raise UsageError(f"Axis({name!r}) must have 0 <= min < max; got min {low} and max {high}")
    if limits.setdefault(name, (low, high)) != (low, high):
        before = _bounds_of(*limits[name])
        raise UsageError(
            f"axis {name!r} is {before[0]} to {before[1]} in one place and {least} to {most} in "
            "another; give it the same bounds everywhere"
        )
    return name


def named_axes(shape: Shape) -> dict[int, str]:
    """Return the names of the dynamic axes of a shape by their numbers."""
    return {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
