"""Job that rewrites the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from attn_export.dialect_names import STANDARD, check_dialects
from attn_export.errors import GraphError, OutputError, UsageError
from attn_export.graph.load import load_graph, load_proto
from attn_export.graph.lower import Lowered, lower
from attn_export.graph.lower.dialects import NOTHING_TO_LOWER
from attn_export.graph.save import external_files, replace_graph
from attn_export.output_folder import check_utf8
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits
from attn_export.temp_folders import scratch


def lower_file(
    model: Path | str, output: Path | str, dialect: str, limits: Limits | None = None
) -> dict[Path, dict[str, int]]:
    """Write a graph in a dialect.

    External data is pointed to where `output` lies beside `model`, and copied elsewhere.

    Args:
        model: Any ONNX file with ai.onnx `Attention` nodes, of any origin.
        output: The file to write. In the dialect ``ort``, where there is a KV cache, the graph
            for a single query goes to ``OUTPUT.decode.onnx``.
        dialect: One of `DIALECTS`.
        limits: The time and memory of the process that does it.

    Returns:
        The number of each operator, for every file.

    Raises:
        UsageError: If the dialect is unknown, or `output` is `model` or holds its weights.
        GraphError: If the file cannot be read, or the dialect cannot express it.
        OutputError: If `output` cannot be written, or is there and is no ONNX model.
    """
    check_utf8(Path(output))
    check_dialects([dialect])
    found = limited(
        f"{__name__}:lowered", str(model), limits,
        model=str(model), output=str(output), dialect=dialect,
    )  # fmt: skip
    return {Path(path): counts for path, counts in found.items()}


def has_attention(model: Path) -> bool:
    """Return whether a graph has `Attention` nodes.

    Raises:
        GraphError: If the file cannot be read.
    """
    return any(node.op_type == "Attention" for node in load_proto(model).graph.node)


def lowered(model: str, output: str, dialect: str) -> dict[str, dict[str, int]]:
    """Write a graph in a dialect, in this process; see `lower_file`.

    Args:
        model: The input file.
        output: The output file.
        dialect: The dialect to write.
    """
    source, target = Path(model), Path(output)
    graph = load_graph(source)
    weights = {path for path in external_files(graph) if path.exists()}
    if dialect == STANDARD and not has_attention(source):
        raise GraphError(NOTHING_TO_LOWER.format(dialect=dialect))
    forms = lower(graph, dialect)
    if any(form.recognised for form in forms.values()):
        _prove(source, forms)
    files = {_named(target, phase): form.model for phase, form in forms.items()}
    try:
        for path in files:
            _check_replaceable(path, source, weights)
        beside = target.absolute().parent == source.absolute().parent
        for path, form in files.items():
            replace_graph(form, path, beside=beside, kept=weights)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    return {
        str(path): dict(Counter(node.op_type for node in form.graph))
        for path, form in files.items()
    }


def _prove(source: Path, forms: Mapping[str, Lowered]) -> None:
    """Compare graphs in which attention was recognised with their source, in ONNX Runtime.

    Inputs are random numbers; of masks, rows that hide nothing, some keys, and all keys.

    Raises:
        GraphError: If a graph gives other numbers, or cannot be run.
    """
    from attn_export.runtimes.compare_graphs import difference

    with scratch() as folder:
        for phase, form in forms.items():
            path = folder / f"{phase or 'whole'}.onnx"
            replace_graph(form.model, path, beside=False, kept=())
            found = difference(source, path, form.file.fixed)
            if found:
                raise GraphError(
                    f"{source}: attention is written out in it, and as one node {found}; keep the "
                    "graph as it is"
                )


def _check_replaceable(path: Path, model: Path, weights: Collection[Path]) -> None:
    """Refuse to replace the input file, or a file that is no graph."""
    if not os.path.lexists(path):
        return
    if path.exists() and path.samefile(model):
        raise UsageError(f"{path} is the file to lower; choose another --output")
    if path.exists() and any(path.samefile(other) for other in weights):
        raise UsageError(f"{path} holds weights of {model}; choose another --output")
    if not _is_graph_or_empty(path):
        raise OutputError(
            f"{path} exists and is no ONNX model; choose another --output or remove it"
        )


def _is_graph_or_empty(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        return path.stat().st_size == 0 or bool(load_proto(path))
    except GraphError:
        return False


def _named(output: Path, phase: str) -> Path:
    return output.with_suffix(f".{phase}{output.suffix}") if phase else output
