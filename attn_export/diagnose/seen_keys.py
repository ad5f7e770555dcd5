"""Probes of the keys that a query sees: causal alignment, windows, shared heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_export.diagnose.findings import Probe, Readings, attend
from attn_export.diagnose.misreadings import READINGS
from attn_export.diagnose.probe_graphs import HKV, H, ProbeGraph, case_of_a_build, drawn
from attn_export.tensorfile import ArrayDict

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
