"""Inputs and outputs by name: nested ones taken apart, their dynamic axes, arrays and tensors.

What counts as nested is what `torch.utils._pytree` knows: `torch.export` flattens alike, and
libraries register their caches and outputs with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_export.errors import UsageError, counted
from attn_export.parity.draw import MAX_SIZE, Bounds, Sizes, add_sums
from attn_export.spec import Shape
from attn_export.tensorfile import numpy_dtype

# -- nested inputs and outputs (tuples, dicts, caches) as flat, named tensors -------------------

CONSTANTS = (bool, int, float, str, type(None))
"""Types allowed in the inputs beside tensors: such a value becomes part of the module."""


@dataclasses.dataclass(frozen=True)
class InputTree:
    """The arguments of a module, taken apart.

    Attributes:
        tensors: The tensors by name: ``cache.0.1`` is ``cache[0][1]``.
        names: For every leaf the name of its tensor, or None for a constant.
        constants: The leaves that are no tensors.
    """

    tensors: Mapping[str, Tensor]
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    structure: pytree.TreeSpec

    @classmethod
    def flatten(cls, inputs: Mapping[str, Any]) -> Self:
        """Take arguments apart.

        Raises:
            UsageError: If something is neither a tensor nor a plain constant.
        """
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
        """Return the arguments again, with a value for each tensor.

        Args:
            values: By the names of the tensors.
        """
        leaves = [
            values[name] if name is not None else constant
            for name, constant in zip(self.names, self.constants, strict=True)
        ]
        rebuilt: dict[str, Any] = pytree.tree_unflatten(leaves, self.structure)
        return rebuilt

    def dynamic_shapes(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``dynamic_shapes`` for `torch.export`, with a value for each tensor.

        `torch.export` expects the parts of a foreign class, such as a cache, in flattened form.

        Args:
            shapes: By the names of the tensors.
        """
        leaves = iter([shapes[name] if name is not None else None for name in self.names])
        built: dict[str, Any] = _flattened(self.rebuild(self.tensors), leaves)
        return built


def is_named(returned: Any, names: Sequence[str]) -> bool:
    """Return whether a returned object is a dict whose keys, in any order, are the names.

    Args:
        returned: What the module returned: a tensor, tuple, list or dict.
        names: The names, in order.
    """
    return isinstance(returned, Mapping) and set(returned) == set(names)


