"""Rewrites the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attn_export.errors import OutputError, UsageError
from attn_export.graph.load import load_graph
from attn_export.graph.lower import check_dialects, lower
from attn_export.graph.save import replace_graph
from attn_export.runtimes.limited import limited
from attn_export.runtimes.protocol import Limits


def lower_file(
    model: Path | str, output: Path | str, dialect: str, limits: Limits | None = None
) -> dict[Path, dict[str, int]]:
    """Write a graph in a dialect.

    External data is pointed to where `output` lies beside `model`, and copied elsewhere.

    Args:
        model: Any ONNX file with ai.onnx `Attention` nodes, whoever made it.
        output: The file to write. In the dialect ``ort``, where there is a KV cache, the graph
            for a single query goes to ``OUTPUT.decode.onnx``.
        dialect: One of `DIALECTS`.
        limits: The time and memory of the process that does it.

    Returns:
        How often each operator occurs, for every file.

    Raises:
        UsageError: If the dialect is unknown, or `output` is `model`.
        GraphError: If the file cannot be read, or the dialect cannot say what it does.
        OutputError: If `output` cannot be written.
    """
    check_dialects([dialect])
    found = limited(
        f"{__name__}:lowered", str(model), limits,
        model=str(model), output=str(output), dialect=dialect,
    )  # fmt: skip
    return {Path(path): counts for path, counts in found.items()}


def lowered(model: str, output: str, dialect: str) -> dict[str, dict[str, int]]:
    """Write a graph in a dialect, in this process; see `lower_file`."""
    forms = lower(load_graph(Path(model)), dialect)
    files = {_named(Path(output), regime): form.model for regime, form in forms.items()}
    for path in files:
        if path.exists() and Path(model).exists() and path.samefile(model):
            raise UsageError(f"{path} is the file to lower; choose another --output")
    beside = Path(output).absolute().parent == Path(model).absolute().parent
    try:
        for path, form in files.items():
            replace_graph(form, path, beside=beside)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    return {
        str(path): dict(Counter(node.op_type for node in form.graph))
        for path, form in files.items()
    }


def _named(output: Path, regime: str) -> Path:
    return output.with_suffix(f".{regime}{output.suffix}") if regime else output
