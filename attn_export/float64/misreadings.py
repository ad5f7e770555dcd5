"""Known misreadings of attention: wrong ways to compute its steps.

`probe` finds the misreading that a runtime's output matches. `explain` applies each misreading to a
right graph, and compares the outputs with the runtime's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from attn_export.float64.attention_steps import StepChange, softmax
from attn_export.tensorfile import Array

StepValues = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Misreading:
    """A way to compute attention that differs from the specification.

    Attributes:
        kind: Its kind, in a word or two: ``"scale"``.
        effect: Its effect as a clause: ``"scores are multiplied by …"``.
        reading: Its name in the results of `probe`; "" if no probe tests it.
    """

    kind: str
    effect: str
    changes: Mapping[str, StepChange]
    reading: str = ""


SCALES: Mapping[str, Callable[[float, float], float]] = {
    "is 1/sqrt(head_dim)": lambda _, width: width**-0.5,
    "is 1/sqrt(head_dim + 1)": lambda _, width: (width + 1) ** -0.5,
    "is 1/sqrt(head_dim - 1)": lambda _, width: max(width - 1, 0.5) ** -0.5,
    "is missing: it is 1": lambda *_: 1.0,
    "is applied twice": lambda scale, _: scale * scale,
    "is its square root: applied to queries or keys alone": lambda scale, _: scale**0.5,
    "is sqrt(head_dim): divided by instead of multiplied": lambda _, width: width**0.5,
    "is 1/head_dim": lambda _, width: 1 / width,
}
"""Wrong scales: functions of the right scale and the head width, by clause."""


# -- changes ------------------------------------------------------------------------------------


def _scale(wrong_scale: Callable[[float, float], float]) -> StepChange:
    return lambda scale, steps: wrong_scale(scale, steps["queries"].shape[-1])


def _show_keys_up_to(shift: int) -> StepChange:
    """Return a causal mask that is shifted along the keys."""
    return lambda _, steps: _keys_up_to(steps, steps["offset"] + shift)


def _keys_up_to(steps: StepValues, offset: Any) -> Array:
    return np.asarray(_keys(steps) <= _queries(steps) + offset)


def _keys(steps: StepValues) -> Array:
    """Return the indices of keys, `[S]`."""
    return np.arange(steps["keys"].shape[2])


def _queries(steps: StepValues) -> Array:
    """Return the indices of queries, `[L, 1]`."""
    return np.arange(steps["queries"].shape[2])[:, None]


def _put_new_first(cached: Array, steps: StepValues) -> Array:
    return np.roll(cached, -_past_length(steps), axis=2)


def _past_length(steps: StepValues) -> int:
    past = steps["past"][0]
    return 0 if past is None else int(past.shape[2])


def _keep_heads_first(attended: Array, _: StepValues) -> Array:
    B, H, L, D = attended.shape
    return np.swapaxes(attended.reshape(B, L, H, D), 1, 2)


def _interleave_heads(attended: Array, _: StepValues) -> Array:
    B, H, L, D = attended.shape
    merged = np.moveaxis(attended, 1, -1).reshape(B, L, D, H).reshape(B, L, H * D)
    return np.swapaxes(merged.reshape(B, L, H, D), 1, 2)


def _sees_nothing(steps: StepValues, weights: Array) -> Array:
    visible = np.broadcast_to(steps["visible"], weights.shape)
    return np.asarray(~visible.any(axis=-1, keepdims=True))


def _constant(value: float) -> StepChange:
    return lambda *_: value


def _past_keys(steps: StepValues) -> Array:
    return np.asarray(_keys(steps) < _past_length(steps))


def _show(keys: Callable[[StepValues], Array]) -> Mapping[str, StepChange]:
    """Return the changes of a mask that is not applied to some keys."""
    return {
        "mask_visible": lambda allowed, steps: allowed | keys(steps),
        "mask_bias": lambda bias, steps: np.where(keys(steps), 0.0, bias),
    }


def _roll_heads(by: int) -> StepChange:
    return lambda attended, _: np.roll(attended, by, axis=1)


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


def _softmax_plus_one(_: Array, steps: StepValues) -> Array:
    exponentials = np.exp(steps["scores"])
    return np.asarray(exponentials / (1 + exponentials.sum(axis=-1, keepdims=True)))


# -- the table ----------------------------------------------------------------------------------


def _low_precision() -> Iterator[Misreading]:
    kind = "softmax in low precision"
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        rounded = {"scores": _round_to(dtype), "weights": _round_to(dtype)}
        yield Misreading(kind, f"the softmax is computed in {name}", rounded)
        effect = f"each step of the softmax is rounded to {name}"
        yield Misreading(kind, effect, {"weights": _softmax_in(dtype)})


def _weak_masks() -> Iterator[Misreading]:
    """Yield finite scores of hidden keys; fully masked rows attend to them, or stay 0."""
    for value in (-10.0, -100.0, -1e3, -1e4, -1e5, -1e9):
        effect = f"hidden keys score {value:g} in place of -inf"
        hidden = {"hidden": _constant(value)}
        yield Misreading("weak mask", effect, {**hidden, "weights": _softmax_unmasked})
        yield Misreading("weak mask", f"{effect}, except in fully masked rows", hidden)


MASKED_ROWS = "fully masked rows"
MISREADINGS: Final = (
    *(Misreading("scale", f"the softmax scale {effect}", {"scale": _scale(wrong_scale)})
      for effect, wrong_scale in SCALES.items()),

    Misreading("scale", "the softmax scale is 1/sqrt(embed_dim), of all heads together",
        {"scale": lambda _, steps: np.prod(np.array(steps["queries"].shape)[[1, 3]]) ** -0.5}),

    # heads, and keys of the past
    Misreading("tiled heads", "query head h uses K/V head h % Hkv in place of h // (H / Hkv)",
        {"kv_head": lambda heads, steps: np.arange(len(heads)) % steps["keys"].shape[1]}, "tiles"),
    Misreading("one K/V head for all", "every query head uses K/V head 0",
        {"kv_head": lambda heads, _: np.zeros_like(heads)}, "the first"),
    Misreading("K/V heads reversed", "query heads use the K/V heads in reverse",
        {"kv_head": lambda heads, _: heads[::-1]}),
    Misreading("heads reversed", "the results of query heads are in reverse",
        {"attended": lambda attended, _: attended[:, ::-1]}),
    Misreading("heads shifted", "the result of query head h is that of head h + 1",
        {"attended": _roll_heads(-1)}),
    Misreading("heads shifted", "the result of query head h is that of head h - 1",
        {"attended": _roll_heads(1)}),
    Misreading("heads not moved", "[B, H, L, Dv] is read as [B, L, H·Dv] without a transpose",
        {"attended": _keep_heads_first}),
    Misreading("heads interleaved", "heads are merged as [Dv, H] in place of [H, Dv]",
        {"attended": _interleave_heads}),
    Misreading("past ignored", "past keys and values are not attended to",
        {"mask_visible": lambda allowed, steps: allowed & (_keys(steps) >= _past_length(steps))}),
    Misreading("past after new keys", "new keys and values come before those of the past",
        {"keys": _put_new_first, "values": _put_new_first}),

    # causal masks
    Misreading("causal dropped", "the causal mask is not applied",
        {"causal": lambda visible, _: np.ones_like(visible)}, "all keys"),
    Misreading("causal offset", "query i sees one key too many: up to P + i + 1",
        {"causal": _show_keys_up_to(1)}),
    Misreading("causal offset", "query i sees one key too few: up to P + i - 1",
        {"causal": _show_keys_up_to(-1)}),
    Misreading("causal offset", "query i sees keys up to i, as if there were no past",
        {"causal": lambda _, steps: _keys_up_to(steps, 0)}, "keys to i"),
    Misreading("causal offset", "query i sees keys up to S - L + i, the last query all of them",
        {"causal": lambda _, steps: _keys_up_to(steps, len(_keys(steps)) - len(_queries(steps)))},
        "keys to S-L+i"),
    Misreading("causal offset", "query i sees two keys too many: up to P + i + 2",
        {"causal": _show_keys_up_to(2)}),
    Misreading("causal offset", "query i sees two keys too few: up to P + i - 2",
        {"causal": _show_keys_up_to(-2)}),
    Misreading("own key alone", "each query sees its own key alone",
        {"causal": lambda _, steps: _keys(steps) == _queries(steps) + steps["offset"]}),
    Misreading("causal reversed", "query i sees keys from P + i on, in place of those up to it",
        {"causal": lambda _, steps: _keys(steps) >= _queries(steps) + steps["offset"]}),
    Misreading("length of one batch row",
        "the causal rule counts the keys of batch row 0 for every batch row",
        {"offset": lambda offset, _: np.broadcast_to(offset[:1], offset.shape)}),
    Misreading("causal added", "a causal mask is applied where there is none",
        {"causal": lambda causal, steps: causal & _keys_up_to(steps, steps["offset"])}),
    Misreading("mask dropped beside causal", "the causal mask takes the place of the given one",
        {"mask_visible": lambda visible, _: np.ones_like(visible),
         "mask_bias": lambda bias, _: np.zeros_like(bias)}),
    Misreading("mask or causal", "a key is seen if the causal rule or the mask allows it, not both",
        {"visible": lambda _, steps: steps["causal"] | steps["mask_visible"]}),
    Misreading("mask of some keys", "the given mask is not applied to keys of the past",
        _show(_past_keys)),
    Misreading("mask of some keys", "the given mask is not applied to new keys",
        _show(lambda steps: ~_past_keys(steps))),
    Misreading("key always visible", "key 0 is always visible, whatever the masks hide",
        {"visible": lambda visible, steps: visible | (_keys(steps) == 0)}),
    Misreading("key always visible", "each query sees its own key, whatever the masks hide",
        {"visible": lambda visible, steps:
            visible | (_keys(steps) == _queries(steps) + steps["offset"])}),
    Misreading("last key dropped", "the last key is not attended to",
        {"mask_visible": lambda allowed, steps: allowed & (_keys(steps) < len(_keys(steps)) - 1)}),
    Misreading("first key dropped", "key 0 is not attended to",
        {"mask_visible": lambda allowed, steps: allowed & (_keys(steps) > 0)}),

    # masks that hide every key of a query, and values of float masks
    Misreading(MASKED_ROWS, "a fully masked row is the mean of all values",
        {"weights": _in_masked_rows(lambda w: np.full_like(w, 1 / max(w.shape[-1], 1)))},
        "mean of values"),
    Misreading(MASKED_ROWS, "a fully masked row is NaN",
        {"weights": _in_masked_rows(lambda w: np.full_like(w, np.nan))}, "NaN"),
    Misreading(MASKED_ROWS, "a fully masked row is the first value",
        {"weights": _in_masked_rows(_first_value)}, "first value"),
    Misreading(MASKED_ROWS,
        "hidden keys score the lowest number, so that a fully masked row attends to them",
        {"scores": lambda scores, steps: np.where(steps["visible"], scores, -1e30),
         "weights": _softmax_unmasked}),
    *_weak_masks(),
    Misreading("mask scaled",
        "what is added to the scores, masks among it, is multiplied by the softmax scale too",
        {"mask_bias": lambda bias, steps: bias * steps["scale"]}),
    Misreading("mask values dropped",
        "of a float mask only -inf counts, its other values are dropped",
        {"mask_bias": lambda bias, _: np.zeros_like(bias)}),

    # softmax and softcap
    *_low_precision(),
    Misreading("softmax over queries", "the softmax is taken over the queries, not over the keys",
        {"weights": _softmax_over_queries}),
    Misreading("softmax base", "the softmax raises 2, not e, to the scores",
        {"weights": lambda _, steps: softmax(steps["scores"] * np.log(2), steps["visible"])}),
    Misreading("softmax not normalised", "weights are not divided by their sum",
        {"weights": lambda _, steps: np.exp(steps["scores"])}),
    Misreading("softmax plus one", "1 is added to the sum of the softmax",
        {"weights": _softmax_plus_one}),
    Misreading("softcap", "there is no softcap", {"capped": lambda _, steps: steps["products"]}),
    Misreading("softcap", "the tanh of the softcap is not multiplied by it",
        {"capped": lambda _, at: np.tanh(at["products"] / at["softcap"])}),
    Misreading("softcap", "the scores are not divided by the softcap before its tanh",
        {"capped": lambda _, at: at["softcap"] * np.tanh(at["products"])}),
    Misreading("softcap",
        "the softcap is applied after the mask, so that hidden keys score -softcap",
        {"scores": _capped_with_mask, "weights": _softmax_unmasked}, "after the mask"),
    Misreading("softcap", "scores are clipped at the softcap, without tanh",
        {"capped": lambda _, at: np.clip(at["products"], -at["softcap"], at["softcap"])}),
)  # fmt: skip
"""All known misreadings. Of two with the same outputs, `explain` names the first."""

READINGS: Final = {m.reading: m.changes for m in MISREADINGS if m.reading}
"""The changed steps of each reading that a probe tests."""
