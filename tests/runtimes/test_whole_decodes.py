"""Whole decodes in each graph and runtime, and the faults that only they find."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoded import JUDGED, Arrays, bundle_of
from onnx import helper
from shared import report_of

from attn_export import verify
from attn_export.bundle.golden import read_golden, stored_cases
from attn_export.judge.judge import judge
from attn_export.results import WHOLE_DECODE, Golden, Verdict
from attn_export.runtimes import decode_steps
from attn_export.runtimes.engines.ort_cpu import OrtCpu
from attn_export.tensorfile import read_tensors

CASE = "decode_300"
ORT = ("model.onnx", "model.portable.onnx", "model.ort.onnx", "model.ort.decode.onnx")
REFERENCE = ("model.onnx", "model.portable.onnx")

Run = Callable[[Arrays], Arrays]


def test_every_graph_decodes_in_every_runtime():
    seen = [v for v in report_of(bundle_of(JUDGED))["verdicts"] if v["case"] == CASE]
    assert {v["status"] for v in seen} == {"passed"}
    assert {(v["runtime"], v["graph"]) for v in seen} == {
        *(("ort-cpu", graph) for graph in ORT), *(("onnx-reference", graph) for graph in REFERENCE),
    }  # fmt: skip
    outputs = {"output", "present_key", "present_value", "attn_weights"}
    assert {v["output"] for v in seen} == outputs
    assert len(seen) == len(outputs) * (len(ORT) + len(REFERENCE))


def test_the_index_says_which_case_is_a_decode_and_verify_replays_it():
    bundle = bundle_of(JUDGED)
    entries = json.loads((bundle / "golden" / "index.json").read_text())["cases"]
    assert [entry["name"] for entry in entries if entry["kind"] == WHOLE_DECODE] == [CASE]
    seen = [v for v in verify(bundle, runtimes=["ort-cpu"]).verdicts if v.case == CASE]
    assert {v.graph for v in seen} == set(ORT)
    assert {v.status for v in seen} == {"passed"}


def test_a_graph_that_fails_after_150_keys_fails_no_other_case(tmp_path: Path):
    bundle = bundle_of(JUDGED)
    model = onnx.load(bundle / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["at_most" if name == "past_length" else name for name in node.input]
    limit = helper.make_tensor("limit", onnx.TensorProto.INT64, [], [150])
    model.graph.initializer.append(limit)
    model.graph.node.insert(0, helper.make_node("Min", ["past_length", "limit"], ["at_most"]))
    onnx.save(model, tmp_path / "model.onnx")
    report = verify(bundle, graph=tmp_path / "model.onnx", runtimes=["ort-cpu"])
    assert report.exit_code == 6
    _, cases = stored_cases(bundle / "golden")
    beyond = {case.name for case in cases if case.sizes["past_len"] > 150}
    assert {v.case for v in report.verdicts if v.status == "failed"} == {CASE} | beyond


# -- planted faults, in this process ----------------------------------------------------------


def golden_of() -> tuple[Golden, Arrays]:
    folder = bundle_of(JUDGED) / "golden"
    inputs, cases = stored_cases(folder)
    (case,) = (case for case in cases if case.kind == WHOLE_DECODE)
    (golden,) = (golden for golden in read_golden(folder) if golden.case.name == case.name)
    return golden, read_tensors(case.folder, "input", inputs)


def judged(fault: Callable[[Run], Run]) -> list[Verdict]:
    """Return the verdicts on the standard graph with a fault around it."""
    golden, inputs = golden_of()
    engine = OrtCpu().load(bundle_of(JUDGED) / "model.onnx", threads=1)
    manifest = json.loads((bundle_of(JUDGED) / "manifest.json").read_text())
    axes = {n: e["shape"] for part in ("inputs", "outputs") for n, e in manifest[part].items()}
    outputs = decode_steps.decode(fault(lambda x: engine.run(x, {})), inputs, axes, {})
    return list(judge("ort-cpu", "model.onnx", golden, outputs))


def written_one_far(run: Run) -> Run:
    """Write one position too far from 100 keys on, if there is space."""

    def wrong(inputs: Arrays) -> Arrays:
        held, capacity = int(inputs["past_length"][0]), inputs["past_key"].shape[2]
        late = held > 100 and held + inputs["query"].shape[1] < capacity
        return run(inputs | {"past_length": inputs["past_length"] + late})

    return wrong


def on_growth(change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Run], Run]:
    """Return a fault in the copy of a growing buffer: `change(held before, grown)`."""

    def fault(run: Run) -> Run:
        last: Arrays = {}

        def wrong(inputs: Arrays) -> Arrays:
            for name in ("past_key", "past_value"):
                if name in last and last[name].shape != inputs[name].shape:
                    inputs = inputs | {name: change(last[name], inputs[name])}
            outputs = run(inputs)
            last.update({n: outputs[n.replace("past", "present")] for n in inputs if "past_" in n
                         and n != "past_length"})  # fmt: skip
            return outputs

        return wrong

    return fault


def copied_flat(held: np.ndarray, grown: np.ndarray) -> np.ndarray:
    """Copy as flat memory, ignoring the axes."""
    flat = np.zeros_like(grown)
    flat.reshape(-1)[: held.size] = held.reshape(-1)
    return flat


def without_last_key(held: np.ndarray, grown: np.ndarray) -> np.ndarray:
    grown = grown.copy()
    grown[:, :, held.shape[2] - 1] = 0
    return grown


FAULTS = {
    "written one far": written_one_far,
    "content lost": on_growth(lambda _, grown: np.zeros_like(grown)),
    "copied flat": on_growth(copied_flat),
    "rows exchanged": on_growth(lambda _, grown: grown[::-1].copy()),
    "last key lost": on_growth(without_last_key),
    "position 0 at each token": lambda run: (
        lambda x: run(x | {"past_length": x["past_length"] * 0})
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(fault: Callable[[Run], Run]):
    assert {v.status for v in judged(lambda run: run)} == {"passed"}
    failed = [verdict for verdict in judged(fault) if verdict.status == "failed"]
    assert failed
    assert {verdict.case for verdict in failed} == {CASE}


def test_a_replay_that_loses_the_buffers_when_they_grow_is_caught(monkeypatch: pytest.MonkeyPatch):
    fit = decode_steps._fit

    def losing(array: np.ndarray, axis: int, size: int) -> np.ndarray:
        fitted = fit(array, axis, size)
        return fitted * 0 if axis == 2 and size > array.shape[axis] else fitted  # of caches

    monkeypatch.setattr(decode_steps, "_fit", losing)
    assert "failed" in {verdict.status for verdict in judged(lambda run: run)}
