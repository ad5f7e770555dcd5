"""Features can be trained: their gradients are those of finite differences, and finite."""

from __future__ import annotations

import pytest
import torch
from features import FEATURES, SEEING_AHEAD, exact_module, feature_spec
from slow import draw_inputs
from torch import Tensor
from torch.func import functional_call

TINY = {"embed_dim": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "v_head_dim": 1}
CHECKED = {
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
    spec = feature_spec(feature | TINY, attn_mask=mask, attn_weights=attn_weights)
    module = exact_module(spec)
    inputs = draw_inputs(spec, 1, 2, 1)
    if mask.startswith("bool"):
        inputs["attn_mask"] = torch.tensor([False, True, True]).view(1, 1, 1, 3)
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


EVERYWHERE = FEATURES | SEEING_AHEAD


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", ["bool[B,1,1,S]", "float[B,1,1,S]"])
@pytest.mark.parametrize("feature", EVERYWHERE.values(), ids=EVERYWHERE)
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


LEARNED = {
    "sinks": ({"sinks": True}, ["sinks"]),
    "rms": ({"qk_norm": "rms"}, ["q_norm.weight", "k_norm.weight"]),
    "layer": ({"qk_norm": "layer"}, ["q_norm.weight", "q_norm.bias", "k_norm.weight"]),
    "relative": (
        {"relative_buckets": 4, "relative_max_distance": 6},
        ["score_bias.relative_attention_bias.weight"],
    ),
}


@pytest.mark.parametrize(("feature", "names"), LEARNED.values(), ids=LEARNED)
def test_every_learned_number_gets_a_gradient(feature: dict, names: list[str]) -> None:
    module = exact_module(feature_spec(feature, attn_mask="none", attn_weights=False)).train()
    inputs = draw_inputs(module.spec, 2, 9)
    module(**inputs)[0].square().sum().backward()
    for name in names:
        gradient = module.get_parameter(name).grad
        assert (gradient.abs() > 1e-9).all(), name
