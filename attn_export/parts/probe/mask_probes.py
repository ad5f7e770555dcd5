"""Probes of visible keys (causal alignment, windows, shared heads, masks) and of unusual inputs.

Unusual inputs hold NaN or infinities, or have axes of size 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_export.explain.match import READINGS
from attn_export.float64.attention_steps import join_heads
from attn_export.parts.probe.findings import Probe, attend
from attn_export.parts.probe.probe_graphs import (
    HKV,
    B,
    D,
    H,
    L,
    ProbeGraph,
    case_inputs,
    draw_inputs,
)
from attn_export.tensorfile import ArrayDict, lowest_number

PLAIN = ProbeGraph("plain")
CAUSAL = ProbeGraph("causal", attributes={"is_causal": 1})
PAST = ProbeGraph("past", attributes={"is_causal": 1}, past=True)
LENGTHS = ProbeGraph("lengths", attributes={"is_causal": 1}, lengths=True, opset=24)

LEFT, RIGHT = 2, 1
WINDOW = ProbeGraph(
    "window", attributes={"left_window_size": LEFT, "right_window_size": RIGHT}, opset=25
)
_LOCAL = 3
GROUPED = ProbeGraph(
    "window of GroupQueryAttention", past=True, operator="GroupQueryAttention",
    attributes={"num_heads": H, "kv_num_heads": HKV, "local_window_size": _LOCAL},
)  # fmt: skip

TOP_LEFT, BOTTOM_RIGHT, OFFSET = "keys to i", "keys to S-L+i", "keys to P+i"
ALL = "all keys"


def visible_key_probes() -> Iterator[Probe]:
    """Yield the probes of visible keys."""
    yield from _causal()
    yield _causal_with_lengths()
    yield _window()
    yield _local_window()
    yield _head_sharing()


def _causal_readings(inputs: ArrayDict, *readings: str) -> dict[str, np.ndarray]:
    """Compute the output of causal attention under each reading; `OFFSET` changes no step."""
    return {name: attend(inputs, READINGS.get(name), is_causal=1) for name in readings}


def _causal() -> Iterator[Probe]:
    inputs = draw_inputs("causal", queries=3, keys=5)
    yield Probe(
        "causal, L < S", "is_causal with fewer queries than keys: what query i sees",
        CAUSAL, inputs, _causal_readings(inputs, TOP_LEFT, BOTTOM_RIGHT, ALL),
        specified=TOP_LEFT,
    )  # fmt: skip
    inputs = case_inputs("causal_future", past=True)
    yield Probe(
        "causal, past", "is_causal with P keys of a past: what query i sees",
        PAST, inputs, _causal_readings(inputs, OFFSET, TOP_LEFT, ALL), specified=OFFSET,
    )  # fmt: skip
    inputs = draw_inputs("causal, past, more keys", queries=2, keys=4, past=2)
    yield Probe(
        "past, L < new keys", "is_causal with a past and fewer queries than new keys", PAST, inputs,
        _causal_readings(inputs, OFFSET, TOP_LEFT, BOTTOM_RIGHT, ALL), specified=OFFSET,
    )  # fmt: skip


def _causal_with_lengths() -> Probe:
    inputs = draw_inputs("causal, n keys", queries=2, keys=6)
    with_lengths = inputs | {"lengths": np.array([4, 6], np.int64)}
    outputs = _causal_readings(inputs, TOP_LEFT, BOTTOM_RIGHT, ALL) | {
        "keys to n-L+i": attend(with_lengths, is_causal=1),
        f"{BOTTOM_RIGHT}, < n": attend(with_lengths, READINGS[BOTTOM_RIGHT], is_causal=1),
        "keys < n": attend(with_lengths),
    }
    return Probe(
        "causal, n keys", "is_causal where nonpad_kv_seqlen says that n keys count",
        LENGTHS, with_lengths, outputs, specified="keys to n-L+i",
        not_in_pytorch="has no lengths",
    )  # fmt: skip


def _window() -> Probe:
    inputs = draw_inputs("window", queries=6, keys=6)
    outputs = {
        f"i-{left} to i+{right}" if right else f"i-{left} to i":
        attend(inputs, left_window_size=left, right_window_size=right)
        for left, right in ((LEFT, RIGHT), (LEFT - 1, RIGHT), (LEFT - 1, 0), (LEFT, 0))
    }  # fmt: skip
    outputs |= {
        f"i-{LEFT} on": attend(inputs, left_window_size=LEFT),
        "ignored: all keys": attend(inputs),
    }
    return Probe(
        "window 2, 1", "left_window_size 2 and right_window_size 1 of opset 25",
        WINDOW, inputs, outputs, specified=f"i-{LEFT} to i+{RIGHT}",
        not_in_pytorch="has no window",
    )  # fmt: skip


def _local_window() -> Probe:
    queries, P = 4, 3
    whole = draw_inputs("local window", batch=1, queries=queries, keys=queries, past=P)
    windows = {f"{_LOCAL} keys": _LOCAL - 1, f"{_LOCAL} and its own": _LOCAL,
               "ignored: keys to P+i": -1}  # fmt: skip
    outputs = {
        name: join_heads(attend(whole, is_causal=1, left_window_size=left))
        for name, left in windows.items()
    }
    inputs = {name: join_heads(whole[name]) for name in ("query", "key", "value")}
    inputs |= {name: whole[name] for name in ("past_key", "past_value")}
    keys = P + queries
    inputs |= {"seqlens_k": np.array([keys - 1], np.int32), "total": np.array(keys, np.int32)}
    return Probe(
        "local_window_size 3", "local_window_size 3 of com.microsoft.GroupQueryAttention",
        GROUPED, inputs, outputs, not_in_pytorch="has no window",
    )  # fmt: skip


def _head_sharing() -> Probe:
    inputs = case_inputs("sharp")
    blocks = f"blocks: h // {H // HKV}"
    outputs = {
        blocks: attend(inputs),
        f"tiles: h % {HKV}": attend(inputs, READINGS["tiles"]),
        "the first": attend(inputs, READINGS["the first"]),
    }
    return Probe(
        "head sharing", f"which of {HKV} K/V heads query head h of {H} uses",
        PLAIN, inputs, outputs, specified=blocks,
    )  # fmt: skip


# -- masks, odd inputs, axes of size 0 ----------------------------------------------------------

BOOL_MASK, FLOAT_MASK = ProbeGraph("bool mask", mask="bool"), ProbeGraph("float mask", mask="float")
_CAP = 1.5
SOFTCAP = ProbeGraph("softcap", mask="float", attributes={"softcap": _CAP})

ZERO, MEAN, NAN, FIRST = "0", "mean of values", "NaN", "first value"


def mask_probes() -> Iterator[Probe]:
    """Yield the probes of masks."""
    bool_case = case_inputs("fully_masked_rows", mask="bool[B,1,L,S]")
    float_case = case_inputs("fully_masked_rows", mask="float[B,1,L,S]")
    lowest = case_inputs("lowest_float", mask="float[B,1,L,S]")
    yield Probe(
        "masked row, False", "rows of a bool mask that hide every key",
        BOOL_MASK, bool_case, _masked_row_readings(bool_case), specified=ZERO,
    )  # fmt: skip
    yield Probe(
        "masked row, -inf", "rows of a float mask that are -inf for every key",
        FLOAT_MASK, float_case, _masked_row_readings(float_case), specified=ZERO,
    )  # fmt: skip
    yield Probe(
        "finfo.min in mask", "a row of a float mask that is finfo.min for every key",
        FLOAT_MASK, lowest, _masked_row_readings(lowest), specified=MEAN,
    )  # fmt: skip
    yield _softcap()
    yield from _nan_where_hidden()


def _masked_row_readings(inputs: ArrayDict) -> ArrayDict:
    """Return the readings of mask rows without a visible key; all heads have the same mask."""
    mask, lowest = inputs["attn_mask"], lowest_number(np.dtype(np.float32))
    added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask
    added = np.where(added <= lowest, -np.inf, added)
    hidden = np.isneginf(added).all(axis=-1, keepdims=True)  # [B, 1, L, 1]
    masked = {**inputs, "attn_mask": added}
    outputs = {name: attend(masked, READINGS[name]) for name in (MEAN, NAN, FIRST)}
    unmasked = attend({**inputs, "attn_mask": np.where(hidden, 0.0, added)})
    return {ZERO: attend(masked), **outputs, "mask ignored": unmasked}


def _softcap() -> Probe:
    inputs = case_inputs("sharp", mask="float[B,1,L,S]")
    outputs = {
        "before the mask": attend(inputs, softcap=_CAP),
        "after the mask": attend(inputs, READINGS["after the mask"], softcap=_CAP),
        "no softcap": attend(inputs),
    }
    return Probe(
        "softcap", "whether scores are capped before a float mask is added, or after",
        SOFTCAP, inputs, outputs, specified="before the mask",
        not_in_pytorch="has no softcap",
    )  # fmt: skip


def _nan_where_hidden() -> Iterator[Probe]:
    clean = case_inputs("right_padding", mask="bool[B,1,L,S]")
    expected = attend(clean)
    last = clean["key"].shape[2] - 1  # padding in every batch element
    readings = _nan_readings(expected)
    for name in ("key", "value"):
        inputs = {**clean, name: clean[name].copy()}
        inputs[name][0, :, last] = np.nan
        yield Probe(
            f"NaN in hidden {name}", f"a {name} of NaN that the mask hides from every query",
            BOOL_MASK, inputs, readings,
        )  # fmt: skip


def _nan_readings(expected: np.ndarray) -> ArrayDict:
    """Return the readings of a NaN in a hidden key or value of batch element 0."""
    spread, zeroed = expected.copy(), expected.copy()
    spread[0], zeroed[0] = np.nan, 0.0
    everywhere = np.full_like(expected, np.nan)
    return {
        "hidden": expected, "spreads": spread, "0 for its queries": zeroed,
        "spreads everywhere": everywhere,
    }  # fmt: skip


# -- probes of odd inputs: NaN and infinities that are seen, and axes of size 0 -----------------

_EMPTY = "empty output"
HUGE = 1e20
"""A number whose square overflows in float32, but not in float64."""


def odd_input_probes() -> Iterator[Probe]:
    """Yield the probes of unusual inputs. Those of size 0 come last: they may crash the process."""
    yield _nan_in_query()
    yield _infinite_score()
    yield _empty_past()
    yield _empty_axis("no batch, B = 0", "a batch of nothing", batch=0)
    yield _empty_axis("no query, L = 0", "no query", queries=0)
    yield _no_key()


def _nan_in_query() -> Probe:
    inputs = draw_inputs("NaN in query")
    expected = attend(inputs)
    inputs["query"][0, 1, 2, 0] = np.nan
    mean = inputs["value"][0, 0].mean(axis=0)
    results = {"NaN in its row": np.nan, "0 in its row": 0.0, MEAN: mean}
    readings = _single_query_readings(expected, results)
    return Probe("NaN in a query", "a query with one NaN", PLAIN, inputs, readings)


def _single_query_readings(
    expected: np.ndarray, values: dict[str, np.ndarray | float]
) -> ArrayDict:
    """Return readings of one query's result: element 0, head 1, query 2. NaN may spread to all."""
    outputs = {"NaN everywhere": np.full_like(expected, np.nan)}
    for name, value in values.items():
        outputs[name] = expected.copy()
        outputs[name][0, 1, 2] = value
    return outputs


