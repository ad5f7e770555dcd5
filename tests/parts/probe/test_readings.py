"""Readings of probes, which must differ from each other, and match the outputs that they name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import interface_of
from hypothesis import given
from hypothesis import strategies as st

from attn_export.cases.fixed_cases import pattern_case
from attn_export.cases.input_patterns import FUTURE, VALUES
from attn_export.cases.mask_patterns import LOWEST, MASKS
from attn_export.measures import measure_strictly
from attn_export.parts.probe.findings import APART, CLOSE, SOMETHING_ELSE, attend
from attn_export.parts.probe.precision import STEPS, bit_inputs, read_bits
from attn_export.parts.probe.probe_graphs import HKV, D, H, case_inputs
from attn_export.parts.probe.run_probes import probes
from attn_export.spec import AttentionSpec

PROBES = {probe.name: probe for probe in probes()}
OUTPUTS = {name: probe.outputs for name, probe in PROBES.items() if probe.outputs}
PAIRS = [
    (name, one, other)
    for name, outputs in OUTPUTS.items()
    for one in outputs
    for other in outputs
    if one != other
]

Rounding = Callable[[np.ndarray], np.ndarray]


# -- every reading ----------------------------------------------------------------------------


def test_names_are_unique_and_short_enough_for_the_table():
    assert len(PROBES) == len(probes())
    assert all(len(name) <= 19 for name in PROBES)
    assert {"precision"} == set(PROBES) - set(OUTPUTS)


@pytest.mark.parametrize(("probe", "one", "other"), PAIRS, ids=lambda x: x)
def test_any_two_readings_of_a_probe_are_far_apart(probe, one, other):
    outputs = OUTPUTS[probe]
    assert measure_strictly(outputs[one], outputs[other]).row >= APART > CLOSE


@pytest.mark.parametrize(
    ("probe", "reading"), [(p, r) for p, outputs in OUTPUTS.items() for r in outputs]
)
def test_outputs_of_a_reading_are_recognised_even_with_8_bits(probe, reading):
    wanted, dtype = OUTPUTS[probe][reading], PROBES[probe].inputs["query"].dtype
    assert PROBES[probe].read(wanted.astype(dtype)).reading == reading
    rounded = wanted * (1 + 2.0**-8 * np.random.default_rng(0).uniform(-1, 1, wanted.shape))
    assert PROBES[probe].read(rounded).reading == reading


@pytest.mark.parametrize("probe", PROBES.values(), ids=lambda p: p.name)
def test_the_rule_of_onnx_is_a_reading(probe):
    if probe.specified and probe.name in OUTPUTS:
        assert probe.specified in OUTPUTS[probe.name]


@given(st.sampled_from(sorted(OUTPUTS)), st.integers(0, 10**6))
def test_other_numbers_are_something_else_with_a_place_and_numbers(probe, seed):
    wanted = next(iter(OUTPUTS[probe].values()))
    if wanted.size == 0:
        return
    strange = np.random.default_rng(seed).normal(50, 1, wanted.shape)
    found = PROBES[probe].read(strange)
    assert found.reading == SOMETHING_ELSE
    assert "; if '" in found.detail


def test_another_shape_is_something_else():
    found = PROBES["causal, L < S"].read(np.zeros((2, H, 4, D)))
    assert (found.reading, found.detail) == (
        SOMETHING_ELSE, "its shape is [2, 4, 4, 16], not [2, 4, 3, 16]"
    )  # fmt: skip
    assert PROBES["precision"].read(np.zeros((1, H, 1, D))).reading == SOMETHING_ELSE


# -- the cases of a build ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probe", "case", "mask", "past"),
    [
        ("causal, past", "causal_future", "none", True),
        ("head sharing", "sharp", "none", False),
        ("masked row, False", "fully_masked_rows", "bool[B,1,L,S]", False),
        ("masked row, -inf", "fully_masked_rows", "float[B,1,L,S]", False),
        ("finfo.min in mask", "lowest_float", "float[B,1,L,S]", False),
    ],
)
def test_probes_have_the_inputs_that_a_build_tries(probe, case, mask, past):
    spec = AttentionSpec(
        embed_dim=H * D, num_heads=H, num_kv_heads=HKV, attn_mask=mask, causal=past,
        cache="append" if past else "none",
    )  # fmt: skip
    content = next(c for c in (*VALUES, FUTURE, *MASKS, LOWEST) if c.name == case)
    built = pattern_case(content, interface_of(spec)).inputs
    found = PROBES[probe].inputs
    query = found["query"].transpose(0, 2, 1, 3).reshape(built["query"].shape)
    np.testing.assert_array_equal(query, built["query"])
    for name in built.keys() - {"query"}:
        np.testing.assert_array_equal(found[name], built[name])


def test_the_masked_rows_are_masked():
    mask = case_inputs("fully_masked_rows", mask="bool[B,1,L,S]")["attn_mask"]
    assert not mask[0, 0, 0].any()
    assert not mask[-1, 0, -1].any()
    assert mask.any(axis=-1).sum() == mask[..., 0].size - 3


# -- planted faults: numpy runtimes that are wrong in one way --------------------------------


def plain(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    return attend({"query": query, "key": key, "value": value})


def shared(x: np.ndarray) -> np.ndarray:
    """Return keys or values in float64, one for each query head."""
    return np.repeat(x.astype(np.float64), H // HKV, axis=1)


def up_to(last: list[int], inputs) -> np.ndarray:
    """Compute with loops, unlike the probes' model: query i sees the keys up to last[i]."""
    key, value = (
        np.concatenate([inputs[each] for each in (f"past_{name}", name) if each in inputs], axis=2)
        for name in ("key", "value")
    )
    rows = [
        plain(inputs["query"][:, :, [i]], key[:, :, : end + 1], value[:, :, : end + 1])
        for i, end in enumerate(last)
    ]
    return np.concatenate(rows, axis=2).astype(np.float32)


