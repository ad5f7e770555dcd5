"""Graphs with a cache in place also run without shared buffers, as in a plain call of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import on
from graph_surgery import Graph
from onnx import helper
from shared import bundle_of, extended, report_of

from attn_export import Report, verify
from attn_export.commands.explain_bundle import ONLY_SEPARATE, explain
from attn_export.runtimes import worker
from attn_export.runtimes.protocol import SEPARATE_BUFFERS, Engine

BINDING = ("ort-cpu", "c", "cpp", "node")
ONE_QUERY, CAPACITY_16, BATCH_3 = ("query", 1, 1), ("past_key", 2, 16), ("query", 0, 3)
SIZES = {"one query": ONE_QUERY, "a capacity of 16": CAPACITY_16, "a batch of 3": BATCH_3}
"""An input, its axis and the size at which a planted graph is wrong."""


def reads_the_past_after_the_write(folder: Path, at: tuple[str, int, int]) -> Path:
    """Let attention read `past_key` at one size. With shared buffers it holds the new keys, too."""
    source, axis, size = at
    model = onnx.load(bundle_of("in-place") / "model.portable.onnx")
    graph = Graph(model)
    for node in graph.nodes:
        node.input[:] = ["read" if name == "present_key" else name for name in node.input]
    axis_name, size_name = (
        graph.constant(np.array(number), f"planted_{number_name}")
        for number_name, number in (("axis", axis), ("size", size))
    )
    planted = [
        helper.make_node("Shape", [source], ["shape"]),
        helper.make_node("Gather", ["shape", axis_name], ["length"]),
        helper.make_node("Equal", ["length", size_name], ["is_size"]),
        helper.make_node("Where", ["is_size", "past_key", "present_key"], ["read"]),
    ]
    written = next(n for n in graph.nodes if "present_key" in n.output)
    for number, node in enumerate(planted, graph.nodes.index(written) + 1):
        graph.insert(number, node)
    path = folder / "model.portable.onnx"
    onnx.save(model, path)
    return path


def failed_cases(report: Report) -> set[str]:
    failed = [verdict for verdict in report.verdicts if verdict.status == "failed"]
    assert all(v.message.startswith(SEPARATE_BUFFERS) for v in failed if v.message)
    return {verdict.case for verdict in failed}


@pytest.mark.parametrize("name", BINDING)
def test_a_graph_that_needs_shared_buffers_fails_in_each_runtime_that_binds(
    name: str, need: Callable[[str], None], tmp_path: Path
):
    need(name)
    graph = reads_the_past_after_the_write(tmp_path, ONE_QUERY)
    report = verify(bundle_of("in-place"), graph=graph, runtimes=[name])
    assert report.exit_code == 6
    assert "base" not in failed_cases(report), "it has several queries"
    assert "decode_300" in failed_cases(report)


@pytest.mark.parametrize("sizes", extended(SIZES, lambda name: name != "one query"))
def test_a_fault_at_one_size_shows_at_this_size_alone(sizes: str, tmp_path: Path):
    graph = reads_the_past_after_the_write(tmp_path, SIZES[sizes])
    report = verify(bundle_of("in-place"), graph=graph, runtimes=["ort-cpu"])
    cases = {verdict.case for verdict in report.verdicts}
    assert 0 < len(failed_cases(report)) < len(cases) / 2


def test_explain_locates_it_and_says_that_it_passes_with_shared_buffers(tmp_path: Path):
    graph = reads_the_past_after_the_write(tmp_path, ONE_QUERY)
    explanation = explain(bundle_of("in-place"), on("ort-cpu"), graph=graph, seconds=30)
    assert explanation.fault == "graph"
    assert ONLY_SEPARATE in explanation.notes
    assert set(explanation.smallest.items()) >= {("query_len", 1), ("batch", 1)}


def test_reports_name_the_second_run_where_a_cache_is_in_place():
    notes = {name: report_of(bundle_of(name))["notes"] for name in ("in-place", "append")}
    says = {name: any("separate ones" in note for note in of) for name, of in notes.items()}
    assert says == {"in-place": True, "append": False}


class Overwriting(Engine):
    """An engine that writes into its inputs whether or not outputs share their buffers."""

    def run(self, inputs, bound):  # noqa: ARG002
        inputs["past"] *= 2
        return {"present": inputs["past"].copy()}


def test_a_run_that_changes_an_input_of_its_own_buffer_is_an_error():
    with pytest.raises(RuntimeError, match="the run changed its input past"):
        worker._run_separately(
            Overwriting(dict, {}), {"past": np.ones(3), "other": np.full(2, np.nan)}
        )


def test_rows_after_the_last_new_one_are_not_compared_where_the_operator_leaves_them_unset():
    past = np.zeros((2, 1, 4, 2), np.int8)
    shared = past.copy()
    shared[0, :, 1:3] = 1  # batch element 0 has written rows 1 and 2, batch element 1 row 0
    shared[1, :, 0] = 1
    separate = {"present": np.where(shared, shared, 9).astype(np.int8)}
    worker._fill_unset_rows(separate, {"present": shared}, {"past": past}, {"present": "past"})
    assert separate["present"][0, 0, :, 0].tolist() == [9, 1, 1, 0]
    assert separate["present"][1, 0, :, 0].tolist() == [1, 0, 0, 0]
