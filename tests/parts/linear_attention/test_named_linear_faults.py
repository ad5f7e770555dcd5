"""Known faults of linear attention are named, and so is their place."""

from __future__ import annotations

import functools

import numpy as np
import numpy_linear
import onnx_ir as ir
import pytest
from linear_faults import CAUSES, FAULTS
from linear_specs import LINEAR_SPECS
from named_causes import causes_of

from attn_export import Subject
from attn_export.export.export import export
from attn_export.float64.evaluate import Evaluation
from attn_export.results import Arrays

UNNAMED = {
    # A share above 1 that a state keeps makes it grow beyond all else.
    ("gated delta, mqa", "decay not exponentiated"),
    # Rounded states lead to others that round elsewhere.
    ("gated delta, gqa", "state in bfloat16"),
    ("delta of one rate, gqa", "state in bfloat16"),
    ("gated delta by channel", "state in bfloat16"),
    ("gated delta, mqa", "state in bfloat16"),
    # Few of the chosen cases have more than 16 tokens.
    *(
        (name, "new state at chunks of 16")
        for name in (
            "delta of one rate, gqa",
            "gated, gqa",
            "gated by channel, mqa",
            "gated delta, mqa",
        )
    ),
}
"""Specs and faults whose cause is not found."""

NAMED = [
    pytest.param(name, fault, marks=pytest.mark.xdist_group(f"mistaken {name}"))
    for fault in CAUSES
    for name, spec in LINEAR_SPECS.items()
    if FAULTS[fault][0](spec) and spec.has_state and (name, fault) not in UNNAMED
]


@functools.cache
def evaluated(name: str) -> tuple[Evaluation, Arrays, list[tuple[Arrays, Arrays]]]:
    """Return the graph of a spec, its weights, and the inputs of some cases with all values."""
    subject = Subject.from_spec(LINEAR_SPECS[name])
    evaluation = Evaluation(ir.to_proto(export(subject).model))
    cases = [c for c in subject.plan().cases if c.sizes["batch"] > 1 and not c.ignored_rows]
    chosen = sorted(cases, key=lambda case: case.sizes["query_len"])
    middle = [case for case in chosen if 4 < case.sizes["query_len"] < 40][::8]
    long = [case for case in chosen if 100 < case.sizes["query_len"] < 400][:1]
    inputs = [case.inputs for case in (*middle[:4], *long)]
    parameters = {n: tensor.numpy() for n, tensor in subject.module.state_dict().items()}
    return evaluation, parameters, [(given, evaluation.values(given)) for given in inputs]


def found(name: str, fault: str) -> list[str]:
    """Return the kinds of the faults that explain a fault, the best first."""
    evaluation, parameters, cases = evaluated(name)
    seen = []
    for inputs, values in cases:
        with np.errstate(all="ignore"):
            actual = numpy_linear.run(LINEAR_SPECS[name], parameters, inputs, FAULTS[fault][1])
        seen.append((values, actual))
    return causes_of(evaluation, seen)


@pytest.mark.parametrize(("name", "fault"), NAMED)
@pytest.mark.every(60)
def test_a_fault_is_named_first(name: str, fault: str):
    assert found(name, fault)[:1] == [CAUSES[fault]]
