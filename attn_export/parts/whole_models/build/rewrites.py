"""Weights of a whole model as its graphs read them: products packed, and offsets of norms added.

A token is multiplied by one large matrix rather than by several small ones, which reads weights
from memory faster.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from attn_export.export.mapped_weights import PARTS
from attn_export.graph.axis_names import Size
from attn_export.graph.ir_helpers import add_lazy, constant_array, dims, nodes_of, producer_of
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.graph.unread import Read, reader


def rewrite_weights(model: ir.Model) -> None:
    """Pack the products of each value with weights `[in, out]`, such as those of q, k and v.

    New weights are computed when they are written, and are not in memory before.
    """
    _add_offsets(model)
    _move_experts(model)
    products: dict[ir.Value, list[ir.Node]] = {}
    for node in nodes_of(model, "MatMul"):
        x, weight = node.inputs
        if x is not None and weight is not None and _rank(weight) == 2 and len(weight.uses()) == 1:
            products.setdefault(x, []).append(node)
    for nodes in products.values():
        if len(nodes) > 1:
            _pack(model, nodes)
    common.RemoveUnusedNodesPass()(model)


def _add_offsets(model: ir.Model) -> None:
    """Replace the sum of a weight `[E]` and a number, as in Gemma's norms, by a weight."""
    for node in nodes_of(model, "Add"):
        weight, offset = node.inputs
        number = constant_array(offset)
        if weight is not None and _rank(weight) == 1 and number is not None and not number.ndim:
            array, name = constant_array(weight), f"{weight.name}.plus_{number.item():g}"
            assert array is not None  # it has a rank
            read = functools.partial(_add, reader(array), number)
            added = _weight(model, name, weight.dtype, dims(weight), read)
            node.outputs[0].replace_all_uses_with(added)


def _move_experts(model: ir.Model) -> None:
    """Replace weights of experts that nodes reshape and transpose by weights that are so."""
    for node in list(model.graph):
        weight = node.inputs[0] if node.op_type in ("Reshape", "Transpose") else None
        tensor = None if weight is None or weight.is_graph_input() else weight.const_value
        if weight is None or tensor is None or tensor.dtype not in _FLOATS or len(dims(weight)) < 3:
            continue
        out, name = node.outputs[0], str(weight.name)
        if len(weight.uses()) == 1:
            del model.graph.initializers[name]
        shape = [int(str(size)) for size in dims(out)]
        array = tensor.numpy if isinstance(tensor, ir.LazyTensor) else reader(tensor.numpy())
        read = functools.partial(_move, array, shape, node.attributes.get_ints("perm", ()))
        value = _weight(model, name, weight.dtype, shape, read)
        value.meta[PARTS] = weight.meta.get(PARTS) or [tensor.numpy()]
        out.replace_all_uses_with(value)
        model.graph.remove(node, safe=True)


def _add(read: Read, number: np.ndarray) -> np.ndarray:
    added: np.ndarray = np.add(read(), number)
    return added


def _move(read: Read, shape: Sequence[int], perm: Sequence[int]) -> np.ndarray:
    array = read()
    return np.ascontiguousarray(array.transpose(perm) if perm else array.reshape(shape))


def _pack(model: ir.Model, nodes: Sequence[ir.Node]) -> None:
    """Replace products of one value by the parts of one product."""
    op = Builder(model, nodes[0])
    weights = [node.inputs[1] for node in nodes]
    product = op("MatMul", nodes[0].inputs[0], _packed(model, weights))
    sums = [_sum_with_bias(node) for node in nodes]
    if all(sums):
        nodes = [node for node in sums if node is not None]
        product = op("Add", product, _packed(model, [node.inputs[1] for node in nodes]))
    sizes = op.ints(*(int(str(dims(weight)[-1])) for weight in weights if weight is not None))
    parts = op.add_node("Split", [product, sizes], len(nodes), axis=-1)
    for node, part in zip(nodes, parts, strict=True):
        take_over(node.outputs[0], part)


def _sum_with_bias(product: ir.Node) -> ir.Node | None:
    """Return the node that adds a bias to a product, if it is its only reader."""
    (out,) = product.outputs
    node = next((use.node for use in out.uses()), None)
    if node is None or len(out.uses()) > 1 or node is not producer_of(node.outputs[0], "Add"):
        return None
    bias = node.inputs[1]
    width = dims(product.inputs[1] or out)[-1:]
    fits = bias is not None and _rank(bias) == 1 and dims(bias) == width
    return node if fits else None


def _rank(weight: ir.Value) -> int:
    """Return the number of axes of a floating weight; 0 for other values."""
    is_weight = constant_array(weight) is not None and weight.dtype in _FLOATS
    return len(dims(weight)) if is_weight else 0


_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _packed(model: ir.Model, values: Sequence[ir.Value | None]) -> ir.Value:
    """Return a weight of others, side by side."""
    weights = [value for value in values if value is not None]
    # Views on the model's memory.
    arrays = [array for array in map(constant_array, weights) if array is not None]
    paths = [str(weight.name).split(".") for weight in weights]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    start = [parts[0] for parts in same]
    own = "_".join(".".join(path[len(start) : -1]) for path in paths)
    name = ".".join([*start, own, paths[0][-1]])
    shape = *dims(weights[0])[:-1], sum(int(str(dims(weight)[-1])) for weight in weights)
    readers = [reader(array) for array in arrays]
    value = _weight(
        model, name, weights[0].dtype, shape,
        lambda: np.concatenate([read() for read in readers], axis=-1),
    )  # fmt: skip
    value.meta[PARTS] = arrays
    return value


def _weight(
    model: ir.Model, name: str, dtype: ir.DataType | None, shape: Sequence[Size],
    read: Read,
) -> ir.Value:  # fmt: skip
    """Return a weight that is computed when it is read."""
    while name in model.graph.initializers:
        name += "_"
    assert dtype is not None  # weights have one
    return add_lazy(model, name, dtype, shape, read)
