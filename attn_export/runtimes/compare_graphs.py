"""Two graphs on the same random inputs, in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import one_line

ROUNDS = ("random numbers", "rows of which all keys are masked")
MOST_ERROR = 1e-3
"""The largest error, relative to the largest output, that rounding in another order explains; a
wrong mask or scale exceeds it by far."""

SIZES = (2, 5, 7, 3, 4, 6)
"""The sizes of dynamic axes, by turns."""

INTEGERS = frozenset({"tensor(int32)", "tensor(int64)"})


def difference(one: Path, other: Path, fixed: Mapping[str, int]) -> str:
    """Return how the second graph differs from the first; empty if it does not.

    Args:
        one: An ONNX file.
        other: Another one, of the same inputs and outputs.
        fixed: Axes that have one size in the other.
    """
    try:
        sessions = [_session(path) for path in (one, other)]
        sizes = _sizes(sessions[0], fixed)
        for number, what in enumerate(ROUNDS):
            feed = _inputs(sessions[0], sizes, np.random.default_rng(number), hidden=number == 1)
            first, second = (session.run(None, feed) for session in sessions)
            if not all(_agree(a, b) for a, b in zip(first, second, strict=True)):
                return f"it gives other numbers, for {what}"
    except Exception as error:  # of the engine: it has no class of its own
        return f"it could not be compared ({one_line(error)})"
    return ""


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _sizes(session: Any, fixed: Mapping[str, int]) -> dict[str, int]:
    names = dict.fromkeys(
        size for node in session.get_inputs() for size in node.shape if isinstance(size, str)
    )
    found = {name: SIZES[index % len(SIZES)] for index, name in enumerate(names)}
    if {"past_len", "query_len", "total_len"} <= found.keys():
        found["total_len"] = found["past_len"] + fixed.get("query_len", found["query_len"])
    return found | dict(fixed)


def _inputs(
    session: Any, sizes: Mapping[str, int], rng: np.random.Generator, *, hidden: bool
) -> dict[str, np.ndarray]:
    found = {}
    for node in session.get_inputs():
        shape = [sizes[size] if isinstance(size, str) else size for size in node.shape]
        if node.type == "tensor(bool)":
            found[node.name] = _mask(shape, rng, hidden=hidden)
        elif node.type in INTEGERS:
            dtype = np.int32 if node.type == "tensor(int32)" else np.int64
            found[node.name] = np.ones(shape, dtype)
        else:
            narrow = np.float16 if node.type == "tensor(float16)" else np.float32
            found[node.name] = rng.standard_normal(shape).astype(narrow)
    return found


def _mask(shape: Sequence[int], rng: np.random.Generator, *, hidden: bool) -> np.ndarray:
    mask = rng.random(shape) < 0.7
    if mask.ndim:
        mask[..., 0] = True
        if hidden:
            mask[:1] = False
    return mask


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.astype(np.float64), other.astype(np.float64)
    known = ~np.isnan(one)  # NaN, as of a row that sees no key, is no number to compare with
    error = np.abs(one - other)[known].max(initial=0.0)
    return bool(error <= MOST_ERROR * max(np.abs(one[known]).max(initial=0.0), 1e-30))
