"""Layers can be trained: gradients are right and finite, and dropout is for training only."""

from __future__ import annotations

import pytest
import torch
from conftest import small_spec
from features import IN_ANY_PLACE
from layers import draw_inputs, exact_module, feature_spec, make_module, outputs_of
from torch import Tensor
from torch.func import functional_call

TINY = {"embed_dim": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "v_head_dim": 1}
CHECKED = {
    "plain": {},
    "no sharing": {"num_kv_heads": 2, "v_head_dim": 3, "scale": 0.3},
    "all keys": {"causal": False, "cache": "none"},
    "cross": {"cross": True, "causal": False, "cache": "none", "kdim": 3, "vdim": 2},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "sinks and softcap": {"sinks": True, "softcap": 0.8},
    "relative": {"relative_buckets": 4, "relative_max_distance": 5},
    "relative on both sides": {
        "relative_buckets": 4, "relative_max_distance": 5, "causal": False,
    },
    "half": {"rotary": "half"},
    "interleaved": {"rotary": "interleaved", "rotary_dim": 2},
    "yarn": {
        "rotary": "half", "rotary_scaling": "yarn", "rotary_factor": 4.0,
        "rotary_original_len": 64,
    },
    "alibi": {"alibi": True},
    "window": {"window_left": 1},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "everything": {
        "qk_norm": "rms", "rotary": "half", "softcap": 0.8, "sinks": True, "alibi": True,
        "window_left": 1, "relative_buckets": 4, "relative_max_distance": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,H,L,S]"])
@pytest.mark.parametrize("feature", CHECKED.values(), ids=CHECKED)
@pytest.mark.every(4)
def test_gradients_are_those_of_finite_differences(
    feature: dict, mask: str, attn_weights: bool
) -> None:
    spec = feature_spec(TINY | feature, attn_mask=mask, attn_weights=attn_weights)
    module = exact_module(spec)
    inputs = draw_inputs(spec, 1, 2, 1, key_len=3)
    if mask.startswith("bool"):
        inputs["attn_mask"] = torch.ones_like(inputs["attn_mask"])
        inputs["attn_mask"][..., 0] = False
    else:
        inputs["attn_mask"] = inputs["attn_mask"].nan_to_num(neginf=0.5)
    parameters = dict(module.named_parameters())
    names = [name for name, tensor in inputs.items() if tensor.is_floating_point()]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip([*names, *parameters], tensors, strict=True))
        called = {name: given.pop(name) for name in names}
        return functional_call(module, given, kwargs=inputs | called)

    leaves = [inputs[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(call, (*leaves, *parameters.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,1,1,S]"])
@pytest.mark.parametrize("feature", IN_ANY_PLACE.values(), ids=IN_ANY_PLACE)
def test_gradients_are_finite_where_rows_see_nothing(
    feature: dict, mask: str, dtype: torch.dtype
) -> None:
    module = exact_module(feature_spec(feature, attn_mask=mask)).to(dtype).train()
    inputs = draw_inputs(module.spec, 2, 5, 3)
    allowed = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    allowed[0, ..., :6] = False
    added = torch.zeros(2, 1, 1, 8).masked_fill(~allowed, -torch.inf)
    inputs["attn_mask"] = allowed if mask.startswith("bool") else added
    inputs = {
        name: x.to(dtype).requires_grad_() if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    sum(output.square().sum() for output in module(**inputs)).backward()
    leaves = {name: x for name, x in inputs.items() if x.is_floating_point()}
    for name, leaf in {**leaves, **dict(module.named_parameters())}.items():
        assert leaf.grad is not None, name
        assert torch.isfinite(leaf.grad).all(), name


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize(
    "feature", ["plain", "cross", "sinks", "rms", "layer", "relative"], ids=lambda name: name
)
def test_every_parameter_and_input_gets_a_gradient(feature: str, attn_weights: bool) -> None:
    spec = feature_spec(CHECKED[feature], attn_mask="none", attn_weights=attn_weights)
    module = exact_module(spec).train()
    inputs = {name: x.requires_grad_() for name, x in draw_inputs(spec, 2, 9, 2).items()}
    sum(output.square().sum() for output in as_tuple(module(**inputs))).backward()
    reached = {name: x.grad.abs().max() > 1e-12 for name, x in inputs.items()}
    reached |= {name: p.grad.abs().max() > 1e-12 for name, p in module.named_parameters()}
    # Attention alone cannot tell a bias of the keys, which moves all scores of a row alike; the
    # cache, in the loss here, can.
    if feature == "cross":
        reached.pop("k_proj.bias")
    assert all(reached.values()), reached


def as_tuple(returned: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
def test_dropout_is_for_training_only(attn_weights: bool) -> None:
    spec = small_spec(dropout=0.5, attn_weights=attn_weights)
    inputs = draw_inputs(spec, 2, 6, 3)
    module = make_module(spec)
    evaluated = outputs_of(module, inputs)["output"]
    assert torch.equal(evaluated, outputs_of(module, inputs)["output"])
    without = make_module(small_spec(attn_weights=attn_weights))
    assert torch.equal(evaluated, outputs_of(without, inputs)["output"])
    trained = [outputs_of(module.train(), inputs)["output"] for _ in range(2)]
    assert not torch.equal(trained[0], evaluated)
    assert not torch.equal(trained[0], trained[1])


def test_returned_weights_are_those_before_dropout() -> None:
    spec = small_spec(dropout=0.5, attn_weights=True)
    inputs = draw_inputs(spec, 2, 6, 3)
    module = make_module(spec)
    evaluated = outputs_of(module, inputs)["attn_weights"]
    assert torch.equal(outputs_of(module.train(), inputs)["attn_weights"], evaluated)
