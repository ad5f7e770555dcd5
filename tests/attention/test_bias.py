"""Biases of some projections: which parameters there are, and what they add."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from conftest import small_spec
from features import exact_module
from slow import draw_inputs, outputs_of

from attn_export.attention import Attention

PROJECTIONS = ("q", "k", "v", "out")
SUBSETS = [some for size in range(5) for some in combinations(PROJECTIONS, size)]


@pytest.mark.parametrize("some", SUBSETS, ids=",".join)
def test_projections_named_in_the_spec_have_a_bias_and_no_others(some: tuple[str, ...]) -> None:
    spec = small_spec(bias=list(some))
    state = Attention(spec).state_dict()
    weights = {f"{name}_proj.weight" for name in PROJECTIONS}
    assert set(state) == weights | {f"{name}_proj.bias" for name in some}
    assert [name for name in PROJECTIONS if spec.has_bias(name)] == list(some)


@pytest.mark.parametrize("some", SUBSETS, ids=",".join)
def test_missing_bias_is_a_bias_of_0(some: tuple[str, ...]) -> None:
    partial, full = (exact_module(small_spec(bias=bias)) for bias in (list(some), True))
    zeros = {f"{name}_proj.bias": torch.zeros_like(full.get_parameter(f"{name}_proj.bias"))
             for name in PROJECTIONS}  # fmt: skip
    full.load_state_dict(zeros | partial.state_dict())
    inputs = draw_inputs(partial.spec, 2, 4, 3)
    wanted = outputs_of(full, inputs)
    for name, actual in outputs_of(partial, inputs).items():
        torch.testing.assert_close(actual, wanted[name], rtol=1e-13, atol=1e-13)
