"""Cases of quantised activations: no value near a tie, or an allowed error that covers ties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import small_spec

from attn_export import Subject
from attn_export.measures import EPS_FLOAT32
from attn_export.parts.low_precision.rounding_sites import (
    Site,
    settled,
    sites_of,
    subtracting_zero_points,
)
from attn_export.results import BASE, Case
from attn_export.truth.oracle import Oracle
from attn_export.truth.rounding import RandomRounding

SPECS = {
    "cached": {"rotary": "half"},
    "cross": {"cross": True, "causal": False, "cache": "none", "kdim": 24},
    "by block": {"embed_dim": 64, "rotary": "half"},
}
FAR = 5e-7
"""A distance from ties, relative to the quotients: a division rounds by 6e-8."""


def oracle_of(name: str) -> Oracle:
    kind = ("int4", "dynamic-int8-per-block") if name == "by block" else ("int8", "dynamic-int8")
    spec = small_spec(weights_dtype=kind[0], activations=kind[1], **SPECS[name])
    return Oracle(Subject.from_spec(spec))


def quotients(oracle: Oracle, case: Case) -> list[np.ndarray]:
    """Return what a case quantises, divided by its scales."""
    sites = sites_of(oracle.precise, lambda: oracle.truth(case.inputs))
    return [site.parts[0].values.numpy() for site in sites]


def nearest_tie(values: np.ndarray) -> float:
    distances = np.abs(values - np.floor(values) - 0.5)
    return float((distances / np.maximum(np.abs(values), 0.5)).min())


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return oracle_of("cached")


def cases_of(oracle: Oracle) -> list[Case]:
    return [case for case in oracle.subject.plan().cases if case.inputs["query"].shape[1] < 100]


@pytest.mark.parametrize("name", SPECS)
def test_most_cases_are_certain_and_none_has_inputs_near_a_tie(name: str):
    oracle = oracle_of(name)
    cases = cases_of(oracle)[::2]
    moved = [case for case in map(oracle.move_off_ties, cases) if case is not None]
    assert len(moved) > 0.95 * len(cases)
    goldens = [oracle.golden(case) for case in moved]
    certain = [golden for golden in goldens if not golden.rows_near_ties]
    assert len(certain) > 0.9 * len(goldens)
    for golden in goldens:
        if golden.case.ignored_rows:
            continue
        *inputs, attended = quotients(oracle, golden.case)
        assert min(map(nearest_tie, inputs)) > FAR, golden.case.name
        if not golden.rows_near_ties:
            assert nearest_tie(attended) > FAR, golden.case.name
        assert not golden.unusable
    assert np.median([golden.allowed["output"].whole for golden in certain]) < 2e-6


def planted(oracle: Oracle) -> Case:
    """Return a case with one value of the last projection's input on a tie."""
    # Of one size, whatever is planned: a step is a larger part of an output of fewer rows.
    case = next(c for c in cases_of(oracle) if c.name == BASE)
    case = oracle.move_off_ties(case)
    low, high = (case.inputs["past_value"][1, 0, :, 3] * s for s in (1.0, 1.3))

    def value(share: float) -> tuple[Case, float]:
        past = case.inputs["past_value"].copy()
        past[1, 0, :, 3] = low + np.float32(share) * (high - low)
        other = dataclasses.replace(case, inputs={**case.inputs, "past_value": past})
        return other, float(quotients(oracle, other)[-1][1, -1, 3])

    ends = value(0.0), value(1.0)
    tie = np.floor(min(ends[0][1], ends[1][1]) + 0.5) + 0.5
    assert tie < max(ends[0][1], ends[1][1])
    below, above = (0.0, 1.0) if ends[0][1] < ends[1][1] else (1.0, 0.0)
    for _ in range(40):
        middle = (below + above) / 2
        below, above = (middle, above) if value(middle)[1] < tie else (below, middle)
    return value(below)[0]


def error_of_the_other_integer(oracle: Oracle, case: Case) -> float:
    """Return the relative error of the output if the value on a tie is rounded the other way."""
    truth = oracle.truth(case.inputs)["output"]
    sites = sites_of(oracle.precise, lambda: oracle.truth(case.inputs))
    last = quotients(oracle, case)[-1]
    tied = np.abs(last - np.floor(last) - 0.5) < 1e-5
    assert tied.any()
    rounding, (x,) = sites[-1].rounding, sites[-1].values
    other = x + 1e-4 * torch.from_numpy(tied) * rounding.scales(x)
    with settled([*sites[:-1], Site(rounding, (other,))], oracle.precise):
        changed = oracle.truth(case.inputs)["output"]
    return float(np.linalg.norm(changed - truth) / np.linalg.norm(truth))


def test_a_value_on_a_tie_allows_its_step_and_is_moved_where_that_is_wanted(oracle: Oracle):
    case = planted(oracle)
    golden = oracle.golden(case)
    assert golden.rows_near_ties >= 1
    error = error_of_the_other_integer(oracle, case)
    allowed = golden.allowed["output"].whole
    # The other integer is as right, several steps are wrong.
    assert error <= allowed < 3 * error
    # Queries and keys of the cache are certain.
    assert golden.allowed["present_key"].whole < 1e-6
    moved = oracle.move_off_ties(case)
    assert not oracle.golden(moved).rows_near_ties


def test_eager_counts_as_rounded_to_the_integers_of_the_truth(oracle: Oracle):
    case = planted(oracle)
    golden = oracle.golden(case)
    own = oracle.eager(case.inputs)["output"]
    assert np.array_equal(golden.eager["output"], own)
    step = np.linalg.norm(own - golden.expected["output"]) / np.linalg.norm(own)
    # Were a step of eager's own counted, it would be allowed four times.
    error = error_of_the_other_integer(oracle, case)
    assert golden.allowed["output"].whole < 1e-5 + 2 * max(step, error)


def test_inputs_that_are_not_finite_have_no_integers(oracle: Oracle):
    case = cases_of(oracle)[0]
    query = case.inputs["query"].copy()
    query[0, 0, 0] = np.inf
    spoilt = dataclasses.replace(case, inputs={**case.inputs, "query": query})
    assert oracle.move_off_ties(spoilt) is None


def test_runs_at_random_subtract_zero_points_where_products_nearly_cancel():
    oracle = oracle_of("by block")
    layer = oracle.precise.k_proj.requires_grad_(requires_grad=False)
    alike = torch.full((1, 1, 64), 0.7, dtype=torch.float64)
    with subtracting_zero_points(oracle.precise):
        exact = layer(alike)
        with RandomRounding(EPS_FLOAT32, EPS_FLOAT32, 1):
            apart = layer(alike)
    assert relative_error(exact, layer(alike)) < 1e-12  # they are right all the same
    with RandomRounding(EPS_FLOAT32, EPS_FLOAT32, 1):
        plain = layer(alike)
    assert relative_error(apart, exact) > 2 * relative_error(plain, exact)


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).norm() / y.norm())
