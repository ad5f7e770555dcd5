"""The job behind `lower`: rewrite the `Attention` nodes of any ONNX file into a dialect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.dialect_names import STANDARD, check_dialects
from attn_export.errors import GraphError, OutputError, UsageError, one_line
from attn_export.graph.load import load_graph, load_proto
from attn_export.graph.lower import Lowered, lower
from attn_export.graph.lower.dialects import NOTHING_TO_LOWER
from attn_export.graph.save import external_files, replace_graph
from attn_export.output_folder import check_utf8, write_errors
from attn_export.parity.measures import measure_strictly
from attn_export.runtimes.child import limited
from attn_export.runtimes.ort_cpu import CPU_PROVIDER, dtype_name, sdk
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
    """Return the result of `lower_file`, computed in this process.

    Args:
        model: As for `lower_file`.
        output: As for `lower_file`.
        dialect: As for `lower_file`.

    Raises:
        AttnExportError: The errors of `lower_file`.
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


# -- graphs in which attention was recognised, against their source -----------------------------

ROUNDS = ("random numbers", "rows of which all keys are masked")
"""The two comparisons, in the words of messages. In the second, the first slice of axis 0 of each
boolean mask is all False."""

MOST_ERROR = 1e-3
"""The largest relative L2 distance that passes: sums in another order differ by less, and a wrong
mask or scale by far more."""

SIZES = (2, 5, 7, 3, 4, 6)
"""The sizes of the dynamic axes: the first size for the first axis, and so on, in a cycle."""


def _compare_with_source(source: Path, graphs: Mapping[str, Lowered]) -> None:
    """Raise GraphError unless graphs compute in ONNX Runtime what their source does."""
    with scratch() as folder:
        for phase, graph in graphs.items():
            path = folder / f"{phase or 'whole'}.onnx"
            replace_graph(graph.model, path, beside=False, kept=())
            problem = _difference(source, path, graph.file.fixed)
            if problem:
                raise GraphError(
                    f"{source}: attention is written out in it, and as one node {problem}; keep "
                    "the graph as it is"
                )


def _difference(one: Path, other: Path, fixed: Mapping[str, int]) -> str:
    """Return a description of the difference between the outputs of two graphs; "" if they agree.

    `fixed` are the sizes of the axes that are static in the second graph.
    """
    try:
        sessions = [_session(path) for path in (one, other)]
        sizes = _sizes(sessions[0], fixed)
        for number, contents in enumerate(ROUNDS):
            feed = _inputs(sessions[0], sizes, np.random.default_rng(number), hide_keys=number == 1)
            first, second = (session.run(None, feed) for session in sessions)
            if not all(_agree(a, b) for a, b in zip(first, second, strict=True)):
                return f"it gives other numbers, for {contents}"
    except Exception as error:  # ONNX Runtime's errors have no common base class
        return f"it could not be compared ({one_line(error)})"
    return ""


def _session(path: Path) -> Any:
    onnxruntime = sdk()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=[CPU_PROVIDER])


def _sizes(session: Any, fixed: Mapping[str, int]) -> dict[str, int]:
    names = dict.fromkeys(
        size for node in session.get_inputs() for size in node.shape if isinstance(size, str)
    )
    sizes = {name: SIZES[index % len(SIZES)] for index, name in enumerate(names)}
    if {"past_len", "query_len", "total_len"} <= sizes.keys():
        sizes["total_len"] = sizes["past_len"] + fixed.get("query_len", sizes["query_len"])
    return sizes | dict(fixed)


def _inputs(
    session: Any, sizes: Mapping[str, int], rng: np.random.Generator, *, hide_keys: bool
) -> dict[str, np.ndarray]:
    inputs = {}
    for node in session.get_inputs():
        shape = [sizes[size] if isinstance(size, str) else size for size in node.shape]
        dtype = dtype_name(node.type)
        if dtype == "bool":
            inputs[node.name] = _mask(shape, rng, hide_keys=hide_keys)
        elif dtype in ("int32", "int64"):
            inputs[node.name] = np.ones(shape, dtype)
        else:
            floating = np.float16 if dtype == "float16" else np.float32
            inputs[node.name] = rng.standard_normal(shape).astype(floating)
    return inputs


def _mask(shape: Sequence[int], rng: np.random.Generator, *, hide_keys: bool) -> np.ndarray:
    mask = rng.random(shape) < 0.7
    if mask.ndim:
        mask[..., 0] = True
        if hide_keys:
            mask[:1] = False
    return mask


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Fully masked rows may be NaN in the first graph. They are not compared.
    is_number = ~np.isnan(one)
    return measure_strictly(other[is_number], one[is_number]).whole <= MOST_ERROR
