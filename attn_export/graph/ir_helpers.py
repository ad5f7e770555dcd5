"""Helpers for `onnx_ir` graphs: nodes, shapes, inserted nodes, shared constants and weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common


def constant(model: ir.Model, array: np.ndarray) -> ir.Value:
    """Return an initializer that holds `array`, shared by all callers.

    Args:
        model: The graph; changed in place.
        array: The values, of any type and shape.
    """
    tensor = ir.tensor(array)
    name, held = constant_name(tensor), model.graph.initializers
    # Names have six digits: other values of one name get names of their own.
    while name in held:
        known = held[name].const_value
        if known is not None and known.numpy().tobytes() == array.tobytes():
            return held[name]
        name += "_"
    tensor.name = name
    value = ir.val(name, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def ints(model: ir.Model, *numbers: int) -> ir.Value:
    """Return a constant int64 `[n]`."""
    return constant(model, np.array(numbers, np.int64))


def constant_name(tensor: ir.TensorProtocol) -> str:
    """Return a name such as ``int64[2]_0_-1``: type, shape and values, for any exporter."""
    values = tensor.numpy().ravel().tolist()
    held = "_".join(str(int(x)) if isinstance(x, int) else f"{x:g}" for x in values)
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{tensor.dtype.name.lower()}[{shape}]_{held}"


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    """Return a snapshot of the nodes of an ONNX operator; the graph may change meanwhile.

    Args:
        model: The graph.
        op_type: The operator, such as ``"Add"``.
    """
    return [node for node in model.graph if node.op_type == op_type and node.domain == ""]


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an optional input of a node.

    Args:
        node: The node.
        index: The index of the input.
    """
    return node.inputs[index] if index < len(node.inputs) else None


def dims(value: ir.Value) -> tuple[int | ir.SymbolicDim, ...]:
    """Return the axes of a value; none if its shape is unknown."""
    return tuple(value.shape or ())


def insert(
    node: ir.Node,
    new: ir.Node,
    like: ir.Value | None,
    dtype: ir.DataType | None = None,
    shape: ir.Shape | None = None,
) -> ir.Value:
    """Put `new` in front of `node`, in its name; type and shape are as given, or of `like`.

    Args:
        node: The node in front of which it goes.
        new: The new node, of one output.
        like: The value from which type and shape are taken by default.
        dtype: The type of the output.
        shape: The shape of the output.
    """
    assert node.graph is not None  # it was found in one
    new.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, new)
    out = new.outputs[0]
    known = dtype or (like.dtype if like is not None else None)
    if known is not None:
        out.dtype = known
    shape = shape or (like.shape if like is not None else None)
    out.shape = ir.Shape(shape) if shape is not None else None
    return out


# -- initialisers of equal values become one, without a copy of large ones ----------------------


LARGE = 2**20
"""The largest number of elements that are compared by a copy of their bytes."""


def merge_equal_constants(model: ir.Model) -> None:
    """Keep one of several small initialisers of the same type, shape and bytes; read no file."""
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
    """Keep one of several initialisers of the same type, shape and bytes, large ones too."""
    common.DeduplicateInitializersPass(size_limit=LARGE)(model)
    kept: dict[tuple[object, ...], list[ir.Value]] = {}
    outputs = set(model.graph.outputs)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.size <= LARGE or value in outputs:
            continue
        alike = kept.setdefault((tensor.dtype, tuple(tensor.shape)), [])
        twin = next((other for other in alike if same_bytes(other.const_value, tensor)), None)
        if twin is None:
            alike.append(value)
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


# -- weights, inputs and outputs in a type of few bits, around a graph in float32 ---------------


def narrow(model: ir.Model, dtypes: Mapping[str, str]) -> None:
    """Store values in narrower types, with a Cast between them and the graph.

    Args:
        model: Changed in place; computes in float32. The values of its initialisers are exact in
            the narrow types.
        dtypes: The type of each input, output and initialiser that is narrow, such as
            ``"bfloat16"``. Names that the graph does not have are passed over.
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
