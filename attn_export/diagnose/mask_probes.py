"""Probes of the keys that a query sees: causal alignment, windows, shared heads, masks.

And of odd inputs (NaN, infinities), and of axes of size 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_export.diagnose.findings import Probe, Readings, attend
from attn_export.diagnose.misreadings import READINGS
from attn_export.diagnose.probe_graphs import HKV, B, D, H, L, ProbeGraph, case_of_a_build, drawn
from attn_export.tensorfile import ArrayDict, lowest_number

# -- causal alignment, windows, shared heads ----------------------------------------------------

PLAIN = ProbeGraph("plain")
CAUSAL = ProbeGraph("causal", attributes={"is_causal": 1})
PAST = ProbeGraph("past", attributes={"is_causal": 1}, past=True)
LENGTHS = ProbeGraph("lengths", attributes={"is_causal": 1}, lengths=True, opset=24)

LEFT, RIGHT = 2, 1
WINDOW = ProbeGraph(
    "window", attributes={"left_window_size": LEFT, "right_window_size": RIGHT}, opset=25
)
LOCAL = 3
GROUPED = ProbeGraph(
    "window of GroupQueryAttention", past=True, grouped_query=True,
    attributes={"num_heads": H, "kv_num_heads": HKV, "local_window_size": LOCAL},
)  # fmt: skip

TOP_LEFT, BOTTOM_RIGHT, OFFSET = "keys to i", "keys to S-L+i", "keys to P+i"
ALL = "all keys"


def seen_keys() -> Iterator[Probe]:
    """Yield the probes of visible keys."""
    yield _causal()
    yield _causal_with_past()
    yield _causal_with_past_and_more_keys()
    yield _causal_with_lengths()
    yield _window()
    yield _local_window()
    yield _heads()


def _causal_readings(inputs: ArrayDict, *readings: str) -> dict[str, np.ndarray]:
    """Return the outputs of causal attention by reading; `OFFSET` is that of the specification."""
    return {name: attend(inputs, READINGS.get(name), is_causal=1) for name in readings}


def _causal() -> Probe:
    inputs = drawn("causal", queries=3, keys=5)
    return Probe(
        "causal, L < S", "is_causal with fewer queries than keys: what query i sees",
        CAUSAL, inputs, Readings(_causal_readings(inputs, TOP_LEFT, BOTTOM_RIGHT, ALL)),
        says=TOP_LEFT,
    )  # fmt: skip


def _causal_with_past() -> Probe:
    inputs = case_of_a_build("causal_future", past=True)
    return Probe(
        "causal, past", "is_causal with P keys of a past: what query i sees",
        PAST, inputs, Readings(_causal_readings(inputs, OFFSET, TOP_LEFT, ALL)), says=OFFSET,
    )  # fmt: skip


def _causal_with_past_and_more_keys() -> Probe:
    inputs = drawn("causal, past, more keys", queries=2, keys=4, past=2)
    return Probe(
        "past, L < new keys", "is_causal with a past and fewer queries than new keys", PAST, inputs,
        Readings(_causal_readings(inputs, OFFSET, TOP_LEFT, BOTTOM_RIGHT, ALL)), says=OFFSET,
    )  # fmt: skip


def _causal_with_lengths() -> Probe:
    inputs = drawn("causal, n keys", queries=2, keys=6)
    counted = inputs | {"lengths": np.array([4, 6], np.int64)}
    outputs = _causal_readings(inputs, TOP_LEFT, BOTTOM_RIGHT, ALL) | {
        "keys to n-L+i": attend(counted, is_causal=1),
        f"{BOTTOM_RIGHT}, < n": attend(counted, READINGS[BOTTOM_RIGHT], is_causal=1),
        "keys < n": attend(counted),
    }
    return Probe(
        "causal, n keys", "is_causal where nonpad_kv_seqlen says that n keys count",
        LENGTHS, counted, Readings(outputs), says="keys to n-L+i",
        not_in_pytorch="has no lengths",
    )  # fmt: skip


def _window() -> Probe:
    inputs = drawn("window", queries=6, keys=6)
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
        WINDOW, inputs, Readings(outputs), says=f"i-{LEFT} to i+{RIGHT}",
        not_in_pytorch="has no window",
    )  # fmt: skip


def _local_window() -> Probe:
    queries, P = 4, 3
    whole = drawn("local window", batch=1, queries=queries, keys=queries, past=P)
    windows = {f"{LOCAL} keys": LOCAL - 1, f"{LOCAL} and its own": LOCAL,
               "ignored: keys to P+i": -1}  # fmt: skip
    outputs = {
        name: _side_by_side(attend(whole, is_causal=1, left_window_size=left))
        for name, left in windows.items()
    }
    inputs = {name: _side_by_side(whole[name]) for name in ("query", "key", "value")}
    inputs |= {name: whole[name] for name in ("past_key", "past_value")}
    keys = P + queries
    inputs |= {"seqlens_k": np.array([keys - 1], np.int32), "total": np.array(keys, np.int32)}
    return Probe(
        "local_window_size 3", "local_window_size 3 of com.microsoft.GroupQueryAttention",
        GROUPED, inputs, Readings(outputs), not_in_pytorch="has no window",
    )  # fmt: skip


def _side_by_side(x: np.ndarray) -> np.ndarray:
    """Reshape `[B, heads, L, D]` to `[B, L, heads · D]`."""
    joined = x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
    return np.ascontiguousarray(joined)


def _heads() -> Probe:
    inputs = case_of_a_build("sharp")
    blocks = f"blocks: h // {H // HKV}"
    outputs = {
        blocks: attend(inputs),
        f"tiles: h % {HKV}": attend(inputs, READINGS["tiles"]),
        "the first": attend(inputs, READINGS["the first"]),
    }
    return Probe(
        "head sharing", f"which of {HKV} K/V heads query head h of {H} uses",
        PLAIN, inputs, Readings(outputs), says=blocks,
    )  # fmt: skip


# -- masks, odd inputs, axes of size 0 ----------------------------------------------------------

BOOL_MASK, FLOAT_MASK = ProbeGraph("bool mask", mask="bool"), ProbeGraph("float mask", mask="float")
CAP = 1.5
SOFTCAP = ProbeGraph("softcap", mask="float", attributes={"softcap": CAP})

ZERO, MEAN, NAN, FIRST = "0", "mean of values", "NaN", "first value"
IGNORED = "mask ignored"
HIDDEN, SPREADS = "hidden", "spreads"


def masks() -> Iterator[Probe]:
    """Yield the probes of masks."""
    bool_case = case_of_a_build("fully_masked_rows", mask="bool[B,1,L,S]")
    float_case = case_of_a_build("fully_masked_rows", mask="float[B,1,L,S]")
    lowest = case_of_a_build("lowest_float", mask="float[B,1,L,S]")
    yield Probe(
        "masked row, False", "rows of a bool mask that hide every key",
        BOOL_MASK, bool_case, _of_masked_rows(bool_case), says=ZERO,
    )  # fmt: skip
    yield Probe(
        "masked row, -inf", "rows of a float mask that are -inf for every key",
        FLOAT_MASK, float_case, _of_masked_rows(float_case), says=ZERO,
    )  # fmt: skip
    yield Probe(
        "finfo.min in mask", "a row of a float mask that is finfo.min for every key",
        FLOAT_MASK, lowest, _of_masked_rows(lowest), says=MEAN,
    )  # fmt: skip
    yield _softcap()
    yield from _nan_where_hidden()


def _of_masked_rows(inputs: ArrayDict) -> Readings:
    """Return the possible results of mask rows without a visible key, for every head."""
    mask, lowest = inputs["attn_mask"], lowest_number(np.dtype(np.float32))
    added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask
    added = np.where(added <= lowest, -np.inf, added)
    hidden = np.isneginf(added).all(axis=-1, keepdims=True)  # [B, 1, L, 1]
    masked = {**inputs, "attn_mask": added}
    outputs = {name: attend(masked, READINGS[name]) for name in (MEAN, NAN, FIRST)}
    unmasked = attend({**inputs, "attn_mask": np.where(hidden, 0.0, added)})
    return Readings({ZERO: attend(masked), **outputs, IGNORED: unmasked})


def _softcap() -> Probe:
    inputs = case_of_a_build("sharp", mask="float[B,1,L,S]")
    outputs = {
        "before the mask": attend(inputs, softcap=CAP),
        "after the mask": attend(inputs, READINGS["after the mask"], softcap=CAP),
        "no softcap": attend(inputs),
    }
    return Probe(
        "softcap", "whether scores are capped before a float mask is added, or after",
        SOFTCAP, inputs, Readings(outputs), says="before the mask",
        not_in_pytorch="has no softcap",
    )  # fmt: skip


def _nan_where_hidden() -> Iterator[Probe]:
    clean = case_of_a_build("right_padding", mask="bool[B,1,L,S]")
    whole = attend(clean)
    last = clean["key"].shape[2] - 1  # padding in every row of the batch
    readings = _of_nan(whole)
    for name in ("key", "value"):
        inputs = {**clean, name: clean[name].copy()}
        inputs[name][0, :, last] = np.nan
        yield Probe(
            f"NaN in hidden {name}", f"a {name} of NaN that the mask hides from every query",
            BOOL_MASK, inputs, readings,
        )  # fmt: skip


def _of_nan(whole: np.ndarray) -> Readings:
    """Return readings of a NaN in the keys or values of batch 0."""
    spread, zero = whole.copy(), whole.copy()
    spread[0], zero[0] = np.nan, 0.0
    return Readings(
        {HIDDEN: whole, SPREADS: spread, "spreads everywhere": np.full_like(whole, np.nan),
         "0 for its queries": zero}
    )  # fmt: skip


# -- probes of odd inputs: NaN and infinities that are seen, and axes of size 0 -----------------

EMPTY = "empty output"
HUGE = 1e20
"""A factor whose square is beyond float32, and within float64."""


def odd_inputs() -> Iterator[Probe]:
    """Yield the probes of odd inputs. Probes of size 0 come last, as they may end the process."""
    yield _nan_in_query()
    yield _infinite_score()
    yield _empty_past()
    yield _nothing("no batch, B = 0", "a batch of nothing", batch=0)
    yield _nothing("no query, L = 0", "no query", queries=0)
    yield _no_key()


def _nan_in_query() -> Probe:
    inputs = drawn("NaN in query")
    whole = attend(inputs)
    inputs["query"][0, 1, 2, 0] = np.nan
    return Probe(
        "NaN in a query", "a query with one NaN", PLAIN, inputs, _of_row(whole, {
            "NaN in its row": np.nan, "0 in its row": 0.0, "mean of values":
            inputs["value"][0, 0].mean(axis=0),
        }),
    )  # fmt: skip


def _of_row(whole: np.ndarray, rows: dict[str, np.ndarray | float]) -> Readings:
    """Return readings of the row of batch 0, head 1, query 2, or of NaN that comes from it."""
    outputs = {"NaN everywhere": np.full_like(whole, np.nan)}
    for name, row in rows.items():
        outputs[name] = whole.copy()
        outputs[name][0, 1, 2] = row
    return Readings(outputs)


def _infinite_score() -> Probe:
    inputs = drawn("infinite score")
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    # One query and one key whose product overflows, and which overflow with no other.
    query[0, 1, 2], key[0, 0, 1] = 0.0, 0.0
    query[0, :, :, 0] = 0.0
    query[0, 1, 2, 0] = key[0, 0, 1, 0] = HUGE
    whole = attend(inputs)
    return Probe(
        "infinite score", "a product of a query and a key beyond float32", PLAIN, inputs,
        _of_row(whole, {
            "NaN in its row": np.nan, "0 in its row": 0.0, "value of the key": whole[0, 1, 2],
            "mean of values": value[0, 0].mean(axis=0),
        }),
    )  # fmt: skip


def _empty_past() -> Probe:
    inputs = drawn("empty past")
    whole = attend(inputs, is_causal=1)
    empty = np.zeros((B, HKV, 0, D), np.float32)
    return Probe(
        "empty past, P = 0", "a past of no keys, with is_causal", PAST,
        {**inputs, "past_key": empty, "past_value": empty},
        Readings({"as without past": whole, "0": np.zeros_like(whole)}),
        says="as without past",
    )  # fmt: skip


def _nothing(name: str, about: str, *, batch: int = B, queries: int = L) -> Probe:
    inputs = drawn(name, batch=batch, queries=queries)
    shape = (batch, H, queries, D)
    return Probe(
        name, about, PLAIN, inputs, Readings({EMPTY: np.zeros(shape, np.float32)}), says=EMPTY
    )


def _no_key() -> Probe:
    inputs = drawn("no key", keys=0)
    shape = (B, H, L, D)
    return Probe(
        "no key, S = 0", "queries that have no keys at all", PLAIN, inputs,
        Readings({"0": np.zeros(shape), "NaN": np.full(shape, np.nan),
                  EMPTY: np.zeros((B, H, 0, D))}),
    )  # fmt: skip
