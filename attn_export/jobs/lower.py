"""Rewrites the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attn_export.errors import OutputError, UsageError
from attn_export.graph.load import load_graph
from attn_export.graph.lower import DIALECTS, lower
from attn_export.graph.save import replace_graph


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
    lowered = lower(load_graph(model), dialect)
    try:
        replace_graph(lowered, output, beside=output.absolute().parent == model.absolute().parent)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    return dict(Counter(node.op_type for node in lowered.graph))
