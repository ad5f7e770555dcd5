"""Known faults of `Attention` nodes: of the scale, of heads, and of the keys that queries see."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.faults.fault import (
    MOST_HEADS,
    Changes,
    Fault,
    GraphPlace,
    Locator,
    roll,
    rows,
)
from attn_export.float64.attention_steps import StepChange
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

StepValues = Mapping[str, Any]

# -- places -------------------------------------------------------------------------------------


@functools.cache
def attention(*tags: str) -> Locator:
    """Return what finds `Attention` nodes.

    `tags`: What a node must be: ``"causal"`` or ``"not causal"``, ``"masked"``, ``"capped"``.
    """

    def places(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
        for node in evaluation.nodes:
            if node.op_type != "Attention":
                continue
            values = {a.name: a.i or a.f for a in node.attribute}
            found = {
                "causal" if values.get("is_causal") else "not causal",
                "masked" if len(node.input) > 3 and node.input[3] else "",
                "capped" if values.get("softcap") else "",
            }
            if found.issuperset(tags):
                compute = functools.partial(_change_steps, evaluation, node)
                yield GraphPlace("", node.name, given={"heads": MOST_HEADS}, compute=compute)

    return places


def _change_steps(
    evaluation: Evaluation, node: onnx.NodeProto, values: Values, changes: Changes
) -> Mapping[str, Array]:
    return evaluation.attention(node, values, changes)


ANY, CAUSAL, CAPPED = attention(), attention("causal"), attention("capped")

# -- changes ------------------------------------------------------------------------------------


def scale_of_width(wrong_scale: Callable[[float, float], float]) -> StepChange:
    """Return the change of a scale by a function of it and the width of heads."""
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


def _past_keys(steps: StepValues) -> Array:
    return np.asarray(_keys(steps) < _past_length(steps))


def _show(keys: Callable[[StepValues], Array]) -> Mapping[str, StepChange]:
    """Return the changes of a mask that is not applied to some keys."""
    return {
        "mask_visible": lambda allowed, steps: allowed | keys(steps),
        "mask_bias": lambda bias, steps: np.where(keys(steps), 0.0, bias),
    }


def _products_with_values(_: Array, at: StepValues) -> Array:
    if at["keys"].shape != at["values"].shape:
        raise ValueError("keys and values have different shapes")
    swapped = np.swapaxes(at["values"][:, at["kv_head"]], -1, -2)
    return np.asarray((at["queries"] @ swapped) * at["scale"])


def _sums_of_keys(_: Array, at: StepValues) -> Array:
    return np.asarray(at["weights"] @ at["keys"][:, at["kv_head"]])


# -- the table ----------------------------------------------------------------------------------

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

IN_ATTENTION: Final = (
    *(Fault(ANY, "scale", f"the softmax scale {effect}", {"scale": scale_of_width(wrong_scale)})
      for effect, wrong_scale in SCALES.items()),
    *rows(ANY,
        ("scale", "the softmax scale is 1/sqrt(embed_dim), of all heads together",
         {"scale": lambda _, steps: np.prod(np.array(steps["queries"].shape)[[1, 3]]) ** -0.5})),
    # heads, and keys of the past
    *rows(ANY,
        ("tiled heads", "query head h uses K/V head h % Hkv in place of h // (H / Hkv)",
         {"kv_head": lambda heads, steps: np.arange(len(heads)) % steps["keys"].shape[1]}, "tiles"),
        ("one K/V head for all", "every query head uses K/V head 0",
         {"kv_head": lambda heads, _: np.zeros_like(heads)}, "the first"),
        ("K/V heads reversed", "query heads use the K/V heads in reverse",
         {"kv_head": lambda heads, _: heads[::-1]}),
        ("heads reversed", "the results of query heads are in reverse",
         {"attended": lambda attended, _: attended[:, ::-1]}),
        ("heads shifted", "the result of query head h is that of head h + 1",
         {"attended": roll(-1, 1)}),
        ("heads shifted", "the result of query head h is that of head h - 1",
         {"attended": roll(1, 1)}),
        ("heads not moved", "[B, H, L, Dv] is read as [B, L, H·Dv] without a transpose",
         {"attended": _keep_heads_first}),
        ("heads interleaved", "heads are merged as [Dv, H] in place of [H, Dv]",
         {"attended": _interleave_heads}),
        ("past ignored", "past keys and values are not attended to",
         {"mask_visible": lambda allowed, steps: allowed & (_keys(steps) >= _past_length(steps))}),
        ("past after new keys", "new keys and values come before those of the past",
         {"keys": _put_new_first, "values": _put_new_first})),
    # causal masks
    *rows(CAUSAL,
        ("causal dropped", "the causal mask is not applied",
         {"causal": lambda visible, _: np.ones_like(visible)}, "all keys"),
        ("causal offset", "query i sees one key too many: up to P + i + 1",
         {"causal": _show_keys_up_to(1)}),
        ("causal offset", "query i sees one key too few: up to P + i - 1",
         {"causal": _show_keys_up_to(-1)}),
        ("causal offset", "query i sees keys up to i, as if there were no past",
         {"causal": lambda _, steps: _keys_up_to(steps, 0)}, "keys to i"),
        ("causal offset", "query i sees keys up to S - L + i, the last query all of them",
         {"causal": lambda _, steps: _keys_up_to(steps, len(_keys(steps)) - len(_queries(steps)))},
         "keys to S-L+i"),
        ("causal offset", "query i sees two keys too many: up to P + i + 2",
         {"causal": _show_keys_up_to(2)}),
        ("causal offset", "query i sees two keys too few: up to P + i - 2",
         {"causal": _show_keys_up_to(-2)})),
    *rows(ANY,
        ("own key alone", "each query sees its own key alone",
         {"causal": lambda _, steps: _keys(steps) == _queries(steps) + steps["offset"]}),
        ("causal reversed", "query i sees keys from P + i on, in place of those up to it",
         {"causal": lambda _, steps: _keys(steps) >= _queries(steps) + steps["offset"]}),
        ("length of one batch row",
         "the causal rule counts the keys of batch row 0 for every batch row",
         {"offset": lambda offset, _: np.broadcast_to(offset[:1], offset.shape)})),
    *rows(attention("not causal"),
        ("causal added", "a causal mask is applied where there is none",
         {"causal": lambda causal, steps: causal & _keys_up_to(steps, steps["offset"])})),
    *rows(CAUSAL,
        ("mask dropped beside causal", "the causal mask takes the place of the given one",
         {"mask_visible": lambda visible, _: np.ones_like(visible),
          "mask_bias": lambda bias, _: np.zeros_like(bias)})),
    *rows(ANY,
        ("mask or causal", "a key is seen if the causal rule or the mask allows it, not both",
         {"visible": lambda _, steps: steps["causal"] | steps["mask_visible"]}),
        ("mask of some keys", "the given mask is not applied to keys of the past",
         _show(_past_keys)),
        ("mask of some keys", "the given mask is not applied to new keys",
         _show(lambda steps: ~_past_keys(steps))),
        ("key always visible", "key 0 is always visible, whatever the masks hide",
         {"visible": lambda visible, steps: visible | (_keys(steps) == 0)}),
        ("key always visible", "each query sees its own key, whatever the masks hide",
         {"visible": lambda visible, steps:
             visible | (_keys(steps) == _queries(steps) + steps["offset"])}),
        ("last key dropped", "the last key is not attended to",
         {"mask_visible": lambda allowed, steps: allowed & (_keys(steps) < len(_keys(steps)) - 1)}),
        ("first key dropped", "key 0 is not attended to",
         {"mask_visible": lambda allowed, steps: allowed & (_keys(steps) > 0)}),
        ("keys and values swapped", "keys are used as values, and values as keys",
         {"products": _products_with_values, "attended": _sums_of_keys})),
)  # fmt: skip
"""Faults of heads and masks."""


def _swap_heads(a: int, b: int) -> StepChange:
    def change(attended: Array, _: StepValues) -> Array:
        order = np.arange(attended.shape[1])
        order[[a, b]] = b, a
        return attended[:, order]

    return change


_MOST_SWAPPED = 32
"""The number of query heads, from the first on, of which every pair is tried."""

MANY_IN_ATTENTION: Final = rows(
    ANY,
    *(("swapped heads", f"the results of query heads {a} and {b} are swapped",
       {"attended": _swap_heads(a, b)})
      for a, b in itertools.combinations(range(_MOST_SWAPPED), 2)),
)  # fmt: skip
"""Pairs of heads. One with a head beyond those of the node is impossible."""
