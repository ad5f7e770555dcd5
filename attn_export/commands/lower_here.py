"""Lowering of a graph of any origin, in the process of its own that `lower` starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.commands.source_runs import SourceRuns
from attn_export.dialect_names import MICROSOFT, PORTABLE, STANDARD
from attn_export.errors import GraphError, counted
from attn_export.graph import IrGraph
from attn_export.graph.ir_helpers import every_node, nodes_of
from attn_export.graph.load import load_graph
from attn_export.graph.lower import lower
from attn_export.graph.lower.dialects import NOTHING_TO_LOWER
from attn_export.graph.save import check_replaceable, external_files, replace_graph
from attn_export.output_folder import write_errors
from attn_export.temp_folders import scratch


def lower_here(model: str, output: str, dialect: str) -> dict[str, Any]:
    """Lower a graph; return the fields of `LoweredFiles`, with plain paths."""
    source, target = Path(model), Path(output)
    graph = load_graph(source)
    weights = {path for path in external_files(graph) if path.exists()}
    is_foreign = nodes_of(graph, "Softmax") or any(n.domain == MICROSOFT for n in graph.graph)
    is_decomposed = not any(nodes_of(graph, name) for name in ("Attention", "LinearAttention"))
    runs = SourceRuns(source) if is_foreign else None
    if runs is not None and not runs.trials and is_decomposed:
        _refuse_untried(runs, source, dialect)
    graphs = lower(graph, dialect, observed=None if runs is None else runs.observed())
    recognised = graphs[""].recognised
    if dialect == STANDARD and not recognised and is_decomposed:
        raise GraphError(NOTHING_TO_LOWER.format(dialect=dialect))
    if runs is not None and recognised:
        _compare_with_source(runs, source, graphs)
    models = {
        target.with_suffix(f".{phase}{target.suffix}") if phase else target: result.model
        for phase, result in graphs.items()
    }
    with write_errors(output):
        for path in models:
            check_replaceable(path, source)
        beside = target.absolute().parent == source.absolute().parent
        for path, result in models.items():
            replace_graph(result, path, beside=beside, kept=weights)
    note = _ONLY_OPSET if is_decomposed else ""
    if recognised:
        became = "a node" if recognised == 1 else "nodes"
        note = f"{counted(recognised, 'attention')} written out in operators became {became}"
        if runs is not None and runs.loses_nan:
            note += "; a query of which all keys are hidden is NaN in it, and gets 0 in its place"
    operators = {
        str(path): dict(Counter(node.op_type for node in every_node(result.graph)))
        for path, result in models.items()
    }
    return {"operators": operators, "note": note}


def _refuse_untried(runs: SourceRuns, source: Path, dialect: str) -> None:
    """Refuse contrib attention in a graph that ran at no sizes."""
    if dialect in (STANDARD, PORTABLE) and runs.contrib:
        raise GraphError(
            f"{source}: {runs.contrib} cannot be compared with what takes its place, since the "
            f"graph runs in ONNX Runtime at no sizes that were tried ({runs.problem}); keep it as "
            "it is"
        )


_ONLY_OPSET = "there is no Attention node; only the opset was changed"


# -- graphs in which attention was recognised, against their source -----------------------------


def _compare_with_source(runs: SourceRuns, source: Path, graphs: Mapping[str, IrGraph]) -> None:
    """Raise GraphError unless graphs compute in ONNX Runtime what their source does."""
    with scratch() as folder:
        for phase, graph in graphs.items():
            path = folder / f"{phase or 'whole'}.onnx"
            replace_graph(graph.model, path, beside=False, kept=())
            problem = runs.difference(path, graph.file.fixed)
            if problem:
                raise GraphError(
                    f"{source}: attention is written out in it, and as one node {problem}; keep "
                    "the graph as it is"
                )
