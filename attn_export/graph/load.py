"""ONNX files in: read once, with one clear line where that fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import GraphError, one_line
from attn_export.untrusted import read_bytes

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


MOST_BYTES = 2**31 - 1
"""The largest size of a protobuf message."""


def load_proto(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without its external data.

    Raises:
        GraphError: If the file cannot be read or is no ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(read_bytes(path, MOST_BYTES))
    except OSError as error:
        raise GraphError(f"cannot read {path}: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        raise GraphError(
            f"{path} is no ONNX model, or only the beginning of one: {error}"
        ) from error
    if not model.ir_version or not model.graph.output:
        raise GraphError(f"{path} is no ONNX model: it has no graph with outputs")
    return model


def load_graph(path: Path) -> ir.Model:
    """Read an ONNX file as a graph to work on; external data is read where it is used.

    Raises:
        GraphError: If the file cannot be read or is no ONNX model.
    """
    load_proto(path)  # says in one line what is wrong with most files
    import onnx_ir as ir

    try:
        return ir.load(path)
    except Exception as error:
        raise GraphError(f"{path} is no sound ONNX model: {one_line(error)}") from error
