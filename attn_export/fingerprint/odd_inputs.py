"""Probes of odd inputs: NaN and infinities that are seen, and axes of size 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_export.fingerprint.attention_choices import attend, shared
from attn_export.fingerprint.probe import Probe
from attn_export.fingerprint.probe_graphs import HKV, D, H
from attn_export.fingerprint.probe_inputs import B, L, drawn
from attn_export.fingerprint.readings import Readings
from attn_export.fingerprint.seen_keys import PAST, PLAIN

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
    whole = attend(inputs["query"], inputs["key"], inputs["value"])
    inputs["query"][0, 1, 2, 0] = np.nan
    return Probe(
        "NaN in a query", "a query with one NaN", PLAIN, inputs, _of_row(whole, {
            "NaN in its row": np.nan, "0 in its row": 0.0, "mean of values":
            shared(inputs["value"], H)[0, 1].mean(axis=0),
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
    whole = attend(query, key, value)
    return Probe(
        "infinite score", "a product of a query and a key beyond float32", PLAIN, inputs,
        _of_row(whole, {
            "NaN in its row": np.nan, "0 in its row": 0.0, "value of the key": whole[0, 1, 2],
            "mean of values": value[0, 0].mean(axis=0),
        }),
    )  # fmt: skip


def _empty_past() -> Probe:
    inputs = drawn("empty past")
    whole = attend(inputs["query"], inputs["key"], inputs["value"], np.tri(L, dtype=np.bool_))
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
