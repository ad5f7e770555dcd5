"""The job behind `lower`: rewrite the `Attention` nodes of any ONNX file into a dialect."""

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
from attn_export.output_folder import check_utf8, write_errors
from attn_export.runtimes.child import limited
from attn_export.temp_folders import scratch


def lower_file(model: Path | str, output: Path | str, dialect: str) -> dict[Path, dict[str, int]]:
    """Lower a graph to a dialect, in a child process.

    If `output` is in the folder of `model`, both share the external data; else it is copied.

    Args:
        model: An ONNX file of any origin.
        output: The file to write. In the dialect ``ort``, a graph with a KV cache gets a second
            graph for single queries, in ``OUTPUT.decode.onnx``.
        dialect: One of `DIALECTS`.

    Returns:
        The number of nodes of each operator, for every written file.

    Raises:
        UsageError: If the dialect is unknown, or `output` is `model` or holds its weights.
        GraphError: If the file cannot be read, or the dialect does not fit it.
        OutputError: If `output` cannot be written, or exists and is not an ONNX model.
    """
    check_utf8(Path(output))
    check_dialects([dialect])
    operators = limited(
        f"{__name__}:lower_here", str(model), model=str(model), output=str(output), dialect=dialect
    )
    return {Path(path): counts for path, counts in operators.items()}


def has_attention(model: Path) -> bool:
    """Return whether a graph has `Attention` nodes.

    Raises:
        GraphError: If the file cannot be read.
    """
    return any(node.op_type == "Attention" for node in load_proto(model).graph.node)


def lower_here(model: str, output: str, dialect: str) -> dict[str, dict[str, int]]:
    """Lower a graph to a dialect in this process; see `lower_file`.

    Args:
        model: The input file.
        output: The output file.
        dialect: The dialect.

    Returns:
        The number of nodes of each operator, for every written file.

    Raises:
        UsageError: If `output` is `model` or holds its weights.
        GraphError: If the file cannot be read, or the dialect does not fit it.
        OutputError: If `output` cannot be written, or exists and is not an ONNX model.
    """
    source, target = Path(model), Path(output)
    graph = load_graph(source)
    weights = {path for path in external_files(graph) if path.exists()}
    if dialect == STANDARD and not has_attention(source):
        raise GraphError(NOTHING_TO_LOWER.format(dialect=dialect))
    graphs = lower(graph, dialect)
    if any(result.recognised for result in graphs.values()):
        _compare_with_source(source, graphs)
    models = {
        target.with_suffix(f".{phase}{target.suffix}") if phase else target: result.model
        for phase, result in graphs.items()
    }
    with write_errors(output):
        for path in models:
            _check_replaceable(path, source, weights)
        beside = target.absolute().parent == source.absolute().parent
        for path, result in models.items():
            replace_graph(result, path, beside=beside, kept=weights)
    return {
        str(path): dict(Counter(node.op_type for node in result.graph))
        for path, result in models.items()
    }


def _compare_with_source(source: Path, graphs: Mapping[str, Lowered]) -> None:
    """Compare graphs in which attention was recognised with their source, in ONNX Runtime.

    The inputs are random. Boolean masks hide some keys, and all keys in some rows.

    Raises:
        GraphError: If the outputs of a graph differ, or it cannot be run.
    """
    from attn_export.runtimes.compare_graphs import difference

    with scratch() as folder:
        for phase, graph in graphs.items():
            path = folder / f"{phase or 'whole'}.onnx"
            replace_graph(graph.model, path, beside=False, kept=())
            problem = difference(source, path, graph.file.fixed)
            if problem:
                raise GraphError(
                    f"{source}: attention is written out in it, and as one node {problem}; keep "
                    "the graph as it is"
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
            f"{path} exists and is not an ONNX model; choose another --output or remove it"
        )


def _is_graph_or_empty(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        return path.stat().st_size == 0 or bool(load_proto(path))
    except GraphError:
        return False
