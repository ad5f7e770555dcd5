"""Probes of the keys that a query sees: causal alignment, windows, shared heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from attn_export.fingerprint.attention_choices import attend, scores, up_to, weigh
from attn_export.fingerprint.findings import Probe
from attn_export.fingerprint.probe_graphs import HKV, H, ProbeGraph
from attn_export.fingerprint.probe_inputs import case_of_a_build, drawn, with_past
from attn_export.fingerprint.readings import Readings
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


def _readings(inputs: ArrayDict, seen: Mapping[str, np.ndarray | None]) -> Readings:
    key, value = with_past(inputs)
    return Readings(
        {name: attend(inputs["query"], key, value, keys) for name, keys in seen.items()}
    )


def _causal() -> Probe:
    queries, keys = 3, 5
    inputs, i = drawn("causal", queries=queries, keys=keys), np.arange(queries)
    seen = {
        TOP_LEFT: up_to(i, keys), BOTTOM_RIGHT: up_to(keys - queries + i, keys), ALL: None,
    }  # fmt: skip
    return Probe(
        "causal, L < S", "is_causal with fewer queries than keys: what query i sees",
        CAUSAL, inputs, _readings(inputs, seen), says=TOP_LEFT,
    )  # fmt: skip


def _causal_with_past() -> Probe:
    inputs = case_of_a_build("causal_future", past=True)
    P, i = inputs["past_key"].shape[2], np.arange(inputs["query"].shape[2])
    keys = P + len(i)
    seen = {OFFSET: up_to(P + i, keys), TOP_LEFT: up_to(i, keys), ALL: None}
    return Probe(
        "causal, past", "is_causal with P keys of a past: what query i sees",
        PAST, inputs, _readings(inputs, seen), says=OFFSET,
    )  # fmt: skip


def _causal_with_past_and_more_keys() -> Probe:
    queries, new, P = 2, 4, 2
    inputs = drawn("causal, past, more keys", queries=queries, keys=new, past=P)
    i, keys = np.arange(queries), P + new
    seen = {
        OFFSET: up_to(P + i, keys), TOP_LEFT: up_to(i, keys),
        BOTTOM_RIGHT: up_to(keys - queries + i, keys), ALL: None,
    }  # fmt: skip
    return Probe(
        "past, L < new keys", "is_causal with a past and fewer queries than new keys",
        PAST, inputs, _readings(inputs, seen), says=OFFSET,
    )  # fmt: skip


def _causal_with_lengths() -> Probe:
    queries, keys, n = 2, 6, np.array([4, 6], np.int64)
    inputs, i = drawn("causal, n keys", queries=queries, keys=keys), np.arange(queries)
    inputs["lengths"] = n
    counted = (np.arange(keys) < n[:, None])[:, None, None]  # [B, 1, 1, S]
    last = keys - queries + i
    seen = {
        "keys to n-L+i": up_to((n[:, None] - queries + i)[:, None], keys),
        TOP_LEFT: up_to(i, keys),
        f"{BOTTOM_RIGHT}, < n": up_to(last, keys) & counted,
        BOTTOM_RIGHT: up_to(last, keys),
        "keys < n": np.broadcast_to(counted, (len(n), 1, queries, keys)),
        ALL: None,
    }
    return Probe(
        "causal, n keys", "is_causal where nonpad_kv_seqlen says that n keys count",
        LENGTHS, inputs, _readings(inputs, seen), says="keys to n-L+i",
        not_in_pytorch="has no lengths",
    )  # fmt: skip


def _between(first: np.ndarray, last: np.ndarray, keys: int) -> np.ndarray:
    return np.asarray(up_to(last, keys) & ~up_to(first - 1, keys))


def _window() -> Probe:
    size = 6
    inputs, i = drawn("window", queries=size, keys=size), np.arange(size)
    seen = {
        f"i-{LEFT} to i+{RIGHT}": _between(i - LEFT, i + RIGHT, size),
        f"i-{LEFT - 1} to i+{RIGHT}": _between(i - LEFT + 1, i + RIGHT, size),
        f"i-{LEFT - 1} to i": _between(i - LEFT + 1, i + RIGHT - 1, size),
        f"i-{LEFT} to i": _between(i - LEFT, i, size),
        f"i-{LEFT} on": _between(i - LEFT, i + size, size),
        "ignored: all keys": None,
    }
    return Probe(
        "window 2, 1", "left_window_size 2 and right_window_size 1 of opset 25",
        WINDOW, inputs, _readings(inputs, seen), says=f"i-{LEFT} to i+{RIGHT}",
        not_in_pytorch="has no window",
    )  # fmt: skip


def _local_window() -> Probe:
    queries, P = 4, 3
    whole = drawn("local window", batch=1, queries=queries, keys=queries, past=P)
    keys, last = P + queries, P + np.arange(queries)
    seen = {
        f"{LOCAL} keys": _between(last - LOCAL + 1, last, keys),
        f"{LOCAL} and its own": _between(last - LOCAL, last, keys),
        "ignored: keys to P+i": up_to(last, keys),
    }
    outputs = {name: _side_by_side(output) for name, output in
               _readings(whole, seen).outputs.items()}  # fmt: skip
    inputs = {name: _side_by_side(whole[name]) for name in ("query", "key", "value")}
    inputs |= {name: whole[name] for name in ("past_key", "past_value")}
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
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    choices = {
        f"blocks: h // {H // HKV}": lambda h: h // (H // HKV),
        f"tiles: h % {HKV}": lambda h: h % HKV,
        "the first": lambda h: 0,  # noqa: ARG005
    }
    outputs = {
        name: weigh(scores(query, key, choice), value, None, choice)
        for name, choice in choices.items()
    }
    return Probe(
        "head sharing", f"which of {HKV} K/V heads query head h of {H} uses",
        PLAIN, inputs, Readings(outputs), says=f"blocks: h // {H // HKV}",
    )  # fmt: skip