@pytest.mark.parametrize(
    ("probe", "last", "reading"),
    [
        ("causal, L < S", [0, 1, 2], "keys to i"),
        ("causal, L < S", [2, 3, 4], "keys to S-L+i"),
        ("causal, L < S", [4, 4, 4], "all keys"),
        ("causal, L < S", [1, 2, 3], SOMETHING_ELSE),
        ("causal, past", [2, 3, 4], "keys to P+i"),
        ("causal, past", [0, 1, 2], "keys to i"),
        ("past, L < new keys", [2, 3], "keys to P+i"),
        ("past, L < new keys", [4, 5], "keys to S-L+i"),
    ],
)
def test_a_planted_alignment_is_read_as_it_is(probe, last, reading):
    assert PROBES[probe].read(up_to(last, PROBES[probe].inputs)).reading == reading


@pytest.mark.parametrize(
    ("hides", "reading"),
    [
        (lambda mask: np.where(mask, 0.0, -np.inf), "NaN"),
        (lambda mask: np.where(mask, 0.0, -1e9), "mean of values"),
        (lambda mask: np.zeros(mask.shape), SOMETHING_ELSE),  # all rows lose their mask
        (lambda mask: np.where(mask | ~mask.any(-1, keepdims=True), 0.0, -np.inf), "mask ignored"),
    ],
)
def test_a_planted_way_to_mask_is_read_as_it_is(hides, reading):
    inputs = PROBES["masked row, False"].inputs
    found = (inputs["query"] @ shared(inputs["key"]).swapaxes(-1, -2) / 4).astype(np.float32)
    found = found + hides(inputs["attn_mask"]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        weights = np.exp(found - found.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        output = weights @ shared(inputs["value"])
    assert PROBES["masked row, False"].read(output).reading == reading


def test_a_planted_tiling_of_heads_is_read_as_it_is():
    inputs = PROBES["head sharing"].inputs
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    tiled = [np.tile(x, (1, H // HKV, 1, 1)) for x in (key, value)]
    assert PROBES["head sharing"].read(plain(query, *tiled)).reading == "tiles: h % 2"
    swapped = plain(query, key[:, ::-1], value[:, ::-1])
    assert PROBES["head sharing"].read(swapped).reading == SOMETHING_ELSE


# -- precision ---------------------------------------------------------------------------------


def to_bits(count: int) -> Rounding:
    """Round to a significand of `count` bits, of any exponent."""

    def to(x: np.ndarray) -> np.ndarray:
        significand, exponent = np.frexp(np.asarray(x, np.float64))
        return np.ldexp(np.round(significand * 2**count) / 2**count, exponent)

    return to


def to_float16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float64)


FORMATS = [
    (to_bits(24), "float32"), (to_bits(16), "16 bits"), (to_bits(11), "TF32"),
    (to_bits(8), "bfloat16"), (to_float16, "float16"), (to_bits(4), "4 bits"),
]  # fmt: skip


def rounding(step: str, to: Rounding) -> np.ndarray:
    """Compute attention with one step rounded, or all steps."""
    at = {name: to if step in (name, "all") else lambda x: x for name in STEPS}
    inputs = bit_inputs()
    with np.errstate(invalid="ignore"):
        query, key = at["query"](inputs["query"]), at["key"](inputs["key"])
        found = at["scores"](query @ shared(key).swapaxes(-1, -2) * 0.25)
        weights = np.exp(found - found.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return at["weights"](weights) @ at["value"](shared(inputs["value"]))


@pytest.mark.parametrize(("to", "reading"), FORMATS, ids=[name for _, name in FORMATS])
def test_a_format_is_found_by_its_bits(to, reading):
    assert read_bits(rounding("all", to)).reading == reading


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("to", "reading"), [(to_bits(11), "TF32"), (to_bits(8), "bfloat16")])
def test_a_single_step_of_few_bits_is_found_and_named(step, to, reading):
    found = read_bits(rounding(step, to))
    assert found.reading == reading
    bits = dict(part.rsplit(" ", 1) for part in found.detail.removeprefix("bits: ").split(", "))
    least = {"TF32": 11, "bfloat16": 8}[reading]
    assert [name for name in STEPS if int(bits[name]) <= least] == [step]


def test_nan_has_no_bits():
    assert read_bits(np.full(bit_inputs()["query"].shape, np.nan)).reading == "float16"


def test_the_model_gives_0_where_nothing_is_seen():
    query, key = np.ones((1, 1, 2, D)), np.ones((1, 1, 3, D))
    seen = np.array([[True, False, False], [False] * 3])
    output = attend({"query": query, "key": key, "value": 2 * key, "attn_mask": seen})
    assert (output[0, 0, 0] == 2).all()
    assert (output[0, 0, 1] == 0).all()
    assert plain(query, key[:, :, :0], key[:, :, :0]).tolist() == np.zeros((1, 1, 2, D)).tolist()