def name_outputs(returned: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors that a module returned, by their names.

    A flat dict is taken by its keys where they are the names, all else in its order.

    Args:
        returned: What the module returned: a tensor, tuple, list or dict.
        names: The names, in order.

    Raises:
        UsageError: If there is something else than tensors, or another number of them.
    """
    if is_named(returned, names):
        found = [returned[name] for name in names]
    else:
        found = [leaf for leaf in pytree.tree_leaves(returned) if leaf is not None]
    for leaf in found:
        if not isinstance(leaf, Tensor):
            raise UsageError(
                f"the module returns {type(leaf).__name__} in {type(returned).__name__}; it has to "
                "return a tensor, or tuples, lists or dicts of tensors"
            )
    if len(found) != len(names):
        raise UsageError(
            f"the module returns {counted(len(found), 'tensor')}, but outputs names {len(names)}: "
            f"{', '.join(names)}"
        )
    return dict(zip(names, found, strict=True))


def _flattened(node: Any, leaves: Iterator[Any]) -> Any:
    kind = pytree._get_node_type(node)
    if kind not in pytree.SUPPORTED_NODES:
        return next(leaves)
    known = pytree.SUPPORTED_NODES[kind]
    parts, context = known.flatten_fn(node)
    done = type(parts)(_flattened(part, leaves) for part in parts)
    return known.unflatten_fn(done, context) if kind in pytree.BUILTIN_TYPES else done


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


# -- axes of the outputs of a user's module, inferred by running it -----------------------------

Run = Callable[[Sizes], Mapping[str, tuple[int, ...]]]
"""Runs the module at these sizes and gives the shapes of its outputs."""


def infer_output_shapes(
    run: Run, axes: Iterable[str], relations: Mapping[str, str], limits: Bounds
) -> dict[str, Shape]:
    """Name the axes of a module's outputs by running it at two sets of sizes.

    An axis is the one whose size it has both times; "" where it is none.

    Args:
        run: Returns the shapes of the outputs at some sizes.
        axes: The names of all dynamic axes.
        relations: Axes that are sums of others.
        limits: The bounds of axes that have any.
    """
    # Each axis has a size of its own that ends alike, so that a sum of two is no third.
    free = sorted(set(axes) - relations.keys())
    found: list[Mapping[str, tuple[int, ...]]] = []
    rounds: list[dict[str, int]] = []
    for base in (2, 3):
        sizes = {name: base * 2 + 1 + 5 * index * base for index, name in enumerate(free)}
        for name, size in sizes.items():
            low, high = limits.get(name, (1, MAX_SIZE))
            sizes[name] = low + (size - low) % (high - low + 1)
        rounds.append(add_sums(sizes, relations))
        found.append(run(rounds[-1]))
    by_sizes = {(rounds[0][name], rounds[1][name]): name for name in rounds[0]}
    return {
        name: tuple(
            first if first == second else by_sizes.get((first, second), "")
            for first, second in zip(shape, found[1][name], strict=True)
        )
        for name, shape in found[0].items()
    }


# -- arrays and tensors: the same bytes, bfloat16 included --------------------------------------


def to_torch(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors of the same values."""
    return {name: _tensor(array) for name, array in arrays.items()}


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return arrays of the same values."""
    return {name: _array(tensor.detach().cpu()) for name, tensor in tensors.items()}


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # a type that torch does not know from numpy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(numpy_dtype("bfloat16"))
    array: np.ndarray = tensor.numpy()
    return array


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by every name that they have."""
    found: dict[str, Tensor] = {}
    found.update(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


# -- dynamic axes with bounds -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    """Name of a dynamic axis, with the sizes that it may have.

    `torch.export.Dim` with the same arguments is taken as well.

    Attributes:
        name: The name of the axis; axes of one name have one size.
        min: The least size.
        max: The largest size; None if there is none.
    """

    name: str
    min: int = 1
    max: int | None = None


def read_axes(axes: Any) -> tuple[Any, Bounds]:
    """Return axes by name, and the bounds of those that have any.

    Args:
        axes: For each input its dynamic axes: a name, an `Axis` or a `torch.export.Dim` by number.

    Returns:
        The names as `Subject` has them; what is no axis is left for `check_inputs` to refuse.

    Raises:
        UsageError: If bounds are no sizes, or differ for one name.
    """
    bounds: dict[str, tuple[int, int]] = {}
    if not isinstance(axes, Mapping):
        return axes, bounds
    names: dict[Any, Any] = {}
    for name, dynamic in axes.items():
        names[name] = dynamic
        if isinstance(dynamic, Mapping):
            names[name] = {number: _name_of(axis, bounds) for number, axis in dynamic.items()}
    return names, {label: limits for label, limits in bounds.items() if limits != (1, MAX_SIZE)}


def _name_of(axis: Any, bounds: dict[str, tuple[int, int]]) -> object:
    low, high = getattr(axis, "min", None), getattr(axis, "max", None)
    if isinstance(axis, str) or low is None:
        return axis
    # Dim has an infinity of its own for no bound above, and 0 for none below.
    high = high if isinstance(high, int) else None
    name, low = (axis.name, low) if isinstance(axis, Axis) else (axis.__name__, low or 1)
    limits = (low, MAX_SIZE if high is None else high)
    if not isinstance(low, int) or not 1 <= low < limits[1]:
        raise UsageError(f"Axis({name!r}) must have 1 <= min < max; got min {low} and max {high}")
    if bounds.setdefault(name, limits) != limits:
        raise UsageError(
            f"axis {name!r} is {bounds[name][0]} to {bounds[name][1]} in one place and {limits[0]} "
            f"to {limits[1]} in another; give it the same bounds everywhere"
        )
    return name


def named_axes(shape: Shape) -> dict[int, str]:
    """Return the names of the dynamic axes of a shape by their numbers."""
    return {axis: size for axis, size in enumerate(shape) if isinstance(size, str)}
