"""What small constants are called: by what they hold."""

from __future__ import annotations

import onnx_ir as ir


def constant_name(tensor: ir.TensorProtocol) -> str:
    """``int64[2]_0_-1``: type, shape and values, whoever made it."""
    values = tensor.numpy().ravel().tolist()
    held = "_".join(str(int(x)) if isinstance(x, int) else f"{x:g}" for x in values)
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{tensor.dtype.name.lower()}[{shape}]_{held}"
