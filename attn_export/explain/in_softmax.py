"""Known mistakes of the softmax: fully masked rows, weak masks, low precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from attn_export.explain.attention_steps import Change, softmax
from attn_export.explain.mistake import constant
from attn_export.tensorfile import Array

At = Mapping[str, Any]


def softmax_changes() -> Iterator[tuple[str, str, dict[str, Change]]]:
    """Yield the kind of each mistake, its description, and the steps that it changes."""
    yield from _rows()
    yield from _softmaxes()


def _rows() -> Iterator[tuple[str, str, dict[str, Change]]]:
    kind = "fully masked rows"
    yield kind, "a fully masked row is the mean of all values", {"weights": _masked(_uniform)}
    yield (
        kind,
        "a fully masked row is NaN",
        {"weights": _masked(lambda w: np.full_like(w, np.nan))},
    )
    yield kind, "a fully masked row is the first value", {"weights": _masked(_first)}
    yield (
        kind,
        "hidden keys score the lowest number, so that a fully masked row attends to them",
        {"scores": lambda s, at: np.where(at["visible"], s, -1e30), "weights": reweighed},
    )
    yield (
        "weak mask",
        "hidden keys score -10 in place of -inf",
        {"hidden": constant(-10.0), "weights": reweighed},
    )
    yield (
        "weak mask",
        "hidden keys score -1e4 in place of -inf",
        {"hidden": constant(-1e4), "weights": reweighed},
    )
    yield (
        "mask scaled",
        "what is added to the scores, masks among it, is multiplied by the softmax scale too",
        {"added": lambda added, at: added * at["scale"]},
    )
    yield (
        "mask values dropped",
        "of a float mask only -inf counts, its other values are dropped",
        {"added": lambda added, _: np.zeros_like(added)},
    )


def _softmaxes() -> Iterator[tuple[str, str, dict[str, Change]]]:
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        yield (
            "softmax in low precision",
            f"the softmax is computed in {name}",
            {"scores": _through(dtype), "weights": _through(dtype)},
        )
        yield (
            "softmax in low precision",
            f"each step of the softmax is rounded to {name}",
            {"weights": _stepwise(dtype)},
        )
    yield (
        "softmax over queries",
        "the softmax is taken over the queries, not over the keys",
        {"weights": _over_queries},
    )
    yield (
        "softmax plus one",
        "1 is added to the sum of the softmax",
        {"weights": _plus_one},
    )


# -- changes


def _nothing(at: At, weights: Array) -> Array:
    seen = np.broadcast_to(at["visible"], weights.shape)
    return np.asarray(~seen.any(axis=-1, keepdims=True))


def _masked(of: Any) -> Change:
    return lambda weights, at: np.where(_nothing(at, weights), of(weights), weights)


def _uniform(weights: Array) -> Array:
    return np.full_like(weights, 1 / max(weights.shape[-1], 1))


def _first(weights: Array) -> Array:
    first = np.zeros_like(weights)
    first[..., :1] = 1
    return first


def reweighed(_: Array, at: At) -> Array:
    """Return the softmax of the changed scores, ignoring visibility.

    Args:
        _: The weights, which are computed anew: `[B, H, L, S]`.
        at: The values of the other steps.
    """
    return softmax(at["scores"], np.ones((1, 1), bool))


def _through(dtype: Any) -> Change:
    return lambda array, _: array.astype(np.float32).astype(dtype).astype(np.float64)


def _stepwise(dtype: Any) -> Change:
    def change(weights: Array, at: At) -> Array:
        scores = at["scores"].astype(np.float32).astype(dtype)
        if not scores.size:
            return weights
        raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
        rounded = (raised / raised.sum(axis=-1, keepdims=True, dtype=dtype)).astype(np.float64)
        return np.where(_nothing(at, weights), weights, rounded)

    return change


def _over_queries(_: Array, at: At) -> Array:
    scores: Array = at["scores"]
    largest = scores.max(axis=-2, keepdims=True, initial=-np.inf)
    raised: Array = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    return np.asarray(np.nan_to_num(raised / raised.sum(axis=-2, keepdims=True)))


def _plus_one(_: Array, at: At) -> Array:
    raised = np.exp(at["scores"])
    return np.asarray(raised / (1 + raised.sum(axis=-1, keepdims=True)))
