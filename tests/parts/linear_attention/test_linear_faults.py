"""Planted faults of linear attention are caught by the judge over the cases of the specs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy_linear
import pytest
from default_share import long_cases
from linear_faults import FAULTS
from linear_specs import LINEAR_SPECS

from attn_export import Subject
from attn_export.judge.judge import judge
from attn_export.results import Case, Golden, Verdict
from attn_export.truth.oracle import Oracle

LEAST = 0.98
"""The share of faults that must be caught."""


@functools.cache
def subject_of(
    name: str,
) -> tuple[dict[str, np.ndarray], Mapping[str, Case], Callable[[str], Golden]]:
    """Return the parameters of a layer, its cases, and what gives the truth of each."""
    subject = Subject.from_spec(LINEAR_SPECS[name])
    parameters = {n: tensor.numpy() for n, tensor in subject.module.state_dict().items()}
    with long_cases():  # of more tokens than a chunk
        cases = {case.name: case for case in subject.plan().cases}
    oracle = Oracle(subject)
    return parameters, cases, functools.cache(lambda case: oracle.usable(cases[case]))


def verdicts_of(name: str, fault: str = "") -> Iterator[Verdict]:
    """Yield the verdicts on plain numpy with a fault, case by case."""
    parameters, cases, golden_of = subject_of(name)
    changes = FAULTS[fault][1] if fault else None
    # The longest cases show what happens at chunks.
    for case in sorted(cases, key=lambda case: cases[case].sizes["query_len"] > 60):
        golden = golden_of(case)
        with np.errstate(all="ignore"):
            given = numpy_linear.run(LINEAR_SPECS[name], parameters, golden.case.inputs, changes)
        yield from judge("numpy", "none", golden, given)


def applied(name: str) -> list[str]:
    return [fault for fault, (applies, _) in FAULTS.items() if applies(LINEAR_SPECS[name])]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"faulty {name}")) for name in LINEAR_SPECS],
)
def test_planted_faults_are_caught_and_the_reference_passes(name: str):
    assert [v for v in verdicts_of(name) if v.status != "passed"] == []
    missed = [
        fault
        for fault in applied(name)
        if all(verdict.status != "failed" for verdict in verdicts_of(name, fault))
    ]
    assert len(missed) <= (1 - LEAST) * len(applied(name)), missed


def test_there_are_many_faults_and_each_applies_somewhere():
    assert len(FAULTS) >= 60
    assert {fault for name in LINEAR_SPECS for fault in applied(name)} == set(FAULTS)
