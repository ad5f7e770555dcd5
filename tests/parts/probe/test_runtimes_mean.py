"""Measured readings of each runtime, with the reason for each difference from ONNX."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from shared import always, extended

from attn_export.parts.probe import run_probes
from attn_export.parts.probe.findings import ProbeRow
from attn_export.parts.probe.pytorch import PyTorch
from attn_export.parts.probe.run_probes import probe, probes
from attn_export.runtimes.catalogue import packages, required, runtime
from attn_export.runtimes.engines.ort_cpu import OrtCpu

Need = Callable[[str], None]

more = pytest.mark.skipif(
    os.environ.get("ATTN_EXPORT_MORE_RUNTIMES", "") in ("", "0"),
    reason="outside the default tests: ATTN_EXPORT_MORE_RUNTIMES=1",
)

ONNX = {
    "causal, L < S": "keys to i",
    "causal, past": "keys to P+i",
    "past, L < new keys": "keys to P+i",
    "causal, n keys": "keys to n-L+i",
    "window 2, 1": "i-2 to i+1",
    "local_window_size 3": "no such operator",
    "head sharing": "blocks: h // 2",
    "masked row, False": "0",
    "masked row, -inf": "0",
    "finfo.min in mask": "mean of values",
    "softcap": "before the mask",
    "NaN in hidden key": "spreads",  # NaN + -inf
    "NaN in hidden value": "spreads",  # 0 · NaN
    "precision": "float32",
    "precision, float16": "float16 scores",
    "small values": "kept",
    "small weights": "kept",
    "NaN in a query": "NaN in its row",
    "infinite score": "NaN in its row",
    "empty past, P = 0": "as without past",
    "no batch, B = 0": "empty output",
    "no query, L = 0": "empty output",
    # The evaluator takes the largest of no numbers, which numpy refuses.
    "no key, S = 0": "refused; portable: 0",
}
"""Readings of the reference evaluator."""

LINEAR = {
    "linear scale": "1/sqrt(D)",
    "linear heads": "blocks: h // 2",
    "linear, normalised": "as they are",
    "linear, own token": "with its own",
    "linear, state": "[D, Dv]",
    "linear chunk_size 2": "nothing",
    "decay, when": "before",
    "decay, of g": "exp(g)",
    "delta, found in": "the decayed state",
}
"""Readings of `LinearAttention` in the runtimes that have it."""

ORT_OF_LINEAR = "ort-cpu==1.32.0"
READINGS = {
    "ort-cpu": {
        "window 2, 1": "refused",  # opset 25 is newer than the operator that it has
        "local_window_size 3": "3 keys",  # its own counts
        "finfo.min in mask": "0; portable: mean of values",  # taken for -inf
        # Sizes of 0 are refused by the operator, and by a Reshape that would have to guess.
        "no batch, B = 0": "refused; portable: refused",
        "no query, L = 0": "refused; portable: empty output",
        "no key, S = 0": "refused; portable: 0",
    },
    "openvino": {
        "past, L < new keys": "keys to S-L+i; portable: keys to P+i",
        "window 2, 1": "ignored: all keys",
        "local_window_size 3": "3 keys",
        "NaN in hidden key": "0 for its queries",
        "NaN in hidden value": "0 for its queries",
        "precision, float16": "float32 scores; portable: float32 scores",  # by its hint
        "no key, S = 0": "0",
    },
    "opencv": {
        "causal, past": "refused; portable: keys to P+i",
        "past, L < new keys": "refused; portable: keys to P+i",
        "causal, n keys": "refused; portable: keys to n-L+i",
        "window 2, 1": "ignored: all keys",
        "masked row, False": "mean of values; portable: 0",
        "masked row, -inf": "NaN; portable: 0",
        "softcap": "after the mask; portable: before the mask",
        "NaN in hidden key": "hidden",
        "precision, float16": "float32 scores; portable: float32 scores",
        "empty past, P = 0": "refused; portable: as without past",
        "no batch, B = 0": "refused; portable: crashed",
        "no query, L = 0": "refused; portable: crashed",
        "no key, S = 0": "refused; portable: crashed",
    },
    "mnn": {
        "precision, float16": "refused",
        "no batch, B = 0": "refused",
        "no query, L = 0": "refused",
    },
    "iree": {"no batch, B = 0": "crashed"},
    # FlashSDPA of tract: Mask must be floating point.
    "tract": {
        "causal, L < S": "keys to S-L+i; portable: refused",
        "past, L < new keys": "keys to S-L+i; portable: keys to P+i",
        "causal, n keys": "refused; portable: keys to n-L+i",
        "window 2, 1": "ignored: all keys",
        "masked row, False": "refused; portable: 0",
        "masked row, -inf": "NaN; portable: 0",
        "softcap": "refused; portable: before the mask",
        "NaN in hidden key": "refused; portable: hidden",  # by a Where
        "NaN in hidden value": "refused; portable: spreads",
        "precision, float16": "float32 scores; portable: float16 scores",
        "no key, S = 0": "0",
    },
    ORT_OF_LINEAR: {"window 2, 1": "i-2 to i+1"},
}
"""Readings of runtimes where they are not the evaluator's, and of a version where not those."""

