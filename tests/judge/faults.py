"""Planted faults: changes that make attention wrong, each of which the judge must catch.

A fault changes one step, or a few, of `numpy_attention.run`. `applies` says for which specs it
is a fault, so that no spec is left out without a reason.
"""

from __future__ import annotations

import fault_changes as c
import ml_dtypes
import numpy as np
from added_key_faults import ADDED_KEYS
from fault import (
    Fault,
    bool_mask,
    both,
    float_mask,
    gives_weights,
    has_added_keys,
    has_bias,
    has_cache,
    has_norm,
    has_rotary,
    in_place,
    is_causal,
    is_causal_with_past,
    mask_has,
    no,
    one_width,
    scales,
    several_kv_heads,
    shares_some_heads,
)
from in_place_faults import IN_PLACE
from numpy_attention import softmax
from numpy_positions import offsets
from packing_faults import PACKING
from position_faults import POSITIONS
from score_faults import SCORES
from stretch_faults import STRETCHED

from attn_export.spec import AttentionSpec


def key_bias_shows(spec: AttentionSpec) -> bool:
    """Return whether the key bias has an effect.

    q·b is the same for every new key, and softmax ignores constants that are added to all scores:
    without a past, keys of no token, a norm or a rotation, no output depends on the key bias.
    """
    return spec.has_cache or has_added_keys(spec) or has_norm(spec) or has_rotary(spec)


def masks_rows(spec: AttentionSpec) -> bool:
    """Return whether some case masks whole rows, without an added key to see."""
    return mask_has("S")(spec) and not has_added_keys(spec)


def scores_overflow(spec: AttentionSpec) -> bool:
    """Return whether exp overflows (at 88): only external keys reach that in the loudest probe."""
    return spec.has_cache and not has_norm(spec) and spec.softcap is None


SCALE = (
    Fault("scale_of_wider_head", "1/sqrt(D + 1)", {"scale": c.of_width(lambda D: (D + 1) ** -0.5)}),
    Fault(
        "scale_of_narrower_head", "1/sqrt(D - 1)", {"scale": c.of_width(lambda D: (D - 1) ** -0.5)}
    ),
    Fault("scale_twice", "q scaled, then the scores", {"scale": c.value(np.square)}, scales),
    Fault("scale_missing", "scores as they are", {"scale": c.value(lambda _: 1.0)}, scales),
    Fault("scale_after_mask", "the mask scaled too", {"added": c.scaled}, both(float_mask, scales)),
)

HEADS = (
    Fault("heads_tiled", "h uses K/V head h % Hkv", {"kv_head": c.tiled}, shares_some_heads),
    Fault(
        "heads_swapped", "heads 0 and 1 swapped", {"attended": c.rows(np.s_[:, [0, 1]], c.swap(1))}
    ),
    Fault("heads_interleaved", "[Dv, H] merged for [H, Dv]", {"merged": c.interleaved}),
    Fault("heads_not_moved", "[B, H, L, Dv] reshaped, not transposed", {"merged": c.not_moved}),
    Fault("keys_for_values", "K and V swapped", {"kv": c.value(lambda kv: kv[::-1])}, one_width),
)

MASK = (
    Fault("mask_dropped", "every key visible", {"mask": c.value(c.all_visible)}, mask_has("S")),
    Fault("mask_inverted", "True = masked", {"mask": c.value(c.inverted)}, mask_has("S")),
    Fault(
        "mask_inverted_in_one_row",
        "of the last batch row, head and query",
        {"mask": c.rows(np.s_[-1, -1, -1], c.inverted)},
        mask_has("S"),
    ),
    Fault(
        "mask_of_one_batch_row", "row 0's for all", {"mask": c.value(c.first_of(0))}, mask_has("B")
    ),
    Fault("mask_of_one_head", "head 0's for all", {"mask": c.value(c.first_of(1))}, mask_has("H")),
    Fault(
        "mask_of_one_query", "query 0's for all", {"mask": c.value(c.first_of(2))}, mask_has("L")
    ),
    Fault(
        "mask_one_key_late",
        "shifted along S",
        {"mask": c.value(lambda m: np.roll(m, 1, axis=-1))},
        mask_has("S"),
    ),
    Fault(
        "mask_values_dropped",
        "a float mask read as bool",
        {"added": c.value(np.zeros_like)},
        float_mask,
    ),
    Fault(
        "mask_lowest_is_masked",
        "finfo.min taken for -inf",
        {"mask": c.value(c.lowest_to_inf)},
        # Beside a key that nothing hides, or a sink, both weigh 0.
        both(float_mask, no(has_added_keys), no(lambda spec: spec.sinks)),
    ),
    Fault(
        "masked_is_minus_10",
        "-10 for -inf",
        {"hidden_score": c.value(lambda _: np.float32(-10))},
        mask_has("S"),
    ),
    Fault(
        "last_key_dropped", "keys 0 to S - 2", {"visible": c.rows(np.s_[..., -1], np.zeros_like)}
    ),
)

