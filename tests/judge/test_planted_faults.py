"""Tests of the judge and the cases: planted faults must be found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy_attention
import pytest
from fault import Fault
from fault_specs import SPECS
from faults import FAULTS

from attn_export.export.subject import Subject
from attn_export.judge.judge import judge
from attn_export.results import Case, Golden, Verdict
from attn_export.spec import AttentionSpec
from attn_export.truth.oracle import Oracle

BY_NAME = {fault.name: fault for fault in FAULTS}


def with_its_truth(spec_name: str) -> pytest.MarkDecorator:
    """Return the mark of tests of a spec, whose truth one process computes."""
    return pytest.mark.xdist_group(f"planted_{spec_name}")


EACH_SPEC = [pytest.param(spec_name, marks=with_its_truth(spec_name)) for spec_name in SPECS]


@functools.lru_cache
def subject_of(
    spec_name: str,
) -> tuple[AttentionSpec, dict[str, np.ndarray], dict[str, Case], Callable[[str], Golden]]:
    """Return a spec, the parameters of its module, its cases, and what gives the truth of each."""
    subject = Subject.from_spec(SPECS[spec_name])
    parameters = {name: tensor.numpy() for name, tensor in subject.module.state_dict().items()}
    cases = {case.name: case for case in subject.plan().cases}
    oracle = Oracle(subject)
    # Most faults show in one of the first cases: the truth of others is not computed.
    return SPECS[spec_name], parameters, cases, functools.cache(lambda n: oracle.usable(cases[n]))


def verdicts_of(
    spec_name: str, fault: Fault | None, wanted: Callable[[Case], bool] = lambda _: True
) -> Iterator[Verdict]:
    """Yield the verdicts on numpy attention with a fault, case by case."""
    spec, parameters, cases, golden_of = subject_of(spec_name)
    for name, case in cases.items():
        if wanted(case):
            golden = golden_of(name)
            at = fault.at if fault else None
            outputs = numpy_attention.run(spec, parameters, golden.case.inputs, at)
            yield from judge("numpy", "none", golden, outputs)


def is_caught(verdicts: Iterable[Verdict]) -> bool:
    return any(verdict.status == "failed" for verdict in verdicts)


@pytest.mark.parametrize("spec_name", EACH_SPEC)
@pytest.mark.every(14)
def test_without_a_fault_every_output_of_every_case_passes(spec_name):
    verdicts = list(verdicts_of(spec_name, None))
    assert [v for v in verdicts if v.status != "passed"] == []
    assert len(verdicts) == len(subject_of(spec_name)[2]) * len(SPECS[spec_name].output_shapes())


@pytest.mark.parametrize("spec_name", EACH_SPEC)
@pytest.mark.every(6)
def test_the_biases_are_not_zero_so_that_a_missing_one_can_show(spec_name):
    spec, parameters, *_ = subject_of(spec_name)
    biases = [array for name, array in parameters.items() if name.endswith("_proj.bias")]
    projections = ("q", "out") if spec.packed_qkv else ("q", "k", "v", "out")
    assert len(biases) == sum(spec.has_bias(name) for name in projections)
    assert all((np.abs(bias) > 0).all() for bias in biases)


@pytest.mark.parametrize(
    ("spec_name", "fault"),
    [
        pytest.param(
            spec_name, fault, id=f"{spec_name}-{fault.name}", marks=with_its_truth(spec_name)
        )
        for spec_name, spec in SPECS.items()
        for fault in FAULTS
        if fault.applies(spec)
    ],
)
@pytest.mark.every(8)
def test_a_planted_fault_is_caught(spec_name, fault):
    assert is_caught(verdicts_of(spec_name, fault)), f"not caught: {fault.about}"


def test_there_are_many_kinds_of_faults_and_each_applies_somewhere():
    assert len(FAULTS) >= 24
    assert len(BY_NAME) == len(FAULTS)
    for fault in FAULTS:
        assert any(fault.applies(spec) for spec in SPECS.values()), fault.name


def one_query_no_past(sizes: Mapping[str, int]) -> bool:
    return sizes["query_len"] == 1 and sizes["past_len"] == 0


def one_query(sizes: Mapping[str, int]) -> bool:
    return sizes["query_len"] == 1


def no_past(sizes: Mapping[str, int]) -> bool:
    return sizes["past_len"] == 0


def batch_of_one(sizes: Mapping[str, int]) -> bool:
    return sizes["batch"] == 1


def random_shapes(_: Mapping[str, int]) -> bool:
    return True


ANY_SPEC = "gqa_causal_cache_bool_mask"
BLIND = [
    (one_query_no_past, "causal_dropped", "one key, and it is the query's own"),
    (one_query_no_past, "causal_one_ahead", "there is no key after the first"),
    (one_query_no_past, "causal_without_past", "there is no past"),
    (one_query_no_past, "causal_drops_mask", "key 0 is visible in every random mask"),
    (one_query_no_past, "scale_twice", "the softmax of one score is 1"),
    (one_query_no_past, "softmax_bfloat16", "the softmax of one score is 1"),
    (one_query_no_past, "queries_reversed", "there is one query"),
    (one_query, "causal_dropped", "decoding sees all of the past"),
    (one_query, "causal_one_ahead", "decoding has no future"),
    (no_past, "causal_without_past", "nothing to be offset by"),
    (no_past, "past_after_new", "nothing to append to"),
    (batch_of_one, "mask_of_one_batch_row", "row 0 is all there is"),
    (batch_of_one, "past_of_one_batch_row", "row 0 is all there is"),
    (batch_of_one, "batch_reversed", "row 0 is all there is"),
    (random_shapes, "masked_row_is_mean", "random masks leave key 0 visible"),
    (random_shapes, "masked_row_is_nan", "random masks leave key 0 visible"),
]


BLIND_ELSEWHERE = [
    (batch_of_one, "packed_position_ids", "position_ids_of_row_0", "row 0 is all there is"),
    (one_query, "packed_position_ids", "position_ids_of_first_query", "there is one query"),
    (no_past, "packed_position_ids", "position_ids_after_past", "there is no past to be added"),
    (batch_of_one, "in_place", "one_length_for_all_rows", "row 0 is all there is"),
    (batch_of_one, "in_place", "written_where_row_0_is", "row 0 is all there is"),
    (no_past, "in_place", "written_at_0", "all rows begin at 0"),
    (no_past, "in_place", "causal_from_end_of_capacity", "there is no rest"),
]


@pytest.mark.parametrize(
    ("shapes", "fault_name", "why"), BLIND, ids=[f"{s.__name__}-{f}" for s, f, _ in BLIND]
)
@with_its_truth(ANY_SPEC)
def test_some_shapes_alone_are_blind_to_a_fault(shapes, fault_name, why):
    """Check that cases need many sizes, and contents besides."""
    assert_blind(ANY_SPEC, shapes, fault_name, why)


@pytest.mark.parametrize(
    ("shapes", "spec_name", "fault_name", "why"),
    [pytest.param(*row, marks=with_its_truth(row[1])) for row in BLIND_ELSEWHERE],
    ids=[f"{s.__name__}-{f}" for s, _, f, _ in BLIND_ELSEWHERE],
)
def test_some_shapes_alone_are_blind_to_a_fault_of_positions(shapes, spec_name, fault_name, why):
    assert_blind(spec_name, shapes, fault_name, why)


def assert_blind(
    spec_name: str, shapes: Callable[[Mapping[str, int]], bool], fault_name: str, why: str
) -> None:
    """Assert that cases of some shapes miss a fault that others find."""
    fault = BY_NAME[fault_name]
    seen = list(verdicts_of(spec_name, fault, lambda c: c.kind == "shape" and shapes(c.sizes)))
    assert seen
    assert not is_caught(seen), f"not blind after all, though {why}"
    assert is_caught(verdicts_of(spec_name, fault))
