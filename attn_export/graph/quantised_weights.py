"""Weights as integers in a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attn_export.graph.ir_helpers import add_initializer, add_lazy, set_type
from attn_export.graph.lower.node_builder import Builder
from attn_export.quantiser import ORDER, QuantisedWeight

FLOAT = ir.DataType.FLOAT


def store_integers(model: ir.Model, weights: Mapping[str, Sequence[QuantisedWeight]]) -> None:
    """Store weights as integers, scales and zero points, which a DequantizeLinear reads.

    If the rows of a weight are in another order, the inputs of its products are put in it.

    `weights`: Each by its name, as the parts that lie side by side in it.
    """
    for name, parts in weights.items():
        float_weight = model.graph.initializers.pop(name)
        float_weight.name = f"{name}_float32"
        stored = _add_initializers(model, name, parts)
        _dequantise(model, name, parts[0], float_weight, stored)


def _add_initializers(
    model: ir.Model, name: str, parts: Sequence[QuantisedWeight]
) -> list[ir.Value]:
    """Add initialisers for integers, scales and, if there are any, zero points."""
    first = parts[0]
    outputs = sum(part.integers.shape[1] for part in parts)

    def add(name: str, dtype: ir.DataType, of: Callable[[QuantisedWeight], Any]) -> ir.Value:
        # One scale for each output is stored as a vector, which older opsets support, too.
        like = of(first)
        is_vector = len(like) == 1 and not first.is_blocked
        shape = [outputs] if is_vector else [len(like), outputs]

        def read() -> np.ndarray:
            beside = np.concatenate([of(part) for part in parts], axis=1)
            return beside[0] if is_vector else beside

        return add_lazy(model, name, dtype, shape, read)

    dtype = ir.DataType[first.dtype.upper()]
    stored = [
        add(name, dtype, lambda part: part.integers),
        add(f"{name}_scale", FLOAT, lambda part: part.scales),
    ]
    if first.zero_points is not None:
        stored.append(add(f"{name}_zero_point", dtype, lambda part: part.zero_points))
    return stored


def _dequantise(
    model: ir.Model,
    name: str,
    weight: QuantisedWeight,
    float_weight: ir.Value,
    stored: list[ir.Value],
) -> None:
    """Replace a weight by the output of a DequantizeLinear for all readers."""
    layout = {"axis": 0, "block_size": weight.block} if weight.is_blocked else {"axis": 1}
    scope = name.rpartition(".")[0].replace(".", "/")
    node = ir.node("DequantizeLinear", stored, layout, name=f"{scope}/DequantizeLinear")
    output = set_type(node.outputs[0], FLOAT, float_weight.shape)
    output.name = f"{node.name}.out"
    products = [use.node for use in float_weight.uses()]
    float_weight.replace_all_uses_with(output)
    model.graph.insert_before(model.graph[0], node)
    if weight.order is None:
        return
    order = add_initializer(model, f"{name}{ORDER}", weight.order, ir.DataType.INT64)
    for product in products:
        x = product.inputs[0]
        assert x is not None, name
        ordered = Builder(model, product)("Gather", x, order, axis=-1)
        product.replace_input_with(0, set_type(ordered, FLOAT, x.shape))
