"""Errors for tensors that are missing, unused, of a wrong shape or type, or not finite."""

from __future__ import annotations

import pytest
import torch
from checkpoints import (
    LLAMA,
    OUT_PROJ,
    PHI3,
    TORCH,
    equal,
    random_weights,
    save,
    spec_of,
    under,
)  # fmt: skip

from attn_export.errors import WeightsError
from attn_export.weights.checkpoint import load_checkpoint

AT = "model.layers.0.self_attn."
SPEC = spec_of(bias="q,k,v")
WEIGHTS = random_weights(SPEC)
STORED = LLAMA(SPEC, WEIGHTS)


def refusal(tmp_path, stored, spec=SPEC):
    with pytest.raises(WeightsError) as error:
        load_checkpoint(save(tmp_path, under(AT, stored)), spec=spec)
    assert "\n" not in str(error.value)
    return str(error.value)


# -- all that is wrong, in one error -------------------------------------------------------------


def test_one_error_names_all_that_is_wrong_and_what_was_expected(tmp_path):
    stored = {**STORED, "k_proj.weight": torch.ones(11, 24), "rotary.scale": torch.ones(3)}
    del stored["v_proj.bias"]
    message = refusal(tmp_path, stored)
    for part in (
        f"{AT}v_proj.bias [10] is missing",
        f"{AT}k_proj.weight is [11, 24], expected [10, 24] (num_kv_heads 2 * head_dim 5, ",
        f"{AT}rotary.scale is left over",
        "does not hold the attention of the spec",
    ):
        assert part in message


def test_the_seventh_problem_is_counted_only(tmp_path):
    stored = STORED | {f"extra_{n}": torch.ones(1) for n in range(9)}
    message = refusal(tmp_path, stored)
    assert message.count("is left over") == 6
    assert "and 3 more" in message


@pytest.mark.parametrize("name", sorted(STORED))
def test_a_missing_tensor_is_named(name, tmp_path):
    stored = {key: tensor for key, tensor in STORED.items() if key != name}
    assert f"{AT}{name} [" in refusal(tmp_path, stored)


@pytest.mark.parametrize("name", sorted(STORED))
@pytest.mark.parametrize("change", ["longer", "flat", "turned"])
def test_a_tensor_of_another_shape_is_named(name, change, tmp_path):
    tensor = STORED[name]
    if change == "turned" and tensor.dim() == 1:
        tensor = tensor[:, None]
    changed = {
        "longer": torch.cat([tensor, tensor]),
        "flat": tensor.reshape(-1, 1, 1),
        "turned": tensor.permute(*reversed(range(tensor.dim()))),
    }[change]
    assert f"{AT}{name} is [" in refusal(tmp_path, {**STORED, name: changed})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "none"}, "q_proj.bias is left over"),
        ({"bias": "all"}, "o_proj.bias [24] is missing"),
        ({"qk_norm": "rms"}, "q_norm.weight [5] is missing"),
        ({"qk_norm": "layer"}, "k_norm.bias [5] is missing"),
        ({"sinks": True}, "sinks [6] is missing"),
        ({"relative_buckets": 8}, "relative_attention_bias.weight [8, 6] is missing"),
        ({"num_kv_heads": 1}, "expected [5, 24]"),
        (
            {"v_head_dim": 3},
            "v_proj.weight is [10, 24], expected [6, 24] (num_kv_heads 2 * v_head_dim 3",
        ),
        ({"cross": True, "kdim": 7}, "k_proj.weight is [10, 24], expected [10, 7]"),
    ],
)
def test_a_spec_of_another_attention_is_an_error(changes, message, tmp_path):
    assert message in refusal(tmp_path, STORED, spec_of(**{"bias": "q,k,v"} | changes))


@pytest.mark.parametrize(
    "name", ["q_norm.weight", "sinks", "q_proj.weight_scale_inv", "bias_k", "lora.weight"]
)
def test_tensors_that_the_spec_does_not_use_are_left_over(name, tmp_path):
    assert f"{name} is left over" in refusal(tmp_path, STORED | {name: torch.ones(5)})


def test_tensors_beside_the_attention_are_not_left_over(tmp_path):
    beside = {
        "model.layers.0.mlp.up.weight": torch.ones(3),
        "model.layers.0.self_attn2": torch.ones(1),
    }
    path = save(tmp_path, under(AT, STORED) | beside)
    assert equal(load_checkpoint(path, spec=SPEC).weights, WEIGHTS)


def test_a_packed_tensor_says_what_its_rows_are(tmp_path):
    stored = PHI3(spec_of(), random_weights(spec_of()))
    message = refusal(tmp_path, stored, spec_of(num_kv_heads=3))
    assert (
        "qkv_proj.weight is [50, 24], expected [60, 24] ((num_heads 6 + 2 * num_kv_heads 3) * "
        "head_dim 5, embed_dim 24)"
    ) in message


def test_a_packed_bias_is_one_of_all_three(tmp_path):
    spec = spec_of(num_kv_heads=6, bias="all")
    stored = TORCH(spec, random_weights(spec))
    assert "in_proj_bias has one of k, bias is 'q,v,out'" in refusal(
        tmp_path, stored, spec_of(num_kv_heads=6, bias="q,v,out")
    )


