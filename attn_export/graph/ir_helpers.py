"""Helpers for `onnx_ir` graphs: nodes, shapes, inserted nodes, shared constants and weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common


def constant(model: ir.Model, array: np.ndarray) -> ir.Value:
    """Return an initialiser with the values of `array`; equal arrays share one.

    Args:
        model: The graph; changed in place.
        array: The values, of any type and shape.
    """
    tensor = ir.tensor(array)
    name, initializers = constant_name(tensor), model.graph.initializers
    # Names state six digits, so different values may have the same name.
    while name in initializers:
        tensor_of_name = initializers[name].const_value
        if tensor_of_name is not None and tensor_of_name.numpy().tobytes() == array.tobytes():
            return initializers[name]
        name += "_"
    tensor.name = name
    value = ir.val(name, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def ints(model: ir.Model, *numbers: int) -> ir.Value:
    """Return a constant int64 vector, `[n]`."""
    return constant(model, np.array(numbers, np.int64))


def constant_name(tensor: ir.TensorProtocol) -> str:
    """Return a name such as ``int64[2]_0_-1``: type, shape and values, for any exporter."""
    values = tensor.numpy().ravel().tolist()
    text = "_".join(str(int(x)) if isinstance(x, int) else f"{x:g}" for x in values)
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{tensor.dtype.name.lower()}[{shape}]_{text}"


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    """Return the nodes of an ONNX operator as a list, so that the graph may change during a loop.

    Args:
        model: The graph.
        op_type: The operator, such as ``"Add"``.
    """
    return [node for node in model.graph if node.op_type == op_type and node.domain == ""]


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node; None if it is not set.

    Args:
        node: The node.
        index: The index of the input.
    """
    return node.inputs[index] if index < len(node.inputs) else None


def dims(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    """Return the shape of a value as a tuple; empty if it is unknown."""
    return tuple(value.shape or ())


def insert(
    node: ir.Node,
    new: ir.Node,
    like: ir.Value | None,
    dtype: ir.DataType | None = None,
    shape: ir.Shape | None = None,
) -> ir.Value:
    """Insert a node before another, and return its output.

    Args:
        node: The existing node, whose metadata the new one gets.
        new: The new node, which has one output.
        like: The value from which type and shape are taken by default.
        dtype: The type of the output.
        shape: The shape of the output.
    """
    assert node.graph is not None  # callers find it in a graph
    new.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, new)
    out = new.outputs[0]
    out_dtype = dtype or (like.dtype if like is not None else None)
    if out_dtype is not None:
        out.dtype = out_dtype
    shape = shape or (like.shape if like is not None else None)
    out.shape = ir.Shape(shape) if shape is not None else None
    return out


# -- initialisers of equal values become one, without a copy of large ones ----------------------


LARGE = 2**20
"""The largest number of elements of a tensor that is compared by a copy of its bytes."""


def merge_equal_constants(model: ir.Model) -> None:
    """Merge small initialisers of the same type, shape and bytes; external data is not read."""
    kept: dict[tuple[object, ...], ir.Value] = {}
    outputs = set(model.graph.outputs)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size > LARGE:
            continue
        twin = kept.setdefault((tensor.dtype, tuple(tensor.shape), tensor.tobytes()), value)
        if twin is not value and value not in outputs:
            value.replace_all_uses_with(twin)
            del model.graph.initializers[name]


def merge_equal_weights(model: ir.Model) -> None:
    """Merge initialisers of the same type, shape and bytes, large ones included."""
    common.DeduplicateInitializersPass(size_limit=LARGE)(model)
    kept: dict[tuple[object, ...], list[ir.Value]] = {}
    outputs = set(model.graph.outputs)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.size <= LARGE or value in outputs:
            continue
        candidates = kept.setdefault((tensor.dtype, tuple(tensor.shape)), [])
        twin = next((other for other in candidates if same_bytes(other.const_value, tensor)), None)
        if twin is None:
            candidates.append(value)
            continue
        value.replace_all_uses_with(twin)
        del model.graph.initializers[name]


def same_bytes(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    """Return whether two tensors of one type and shape hold the same bytes.

    Args:
        one: A tensor.
        other: Another tensor of its type and shape.
    """
    if one is None or other is None or one is other:
        return one is other
    rows = zip(np.atleast_2d(one.numpy()), np.atleast_2d(other.numpy()), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in rows)


# -- inputs, outputs and weights in narrow types, around a graph in float32 ---------------------


def store_in_narrow_types(model: ir.Model, dtypes: Mapping[str, str]) -> None:
    """Store inputs, outputs and initialisers in narrow types, and cast them to and from float32.

    Args:
        model: The graph, which computes in float32; changed in place. The values of its
            initialisers must be exact in the narrow types.
        dtypes: The narrow type of each input, output and initialiser, such as ``"bfloat16"``.
            Names that the graph does not have are ignored.
    """
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        dtype = dtypes.get(str(value.name))
        if dtype is not None and value.dtype == ir.DataType.FLOAT:
            _narrow_source(model, value, ir.DataType[dtype.upper()])
    for index, value in enumerate(list(model.graph.outputs)):
        dtype = dtypes.get(str(value.name))
        if dtype is not None and value.dtype == ir.DataType.FLOAT:
            _narrow_output(model, index, ir.DataType[dtype.upper()])


def _narrow_source(model: ir.Model, value: ir.Value, dtype: ir.DataType) -> None:
    name = str(value.name)
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"{name}/Cast")
    widened = cast.outputs[0]
    widened.name, widened.shape = f"{name}.float32", value.shape
    widened.dtype = ir.DataType.FLOAT
    value.replace_all_uses_with(widened)
    cast.replace_input_with(0, value)
    first = next(iter(model.graph))
    model.graph.insert_before(first, cast)
    value.dtype = dtype
    if value.const_value is not None:
        exact = value.const_value.numpy()
        stored = exact.astype(dtype.numpy())
        assert np.array_equal(stored.astype(exact.dtype), exact), f"{name} is not exact in {dtype}"
        value.const_value = ir.tensor(stored, dtype=dtype, name=name)


def _narrow_output(model: ir.Model, index: int, dtype: ir.DataType) -> None:
    value = model.graph.outputs[index]
    name = str(value.name)
    value.name = f"{name}.float32"
    cast = ir.node("Cast", [value], {"to": dtype}, name=f"{name}/Cast_of_output")
    narrowed = cast.outputs[0]
    narrowed.name, narrowed.shape, narrowed.dtype = name, value.shape, dtype
    model.graph.append(cast)
    model.graph.outputs[index] = narrowed
