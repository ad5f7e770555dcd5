"""Rewrites the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from attn_export.errors import GraphError, OutputError, UsageError, one_line
from attn_export.graph.load import load_proto
from attn_export.graph.lower import DIALECTS, lower
from attn_export.graph.save import EXTERNAL_ABOVE

if TYPE_CHECKING:
    import onnx_ir as ir


def lower_file(model: Path | str, output: Path | str, dialect: str) -> dict[str, int]:
    """Write a graph in a dialect.

    External data is pointed to where `output` lies beside `model`, and copied elsewhere.

    Args:
        model: Any ONNX file with ai.onnx `Attention` nodes, whoever made it.
        output: The file to write.
        dialect: One of `DIALECTS`.

    Returns:
        How often each operator occurs in it.

    Raises:
        UsageError: If the dialect is unknown, or `output` is `model`.
        GraphError: If the file cannot be read, or the dialect cannot say what it does.
        OutputError: If `output` cannot be written.
    """
    model, output = Path(model), Path(output)
    if dialect not in DIALECTS:
        raise UsageError(f"unknown dialect {dialect!r}; choose from {', '.join(DIALECTS)}")
    if output.exists() and model.exists() and output.samefile(model):
        raise UsageError(f"{output} is the file to lower; choose another --output")
    lowered = lower(_read(model), dialect)
    try:
        _write(lowered, output, beside=output.absolute().parent == model.absolute().parent)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    return dict(Counter(node.op_type for node in lowered.graph))


def _read(path: Path) -> ir.Model:
    load_proto(path)  # says in one line what is wrong with most files
    import onnx_ir as ir

    try:
        return ir.load(path)
    except Exception as error:
        raise GraphError(f"{path} is no sound ONNX model: {one_line(error)}") from error


def _write(model: ir.Model, output: Path, *, beside: bool) -> None:
    """Write beside `output` first, so that nothing half-written is left after a failure."""
    import onnx_ir as ir

    data = None
    if not beside:
        model = ir.external_data.load_to_model(model)
        held = (value.const_value for value in model.graph.initializers.values())
        if sum(tensor.nbytes for tensor in held if tensor is not None) > EXTERNAL_ABOVE:
            data = f"{output.name}.data"
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        if beside:
            # References to files are kept as they are; nothing is read.
            ir.save(model, folder / output.name)
        else:
            ir.save(model, folder / output.name, external_data=data)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == output.name):
            path.replace(output.parent / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
