"""Small constants: stored once, and named after their contents."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def constant(model: ir.Model, array: np.ndarray) -> ir.Value:
    """Return an initializer that holds `array`, shared by all callers."""
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
