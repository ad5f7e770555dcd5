"""`Attention.from_torch`: PyTorch's own module, taken as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from attn_export import Attention, Subject, build
from attn_export.errors import SpecError

E, H = 24, 3
WIDTHS = {"self": {}, "cross": {"kdim": 20, "vdim": 28}}


def both(batch_first: bool, widths: dict, **fields) -> tuple[nn.MultiheadAttention, Attention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, batch_first=batch_first, **widths).eval()
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    return theirs, Attention.from_torch(theirs, **fields)


def drawn(widths: dict, L: int, S: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = ((3, L, E), (3, S, widths.get("kdim", E)), (3, S, widths.get("vdim", E)))
    return tuple(torch.randn(shape, generator=random) for shape in shapes)  # type: ignore[return-value]


def call_theirs(module: nn.MultiheadAttention, tensors, **options):
    """Call PyTorch's module with the batch first in inputs and outputs."""
    if module.batch_first:
        return module(*tensors, **options)
    output, weights = module(*(x.transpose(0, 1) for x in tensors), **options)
    return output.transpose(0, 1), weights


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("averaged", [True, False], ids=["averaged", "per head"])
def test_it_equals_pytorchs_module_with_both_masks_and_weights(batch_first, widths, averaged):
    theirs, ours = both(
        batch_first, widths, cross=True, attn_mask="bool[B,H,L,S]", attn_weights=True
    )
    L, S = 5, 7
    tensors = drawn(widths, L, S)
    hidden = torch.rand(L, S, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden[:, 0] = False
    padding = torch.zeros(3, S, dtype=torch.bool)
    padding[1, 5:] = True
    wanted, weights = call_theirs(
        theirs, tensors, attn_mask=hidden, key_padding_mask=padding, average_attn_weights=averaged
    )
    visible = ~(hidden[None, None] | padding[:, None, None]).expand(3, H, L, S)
    output, own = ours(*tensors, attn_mask=visible)
    torch.testing.assert_close(output, wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(own.mean(1) if averaged else own, weights, rtol=2e-6, atol=2e-6)


def test_it_equals_pytorchs_module_in_causal_self_attention():
    theirs, ours = both(True, {}, causal=True)
    x, *_ = drawn({}, 6, 6)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    wanted, _ = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(ours(x), wanted, rtol=2e-6, atol=2e-6)


def test_it_takes_over_mode_dtype_and_missing_biases():
    theirs = nn.MultiheadAttention(E, H, bias=False, dropout=0.25).double()
    ours = Attention.from_torch(theirs)
    assert ours.training
    assert ours.spec.bias == "none"
    assert ours.spec.dropout == 0.25
    assert ours.q_proj.weight.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_its_spec_has_the_dtype_of_the_module(dtype):
    ours = Attention.from_torch(nn.MultiheadAttention(E, H).to(dtype))
    assert f"torch.{ours.spec.dtype}" == str(dtype)
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}


def test_a_dtype_that_contradicts_the_module_is_refused():
    with pytest.raises(SpecError, match="dtype is 'float16', and the module is in float32"):
        Attention.from_torch(nn.MultiheadAttention(E, H), dtype="float16")


def test_it_owns_its_weights():
    theirs, ours = both(True, {})
    nn.init.zeros_(theirs.out_proj.weight)
    assert ours.out_proj.weight.any()


@pytest.mark.parametrize(
    "options",
    [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
    ids=str,
)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_keys_of_no_token_are_as_in_pytorch(options: dict, widths: dict):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **widths, **options).eval()
    ours = Attention.from_torch(theirs, cross=True, attn_mask="bool[B,1,1,S]", attn_weights=True)
    tensors = drawn(widths, 4, 6)
    padding = (
        torch.arange(6) >= torch.tensor([6, 4, 0])[:, None]
    )  # the last sees only what is added
    wanted, weights = theirs(*tensors, key_padding_mask=padding, average_attn_weights=False)
    output, own = ours(*tensors, attn_mask=~padding[:, None, None])
    torch.testing.assert_close(output, wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(own, weights, rtol=2e-6, atol=2e-6)


def test_the_module_of_pytorch_exports_through_it(tmp_path: Path):
    _, ours = both(True, WIDTHS["cross"], attn_mask="bool[B,1,1,S]", attn_weights=True)
    subject = Subject.from_layer(ours)
    assert build(subject, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"]).passed
