"""Planted faults of linear attention are caught by the judge over the cases of the specs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy_linear
import pytest
from linear_faults import FAULTS
from linear_specs import LINEAR_SPECS

from attn_export import Subject
from attn_export.judge.judge import judge
from attn_export.reference.oracle import Oracle
from attn_export.results import Case, Golden, Verdict


@functools.cache
def subject_of(
    name: str,
) -> tuple[dict[str, np.ndarray], Mapping[str, Case], Callable[[str], Golden]]:
    """Return the parameters of a layer, its cases, and what gives the reference of each."""
    subject = Subject.from_spec(LINEAR_SPECS[name])
    parameters = {n: tensor.numpy() for n, tensor in subject.module.state_dict().items()}
    cases = {case.name: case for case in subject.plan().cases}
    oracle = Oracle(subject)
    return parameters, cases, functools.cache(lambda case: oracle.usable(cases[case]))


def verdicts_of(name: str, fault: str = "", *, most: float = math.inf) -> Iterator[Verdict]:
    """Yield the verdicts on plain numpy with a fault, case by case, up to `most` tokens."""
    parameters, cases, golden_of = subject_of(name)
    changes = FAULTS[fault][1] if fault else None
    # The longest cases show what happens at chunks.
    for case in sorted(cases, key=lambda case: cases[case].sizes["query_len"] > 60):
        if cases[case].sizes["query_len"] > most:
            return
        golden = golden_of(case)
        with np.errstate(all="ignore"):
            given = numpy_linear.run(LINEAR_SPECS[name], parameters, golden.case.inputs, changes)
        yield from judge("numpy", "none", golden, given)


def planted() -> dict[str, list[str]]:
    """Return faults by the spec that they are planted in: each once, in as few specs as can be."""
    found: dict[str, list[str]] = {}
    left = {*FAULTS}
    applied = {n: [f for f in FAULTS if FAULTS[f][0](spec)] for n, spec in LINEAR_SPECS.items()}
    while left:
        name = max(applied, key=lambda name: len(left.intersection(applied[name])))
        found[name] = [fault for fault in applied[name] if fault in left]
        left -= {*found[name]}
    return found


PLANTED = planted()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_caught_and_the_reference_passes(name: str):
    most = (
        math.inf if name == next(iter(PLANTED)) else 60
    )  # the reference of long cases takes seconds
    assert [v for v in verdicts_of(name, most=most) if v.status != "passed"] == []
    missed = [
        fault
        for fault in PLANTED[name]
        if all(verdict.status != "failed" for verdict in verdicts_of(name, fault))
    ]
    assert missed == []


def test_there_are_many_faults_and_each_applies_somewhere():
    assert len(FAULTS) >= 60
