"""Helpers for `onnx_ir` graphs: nodes, shapes, inserted nodes, shared constants and weights."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attn_export.graph.axis_names import Size
from attn_export.graph.unread import Read, lazy, reader, unread_sign
from attn_export.temp_folders import joined_in_file

MASK_INPUT, PAST_KEY_INPUT, PAST_VALUE_INPUT = 3, 4, 5
"""Indices of optional inputs of `Attention`."""

# -- values, and the nodes that compute them ----------------------------------------------------


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    """Return the nodes of an ONNX operator as a list: the graph may change in a loop."""
    return [node for node in model.graph if node.op_type == op_type and node.domain == ""]


def every_node(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of a graph and of its subgraphs."""
    yield from ir.traversal.RecursiveGraphIterator(graph)


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, if it is this operator of ONNX; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and not node.domain else None


def value_before(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """Return the first input of the node that computes a value, if it is this operator, or None."""
    node = producer_of(value, op_type)
    return None if node is None else node.inputs[0]


def trace_back(value: ir.Value, op_types: Collection[str]) -> ir.Value:
    """Return the value from which a value is computed by these operators alone."""
    node = value.producer()
    while node is not None and node.op_type in op_types and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initialiser, of any type and shape; None for other values.

    An initialiser that is also a graph input is no constant, because callers may replace it.
    """
    tensor = None if value is None or value.is_graph_input() else value.const_value
    return None if tensor is None else tensor.numpy()


def constant_numbers(value: ir.Value | None) -> list[Any]:
    """Return the elements of an initialiser; an empty list for other values."""
    array = constant_array(value)
    return [] if array is None else array.ravel().tolist()


def chain(value: ir.Value) -> Iterator[ir.Value]:
    """Yield a value, and those that it is computed from by the first input that is no constant."""
    for _ in range(_MOST_COMPUTED):
        yield value
        node = value.producer()
        inputs = () if node is None else node.inputs
        moving = [x for x in inputs if x is not None and constant_array(x) is None]
        if not moving:
            return
        value = moving[0]


def optional_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node; None if it is not set."""
    return node.inputs[index] if index < len(node.inputs) else None


def dims(value: ir.Value) -> tuple[Size, ...]:
    """Return the shape of a value as a tuple; empty if it is unknown."""
    return tuple(value.shape or ())


def set_type(value: ir.Value, dtype: ir.DataType | None, shape: ir.Shape | None) -> ir.Value:
    """Return a value after its type and shape are set.

    `shape`: The shape; None if it is not known.
    """
    if dtype is not None:
        value.dtype = dtype
    value.shape = shape
    return value


# -- values as the reference computes them ------------------------------------------------------

_MOST_COMPUTED = 32
"""The largest number of nodes by which a value is computed."""

_LARGEST_COMPUTED = 2**27
"""The largest number of elements of a value that is computed."""

_COMPUTABLE = frozenset({
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "Cast", "Clip", "Concat",
    "Constant", "DequantizeLinear", "Div", "Equal", "Floor", "Gather", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not",
    "Or", "QuantizeLinear", "ReduceMax", "ReduceMin", "ReduceSum", "Reshape", "Round", "Slice",
    "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators that round, scale, compare, pack and move: none runs for long or makes large values."""


def computed(value: ir.Value, known: Mapping[ir.Value, np.ndarray]) -> np.ndarray | None:
    """Return a value that simple nodes compute from known ones and constants, or None."""
    nodes, values, arrays = set[ir.Node](), [value], dict[ir.Value, np.ndarray]()
    for x in values:
        array = known[x] if x in known else constant_array(x)
        node = x.producer()
        if array is not None:
            arrays[x] = array
        elif node is None or node.domain or node.op_type not in _COMPUTABLE:
            return None
        elif node not in nodes:
            nodes.add(node)
            values += [y for y in node.inputs if y is not None]
        if len(nodes) > _MOST_COMPUTED:
            return None
    order = [node for node in next(iter(nodes)).graph or () if node in nodes] if nodes else []
    try:
        with np.errstate(all="ignore"):
            for node in order:
                inputs = {x: arrays[x] for x in node.inputs if x is not None}
                model = reference_model([node], inputs, node.outputs)
                found = model.run(None, {str(x.name): array for x, array in inputs.items()})
                arrays |= zip(node.outputs, map(np.asarray, found), strict=True)
                if any(arrays[x].size > _LARGEST_COMPUTED for x in node.outputs):
                    return None
    except Exception:  # graphs from other tools may hold anything
        return None
    return arrays[value]


def reference_model(
    nodes: Sequence[ir.Node], inputs: Collection[ir.Value], outputs: Sequence[ir.Value],
    opset: int = 0,
) -> ReferenceEvaluator:  # fmt: skip
    """Return an evaluator of nodes."""
    graph = helper.make_graph(
        [ir.to_proto(node) for node in nodes], "part",
        [helper.make_empty_tensor_value_info(str(value.name)) for value in inputs],
        [helper.make_empty_tensor_value_info(str(value.name)) for value in outputs],
    )  # fmt: skip
    version = helper.make_opsetid("", opset or _opset(nodes))
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[version]))


def _opset(nodes: Sequence[ir.Node]) -> int:
    graph = nodes[0].graph if nodes else None
    return graph.opset_imports.get("", 23) if isinstance(graph, ir.Graph) else 23


# -- added constants and nodes ------------------------------------------------------------------


def constant(model: ir.Model, array: np.ndarray) -> ir.Value:
    """Return an initialiser with the values of `array`; equal arrays share one.

    `array`: The values, of any type and shape.
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


def add_initializer(model: ir.Model, name: str, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
    """Return a new initialiser with a name.

    `array`: The values, of any shape, which are converted to `dtype`.
    """
    stored = np.ascontiguousarray(array.astype(dtype.numpy()))
    value = ir.val(name, const_value=ir.tensor(stored, dtype=dtype, name=name))
    model.graph.register_initializer(value)
    return value


def add_lazy(
    model: ir.Model, name: str, dtype: ir.DataType, shape: Iterable[Any], read: Read
) -> ir.Value:
    """Return a new initialiser that is computed each time that it is read.

    `read`: Returns its values, which are converted to `dtype`.
    """

    def stored() -> np.ndarray:
        return np.ascontiguousarray(read().astype(dtype.numpy(), copy=False))

    value = ir.val(name, const_value=lazy(name, dtype, shape, stored))
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


def insert(
    node: ir.Node,
    new: ir.Node,
    like: ir.Value | None = None,
    dtype: ir.DataType | None = None,
    shape: ir.Shape | None = None,
) -> ir.Value:
    """Return the output of a new node after it is inserted before another.

    `like`: The value from which type and shape are taken by default.
    `shape`: The shape of the output, if it is another.
    """
    assert node.graph is not None  # callers find it in a graph
    new.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, new)
    if like is not None:
        dtype, shape = dtype or like.dtype, shape or like.shape
    return set_type(new.outputs[0], dtype, None if shape is None else ir.Shape(shape))


# -- initialisers of equal values become one, without a copy of large ones ----------------------

LARGE = 2**20
"""The largest number of elements of a tensor that is compared by a copy of its bytes."""


def merge_equal_constants(model: ir.Model, *, large: bool = False) -> None:
    """Merge initialisers of the same type, shape and bytes: small ones, or also `large` ones.

    External data is not read.
    """
    kept: dict[tuple[object, ...], list[ir.Value]] = {}
    outputs = set(model.graph.outputs)
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor):
            continue
        sign = unread_sign(tensor)
        is_large = tensor.size > LARGE or sign is not None
        if is_large and not large:
            continue
        content = sign if is_large else tensor.tobytes()
        others = kept.setdefault((tensor.dtype, tuple(tensor.shape), content), [])
        if is_large:
            others = [other for other in others if same_bytes(other.const_value, tensor)]
        if others and value not in outputs:
            value.replace_all_uses_with(others[0])
            del model.graph.initializers[name]
        else:
            kept[tensor.dtype, tuple(tensor.shape), content].append(value)


def same_bytes(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> bool:
    """Return whether two tensors of one type and shape hold the same bytes.

    `other`: Another tensor of its type and shape.
    """
    if one is None or other is None or one is other:
        return one is other
    rows = zip(*(np.atleast_2d(reader(each.numpy())()) for each in (one, other)), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in rows)


# -- inputs, outputs and weights in narrow types, around a graph in float32 ---------------------


def store_in_narrow_types(model: ir.Model, dtypes: Mapping[str, str]) -> None:
    """Store inputs, outputs and initialisers in narrow types, and cast them to and from float32.

    `model`: The graph, which computes in float32; changed in place. The values of its initialisers
    must be exact in the narrow types.
    `dtypes`: The narrow type of each input, output and initialiser, such as ``"bfloat16"``. Names
    that the graph does not have are ignored.
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
    widened = set_type(cast.outputs[0], ir.DataType.FLOAT, value.shape)
    widened.name = f"{name}.float32"
    value.replace_all_uses_with(widened)
    cast.replace_input_with(0, value)
    model.graph.insert_before(model.graph[0], cast)
    value.dtype = dtype
    if value.const_value is not None:
        wide = value.const_value
        narrow = functools.partial(_narrowed, wide, dtype)
        value.const_value = (
            lazy(name, dtype, wide.shape, narrow) if isinstance(wide, ir.LazyTensor)
            else ir.tensor(narrow(), dtype=dtype, name=name)
        )  # fmt: skip


_LARGE = 2**24
"""The number of elements above which a weight is narrowed in pieces, into a temporary file."""


def _narrowed(tensor: ir.TensorProtocol, dtype: ir.DataType) -> np.ndarray:
    exact = tensor.numpy()

    def narrow(wide: np.ndarray) -> np.ndarray:
        stored: np.ndarray = wide.astype(dtype.numpy())
        assert np.array_equal(stored.astype(wide.dtype), wide), f"{tensor.name} has other values"
        return stored

    if exact.size <= _LARGE:
        return narrow(exact)
    in_memory = exact.T if exact.T.flags.c_contiguous else exact  # its order there
    step = max(_LARGE // in_memory[0].size, 1)
    pieces = (
        narrow(in_memory[start : start + step]).reshape(-1).view(np.uint8)
        for start in range(0, len(in_memory), step)
    )
    found = joined_in_file(pieces).view(dtype.numpy()).reshape(in_memory.shape)
    return found if in_memory is exact else found.T


def _narrow_output(model: ir.Model, index: int, dtype: ir.DataType) -> None:
    value = model.graph.outputs[index]
    name = str(value.name)
    value.name = f"{name}.float32"
    cast = ir.node("Cast", [value], {"to": dtype}, name=f"{name}/Cast_of_output")
    narrowed = set_type(cast.outputs[0], dtype, value.shape)
    narrowed.name = name
    model.graph.append(cast)
    model.graph.outputs[index] = narrowed