def _infinite_score() -> Probe:
    inputs = draw_inputs("infinite score")
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    # The product of one query and one key overflows; no other product does.
    query[0, 1, 2], key[0, 0, 1] = 0.0, 0.0
    query[0, :, :, 0] = 0.0
    query[0, 1, 2, 0] = key[0, 0, 1, 0] = HUGE
    expected = attend(inputs)
    results = {
        "NaN in its row": np.nan, "0 in its row": 0.0, "value of the key": expected[0, 1, 2],
        MEAN: value[0, 0].mean(axis=0),
    }  # fmt: skip
    return Probe(
        "infinite score", "a product of a query and a key beyond float32", PLAIN, inputs,
        _single_query_readings(expected, results),
    )  # fmt: skip


def _empty_past() -> Probe:
    inputs = draw_inputs("empty past")
    expected = attend(inputs, is_causal=1)
    empty = np.zeros((B, HKV, 0, D), np.float32)
    return Probe(
        "empty past, P = 0", "a past of no keys, with is_causal", PAST,
        {**inputs, "past_key": empty, "past_value": empty},
        {"as without past": expected, "0": np.zeros_like(expected)},
        specified="as without past",
    )  # fmt: skip


def _empty_axis(name: str, about: str, *, batch: int = B, queries: int = L) -> Probe:
    inputs = draw_inputs(name, batch=batch, queries=queries)
    shape = (batch, H, queries, D)
    return Probe(
        name, about, PLAIN, inputs, {_EMPTY: np.zeros(shape, np.float32)}, specified=_EMPTY
    )


def _no_key() -> Probe:
    inputs = draw_inputs("no key", keys=0)
    shape = (B, H, L, D)
    return Probe(
        "no key, S = 0", "queries that have no keys at all", PLAIN, inputs,
        {"0": np.zeros(shape), "NaN": np.full(shape, np.nan),
                  _EMPTY: np.zeros((B, H, 0, D))},
    )  # fmt: skip
