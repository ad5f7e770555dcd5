"""Faults in how integers are read as weights: reference 1 catches each, and its cause is named."""

from __future__ import annotations

import numpy as np
import pytest
import weight_faults as weights
from quantised_layers import (
    all_faults,
    assert_caught,
    assert_passes,
    cause_of,
    edited,
    of_fault,
    of_layer,
)

from attn_export.explain.faults.weights import WEIGHT_ROWS

# As many heads for keys, so that a weight may be read transposed.
SQUARE = {"num_kv_heads": 4}
TWO_BLOCKS = {"embed_dim": 64}
LAYERS = {
    "int4": edited(
        {**SQUARE, **TWO_BLOCKS, "weights_dtype": "int4"}, weights.ANY | weights.OF_NIBBLES
    ),
    "int8": edited({**SQUARE, "weights_dtype": "int8"}, weights.ANY),
}


FAULTS, NAMED = all_faults(LAYERS), all_faults(LAYERS, named=True)


@pytest.mark.parametrize("layer", [of_layer(name) for name in LAYERS])
@pytest.mark.every(4)
def test_a_weight_without_a_fault_passes(layer: str):
    assert_passes(layer, LAYERS[layer])


@pytest.mark.parametrize(("layer", "name", "place"), [of_layer(*fault) for fault in FAULTS])
@pytest.mark.every(16)
def test_a_fault_of_weights_is_caught(layer: str, name: str, place: str):
    assert_caught(layer, LAYERS[layer], (name, place))


@pytest.mark.parametrize("fault", [of_fault(fault) for fault in NAMED])
@pytest.mark.every(19)
def test_its_cause_is_named_first(fault: tuple[str, str, str]):
    layer, *place = fault
    cause, _ = LAYERS[layer].faults[tuple(place)]
    assert cause_of(layer, LAYERS[layer], tuple(place)) == cause


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [(-127, 127, (-96, 96)), (0, 255, (31, 224)), (-7, 7, (-6, 6)), (0, 15, (1, 14))],
)
def test_a_clipped_range_loses_as_many_integers_at_both_ends(
    low: int, high: int, ends: tuple[int, int]
):
    (changes,) = (changes for kind, _, changes in WEIGHT_ROWS if kind == "clipped range")
    q = np.arange(low, high + 1, dtype=np.float64)[:, None]
    clipped = changes["weight"](q, {})
    assert (clipped.min(), clipped.max()) == ends == weights.ends_of_three_quarters(q)
