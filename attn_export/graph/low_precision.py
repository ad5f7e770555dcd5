"""Weights, inputs and outputs in a type of few bits, around a graph that computes in float32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir


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
