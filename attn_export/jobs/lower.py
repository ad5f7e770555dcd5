"""Rewrites the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attn_export.errors import OutputError, UsageError
from attn_export.graph.load import load_graph
from attn_export.graph.lower import check_dialects, lower
from attn_export.graph.save import replace_graph


def lower_file(model: Path | str, output: Path | str, dialect: str) -> dict[Path, dict[str, int]]:
    """Write a graph in a dialect.

    External data is pointed to where `output` lies beside `model`, and copied elsewhere.

    Args:
        model: Any ONNX file with ai.onnx `Attention` nodes, whoever made it.
        output: The file to write. In the dialect ``ort``, where there is a KV cache, the graph
            for a single query goes to ``OUTPUT.decode.onnx``.
        dialect: One of `DIALECTS`.

    Returns:
        How often each operator occurs, for every file.

    Raises:
        UsageError: If the dialect is unknown, or `output` is `model`.
        GraphError: If the file cannot be read, or the dialect cannot say what it does.
        OutputError: If `output` cannot be written.
    """
    model, output = Path(model), Path(output)
    check_dialects([dialect])
    forms = lower(load_graph(model), dialect)
    files = {_named(output, regime): lowered.model for regime, lowered in forms.items()}
    for path in files:
        if path.exists() and model.exists() and path.samefile(model):
            raise UsageError(f"{path} is the file to lower; choose another --output")
    beside = output.absolute().parent == model.absolute().parent
    try:
        for path, lowered in files.items():
            replace_graph(lowered, path, beside=beside)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    return {
        path: dict(Counter(node.op_type for node in lowered.graph))
        for path, lowered in files.items()
    }


def _named(output: Path, regime: str) -> Path:
    return output.with_suffix(f".{regime}{output.suffix}") if regime else output
