"""Changes of single steps, from which `faults.py` builds its faults.

A change takes the value of a step and all steps before it, and returns the wrong value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy_positions as positions
from numpy_attention import Change, softmax

Array = np.ndarray
At = Mapping[str, Any]
Arrays = dict[str, Array]


def value(of: Callable[[Any], Any]) -> Change:
    """Return a change that needs only the value of the step."""
    return lambda value, _: of(value)


def rows(index: Any, of: Callable[[Array], Any]) -> Change:
    """Return a change of some elements."""

    def change(array: Array, at: At) -> Array:
        array = array.copy()
        array[index] = of(array[index])
        return array

    return change


def output(name: str, of: Change) -> dict[str, Change]:
    """Return a change of one output after the computation."""
    return {"outputs": lambda made, at: made | {name: of(made[name], at)}}


def swap(axis: int) -> Callable[[Array], Array]:
    return lambda array: np.flip(array, axis)


def first_of(axis: int) -> Callable[[Array], Array]:
    """Return a function that repeats the first element of an axis."""
    return lambda array: np.broadcast_to(np.take(array, [0], axis=axis), array.shape)


# -- scale and heads


def of_width(of: Callable[[int], float]) -> Change:
    return lambda _, at: of(at["spec"].head_dim)


def scaled(added: Array, at: At) -> Array:
    return added * np.float32(at["scale"])


def tiled(heads: Array, at: At) -> Array:
    return np.arange(len(heads)) % at["spec"].num_kv_heads


def interleaved(merged: Array, at: At) -> Array:
    return np.moveaxis(at["attended"], 1, -1).reshape(merged.shape)


def not_moved(merged: Array, at: At) -> Array:
    return at["attended"].reshape(merged.shape)


# -- masks


def inverted(mask: Array) -> Array:
    return ~mask if mask.dtype == np.bool_ else np.where(mask == -np.inf, 0, -np.inf)


def all_visible(mask: Array) -> Array:
    return np.full_like(mask, mask.dtype == np.bool_)


def lowest_to_inf(mask: Array) -> Array:
    return np.where(mask == np.finfo(mask.dtype).min, -np.inf, mask)


def causal(diagonal: Callable[[Any], Any]) -> Change:
    return lambda _, at: positions.offsets(diagonal(at["P"]), at["shape"]) <= 0


def only_causal(visible: Array, at: At) -> Array:
    return np.broadcast_to(at["causal"], visible.shape)


def masked_rows(weight: Callable[[int], float]) -> Change:
    """Set a weight for every key of a row that sees none."""
    return lambda w, at: np.where(at["nothing"], np.float32(weight(w.shape[-1])), w)


def first_of_masked_rows(weights: Array, at: At) -> Array:
    first = np.eye(weights.shape[-1], dtype=np.float32)[0]
    return np.where(at["nothing"], first, weights)


# -- bias and cache


def without_bias(name: str, *, head: int | None = None) -> Change:
    """Set the bias of one layer, or of one head of it, to 0."""

    def change(weights: Arrays, at: At) -> Arrays:
        spec = at["spec"]
        heads = spec.num_heads if name == "q_proj" else spec.num_kv_heads
        bias = weights[f"{name}.bias"].copy()
        (bias if head is None else np.split(bias, heads)[head])[:] = 0
        return weights | {f"{name}.bias": bias}

    return change


def with_bias_of_q(name: str) -> Change:
    """Add the bias of queries to a layer whose spec has none."""

    def change(weights: Arrays, at: At) -> Arrays:
        width = len(weights[f"{name}.weight"])
        return weights | {f"{name}.bias": weights["q_proj.bias"][:width]}

    return change


def hide_past_of_last_row(visible: Array, at: At) -> Array:
    return rows(np.s_[-1, ..., : at["P"]], np.zeros_like)(visible, at)


def past_of_first_row(parts: list[tuple[Array, Array]], at: At) -> list[tuple[Array, ...]]:
    past, new = parts
    return [tuple(first_of(0)(array) for array in past), new]


def from_position(start: int, keys: Array) -> Array:
    return np.where(np.arange(keys.shape[2])[:, None] < start, keys, np.float32(0))


# -- positions


def frequencies_of(**changes: Any) -> Change:
    """Return the frequencies of another spec."""
    return lambda _, at: positions.frequencies(
        dataclasses.replace(at["spec"], **changes), at["length"]
    )


# -- softmax and precision


def softmax_in(dtype: Any) -> Change:
    def change(_: Array, at: At) -> Array:
        sinks = None if at["sinks"] is None else at["sinks"].astype(dtype)
        return softmax(at["scores"].astype(dtype), sinks=sinks).astype(np.float32)

    return change


def softmax_over_queries(_: Array, at: At) -> Array:
    return np.nan_to_num(softmax(at["scores"], axis=-2))


def softmax_plus_one(_: Array, at: At) -> Array:
    raised = np.exp(at["scores"])
    return raised / (1 + raised.sum(axis=-1, keepdims=True))


def softmax_not_shifted(_: Array, at: At) -> Array:
    raised = np.exp(at["scores"])
    return raised / raised.sum(axis=-1, keepdims=True)


def tf32(array: Array) -> Array:
    """Round to the 10 mantissa bits of TensorFloat-32, to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def through(dtype: Any) -> Callable[[Array], Array]:
    """Round to a narrower type and back."""
    return lambda array: array.astype(dtype).astype(np.float32)


def noisy(row: Array) -> Array:
    """Add alternating signs, so that the change has the size of the row itself."""
    return row * (1 + np.float32(1e-4) * np.resize(np.float32([1, -1]), row.shape))
