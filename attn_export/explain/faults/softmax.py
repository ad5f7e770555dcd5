"""Known faults of `Attention` nodes: of the softmax, the softcap, and rows without a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes
import numpy as np

from attn_export.explain.faults.attention import ANY, CAPPED, StepValues, attention
from attn_export.explain.faults.fault import Fault, by_factor, constant, plain, rows, step
from attn_export.float64.attention_steps import StepChange, softmax
from attn_export.tensorfile import Array

# -- changes ------------------------------------------------------------------------------------


def _sees_nothing(steps: StepValues, weights: Array) -> Array:
    visible = np.broadcast_to(steps["visible"], weights.shape)
    return np.asarray(~visible.any(axis=-1, keepdims=True))


def _in_masked_rows(change: Any) -> StepChange:
    return lambda weights, steps: np.where(_sees_nothing(steps, weights), change(weights), weights)


def _first_value(weights: Array) -> Array:
    first = np.zeros_like(weights)
    first[..., :1] = 1
    return first


def _capped_with_mask(_: Array, steps: StepValues) -> Array:
    masked_products = np.where(steps["visible"], steps["products"] + steps["mask_bias"], -np.inf)
    return np.asarray(steps["softcap"] * np.tanh(masked_products / steps["softcap"]))


def _softmax_unmasked(_: Array, steps: StepValues) -> Array:
    """Compute the softmax over all keys, hidden ones included."""
    return softmax(steps["scores"], np.ones((1, 1), bool))


def _round_to(dtype: Any) -> StepChange:
    return lambda array, _: array.astype(np.float32).astype(dtype).astype(np.float64)


def _softmax_in(dtype: Any) -> StepChange:
    def change(weights: Array, steps: StepValues) -> Array:
        scores = steps["scores"].astype(np.float32).astype(dtype)
        if not scores.size:
            return weights
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        rounded = (exponentials / exponentials.sum(axis=-1, keepdims=True, dtype=dtype)).astype(
            np.float64
        )
        return np.where(_sees_nothing(steps, weights), weights, rounded)

    return change


def _softmax_over_queries(_: Array, steps: StepValues) -> Array:
    scores: Array = steps["scores"]
    largest = scores.max(axis=-2, keepdims=True, initial=-np.inf)
    exponentials: Array = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    return np.asarray(np.nan_to_num(exponentials / exponentials.sum(axis=-2, keepdims=True)))


def _not_normalised(weights: Array) -> Array:
    """Return e to the scores less the largest, without a division."""
    largest = weights.max(axis=-1, keepdims=True, initial=0)
    return np.asarray(weights / np.where(largest > 0, largest, 1))


def _softmax_plus_one(_: Array, steps: StepValues) -> Array:
    """Compute the softmax with one more score, of 0."""
    more = np.pad(steps["scores"], [(0, 0)] * 3 + [(0, 1)])
    return softmax(more, np.ones((1, 1), bool))[..., :-1]


# -- the table ----------------------------------------------------------------------------------


def _low_precision() -> Iterator[Fault]:
    kind = "softmax in low precision"
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        rounded = {"scores": _round_to(dtype), "weights": _round_to(dtype)}
        yield Fault(ANY, kind, f"the softmax is computed in {name}", rounded)
        effect = f"each step of the softmax is rounded to {name}"
        yield Fault(ANY, kind, effect, {"weights": _softmax_in(dtype)})


def _weak_masks() -> Iterator[Fault]:
    """Yield finite scores of hidden keys; fully masked rows attend to them, or stay 0."""
    for value in (-10.0, -100.0, -1e3, -1e4, -1e5, -1e9):
        effect = f"hidden keys score {value:g} in place of -inf"
        hidden = {"hidden": constant(value)}
        yield Fault(ANY, "weak mask", effect, {**hidden, "weights": _softmax_unmasked})
        yield Fault(ANY, "weak mask", f"{effect}, except in fully masked rows", hidden)


MASKED_ROWS = "fully masked rows"
IN_SOFTMAX: Final = (
    # masks that hide every key of a query, and values of float masks
    *rows(ANY,
        (MASKED_ROWS, "a fully masked row is the mean of all values",
         {"weights": _in_masked_rows(lambda w: np.full_like(w, 1 / max(w.shape[-1], 1)))},
         "mean of values"),
        (MASKED_ROWS, "a fully masked row is NaN",
         {"weights": _in_masked_rows(lambda w: np.full_like(w, np.nan))}, "NaN"),
        (MASKED_ROWS, "a fully masked row is the first value",
         {"weights": _in_masked_rows(_first_value)}, "first value"),
        (MASKED_ROWS,
         "hidden keys score the lowest number, so that a fully masked row attends to them",
         {"scores": lambda scores, steps: np.where(steps["visible"], scores, -1e30),
          "weights": _softmax_unmasked})),
    *_weak_masks(),
    *rows(ANY,
        ("mask scaled",
         "what is added to the scores, masks among it, is multiplied by the softmax scale too",
         {"mask_bias": lambda bias, steps: bias * steps["scale"]}),
        ("bias sign", "what is added to the scores has the wrong sign, but for hidden keys",
         {"mask_bias": lambda bias, _: -bias}),
        ("mask values dropped", "of a float mask only -inf counts, its other values are dropped",
         {"mask_bias": lambda bias, _: np.zeros_like(bias)})),
    # softmax and softcap
    *_low_precision(),
    *rows(ANY,
        ("softmax over queries", "the softmax is taken over the queries, not over the keys",
         {"weights": _softmax_over_queries}),
        ("softmax base", "the softmax raises 2, not e, to the scores",
         {"weights": lambda _, steps: softmax(steps["scores"] * np.log(2), steps["visible"])}),
        ("softmax not normalised", "weights are not divided by their sum",
         {"weights": plain(_not_normalised)}),
        ("softmax plus one", "1 is added to the sum of the softmax",
         {"weights": _softmax_plus_one})),
    *rows(CAPPED,
        ("softcap", "there is no softcap", {"capped": step("products")}),
        ("softcap", "the tanh of the softcap is not multiplied by it",
         {"capped": lambda _, at: np.tanh(at["products"] / at["softcap"])}),
        ("softcap", "the scores are not divided by the softcap before its tanh",
         {"capped": lambda _, at: at["softcap"] * np.tanh(at["products"])}),
        ("softcap", "the softcap is applied after the mask, so that hidden keys score -softcap",
         {"scores": _capped_with_mask, "weights": _softmax_unmasked}, "after the mask"),
        ("softcap", "scores are clipped at the softcap, without tanh",
         {"capped": lambda _, at: np.clip(at["products"], -at["softcap"], at["softcap"])})),
    *(by_factor(at, kind, f"{name} is {{factor}} times what it should be", step)
      for at, kind, step, name in (
          (ANY, "scale", "scale", "the softmax scale"),
          (attention("masked"), "mask scaled", "mask_bias", "the mask"),
          (CAPPED, "softcap", "softcap", "the softcap"))),
)  # fmt: skip
