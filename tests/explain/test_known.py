"""The table of known faults: a fault is planted for each kind, and rows differ."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from causes import CAUSES
from conftest import ROOT
from fault_specs import SPECS
from graph_faults import bundle_of
from graph_surgery import Graph
from named_causes import SPEC_OF, causes_of_fault, first_cause, first_cause_of

from attn_export.explain.faults.inputs import IN_PRODUCTS
from attn_export.explain.match import KNOWN, MANY, made_in
from attn_export.float64.evaluate import Evaluation

PLANTED_IN = (
    "explain/*_faults",
    "explain/test_known",
    "explain/test_planted_*",
    "judge/*_faults",
    "judge/causes",
    "parts/*/*_faults",
)
"""The files whose tests plant faults and require their cause by its kind."""


def planted() -> set[str]:
    """Return the texts of the files that plant faults."""
    files = [file for name in PLANTED_IN for file in (ROOT / "tests").glob(f"{name}.py")]
    return {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_each_kind_is_planted():
    assert {fault.kind for fault in (*KNOWN, *MANY)} <= planted()


def test_no_two_rows_say_the_same_of_a_place():
    said = Counter((fault.at, fault.kind, fault.effect) for fault in (*KNOWN, *MANY))
    assert [row for row, count in said.items() if count > 1] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"named {SPEC_OF[name]}"))
        for name in sorted(SPEC_OF, key=lambda name: [*SPECS].index(SPEC_OF[name]))
    ],
)
@pytest.mark.every(12)
def test_a_fault_of_attention_is_named_first(name: str):
    assert causes_of_fault(name)[:1] == [CAUSES[name]]


def test_an_order_of_inputs_that_is_left_out_is_named_first():
    bundle = bundle_of("plain")
    order = np.arange(32)[::-1].copy()
    right, wrong = (Graph(onnx.load(bundle / "model.onnx")) for _ in range(2))
    for graph in (right, wrong):
        graph.set_initializer("q_proj.weight", lambda weight: weight[order])
    product = right.one("MatMul", "q_proj/MatMul")
    right.before(product, 0, "Gather", right.constant(order, "q_proj.weight_order"), axis=-1)
    assert first_cause(bundle, right.model, wrong.model) == "input order"


@pytest.mark.parametrize(
    ("positions", "kind"),
    [(slice(0), "low precision"), (slice(None, None, 5), "")],
    ids=["every row is wrong", "each fifth position is right"],
)
def test_rounding_is_named_only_where_all_rows_are_wrong(positions: slice, kind: str):
    right = onnx.load(bundle_of("plain") / "model.onnx")
    mine = Evaluation(right)

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = mine.values(inputs)
        (rounding,) = made_in(IN_PRODUCTS[:1], mine, values)
        output = mine.outputs_of(values)["output"]
        error = mine.outputs_of(rounding.values(mine, values))["output"] - output
        error[:, positions] = 0.0
        return {"output": output + error}

    assert first_cause_of(bundle_of("plain"), right, run) == kind
