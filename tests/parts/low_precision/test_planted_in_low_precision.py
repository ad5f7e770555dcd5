"""Faults of caches and activations of few bits: truth 1 catches each, and its cause is named."""

from __future__ import annotations

import numpy as np
import pytest
from low_precision_layers import LAYERS, MIXED, MORE, TWICE
from named_causes import first_cause_of
from quantised_layers import (
    all_faults,
    assert_caught,
    assert_passes,
    bundle_of,
    cause_of,
    model_of,
    of_fault,
    of_layer,
)

from attn_export.explain.known import made_in
from attn_export.float64.evaluate import Evaluation
from attn_export.graph.load import load_model
from attn_export.parts.low_precision.in_caches import IN_FLOAT16_CACHES, IN_INTEGER_CACHES

FAULTS, NAMED = (
    all_faults(LAYERS),
    all_faults({n: x for n, x in LAYERS.items() if n != TWICE}, named=True),
)


@pytest.mark.parametrize("layer", [of_layer(name, slow=MORE) for name in LAYERS])
@pytest.mark.every(2)
def test_a_layer_without_a_fault_passes(layer: str):
    assert_passes(layer, LAYERS[layer])


@pytest.mark.parametrize(
    ("layer", "name", "place"), [of_layer(*fault, slow=MORE) for fault in FAULTS]
)
@pytest.mark.every(16)
def test_a_fault_of_low_precision_is_caught(layer: str, name: str, place: str):
    assert_caught(layer, LAYERS[layer], (name, place))


OTHER_CAUSES = {
    # Doubled values double the scale by which the last projection rounds, and change no integer.
    (MIXED, "scale of values doubled where it is read", ""): "activation scale",
    # So small that a few values near a tie are more of the error than is left over.
    ("products", "scale of the largest magnitude", "out"): "",
    ("products and a cache of int8", "scale of 8 bits where it is read", "v"): "",
}


@pytest.mark.parametrize(
    "fault",
    [of_fault(fault, slow=MORE) for fault in NAMED],
)
@pytest.mark.every(19)
def test_its_cause_is_named_first(fault: tuple[str, str, str]):
    layer, *place = fault
    cause, _ = LAYERS[layer].faults[tuple(place)]
    assert cause_of(layer, LAYERS[layer], tuple(place)) == OTHER_CAUSES.get(fault, cause)


@pytest.mark.xdist_group("quantised blocks")
def test_a_cause_is_named_in_a_graph_whose_products_are_read_within_a_condition():
    folder = bundle_of("blocks", LAYERS["blocks"])
    right = load_model(folder / "model.ort.onnx")
    assert any(node.op_type == "If" for node in right.graph.node)
    cause, wrong = LAYERS["blocks"].faults["not rounded", "all"]
    assert first_cause_of(folder, right, wrong(model_of("blocks", LAYERS["blocks"]))) == cause


@pytest.mark.parametrize(
    ("layer", "impossible"),
    [
        of_layer("cache per tensor", "byte"),
        of_layer("packed cache", "once more"),
        of_layer("packed cache", "to the range of 4 bits"),
    ],
)
def test_only_mistakes_that_the_type_of_a_cache_allows_are_tried(layer: str, impossible: str):
    evaluation = Evaluation.load(bundle_of(layer, LAYERS[layer]) / "model.onnx")
    effects = [made.effect for made in made_in(IN_INTEGER_CACHES, evaluation, {})]
    assert effects
    assert not [effect for effect in effects if impossible in effect]


def test_known_roundings_give_the_neighbour_that_they_state():
    x = np.random.default_rng(0).normal(size=(1, 1, 200, 8)) * 10.0 ** np.arange(-3, 5)
    x[..., 0, :] = [0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 65504.0, -65504.0]  # exact in float16
    with np.errstate(over="ignore"):  # beyond the largest number is infinity
        toward_zero, away = (
            row.changes["rounded"](None, {"x": x}).astype(np.float64)
            for row in IN_FLOAT16_CACHES
            if row.effect.endswith("not to nearest")
        )
    assert (np.abs(toward_zero) <= np.abs(x)).all()
    assert (np.abs(x) <= np.abs(away)).all()
    exact = x == x.astype(np.float16)
    assert (toward_zero[exact] == away[exact]).all()
    assert (np.nextafter(np.abs(toward_zero[~exact]).astype(np.float16), np.float16(np.inf))
            == np.abs(away[~exact]).astype(np.float16)).all()  # fmt: skip
