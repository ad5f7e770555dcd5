"""`Attention` can be trained: its gradients are right and dropout is for training only."""

from __future__ import annotations

import pytest
import torch
from conftest import small_spec
from slow import draw_inputs, make_module, outputs_of
from torch import Tensor
from torch.func import functional_call

TINY = {"embed_dim": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
GRADIENTS = {
    "causal": {},
    "no mask": {"attn_mask": "none"},
    "causal alone": {"attn_mask": "none", "cache": "none"},
    "row of forbidden keys": {"cache": "none"},
    "float mask": {"attn_mask": "float[B,H,L,S]"},
    "float mask for all rows": {"attn_mask": "float[1,S]"},
    "all keys": {"causal": False},
    "no sharing": {"num_kv_heads": 2, "v_head_dim": 3, "scale": 0.3},
    "cross": {"cross": True, "causal": False, "cache": "none", "kdim": 3, "vdim": 2},
}


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("changes", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_those_of_finite_differences(changes: dict, attn_weights: bool) -> None:
    spec = small_spec(**TINY | changes, attn_weights=attn_weights)
    module = make_module(spec)
    inputs = draw_inputs(spec, 1, 2, 1, key_len=3)
    if "attn_mask" in inputs:
        mask = inputs["attn_mask"]
        is_bool = mask.dtype == torch.bool
        inputs["attn_mask"] = torch.ones_like(mask) if is_bool else mask.nan_to_num(neginf=0.5)
        if is_bool:
            inputs["attn_mask"][..., 0] = False
    parameters = dict(module.named_parameters())
    names = [name for name, tensor in inputs.items() if tensor.is_floating_point()]

    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        given = dict(zip([*names, *parameters], tensors, strict=True))
        called = {name: given.pop(name) for name in names}
        return functional_call(module, given, kwargs=inputs | called)

    leaves = [inputs[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(call, (*leaves, *parameters.values()))


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_every_parameter_and_input_gets_a_gradient(cross: bool, attn_weights: bool) -> None:
    changes = {"cross": True, "causal": False, "cache": "none"} if cross else {}
    spec = small_spec(attn_mask="none", attn_weights=attn_weights, **changes)
    module = make_module(spec).train()
    inputs = {name: x.requires_grad_() for name, x in draw_inputs(spec, 2, 3, 2).items()}
    sum(output.square().sum() for output in as_tuple(module(**inputs))).backward()
    reached = {name: x.grad.abs().max() > 1e-12 for name, x in inputs.items()}
    reached |= {name: p.grad.abs().max() > 1e-12 for name, p in module.named_parameters()}
    # Attention alone cannot tell a bias of the keys, which moves all scores of a row alike; the
    # cache, in the loss here, can.
    if cross:
        reached.pop("k_proj.bias")
    assert all(reached.values()), reached


def as_tuple(returned: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def test_one_step_of_training_lowers_the_loss() -> None:
    spec = small_spec(cache="none")
    module = make_module(spec).train()
    inputs = draw_inputs(spec, 2, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (module(**inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


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


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
def test_training_without_dropout_is_deterministic(attn_weights: bool) -> None:
    spec = small_spec(attn_weights=attn_weights)
    inputs = draw_inputs(spec, 2, 6, 3)
    evaluated = outputs_of(make_module(spec), inputs)["output"]
    assert torch.equal(outputs_of(make_module(spec).train(), inputs)["output"], evaluated)


@pytest.mark.parametrize("attn_weights", [False, True], ids=["no weights", "weights"])
def test_dropout_keeps_the_mean(attn_weights: bool) -> None:
    spec = small_spec(dropout=0.3, attn_weights=attn_weights)
    inputs = draw_inputs(spec, 1, 3, 3)
    module = make_module(spec)
    wanted = outputs_of(module, inputs)["output"]
    many = {
        name: tensor.expand(4000, *[-1] * (tensor.dim() - 1)) for name, tensor in inputs.items()
    }
    mean = outputs_of(module.train(), many)["output"].mean(0, keepdim=True)
    torch.testing.assert_close(mean, wanted, rtol=0, atol=0.02)


def test_returned_weights_are_those_before_dropout() -> None:
    spec = small_spec(dropout=0.5, attn_weights=True)
    inputs = draw_inputs(spec, 2, 6, 3)
    module = make_module(spec)
    evaluated = outputs_of(module, inputs)["attn_weights"]
    assert torch.equal(outputs_of(module.train(), inputs)["attn_weights"], evaluated)
