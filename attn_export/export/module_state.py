"""Functions that restore or copy the state of a module, or read it from a graph."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attn_export.cases.draw import clamp_sizes, may_try
from attn_export.errors import BundleError, one_line
from attn_export.export.trees import to_torch
from attn_export.graph.load import load_graph

# -- restoration of a module's state after a call -----------------------------------------------


Contents = dict[Any, Any] | list[Any] | set[Any]


@contextlib.contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and its submodules at the end of the block.

    A module may keep a tensor from a call, such as a mask. If it is captured, such a tensor is a
    fake one without values. Restored are all attributes, and the contents of attributes that are
    dicts, lists or sets, but not the values of tensors.
    """
    before = [
        (part, dict(own), [(x, x.copy()) for x in own.values() if type(x) in (dict, list, set)])
        for part in module.modules()
        for own in [vars(part)]
    ]
    try:
        yield
    finally:
        for part, attributes, containers in before:
            vars(part).clear()
            vars(part).update(attributes)
            for container, contents in containers:
                _restore(container, contents)


def _restore(container: Contents, contents: Contents) -> None:
    """Replace the contents of a container."""
    if isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)


@contextlib.contextmanager
def computed_weights(module: nn.Module) -> Iterator[None]:
    """Make weights that are computed by parametrizations constants, inside this block."""
    with parametrize.cached():
        for part in module.modules():
            for name in getattr(part, "parametrizations", ()):
                getattr(part, name)
        yield


# -- copies of modules ---------------------------------------------------------------------------