PORTABLE_ONLY = {
    "window 2, 1": "no such operator",
    "NaN in hidden key": "hidden",  # by a Where
    "no key, S = 0": "0",
}

ENGINES = {*packages(), "onnx-reference"}
MEAN = sorted({*always(), ORT_OF_LINEAR})
MORE = sorted(ENGINES - {*required()})
OF_THE_PROCESSOR = {"small values", "small weights"}
"""Probes of subnormal numbers: some processors keep them, others flush them to 0."""


def shown(row: ProbeRow) -> str:
    """Return the readings as text, with the dialect in front of all but the first."""
    first, *others = row.here
    return "; ".join([first.reading, *(f"{each.dialect}: {each.reading}" for each in others)])


def check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = runtime(name if name in ENGINES else OrtCpu.name)
    lacks_it = "refused" if "standard" in kind.dialects else "no such operator"
    has_it = name in ("onnx-reference", ORT_OF_LINEAR)
    linear = LINEAR if has_it else dict.fromkeys(LINEAR, lacks_it)
    portable = PORTABLE_ONLY if kind.dialects == {"portable"} else {}
    own = READINGS.get(OrtCpu.name if isinstance(kind, OrtCpu) else kind.name, {})
    wanted = ONNX | linear | portable | own | READINGS.get(name, {})
    monkeypatch.setattr(PyTorch, "unavailable", lambda _: "not run here")
    monkeypatch.setattr(
        run_probes, "REFERENCE", name
    )  # nor is the evaluator, but where it is meant
    found = {row.probe.name: shown(row) for row in probe(name).rows}
    assert found.keys() == wanted.keys() == {each.name for each in probes()}
    for small in OF_THE_PROCESSOR:
        assert found.pop(small) in ("kept", "flushed to 0")
    assert found == {key: value for key, value in wanted.items() if key in found}


@pytest.mark.parametrize("name", extended(MEAN, lambda name: name != "wasm"))
@pytest.mark.every(3)
def test_a_runtime_means_what_was_measured(name: str, need: Need, monkeypatch):
    need(name)
    check(name, monkeypatch)


@more
@pytest.mark.parametrize("name", MORE)
def test_a_further_runtime_means_what_was_measured(name: str, need: Need, monkeypatch):
    need(name)
    check(name, monkeypatch)


def test_all_sides_run_and_differences_are_named():
    rows = {row.probe.name: row for row in probe(OrtCpu.name).rows}
    for row in rows.values():
        if row.probe.specified and row.evaluator is not None:
            assert row.evaluator.reading == row.probe.specified, row.probe.name
    past = rows["causal, past"]
    assert (past.probe.specified, past.pytorch.reading, past.differs) == (
        "keys to P+i", "keys to i", ("pytorch",)
    )  # fmt: skip
    assert rows["finfo.min in mask"].differs == ("onnx", "pytorch")
    assert rows["head sharing"].differs == ()
    assert rows["softcap"].pytorch.reading == "has no softcap"
    assert rows["precision"].effective.detail.startswith("bits: query 2")
    window = rows["window 2, 1"]
    assert window.differs == ()
    assert "InvalidGraph" in window.here[0].detail
    assert "/attn-export-" not in window.here[0].detail