CAUSAL = (
    Fault("causal_dropped", "every key visible", {"causal": c.value(np.ones_like)}, is_causal),
    Fault(
        "causal_one_ahead",
        "query i sees key P + i + 1",
        {"causal": c.causal(lambda P: P + 1)},
        is_causal,
    ),
    Fault(
        "causal_one_behind",
        "query i does not see key P + i",
        {"causal": c.causal(lambda P: P - 1)},
        is_causal,
    ),
    Fault(
        "causal_without_past",
        "query i sees keys up to i",
        {"causal": c.causal(lambda _: 0)},
        is_causal_with_past,
    ),
    Fault(
        "causal_drops_mask",
        "causal in place of the mask",
        {"visible": c.only_causal},
        both(is_causal, mask_has("S")),
    ),
)

MASKED_ROWS = (
    Fault(
        "masked_row_is_mean",
        "mean(V)",
        {"attn_weights": c.masked_rows(lambda S: 1 / S)},
        masks_rows,
    ),
    Fault(
        "masked_row_is_nan", "0/0", {"attn_weights": c.masked_rows(lambda _: np.nan)}, masks_rows
    ),
    Fault(
        "masked_row_is_first_value", "V[0]", {"attn_weights": c.first_of_masked_rows}, masks_rows
    ),
)

BIAS = (
    Fault(
        "no_q_bias_of_one_head",
        "the last",
        {"parameters": c.without_bias("q_proj", head=-1)},
        has_bias("q"),
    ),
    Fault(
        "no_k_bias_of_one_head",
        "the last",
        {"parameters": c.without_bias("k_proj", head=-1)},
        both(has_bias("k"), key_bias_shows),
    ),
    Fault(
        "no_v_bias_of_one_head",
        "the last",
        {"parameters": c.without_bias("v_proj", head=-1)},
        has_bias("v"),
    ),
    Fault(
        "no_output_bias", "all of it", {"parameters": c.without_bias("out_proj")}, has_bias("out")
    ),
    *(
        Fault(
            f"{name}_bias_of_q",
            "the bias of another projection",
            {"parameters": c.with_bias_of_q(f"{name}_proj")},
            both(has_bias("q"), no(has_bias(name)), key_bias_shows),
        )
        for name in "kv"
    ),
)

CACHE = (
    Fault("past_after_new", "new + past", {"parts": c.value(lambda parts: parts[::-1])}, has_cache),
    Fault(
        "past_hidden_in_one_batch_row", "the last", {"visible": c.hide_past_of_last_row}, has_cache
    ),
    Fault("past_of_one_batch_row", "row 0's for all", {"parts": c.past_of_first_row}, has_cache),
    Fault(
        "present_is_past",
        "nothing appended",
        c.output("present_key", lambda _, at: at["inputs"]["past_key"]),
        has_cache,
    ),
    Fault(
        "present_not_written",
        "zeros for the new keys",
        c.output("present_key", lambda k, at: c.from_position(at["P"], k)),
        has_cache,
    ),
    Fault(
        "presents_swapped",
        "present_key is present_value",
        c.output("present_key", lambda _, at: at["kv"][1]),
        has_cache,
    ),
)

SOFTMAX = (
    Fault("softmax_float16", "computed in float16", {"softmax": c.softmax_in(np.float16)}),
    Fault(
        "softmax_bfloat16", "computed in bfloat16", {"softmax": c.softmax_in(ml_dtypes.bfloat16)}
    ),
    Fault("softmax_over_queries", "the axis L for S", {"softmax": c.softmax_over_queries}),
    Fault("softmax_plus_one", "1 + the sum below the line", {"softmax": c.softmax_plus_one}),
    Fault(
        "softmax_not_shifted",
        "exp without the largest score",
        {"softmax": c.softmax_not_shifted},
        scores_overflow,
    ),
    Fault(
        "weights_are_scores",
        "attn_weights before softmax",
        c.output("attn_weights", lambda _, at: at["scores"]),
        gives_weights,
    ),
)

