"""Probes of masks: rows that see nothing, low scores, softcap, NaN in what is hidden."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attn_export.cases.draw import Arrays
from attn_export.fingerprint.attention_choices import attend, scores, shared, weigh
from attn_export.fingerprint.probe import Probe
from attn_export.fingerprint.probe_graphs import Graph
from attn_export.fingerprint.probe_inputs import case_of_a_build
from attn_export.fingerprint.readings import Readings
from attn_export.tensorfile import lowest_number

BOOL_MASK, FLOAT_MASK = Graph("bool mask", mask="bool"), Graph("float mask", mask="float")
CAP = 1.5
SOFTCAP = Graph("softcap", mask="float", attributes={"softcap": CAP})

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


def _of_masked_rows(inputs: Arrays) -> Readings:
    """Return the possible results of mask rows without a visible key, for every head."""
    query, key, value, mask = (inputs[name] for name in ("query", "key", "value", "attn_mask"))
    added = _as_added(mask)
    lowest = lowest_number(np.dtype(np.float32))
    hidden = np.all(added <= lowest, axis=-1, keepdims=True)  # [B, 1, L, 1]
    whole = weigh(scores(query, key) + np.where(hidden, 0.0, added), value)
    values = shared(value, query.shape[1])[:, :, None]  # [B, H, 1, S, Dv]
    in_place: dict[str, np.ndarray | float] = {
        ZERO: 0.0, MEAN: values.mean(axis=-2), NAN: np.nan, FIRST: values[..., 0, :],
        IGNORED: whole,
    }  # fmt: skip
    return Readings({name: np.where(hidden, row, whole) for name, row in in_place.items()})


def _as_added(mask: np.ndarray) -> np.ndarray:
    if mask.dtype == np.bool_:
        return np.where(mask, 0.0, -np.inf)
    return mask.astype(np.float64)


def _softcap() -> Probe:
    inputs = case_of_a_build("sharp", mask="float[B,1,L,S]")
    query, key, value, mask = (inputs[name] for name in ("query", "key", "value", "attn_mask"))
    found, added = scores(query, key), _as_added(mask)

    def capped(x: np.ndarray) -> np.ndarray:
        return CAP * np.tanh(x / CAP)

    outputs = {
        "before the mask": weigh(capped(found) + added, value),
        "after the mask": weigh(capped(found + added), value),
        "no softcap": weigh(found + added, value),
    }
    return Probe(
        "softcap", "whether scores are capped before a float mask is added, or after",
        SOFTCAP, inputs, Readings(outputs), says="before the mask",
        not_in_pytorch="has no softcap",
    )  # fmt: skip


def _nan_where_hidden() -> Iterator[Probe]:
    clean = case_of_a_build("right_padding", mask="bool[B,1,L,S]")
    whole = attend(*(clean[name] for name in ("query", "key", "value", "attn_mask")))
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
