"""State of a module: quantised by its spec, restored after a call, copied, or read from a graph."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.errors import BundleError, one_line
from attn_export.export.trees import to_torch
from attn_export.graph.load import load_graph

if TYPE_CHECKING:
    from attn_export.export.given_scales import Calibration
    from attn_export.quantiser import QuantisedWeight

# -- quantisation, where a spec says so ---------------------------------------------------------


def quantise_by_spec(
    module: Attention,
    integers: Mapping[str, QuantisedWeight],
    kv_scales: Path | str | None,
    calibrate: Calibration | None,
) -> tuple[str, ...]:
    """Quantise the weights and the cache of a module in place, and return notes for the reader.

    Args:
        module: The module.
        integers: The integers of its weights where a checkpoint holds them.
        kv_scales: A file with the scales of a cache of integers.
        calibrate: Hidden states that these scales are found from.

    Raises:
        WeightsError: If a weight is not finite, or the scales do not fit.
    """
    spec = module.spec
    quantises = spec.quantised_weights or spec.kv_dtype != "none" or spec.activations != "none"
    if not quantises and not integers and kv_scales is None and calibrate is None:
        return ()
    from attn_export.attention.quantised import quantisation_notes, quantise_module
    from attn_export.export.given_scales import set_given_scales

    quantise_module(module, integers)
    settled = set_given_scales(module, kv_scales, calibrate)
    return (*settled, *quantisation_notes(module.spec))  # which says where the scales are from


# -- restoration of a module's state after a call -----------------------------------------------


Contents = dict[Any, Any] | list[Any] | set[Any]


@contextlib.contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of a module and its parts at the end of the block.

    A module may keep what it made in a call, such as a mask. What it keeps while it is captured
    holds no numbers. The tensors themselves are not copied.

    Args:
        module: The module; its attributes, and the dicts, lists and sets that they are, come back.
    """
    before = [
        (part, dict(vars(part)), [(value, value.copy()) for value in _containers(part)])
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes, contents in before:
            vars(part).clear()
            vars(part).update(attributes)
            for value, held in contents:
                _restore(value, held)


def _containers(part: nn.Module) -> list[Contents]:
    return [value for value in vars(part).values() if type(value) in (dict, list, set)]


def _restore(value: Contents, held: Contents) -> None:
    """Restore the contents of a container."""
    if isinstance(value, list):
        value[:] = held
    else:
        value.clear()
        value.update(held)


# -- copies of modules that hold what cannot be copied -------------------------------------------


def copy_module(module: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a module.

    What cannot be copied, such as a Python module, a lock, a generator or a tensor that was
    computed from weights, is shared with the original.

    Args:
        module: The module.
        shared: What the copy holds in place of objects, by their `id`.

    Raises:
        Exception: Whatever a class raises that refuses to be copied.
    """
    try:
        return copy.deepcopy(module, dict(shared or {}))
    except Exception:
        apart = {
            id(value): value
            for part in module.modules()
            for value in _leaves(vars(part), set())
            if not _is_copied(value)
        }
        return copy.deepcopy(module, {**apart, **(shared or {})})


def _leaves(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what containers hold that is neither a container nor a module."""
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for held in value.values():
            yield from _leaves(held, seen)
    elif isinstance(value, (list, tuple, set)):
        for held in value:
            yield from _leaves(held, seen)
    else:
        yield value


def _is_copied(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_leaf  # quicker than trying
    try:
        copy.deepcopy(value)
    except Exception:
        return False
    return True


# -- the weights of a layer of ours, out of a graph that was exported from it -------------------


def weights_of_graph(path: Path, module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module from the initializers of its graph.

    Args:
        path: The graph in the standard dialect. Its initializers have the names of the module's
            parameters and buffers; the weights of linear layers are stored ``[in, out]``.
        module: The module, with any weights.

    Raises:
        GraphError: If the graph cannot be read.
        BundleError: If a weight is missing or has another shape or dtype.
    """
    from attn_export.graph.quantised_weights import ORDER

    model = load_graph(path)
    initializers = model.graph.initializers
    integers = {
        str(read[0].name): (str(node.name), read)
        for node in model.graph
        if (read := _integers_of(node, initializers)) and read[0]
    }
    linear = {f"{n}.weight" for n, part in module.named_modules() if isinstance(part, nn.Linear)}
    found = {}
    for name, wanted in module.state_dict().items():
        value = initializers.get(name)
        if value is None or value.const_value is None:
            raise BundleError(f"{path} has no weight {name}, which its spec requires")
        stored = integers.get(name)
        if stored is None:
            array = _array(path, name, value.const_value)
        else:
            array = _dequantised(path, *stored, initializers.get(f"{name}{ORDER}"))
        (tensor,) = to_torch({name: array.T if name in linear else array}).values()
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise BundleError(
                f"{path}: the weight {name} is {list(tensor.shape)} {tensor.dtype}, and its spec "
                f"asks for {list(wanted.shape)} {wanted.dtype}"
            )
        found[name] = tensor
    return found


def _integers_of(node: Any, initializers: Mapping[str, Any]) -> Sequence[Any]:
    """Return the integers that a node reads as a weight, their scales and zero points; or none."""
    if node.op_type == "MatMulInteger":
        weight = node.inputs[1]
        return [weight, weight and initializers.get(f"{weight.name}_scale")]
    return node.inputs if node.op_type == "DequantizeLinear" else ()


def _dequantised(path: Path, node: str, given: Sequence[Any], order: Any) -> np.ndarray:
    """Return the weights that integers of a graph stand for, float32 `[in, out]`.

    Args:
        path: The graph, for messages.
        node: The name of the node that reads them.
        given: The integers, their scales and, if there are any, zero points.
        order: The initializer with the input of each row, or None.
    """
    from attn_export.quantiser import QuantisedWeight

    read = [
        None if value is None or value.const_value is None
        else _array(path, str(value.name), value.const_value)
        for value in given
    ]  # fmt: skip
    integers, scales, zeros = (*read, None)[:3]
    if integers is None or scales is None or integers.ndim != 2:
        raise BundleError(f"{path}: {node} does not read a weight and its scales")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise BundleError(
            f"{path}: {node} has scales that are not positive and finite; build it again"
        )
    try:
        scales = np.atleast_2d(scales).astype(np.float32)
        zeros = None if zeros is None else np.atleast_2d(zeros).astype(np.int16)
        places = None
        if order is not None:
            places = _array(path, order.name, order.const_value)
            if not np.array_equal(np.sort(places), np.arange(len(integers))):
                raise ValueError("its order of inputs does not name each once")
        signed = integers.astype(np.int16)
        return QuantisedWeight("", signed, scales, zeros, False, places).dequantised()
    except (ValueError, ZeroDivisionError) as error:
        raise BundleError(
            f"{path}: {node} has scales that do not fit its weight: {one_line(error)}"
        ) from error


def _array(path: Path, name: str, tensor: Any) -> np.ndarray:
    try:
        return np.array(tensor.numpy())
    except Exception as error:  # of external data that is missing or too short
        raise BundleError(f"{path}: the weight {name} cannot be read: {one_line(error)}") from error
