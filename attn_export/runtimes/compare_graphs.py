"""Comparison of two graphs on the same random inputs, in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attn_export.errors import one_line
from attn_export.parity.measures import measure_strictly
from attn_export.runtimes.ort_cpu import CPU_PROVIDER, dtype_name, sdk

ROUNDS = ("random numbers", "rows of which all keys are masked")
"""The two comparisons, in the words of messages. In the second, the first slice of axis 0 of each
boolean mask is all False."""

MOST_ERROR = 1e-3
"""The largest relative L2 distance that passes: sums in another order differ by less, and a wrong
mask or scale by far more."""

SIZES = (2, 5, 7, 3, 4, 6)
"""The sizes of the dynamic axes: the first size for the first axis, and so on, in a cycle."""


def difference(one: Path, other: Path, fixed: Mapping[str, int]) -> str:
    """Return a description of the difference between the outputs of two graphs; "" if they agree.

    Args:
        one: An ONNX file.
        other: An ONNX file with the same inputs and outputs.
        fixed: The sizes of the axes that are static in the second graph, by name.
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
