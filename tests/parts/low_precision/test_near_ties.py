"""Cases of a quantised cache: no key or value may become one of two integers by rounding alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from conftest import small_spec

from attn_export import Subject
from attn_export.attention.quantised_activations import DynamicInt8
from attn_export.results import Case
from attn_export.truth.oracle import Oracle

SPECS = {
    "per tensor": {"rotary": "half"},
    "by channel, norms": {"kv_scale": "per-channel", "qk_norm": "rms", "attn_mask": "none"},
    "by block": {"kv_dtype": "int4", "kv_scale": "per-block", "head_dim": 48},
}
PRODUCTS = {"weights_dtype": "int8", "activations": "dynamic-int8"}


def oracle_of(name: str, **more: str) -> Oracle:
    spec = small_spec(**{"cache": "in-place", "kv_dtype": "int8", **SPECS[name]}, **more)
    return Oracle(Subject.from_spec(spec))


def quotients(oracle: Oracle, case: Case) -> np.ndarray:
    """Return the new keys and values of a case, divided by their scales."""
    scales, found = oracle.precise.kv_scales, []

    def note(_: object, new: tuple[torch.Tensor, ...]) -> None:
        found.extend(part.values.flatten() for part in scales.quotients(*new))

    hook = scales.register_forward_pre_hook(note)
    oracle.truth(case.inputs)
    hook.remove()
    return torch.cat(found).detach().numpy()


def nearest_tie(values: np.ndarray) -> float:
    """Return the least distance from a tie of all values that are not clipped."""
    inside = values[np.abs(values) < 126]
    return float(np.abs(inside - (np.floor(inside) + 0.5)).min())


def base_of(oracle: Oracle) -> Case:
    return next(case for case in oracle.subject.plan().cases if case.name == "base")


@pytest.mark.parametrize("name", SPECS)
def test_integers_of_all_cases_are_those_of_eager(name: str):
    oracle = oracle_of(name)
    cases = [oracle.move_off_ties(case) for case in oracle.subject.plan().cases]
    assert None not in cases
    for case in cases:
        golden = oracle.golden(case)
        rows = [row for row in range(len(case.inputs["query"])) if row not in case.ignored_rows]
        for output in ("present_key", "present_value"):
            assert golden.expected[output].dtype == oracle.subject.spec.inputs()["past_key"].dtype
            assert golden.allowed[output] is None
            same = golden.eager[output][rows] == golden.expected[output][rows]
            assert same.all(), (case.name, output)


def test_queries_are_moved_away_from_ties_by_little():
    oracle = oracle_of("per tensor")
    (case,) = (c for c in oracle.subject.plan().cases if c.kind == "decode")
    before = nearest_tie(quotients(oracle, case))
    moved = oracle.move_off_ties(case)
    assert nearest_tie(quotients(oracle, moved)) > 2 * before
    difference = np.abs(moved.inputs["query"] - case.inputs["query"])
    assert 0 < difference.max() < 1e-2
    assert (difference.max(-1) == 0).mean() > 0.5, "tokens that are far from ties stay"
    for name in set(case.inputs) - {"query"}:
        assert moved.inputs[name] is case.inputs[name]
    assert oracle.move_off_ties(moved) is moved


def test_a_tie_to_the_last_bit_is_left():
    oracle = oracle_of("per tensor")
    case = base_of(oracle)
    with torch.no_grad():  # a value of each token is 5.5 whatever the query
        layer = oracle.precise.v_proj
        layer.weight[3] = 0.0
        layer.bias[3] = 5.5 * oracle.precise.kv_scales.v_scale
    assert oracle.move_off_ties(case) is None


def test_a_row_that_is_not_finite_is_left_alone():
    oracle = oracle_of("per tensor")
    case = base_of(oracle)
    query = case.inputs["query"].copy()
    query[1] = np.nan
    moved = oracle.move_off_ties(dataclasses.replace(case, inputs={**case.inputs, "query": query}))
    assert moved is not None
    assert np.isnan(moved.inputs["query"][1]).all()
    assert np.isfinite(moved.inputs["query"][0]).all()


def test_quantised_activations_move_by_whole_steps_until_the_cache_is_certain():
    oracle = oracle_of("per tensor", **PRODUCTS)
    case = oracle.move_off_ties(base_of(oracle))
    # The first key of a token becomes a number of steps and a half.
    first = quotients(oracle, case)[0]
    oracle.precise.kv_scales.k_scale *= first / (np.floor(first) + 0.5)
    assert nearest_tie(quotients(oracle, case)) < 1e-6
    moved = oracle.move_off_ties(case)
    assert nearest_tie(quotients(oracle, moved)) > 1e-6
    query, other = (torch.from_numpy(c.inputs["query"]).double() for c in (case, moved))
    steps = (query - other) / DynamicInt8().scales(query)
    assert steps[0, 0].abs().max() > 0.99
    assert (steps.round() - steps).abs().max() < 1e-4
    assert (steps == 0).all(-1).sum() > 1, "tokens that are far from ties stay"
    assert oracle.move_off_ties(moved) is moved
    assert oracle.golden(moved).expected["present_key"].dtype == np.int8


def test_a_tie_to_the_last_bit_is_left_with_quantised_activations_too():
    oracle = oracle_of("per tensor", **PRODUCTS)
    case = base_of(oracle)
    with torch.no_grad():
        layer = oracle.precise.v_proj
        layer.weight[3] = 0.0
        layer.bias[3] = 5.5 * oracle.precise.kv_scales.v_scale
    assert oracle.move_off_ties(case) is None