def copy_module(module: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module.

    Objects that cannot be copied, such as a Python module, a lock, a generator or a tensor that was
    computed from weights, are shared with the original.
    """
    try:
        return copy.deepcopy(module, dict(shared or {}))
    except Exception:
        uncopied = {
            id(value): value
            for part in module.modules()
            for value in _leaves(vars(part), set())
            if not _can_be_copied(value)
        }
        return copy.deepcopy(module, {**uncopied, **(shared or {})})


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the objects within nested containers that are neither containers nor modules."""
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(item, seen)
    else:
        yield value


def _can_be_copied(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_leaf  # quicker than trying
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


# -- weights of a layer of ours, read from its graph ---------------------------------------------


def weights_of_graph(path: Path, module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, read from the initializers of its graph.

    `path`: The graph in the standard dialect. Its initializers have the names of the module's
    parameters and buffers; the weights of linear layers are stored ``[in, out]``.
    """
    from attn_export.quantiser import ORDER

    model = load_graph(path)
    initializers = model.graph.initializers
    integers: dict[str, tuple[str, Sequence[Any]]] = {}
    for node in model.graph:
        read = _integers_of(node, initializers)
        if read and read[0]:
            integers[str(read[0].name)] = str(node.name), read
    linear = {f"{n}.weight" for n, part in module.named_modules() if isinstance(part, nn.Linear)}
    state = {}
    for name, expected in module.state_dict().items():
        value = initializers.get(name)
        if value is None or value.const_value is None:
            raise BundleError(f"{path} has no weight {name}, which its spec requires")
        stored = integers.get(name)
        if stored is None:
            array = _array(path, name, value.const_value)
        else:
            array = _dequantised(path, *stored, initializers.get(f"{name}{ORDER}"))
        (tensor,) = to_torch({name: array.T if name in linear else array}).values()
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise BundleError(
                f"{path}: the weight {name} is {list(tensor.shape)} {tensor.dtype}, and its spec "
                f"asks for {list(expected.shape)} {expected.dtype}"
            )
        state[name] = tensor
    return state


def _integers_of(node: Any, initializers: Mapping[str, Any]) -> Sequence[Any]:
    """Return the integers, scales and zero points of a weight that a node reads, or ()."""
    if node.op_type == "MatMulInteger":
        weight = node.inputs[1]
        return [weight, weight and initializers.get(f"{weight.name}_scale")]
    return node.inputs if node.op_type == "DequantizeLinear" else ()


def _dequantised(path: Path, node: str, values: Sequence[Any], order: Any) -> np.ndarray:
    """Return a weight from its integers in a graph, float32 `[in, out]`.

    `values` are the integers, their scales and, if there are any, zero points. `order` is the
    initializer with the index of the input of each row of integers, or None.
    """
    from attn_export.quantiser import QuantisedWeight

    arrays = [
        None if value is None or value.const_value is None
        else _array(path, str(value.name), value.const_value)
        for value in values
    ]  # fmt: skip
    integers, scales, zeros = (*arrays, None)[:3]
    if integers is None or scales is None or integers.ndim != 2:
        raise BundleError(f"{path}: {node} does not read a weight and its scales")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise BundleError(
            f"{path}: {node} has scales that are not positive and finite; build it again"
        )
    try:
        scales = np.atleast_2d(scales).astype(np.float32)
        zeros = None if zeros is None else np.atleast_2d(zeros).astype(np.int16)
        indices = None
        if order is not None:
            indices = _array(path, order.name, order.const_value)
            if not np.array_equal(np.sort(indices), np.arange(len(integers))):
                raise ValueError("its order of inputs does not name each once")
        signed = integers.astype(np.int16)
        return QuantisedWeight("", signed, scales, zeros, False, indices).dequantised()
    except (ValueError, ZeroDivisionError) as error:
        raise BundleError(
            f"{path}: {node} has scales that do not fit its weight: {one_line(error)}"
        ) from error


def _array(path: Path, name: str, tensor: Any) -> np.ndarray:
    try:
        return np.array(tensor.numpy())
    except Exception as error:  # external data may be missing or too short
        raise BundleError(f"{path}: the weight {name} cannot be read: {one_line(error)}") from error


# -- tensors that a module keeps between calls ----------------------------------------------------


Kept = list[tuple[nn.Module, str]]
"""Submodules, each with the name of an attribute or buffer that holds a tensor."""

_LONGEST = 4096
"""The largest dimension of a kept tensor that is tested for growth."""


def find_kept_tensors(subject: Any) -> Kept:
    """Return the tensors that a user's module replaces when an axis becomes larger than them."""
    dimensions = (n for _, _, tensor in _tensor_attributes(subject.module) for n in tensor.shape)
    most = max((size for size in dimensions if size < _LONGEST), default=0)
    weights = sum(parameter.numel() for parameter in subject.module.parameters())
    kept: Kept = []
    for label, size in subject.example_sizes.items():
        sizes = subject.sizes_with(clamp_sizes({label: max(most, size) + 1}, subject.bounds))
        if label in subject.sums or not most or not may_try(weights, sizes, subject.sums):
            continue
        with contextlib.suppress(Exception):  # the module does not accept such sizes
            inputs = subject.tree.rebuild(subject.draw(sizes, "larger"))
            run = functools.partial(subject.module, **inputs)
            with torch.inference_mode():
                kept += _replaced_tensors(subject.module, run)
    return kept


def _tensor_attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the buffers of a module and its tensors that are plain attributes."""
    for submodule in module.modules():
        for name, value in (*submodule._buffers.items(), *vars(submodule).items()):
            if isinstance(value, Tensor):
                yield submodule, name, value


def _replaced_tensors(module: nn.Module, run: Callable[[], object]) -> Kept:
    """Return the tensors that a call with larger inputs replaces, and restore the module."""
    before = {(id(owner), name): tensor for owner, name, tensor in _tensor_attributes(module)}
    with preserve_state(module):
        run()
        return [
            (owner, name)
            for owner, name, tensor in _tensor_attributes(module)
            if before.get((id(owner), name), tensor) is not tensor
        ]


@contextlib.contextmanager
def drop_kept_tensors(module: nn.Module, kept: Kept) -> Iterator[None]:
    """Set kept tensors and empty buffers to None, as before the first call, inside this block.

    Buffers that the module registers inside the block become plain attributes, since `torch.export`
    would fix the size of a buffer.
    """
    with preserve_state(module):
        for submodule in module.modules():
            attributes = vars(submodule)
            attributes["register_buffer"] = functools.partial(_set_attribute, submodule)
            empty = [name for name, buffer in submodule._buffers.items() if buffer is None]
            for name in (*empty, *(name for owner, name in kept if owner is submodule)):
                submodule._buffers.pop(name, None)
                attributes[name] = None
        yield


def _set_attribute(
    submodule: nn.Module,
    name: str,
    tensor: Tensor | None,
    persistent: bool = True,  # noqa: ARG001
) -> None:
    # nn.Module calls this with `persistent`, too, for a buffer to which a module assigns.
    place = submodule._buffers if name in submodule._buffers else vars(submodule)
    place[name] = tensor