PRECISION = (
    Fault("tf32", "q and k in TensorFloat-32", {"q": c.value(c.tf32), "k": c.value(c.tf32)}),
    Fault("float16_values", "v in float16", {"v": c.value(c.through(np.float16))}),
    Fault("one_noisy_row", "1e-4 of one row", {"output": c.rows(np.s_[0, 0], c.noisy)}),
)

OUTPUTS = (
    Fault("one_nan", "in one element", {"output": c.rows(np.s_[0, -1, 0], lambda _: np.nan)}),
    Fault("one_infinity", "in one element", {"output": c.rows(np.s_[0, -1, -1], lambda _: np.inf)}),
    Fault("queries_reversed", "the last first", {"merged": c.value(c.swap(1))}),
    Fault("batch_reversed", "the last row first", {"output": c.value(c.swap(0))}),
    Fault("query_axis_first", "[L, B, E]", {"output": c.value(lambda y: y.swapaxes(0, 1))}),
    Fault("wrong_type", "float64", {"output": c.value(np.float64)}),
    Fault(
        "output_missing",
        "the last",
        {"outputs": c.value(lambda made: dict(list(made.items())[:-1]))},
    ),
    Fault(
        "output_extra",
        "one more",
        {"outputs": c.value(lambda made: made | {"scores": made["output"]})},
    ),
)

OF_SEVERAL = (
    Fault("kv_heads_reversed", "h uses the last for the first",
          {"kv_head": c.value(lambda heads: heads[::-1])}, several_kv_heads),
    Fault("one_kv_head", "0 for all", {"kv_head": c.value(np.zeros_like)}, several_kv_heads),
    Fault("heads_reversed", "the last first", {"attended": c.value(c.swap(1))}),
    Fault("heads_shifted", "that of h + 1", {"attended": c.value(lambda x: np.roll(x, -1, 1))}),
    Fault("k_bias_twice", "added twice", {"parameters": lambda w, _: {
        **w, "k_proj.bias": 2 * w["k_proj.bias"]}}, both(has_bias("k"), has_cache)),
    Fault("key_0_dropped", "keys from 1 on", {"visible": c.rows(np.s_[..., 0], np.zeros_like)}),
    Fault("causal_added", "keys up to the query alone",
          {"visible": lambda seen, at: seen & (offsets(at["P"], at["shape"]) <= 0)},
          both(no(is_causal), no(in_place))),
    Fault("own_key_alone", "one key each",
          {"causal": lambda _, at: offsets(at["P"], at["shape"]) == 0}, is_causal),
    Fault("causal_reversed", "keys from the query on",
          {"causal": lambda _, at: offsets(at["P"], at["shape"]) >= 0}, is_causal),
    Fault("mask_or_causal", "either shows a key",
          {"visible": lambda _, at: at["causal"] | at["mask"]}, both(is_causal, bool_mask)),
    Fault("mask_not_of_past", "keys of the past are seen",
          {"mask": lambda m, at: m | (np.arange(m.shape[-1]) < at["P"])},
          both(has_cache, bool_mask)),
    Fault("past_ignored", "new keys alone",
          {"visible": lambda seen, at: seen & (np.arange(seen.shape[-1]) >= at["P"])}, has_cache),
    Fault("past_of_keys_of_one_batch_row", "row 0's for all", {"parts": lambda parts, _: [
        (c.first_of(0)(parts[0][0]), parts[0][1]), parts[1]]}, has_cache),
    Fault("past_shifted", "values one key late", {"parts": lambda parts, _: [
        (parts[0][0], np.roll(parts[0][1], 1, 2)), parts[1]]}, has_cache),
    Fault("softmax_base_2", "2 for e", {"softmax": lambda _, at: softmax(
        at["scores"] * np.float32(np.log(2)))}, no(lambda spec: spec.sinks)),
    Fault("softmax_not_normalised", "no division", {"softmax": lambda w, _: np.nan_to_num(
        w / w.max(-1, keepdims=True))}, no(lambda spec: spec.sinks)),
    Fault("sink_of_0", "one more score", {"softmax": lambda _, at: softmax(
        at["scores"], sinks=np.zeros((1, 1, 1), np.float32))}, no(lambda spec: spec.sinks)),
)  # fmt: skip

FAULTS = (
    *SCALE, *HEADS, *MASK, *CAUSAL, *MASKED_ROWS, *BIAS, *CACHE, *SOFTMAX, *PRECISION, *OUTPUTS,
    *OF_SEVERAL, *POSITIONS, *STRETCHED, *SCORES, *PACKING, *ADDED_KEYS, *IN_PLACE,
)  # fmt: skip
"""All planted faults, by name."""