def test_a_packed_weight_is_of_one_width(tmp_path):
    spec = spec_of(num_kv_heads=6)
    stored = TORCH(spec, random_weights(spec))
    assert "in_proj_weight packs q, k and v of one width, embed_dim is 24, kdim 7" in refusal(
        tmp_path, stored, spec_of(num_kv_heads=6, cross=True, kdim=7)
    )


def test_names_that_cannot_be_printed_stay_on_one_line(tmp_path):
    assert "\\n" in refusal(tmp_path, STORED | {"a\nb": torch.ones(1)})


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened_exactly_and_noted(dtype, tmp_path):
    narrow = {name: tensor.to(dtype) for name, tensor in STORED.items()}
    loaded = load_checkpoint(save(tmp_path, under(AT, narrow)), spec=SPEC)
    expected = {name: t.to(dtype).to(torch.float32) for name, t in WEIGHTS.items()}
    assert equal(loaded.weights, expected)
    name = str(dtype).removeprefix("torch.")
    assert f"{name} weights were converted to float32: widened, which is exact" in loaded.notes


def test_float64_is_rounded_and_the_note_says_so(tmp_path):
    wide = {name: tensor.double() for name, tensor in STORED.items()}
    loaded = load_checkpoint(save(tmp_path, under(AT, wide)), spec=SPEC)
    assert equal(loaded.weights, WEIGHTS)
    assert "float64 weights were converted to float32: rounded" in loaded.notes


def test_nothing_is_noted_where_nothing_was_converted(tmp_path):
    loaded = load_checkpoint(save(tmp_path, under(AT, STORED)), spec=SPEC)
    assert loaded.notes == (
        "model.layers.0.self_attn of model.safetensors, stored as q_proj … o_proj",
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_quantised_weights_are_refused_by_their_type(dtype, name, tmp_path):
    stored = {**STORED, "q_proj.weight": torch.ones(30, 24).to(dtype)}
    assert f"q_proj.weight is {name}, expected one of F64, F32, F16, BF16" in refusal(
        tmp_path, stored
    )


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_in_the_type_of_the_spec(stored, target, tmp_path):
    spec = spec_of(bias="q,k,v", dtype=target)
    typed = {name: tensor.to(stored) for name, tensor in STORED.items()}
    loaded = load_checkpoint(save(tmp_path, under(AT, typed)), spec=spec)
    dtype, name = getattr(torch, target), str(stored).removeprefix("torch.")
    for key, tensor in WEIGHTS.items():
        assert torch.equal(loaded.weights[key], tensor.to(stored).to(dtype))
    notes = [] if name == target else [f"{name} weights were converted to {target}: rounded"]
    assert list(loaded.notes[1:]) == notes


def test_weights_that_overflow_float16_are_named(tmp_path):
    stored = {**STORED, "q_proj.bias": torch.full((30,), 1e5)}
    assert "q_proj.bias has 30 of 30 values that are NaN or infinite in float16" in refusal(
        tmp_path, stored, spec_of(bias="q,k,v", dtype="float16")
    )


def test_gemmas_one_is_added_before_rounding(tmp_path):
    spec = spec_of(qk_norm="rms", dtype="bfloat16")
    stored = LLAMA(spec_of(), random_weights(spec_of()))
    small = torch.tensor([2.0**-9, -(2.0**-9), 2.0**-7, 0.3, -0.7])
    stored |= {"q_norm.weight": small, "k_norm.weight": small.bfloat16()}
    sibling = {"model.layers.0.pre_feedforward_layernorm.weight": torch.ones(24)}
    loaded = load_checkpoint(save(tmp_path, under(AT, stored) | sibling), spec=spec).weights
    assert torch.equal(loaded["q_norm.weight"], (small + 1).bfloat16())
    assert torch.equal(loaded["k_norm.weight"], (small.bfloat16().float() + 1).bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_named_and_counted(value, dtype, tmp_path):
    broken = STORED["k_proj.weight"].clone()
    broken[1, 2:5] = value
    stored = {n: t.to(dtype) for n, t in {**STORED, "k_proj.weight": broken}.items()}
    message = refusal(tmp_path, stored)
    assert f"{AT}k_proj.weight has 3 of 240 values that are NaN or infinite in float32" in message


def test_a_number_that_float32_does_not_have_is_no_number(tmp_path):
    stored = {**STORED, "q_proj.bias": STORED["q_proj.bias"].double() * 1e300}
    assert "q_proj.bias has 30 of 30 values that are NaN or infinite in float32" in refusal(
        tmp_path, stored
    )


def test_every_weight_is_contiguous_and_owns_its_memory(tmp_path):
    spec = spec_of(bias="all", num_kv_heads=6)
    for number, write in enumerate((OUT_PROJ, TORCH)):
        path = save(tmp_path / str(number), write(spec, random_weights(spec)))
        loaded = load_checkpoint(path, spec=spec).weights
        assert all(t.is_contiguous() and not t.requires_grad for t in loaded.values())
        assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == len(loaded)
