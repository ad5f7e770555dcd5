"""Tests of the judge and the cases: planted faults must be found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy_attention
import pytest
from fault import Fault
from fault_specs import SPECS
from faults import FAULTS

from attn_export.export.subject import Subject
from attn_export.judge.judge import judge
from attn_export.reference.oracle import Oracle
from attn_export.results import Case, Golden, Verdict
from attn_export.spec import AttentionSpec

BY_NAME = {fault.name: fault for fault in FAULTS}


def with_its_reference(spec_name: str) -> pytest.MarkDecorator:
    """Return the mark of tests of a spec, whose reference one process computes."""
    return pytest.mark.xdist_group(f"planted_{spec_name}")


EACH_SPEC = [pytest.param(spec_name, marks=with_its_reference(spec_name)) for spec_name in SPECS]


@functools.lru_cache
def subject_of(
    spec_name: str,
) -> tuple[AttentionSpec, dict[str, np.ndarray], dict[str, Case], Callable[[str], Golden]]:
    """Return a spec, the parameters of its module, its cases, and what gives the reference of
    each."""
    subject = Subject.from_spec(SPECS[spec_name])
    parameters = {name: tensor.numpy() for name, tensor in subject.module.state_dict().items()}
    cases = {case.name: case for case in subject.plan().cases}
    oracle = Oracle(subject)
    # Most faults show in one of the first cases: the reference of others is not computed.
    return SPECS[spec_name], parameters, cases, functools.cache(lambda n: oracle.usable(cases[n]))


def verdicts_of(spec_name: str, fault: Fault | None) -> Iterator[Verdict]:
    """Yield the verdicts on numpy attention with a fault, case by case."""
    spec, parameters, cases, golden_of = subject_of(spec_name)
    at = fault.at if fault else None
    for golden in map(golden_of, cases):
        outputs = numpy_attention.run(spec, parameters, golden.case.inputs, at)
        yield from judge("numpy", "none", golden, outputs)


def is_caught(verdicts: Iterable[Verdict]) -> bool:
    return any(verdict.status == "failed" for verdict in verdicts)


@pytest.mark.parametrize("spec_name", EACH_SPEC)
@pytest.mark.every(30)
def test_without_a_fault_every_output_of_every_case_passes(spec_name):
    verdicts = list(verdicts_of(spec_name, None))
    assert [v for v in verdicts if v.status != "passed"] == []
    assert len(verdicts) == len(subject_of(spec_name)[2]) * len(SPECS[spec_name].output_shapes())


@pytest.mark.parametrize(
    ("spec_name", "fault"),
    [
        pytest.param(
            spec_name, fault, id=f"{spec_name}-{fault.name}", marks=with_its_reference(spec_name)
        )
        for spec_name, spec in SPECS.items()
        for fault in FAULTS
        if fault.applies(spec)
    ],
)
@pytest.mark.every(60)
def test_a_planted_fault_is_caught(spec_name, fault):
    assert is_caught(verdicts_of(spec_name, fault)), f"not caught: {fault.about}"


def test_there_are_many_kinds_of_faults_and_each_applies_somewhere():
    assert len(FAULTS) >= 24
    assert len(BY_NAME) == len(FAULTS)
    for fault in FAULTS:
        assert any(fault.applies(spec) for spec in SPECS.values()), fault.name
