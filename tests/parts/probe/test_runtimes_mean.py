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
READINGS = {ORT_OF_LINEAR: {"window 2, 1": "i-2 to i+1"}}
"""Readings of a version that the runtime's own do not hold for."""

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
    wanted = ONNX | linear | portable | kind.readings | READINGS.get(name, {})
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
