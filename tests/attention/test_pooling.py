"""Pooling of K/V heads: means of neighbours in float64; equal numbers of heads do not change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from attn_export import Attention, AttentionSpec, pool_kv_heads
from attn_export.errors import WeightsError


def spec_of(**fields):
    return AttentionSpec.from_dict({"embed_dim": 24, "num_heads": 6, "bias": "none", **fields})


def random_weights(spec, seed=0):
    """Return random weights of a spec, norms and sinks included."""
    random = torch.Generator().manual_seed(seed)
    state = Attention(spec).state_dict()
    return {name: torch.randn(x.shape, generator=random) for name, x in state.items()}


def equal(ours, theirs):
    """Return whether tensors are equal to the bit, -0.0 included."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(x.view(torch.int32), theirs[name].view(torch.int32)) for name, x in ours.items()
    )


def pool(weights, spec, kv_heads):
    """Return the spec and the weights of a pooled layer."""
    layer = Attention(spec).eval()
    layer.load_state_dict(weights)
    pooled = pool_kv_heads(layer, kv_heads)
    return pooled.spec, dict(pooled.state_dict())


@st.composite
def specs_and_heads(draw):
    """Draw a spec, a number of heads to pool to, and the seed of its weights."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12]))
    spec = spec_of(
        num_kv_heads=kv_heads, num_heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 4)) * 2, v_head_dim=draw(st.integers(1, 5)),
        bias=draw(st.sampled_from(["all", "none", "k", "q,v,out"])),
        qk_norm=draw(st.sampled_from(["none", "rms", "layer"])), sinks=draw(st.booleans()),
        add_bias_kv=draw(st.booleans()),
        rotary=draw(st.sampled_from(["none", "half"])), causal=True,
    )  # fmt: skip
    after = draw(st.sampled_from([n for n in range(1, kv_heads + 1) if kv_heads % n == 0]))
    return spec, after, draw(st.integers(0, 1000))


def of_kv(name):
    return name.startswith(("k_proj", "v_proj", "added_keys"))


def mean_of_heads(tensor, before, after):
    """Compute the mean one number at a time."""
    width = tensor.shape[0] // before
    each = before // after
    rows = []
    for head in range(after):
        for d in range(width):
            members = [tensor[(head * each + m) * width + d].double() for m in range(each)]
            rows.append(sum(members) / each)
    return torch.stack(rows).float()


@settings(max_examples=60, deadline=None)
@given(specs_and_heads())
def test_pooled_heads_are_the_means_of_their_neighbours_and_all_else_stays(drawn):
    spec, after, seed = drawn
    weights = random_weights(spec, seed)
    pooled_spec, pooled = pool(weights, spec, after)
    expected = {
        name: mean_of_heads(t, spec.num_kv_heads, after) if of_kv(name) else t
        for name, t in weights.items()
    }  # fmt: skip
    assert equal(pooled, expected)
    assert pooled_spec.to_dict() == {**spec.to_dict(), "num_kv_heads": after}
    Attention(pooled_spec).load_state_dict(pooled)


@settings(max_examples=30, deadline=None)
@given(specs_and_heads())
def test_one_projection_pools_as_three_do(drawn):
    spec, after, seed = drawn
    assume(spec.bias in ("all", "none"))
    kinds = ("weight", "bias") if spec.bias == "all" else ("weight",)
    weights = random_weights(spec, seed)
    projections = [f"{side}_proj.{kind}" for side in "qkv" for kind in kinds]
    together = {name: tensor for name, tensor in weights.items() if name not in projections}
    for kind in kinds:
        together[f"qkv_proj.{kind}"] = torch.cat([weights[f"{s}_proj.{kind}"] for s in "qkv"])
    one = spec_of(**{**spec.to_dict(), "packed_qkv": True})
    pooled_spec, pooled = pool(together, one, after)
    assert (pooled_spec.packed_qkv, pooled_spec.num_kv_heads) == (True, after)
    _, apart = pool(weights, spec, after)
    for kind in kinds:
        expected = torch.cat([apart[f"{s}_proj.{kind}"] for s in "qkv"])
        assert torch.equal(pooled[f"qkv_proj.{kind}"], expected)
    Attention(pooled_spec).load_state_dict(pooled)


def test_an_attention_of_equal_heads_gives_the_same_output_pooled():
    small = spec_of(
        num_kv_heads=2, qk_norm="rms", rotary="half", head_dim=6, causal=True, bias="all"
    )
    weights = random_weights(small)
    wide = spec_of(**{**small.to_dict(), "num_kv_heads": 6})
    repeated = {
        name: t.unflatten(0, (2, -1)).repeat_interleave(3, 0).flatten(0, 1)
        if of_kv(name) else t
        for name, t in weights.items()
    }  # fmt: skip
    before = Attention(wide)
    before.load_state_dict(repeated)
    pooled_spec, pooled = pool(repeated, wide, 2)
    after = Attention(pooled_spec)
    after.load_state_dict(pooled)
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        torch.testing.assert_close(after(x), before(x))


@pytest.mark.parametrize("heads", [0, -1, 4, 5, 7, 12])
def test_a_number_that_does_not_divide_is_an_error_with_both_values(heads):
    spec = spec_of(num_kv_heads=6)
    with pytest.raises(WeightsError) as error:
        pool(random_weights(spec), spec, heads)
    said = f"{heads} pooled K/V heads do not divide num_kv_heads 6; choose one of 1, 2, 3, 6"
    assert str(error.value) == said


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}])
def test_pytorchs_own_attention_is_pooled_as_what_it_becomes(widths):
    theirs = nn.MultiheadAttention(24, 6, batch_first=True, **widths).eval().half()
    ours = Attention.from_torch(theirs)
    found = pool_kv_heads(theirs, 2)
    assert equal_in_half(found, pool_kv_heads(ours, 2))
    assert (found.spec.num_kv_heads, found.spec.kdim) == (2, widths.get("kdim", 24))
    assert (found.training, found.out_proj.weight.dtype) == (False, torch.float16)


def equal_in_half(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
