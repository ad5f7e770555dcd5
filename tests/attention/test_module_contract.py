"""`Attention` as an `nn.Module` among others: its inputs, names, copies and factories."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from conftest import small_spec
from layers import cast, draw_inputs, make_module, outputs_of

import attn_export
from attn_export.attention import (
    Attention,
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiQueryAttention,
    scaled_dot_product_attention,
)
from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec

CROSS = {"cross": True, "causal": False, "cache": "none"}
MISSING = [
    ({}, "attn_mask"),
    ({}, "past_key"),
    ({}, "past_value"),
    (CROSS, "key"),
    (CROSS, "value"),
    (CROSS, "attn_mask"),
]
UNWANTED = [
    ({}, "key"),
    ({}, "value"),
    ({"attn_mask": "none"}, "attn_mask"),
    ({"cache": "none"}, "past_key"),
    ({"cache": "none"}, "past_value"),
    (CROSS, "past_key"),
]


@pytest.mark.parametrize(("changes", "name"), MISSING)
def test_missing_input_is_named(changes: dict, name: str) -> None:
    module = make_module(small_spec(**changes))
    inputs = draw_inputs(module.spec, 2, 4, 3)
    del inputs[name]
    with pytest.raises(ValueError, match=f"^{name} is missing; the inputs of this spec: query, "):
        module(**inputs)


@pytest.mark.parametrize(("changes", "name"), UNWANTED)
def test_unwanted_input_is_named(changes: dict, name: str) -> None:
    module = make_module(small_spec(**changes))
    inputs = draw_inputs(module.spec, 2, 4, 3) | {name: torch.zeros(2, 2, 3, 8)}
    with pytest.raises(ValueError, match=f"^{name} is given, but the spec has none; the inputs"):
        module(**inputs)


def test_inputs_may_be_given_by_position() -> None:
    module = make_module(small_spec())
    inputs = draw_inputs(module.spec, 2, 4, 3)
    mask, key, value = (inputs[name] for name in ("attn_mask", "past_key", "past_value"))
    returned = module(inputs["query"], None, None, mask, key, value)
    assert torch.equal(returned[0], outputs_of(module, inputs)["output"])


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("cache", ["none", "append"], ids=["no cache", "cache"])
def test_returns_what_the_spec_names_in_its_order_and_shapes(
    cache: str, attn_weights: bool
) -> None:
    spec = small_spec(cache=cache, attn_weights=attn_weights, v_head_dim=3)
    B, L, P = 3, 4, 3
    S = P + L if cache == "append" else L
    outputs = outputs_of(make_module(spec), draw_inputs(spec, B, L, P))
    shapes = {"output": (B, L, 32)}
    if cache == "append":
        shapes |= {"present_key": (B, 2, S, 8), "present_value": (B, 2, S, 3)}
    if attn_weights:
        shapes |= {"attn_weights": (B, 4, L, S)}
    assert {name: tuple(tensor.shape) for name, tensor in outputs.items()} == shapes


def test_output_alone_is_a_tensor_and_not_a_tuple() -> None:
    spec = small_spec(cache="none")
    assert isinstance(make_module(spec)(**draw_inputs(spec, 1, 2)), torch.Tensor)


@pytest.mark.parametrize("cache", ["append", "in-place"])
def test_no_input_is_written_to(cache: str) -> None:
    spec = small_spec(attn_mask="float[B,1,1,S]", attn_weights=True, cache=cache)
    inputs = draw_inputs(spec, 2, 4, 3)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    outputs_of(make_module(spec), inputs)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


# -- names and shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_parameters_have_the_names_that_checkpoints_use(bias: bool) -> None:
    spec = small_spec(**CROSS, kdim=12, vdim=20, v_head_dim=3, bias=bias)
    shapes = {
        "q_proj.weight": (4 * 8, 32), "q_proj.bias": (4 * 8,),
        "k_proj.weight": (2 * 8, 12), "k_proj.bias": (2 * 8,),
        "v_proj.weight": (2 * 3, 20), "v_proj.bias": (2 * 3,),
        "out_proj.weight": (32, 4 * 3), "out_proj.bias": (32,),
    }  # fmt: skip
    wanted = {name: shape for name, shape in shapes.items() if bias or "weight" in name}
    state = Attention(spec).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == wanted


def test_repr_shows_the_spec() -> None:
    text = repr(Attention(small_spec(scale=0.5)))
    for key, value in small_spec(scale=0.5).to_dict().items():
        assert f"{key}={value!r}" in text
    assert "(q_proj): Linear(in_features=32, out_features=32, bias=True)" in text
    assert "(k_proj): Linear(in_features=32, out_features=16, bias=True)" in text


# -- factories -------------------------------------------------------------------------------

FACTORIES = {
    "mha": (lambda: MultiHeadAttention(32, 4), {}),
    "mha with options": (
        lambda: MultiHeadAttention(32, 4, causal=True, bias=False),
        {"causal": True, "bias": False},
    ),
    "mqa": (lambda: MultiQueryAttention(32, 4), {"num_kv_heads": 1}),
    "mqa with options": (
        lambda: MultiQueryAttention(embed_dim=32, num_heads=4, cache="append"),
        {"num_kv_heads": 1, "cache": "append"},
    ),
    "gqa": (lambda: GroupedQueryAttention(32, 4, 2), {"num_kv_heads": 2}),
    "gqa with options": (
        lambda: GroupedQueryAttention(32, 4, num_kv_heads=2, head_dim=5, attn_mask="bool[L,S]"),
        {"num_kv_heads": 2, "head_dim": 5, "attn_mask": "bool[L,S]"},
    ),
}


@pytest.mark.parametrize(("make", "changes"), FACTORIES.values(), ids=FACTORIES)
def test_factory_gives_attention_with_its_spec(make: object, changes: dict) -> None:
    module = make()
    assert type(module) is Attention
    assert module.spec == AttentionSpec(**{"embed_dim": 32, "num_heads": 4} | changes)


def test_factory_refuses_what_the_spec_refuses() -> None:
    with pytest.raises(SpecError, match="num_heads 8 does not divide by num_kv_heads 3"):
        GroupedQueryAttention(32, 8, 3)
    with pytest.raises(SpecError, match="embed_dim 32 does not divide by num_heads 5"):
        MultiHeadAttention(32, 5)


@pytest.mark.parametrize("options", [{"heads": 4}, {"num_kv_heads": 2}])
def test_factory_refuses_an_option_that_is_none_of_its_own(options: dict) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        MultiQueryAttention(32, 4, **options)


@pytest.mark.parametrize(
    "name", ["Attention", "MultiHeadAttention", "MultiQueryAttention", "GroupedQueryAttention"]
)
def test_package_offers_the_modules(name: str) -> None:
    assert getattr(attn_export, name) is getattr(attn_export.attention, name)


# -- as a module among others ----------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "state_dict": lambda module: loaded(make_module(module.spec, seed=1), module.state_dict()),
}


def loaded(module: Attention, state: dict) -> Attention:
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copy_is_the_same_attention_with_weights_of_its_own(duplicate: object) -> None:
    module = make_module(small_spec())
    inputs = draw_inputs(module.spec, 2, 4, 3)
    before = outputs_of(module, inputs)["output"]
    copied = duplicate(module)
    assert copied.spec == module.spec
    assert torch.equal(outputs_of(copied, inputs)["output"], before)
    torch.nn.init.zeros_(copied.q_proj.weight)
    assert torch.equal(outputs_of(module, inputs)["output"], before)


def test_moves_to_float64() -> None:
    module = make_module(small_spec(attn_weights=True), torch.float32)
    inputs = draw_inputs(module.spec, 2, 4, 3)
    narrow = outputs_of(module, cast(inputs, torch.float32))
    wide = outputs_of(module.double(), inputs)
    for name, tensor in wide.items():
        assert tensor.dtype == torch.float64
        assert narrow[name].dtype == torch.float32
        torch.testing.assert_close(narrow[name].double(), tensor, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gives_the_same_in_every_mode_of_autograd(mode: type) -> None:
    module = make_module(small_spec())
    inputs = draw_inputs(module.spec, 2, 4, 3)
    with mode():
        output = module(**inputs)[0]
    torch.testing.assert_close(output.detach(), outputs_of(module, inputs)["output"])


def test_is_part_of_a_larger_module() -> None:
    layer = torch.nn.Sequential(torch.nn.LayerNorm(32), MultiHeadAttention(32, 4))
    assert "1.q_proj.weight" in layer.state_dict()
    assert layer(torch.randn(2, 3, 32)).shape == (2, 3, 32)


# -- the core on its own ---------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize(("L", "S"), [(4, 4), (2, 5), (5, 2), (1, 3)])
def test_core_aligns_causal_attention_to_the_last_key(L: int, S: int, need_weights: bool) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, generator=random) for n in (L, S, S))
    allowed = torch.tensor([[j <= S - L + i for j in range(S)] for i in range(L)])
    causal, masked = (
        scaled_dot_product_attention(q, k, v, scale=0.3, need_weights=need_weights, **options)
        for options in ({"causal": True}, {"attn_mask": allowed})
    )
    torch.testing.assert_close(causal[0], masked[0])
    assert (causal[0][:, :, ~allowed.any(1)] == 0).all()
    assert (causal[1] is None) is not need_weights


@pytest.mark.parametrize(
    ("mask", "given", "message"),
    [
        ("bool[B,1,1,S]", torch.ones(1, 1, 1, 3, dtype=torch.int64), "int64, the spec has bool"),
        ("bool[B,1,1,S]", torch.ones(1, 1, 1, 3), "float32, the spec has bool"),
        ("float[B,1,1,S]", torch.ones(1, 1, 1, 3, dtype=torch.bool), "bool, the spec has float"),
        ("bool[B,1,1,S]", torch.ones(1, 3, dtype=torch.bool), "is [1, 3], the spec has"),
        ("bool[B,1,1,S]", torch.ones(1, 2, 1, 3, dtype=torch.bool), "is [1, 2, 1, 3], the spec"),
    ],
)
def test_a_mask_of_another_kind_or_shape_is_refused_not_added(mask, given, message: str) -> None:
    module = MultiHeadAttention(8, 2, attn_mask=mask)
    with pytest.raises(ValueError, match=re.escape(message)):
        module(torch.ones(1, 3, 8), attn_mask=given)
