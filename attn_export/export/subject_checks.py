"""Checks of the arguments of a subject, and descriptions of inputs from an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from attn_export.cases.draw import Bounds, Sizes, draw_inputs
from attn_export.cases.roles import Trial, find_roles
from attn_export.errors import AttnExportError, ExportError, UsageError, printable
from attn_export.export.nested import Leaves
from attn_export.export.trees import (
    check_bounds,
    check_relations,
    spares_of,
    to_numpy,
    to_torch,
    with_spares,
)
from attn_export.interface import Input, Roles
from attn_export.schema import MOST_BYTES, EndName
from attn_export.tensorfile import ArrayDict
from attn_export.tensorproto import DTYPES
from attn_export.untrusted_files import checked

# -- checks of the arguments of a subject -------------------------------------------------------

_INPUT_DTYPES = tuple(sorted(set(DTYPES.values()) - {"float64"}))
"""Types of inputs. float64 is no such type, since scalars of float64 graphs become float32 in the
exporter of PyTorch 2.13 and in fusions of ONNX Runtime 1.31: results are exact to 1e-7 only."""


def check_call(module: nn.Module, arguments: Mapping[str, Any], outputs: object) -> None:
    """Check that a module can be called with arguments, and is in eval mode."""
    _check_module(module)
    try:
        signature(module.forward).bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"the inputs {', '.join(arguments)} do not fit {type(module).__name__}"
            f".forward{signature(module.forward)}: {error}"
        ) from error
    _check_leaves(arguments)
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise UsageError(f"outputs must be a list of names, such as ['output']; got {outputs!r}")
    _refuse_train_mode(module)


def _check_leaves(arguments: Mapping[str, Any]) -> None:
    """Refuse functions beside integers only: in a block mask these follow."""
    contents = Leaves.of(arguments)
    for place, leaf in contents.leaves.items():
        owner = contents.owner(place) if isinstance(leaf, FunctionType) else ""
        inside = [x for at, x in contents.tensors().items() if owner and at.startswith(owner + ".")]
        if inside and not any(x.is_floating_point() for x in inside):
            raise UsageError(
                f"{place} is a function, which is no input of a graph; pass the tensors that it "
                f"uses, and make {type(contents.objects[owner]).__name__} in forward"
            )


def check_arguments(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    relations: Mapping[str, str],
    bounds: Bounds,
) -> dict[str, int]:
    """Check that the arguments of a subject fit the module and each other.

    Returns:
        The size of every axis in the example, by its name.
    """
    _check_inputs(tensors, axes)
    _check_outputs(module, tensors, names)
    sizes = _check_axes(tensors, {name: axes.get(name, {}) for name in tensors})
    check_relations(relations, sizes)
    sizes |= spares_of(with_spares(relations), sizes)
    check_bounds(sizes, bounds, relations)
    _refuse_train_mode(module)
    return sizes


def _check_module(module: nn.Module) -> None:
    """Check that a module can be called and has weights."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"the module is a {type(module).__name__}, not a torch.nn.Module; wrap it")
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            f"the module is a {type(module).__name__} of torch.jit; pass the module from before "
            "torch.jit.script or torch.jit.trace"
        )
    for name, tensor in module.named_parameters():
        if is_lazy(tensor) or tensor.is_meta:
            what = "size" if is_lazy(tensor) else "values (it is on the device meta)"
            raise UsageError(f"the weight {name} has no {what} yet; load or run the module before")


def _check_inputs(tensors: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]]) -> None:
    """Check that inputs have supported types, and that `axes` is well formed."""
    for name, tensor in tensors.items():
        if dtype_of(tensor) not in _INPUT_DTYPES:
            raise UsageError(
                f"{name} is {dtype_of(tensor)}; inputs are one of {', '.join(_INPUT_DTYPES)}"
            )
    if not isinstance(axes, Mapping):
        raise UsageError(f"axes must be a dict such as {{'query': {{0: 'batch'}}}}; got {axes!r}")
    for name, dynamic in axes.items():
        if not isinstance(dynamic, Mapping):
            raise UsageError(
                f"axes[{name!r}] must be a dict such as {{0: 'batch'}}; got {dynamic!r}"
            )
        for axis, label in dynamic.items():
            if not isinstance(axis, int) or not isinstance(label, str) or not label:
                raise UsageError(
                    f"axes[{name!r}] must give names to axes by number, as in {{0: 'batch'}}; "
                    f"got {axis!r}: {label!r}"
                )
            _check_name(label)
        if name not in tensors:
            known = ", ".join(tensors)
            raise UsageError(f"axes names the input {name!r}, which is not one of: {known}")


def _check_name(name: str) -> None:
    try:
        checked(name, EndName)
    except ValueError as error:
        raise UsageError(
            f"the name {printable(repr(name), 80)} must have 1 to {MOST_BYTES} printable characters"
        ) from error


def _check_axes(
    tensors: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]]
) -> dict[str, int]:
    """Check that axes exist, have one size for each name, and at least 2; return the sizes."""
    first: dict[str, tuple[int, str]] = {}
    for name, dynamic in axes.items():
        for axis, label in dynamic.items():
            shape, here = tensors[name].shape, f"{name}.shape[{axis}]"
            if not 0 <= axis < len(shape):
                raise UsageError(
                    f"{name} has the axes 0 to {len(shape) - 1}, so axis {axis} cannot be named"
                    if shape
                    else f"{name} is a single number, so axis {axis} cannot be named"
                )
            size, there = first.setdefault(label, (shape[axis], here))
            if size != shape[axis]:
                raise UsageError(
                    f"axis {label!r} is {size} in {there} and {shape[axis]} in {here}; give both "
                    "one size or two names"
                )
            if size < 2:
                raise UsageError(
                    f"axis {label!r} ({here}) has size {size} in the example, which the exporter "
                    "would fix; give an example of 2 or more"
                )
    return {label: size for label, (size, _) in first.items()}


def check_integers(tensors: Mapping[str, Tensor]) -> None:
    """Check that integer inputs have different values, since cases draw values of their range.

    Integers of rank 2 or more that are all ones pass: they are a mask without padding.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.numel():
            continue
        low, high = _span(tensor)
        if low == high:
            raise UsageError(
                f"{name} is {low} everywhere in the example, and integers are tried within the "
                "range of the example; give one with other values as well"
            )


def _check_outputs(module: nn.Module, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Check that names of outputs and inputs are strings that are unique in the graph."""
    weights = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for name in names:
        if not isinstance(name, str) or not name:
            raise UsageError(f"outputs must be a list of names; got {name!r} in it")
        if names.count(name) > 1:
            raise UsageError(f"outputs names {name!r} twice; give each a name of its own")
        if name in tensors:
            raise UsageError(f"{name!r} is an input and an output; give the output another name")
    for name in (*tensors, *names):
        _check_name(name)
        if name in weights:
            raise UsageError(f"{name!r} is a weight of the module too; rename the input or output")


def _refuse_train_mode(module: nn.Module) -> None:
    """Raise an error if a submodule is in train mode."""
    for name, part in module.named_modules():
        if part.training:
            where = f"{name} ({type(part).__name__})" if name else type(part).__name__
            raise ExportError(
                f"{where} is in train mode, where dropout and the like change its outputs; "
                "call .eval() on the module first"
            )


def dtype_of(tensor: Tensor) -> str:
    """Return the dtype of a tensor of any shape as text, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


# -- descriptions of inputs from an example -----------------------------------------------------


def input_like(example: Tensor, axes: Mapping[int, str]) -> Input:
    """Return the description of an input, from an example of it.

    The description has the example's dtype and fixed sizes, the range of its integers, the common
    first value of its rows if it is bool (True for integers that are a mask of ones), and whether
    it contains -inf.

    `example`: The example, of any shape and of a dtype of `_INPUT_DTYPES`.
    """
    shape = tuple(axes.get(axis, size) for axis, size in enumerate(example.shape))
    whole = not (example.is_floating_point() or example.dtype == torch.bool)
    span = _span(example) if whole and example.numel() else (0, 0)
    first = True if whole and _is_all_ones(example) else _first(example)
    hides = example.is_floating_point() and bool((example == -torch.inf).any())
    return Input(shape, dtype_of(example), *span, first, hides)


def _span(example: Tensor) -> tuple[int, int]:
    """Return the range of an integer input: from 0 on if one number, 0 to 1 for a mask of ones."""
    if _is_all_ones(example):
        return 0, 1
    low, high = int(example.min()), int(example.max())
    return (low, high) if example.numel() > 1 else (min(low, 0), max(high, int(low == 0)))


def _is_all_ones(example: Tensor) -> bool:
    return bool(example.numel()) and example.dim() > 1 and bool((example == 1).all())


def _first(example: Tensor) -> bool | None:
    """Return the common first value of all rows of a bool tensor, or None."""
    if example.dtype != torch.bool or not example.dim() or not example.numel():
        return None
    starts = set(example[..., 0].flatten().tolist())
    return bool(starts.pop()) if len(starts) == 1 else None


def output_dtypes(run: Callable[[], Mapping[str, Tensor]]) -> dict[str, str]:
    """Return the dtypes of the outputs of a run, by name."""
    with torch.inference_mode():
        return {name: dtype_of(tensor) for name, tensor in run().items()}


# -- roles of the axes of a module, by runs of it -------------------------------------------------


def find_roles_of(subject: Any) -> Roles:
    """Return the roles of the axes of a subject, found by runs of its module."""
    inputs = subject.input_descriptions()

    def draw(changed: Sizes, seed: str) -> ArrayDict:
        return draw_inputs(inputs, subject.sizes_with(changed), seed_words=(seed,))

    def run(arrays: Mapping[str, np.ndarray]) -> Trial:
        recorder = _ConcatenationRecorder()
        with torch.no_grad(), recorder:
            outputs = subject.call(subject.module, to_torch(arrays))
        joined = {str(index): tensor for index, tensor in enumerate(recorder.results)}
        return Trial(to_numpy(outputs), tuple(to_numpy(joined).values()))

    try:
        outputs = subject.output_shapes()
    except AttnExportError:
        return Roles()  # the capture says at which sizes the module raises
    shapes = {name: input_.shape for name, input_ in inputs.items()}
    roles = find_roles(shapes, outputs, subject.sums, draw, run)
    least = {axis: low for axis, low in roles.least.items() if axis not in subject.with_least}
    return dataclasses.replace(
        roles, least=least, caches={**subject.results.states, **roles.caches}
    )


class _ConcatenationRecorder(TorchDispatchMode):
    """Mode that records the results of concatenations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        out = func(*args, **dict(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.results.append(out)
        return out
