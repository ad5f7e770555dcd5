"""`torch.nn.MultiheadAttention` with three widths, in all of its conventions.

It means by True in a mask "may not attend", by default takes batches second, and gives the mean
of the weights over the heads. `InItsConventions` is our `Attention` behind the same interface.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from built import Built, built, close
from shared import extended
from torch import Tensor, nn

from attn_export import Attention, Subject, build

E, H, KDIM, VDIM = 24, 3, 20, 28
WEIGHTS = ("none", "averaged", "per head")


@dataclasses.dataclass(frozen=True)
class Masks:
    """Forms of one kind of mask in PyTorch and in this package.

    `attn_mask` is `[L, S]`, or `[B, H, L, S]`, which PyTorch takes as `[B * H, L, S]`.
    """

    ours: str
    key_padding_mask: bool = False
    attn_mask: str = ""


MASKS = {
    "no mask": Masks("none"),
    "padding": Masks("bool[B,1,1,S]", key_padding_mask=True),
    "pairs": Masks("bool[L,S]", attn_mask="bool[L,S]"),
    "pairs of each head": Masks("bool[B,H,L,S]", attn_mask="bool[B,H,L,S]"),
    "padding and pairs": Masks("bool[B,1,L,S]", key_padding_mask=True, attn_mask="bool[L,S]"),
    "added": Masks("float[L,S]", attn_mask="float[L,S]"),
    "added for each head": Masks("float[B,H,L,S]", attn_mask="float[B,H,L,S]"),
}


class InItsConventions(nn.Module):
    """Our `Attention` with the weights, the masks and the outputs of PyTorch's."""

    def __init__(self, theirs: nn.MultiheadAttention, masks: Masks, weights: str) -> None:
        super().__init__()
        self.attention = Attention.from_torch(
            theirs, attn_mask=masks.ours, attn_weights=weights != "none"
        )
        self.batch_first = theirs.batch_first
        self.averaged = weights == "averaged"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        tensors = (query, key, value)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in tensors)
        mask = _visible(key_padding_mask, attn_mask)
        returned = self.attention(query, key, value, attn_mask=mask)
        output, weights = returned if isinstance(returned, tuple) else (returned, None)
        if not self.batch_first:
            output = output.transpose(0, 1)
        if weights is None:
            return output
        return output, weights.mean(1) if self.averaged else weights


def _visible(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        return attn_mask
    padding = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
    pairs = None if attn_mask is None else ~attn_mask
    return pairs if padding is None else padding if pairs is None else padding & pairs


def pytorchs(batch_first: bool) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(E, H, kdim=KDIM, vdim=VDIM, batch_first=batch_first).eval()
    nn.init.normal_(module.in_proj_bias)
    nn.init.normal_(module.out_proj.bias)
    return module


def called(module: nn.MultiheadAttention, inputs: dict[str, Tensor], weights: str):
    """Return the outputs of PyTorch's module, without None for weights."""
    inputs = dict(inputs)
    if inputs.get("attn_mask", torch.empty(0)).dim() == 4:
        inputs["attn_mask"] = inputs["attn_mask"].flatten(0, 1)
    options = {"need_weights": weights != "none", "average_attn_weights": weights == "averaged"}
    return [tensor for tensor in module(**inputs, **options) if tensor is not None]


def drawn(masks: Masks, batch_first: bool, B: int, L: int, S: int) -> dict[str, Tensor]:
    """Draw inputs in the form of PyTorch's module. Every query may attend to key 0."""
    random = torch.Generator().manual_seed(B * L * S)
    shapes = {"query": (B, L, E), "key": (B, S, KDIM), "value": (B, S, VDIM)}
    found = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    if not batch_first:
        found = {name: x.transpose(0, 1).contiguous() for name, x in found.items()}
    if masks.key_padding_mask:
        found["key_padding_mask"] = _hidden((B, S), random)
    if masks.attn_mask:
        shape = (B, H, L, S) if "H" in masks.attn_mask else (L, S)
        hidden = _hidden(shape, random)
        added = torch.randn(shape, generator=random).masked_fill(hidden, -torch.inf)
        found["attn_mask"] = added if masks.attn_mask.startswith("float") else hidden
    return found


def _hidden(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    hidden = torch.rand(shape, generator=random) < 0.4
    hidden[..., 0] = False
    return hidden


def graph_of(module: InItsConventions, masks: Masks, folder: Path) -> Built:
    """Return the graph, with the inputs of PyTorch's module."""
    example = drawn(masks, module.batch_first, 2, 3, 4)
    batch, length = (0, 1) if module.batch_first else (1, 0)
    axes = {name: {batch: "batch", length: "key_len"} for name in ("key", "value")}
    axes["query"] = {batch: "batch", length: "query_len"}
    if masks.key_padding_mask:
        axes["key_padding_mask"] = {0: "batch", 1: "key_len"}
    if masks.attn_mask:
        first = 2 if "H" in masks.attn_mask else 0
        axes["attn_mask"] = {first: "query_len", first + 1: "key_len"}
        if first:
            axes["attn_mask"][0] = "batch"
    outputs = ["output", "attn_weights"] if module.attention.spec.attn_weights else ["output"]
    return built(module, folder, example, axes, outputs)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("weights", WEIGHTS)
@torch.no_grad()
def test_in_eager_it_is_pytorchs_module(batch_first: bool, masks: Masks, weights: str):
    theirs = pytorchs(batch_first)
    ours = InItsConventions(theirs, masks, weights)
    for sizes in ((3, 5, 7), (1, 1, 1), (2, 6, 2)):
        inputs = drawn(masks, batch_first, *sizes)
        returned = ours(**inputs)
        got = [returned] if isinstance(returned, Tensor) else returned
        for actual, expected in zip(got, called(theirs, inputs, weights), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


GRAPHS = [
    ("no mask", False, "averaged"),
    ("padding", True, "none"),
    ("pairs", False, "per head"),
    ("padding and pairs", False, "averaged"),
    ("pairs of each head", True, "averaged"),
    ("added", True, "per head"),
    ("added for each head", False, "none"),
]
"""Mask, batches first, weights: each convention several times."""


@pytest.mark.parametrize("how", extended(GRAPHS, lambda how: how in GRAPHS[1::2]), ids=str)
@torch.no_grad()
@pytest.mark.every(3)
def test_in_onnx_runtime_it_is_pytorchs_module(how: tuple[str, bool, str], tmp_path: Path):
    mask, batch_first, weights = how
    masks = MASKS[mask]
    theirs = pytorchs(batch_first)
    graph = graph_of(InItsConventions(theirs, masks, weights), masks, tmp_path)
    assert graph.count("Attention") == 1
    for sizes in ((3, 5, 7), (1, 1, 1), (1, 1, 9), (4, 6, 2)):
        inputs = drawn(masks, batch_first, *sizes)
        wanted = called(theirs, inputs, weights)
        for actual, expected in zip(graph.run(**inputs), wanted, strict=True):
            close(actual, expected)


def test_the_result_of_from_torch_passes_with_its_spec(tmp_path: Path):
    ours = Attention.from_torch(pytorchs(True), attn_mask="float[B,H,L,S]", attn_weights=True)
    like = Subject.from_spec(ours.spec)
    subject = Subject(ours, like.inputs, like.axes, like.outputs, spec=ours.spec)
    assert build(subject, tmp_path / "bundle", runtimes=["ort-cpu"], dialects=["standard"]).passed


@torch.no_grad()
def test_a_row_of_hidden_keys_is_nan_there_and_0_here():
    """Check the one difference, softmax over no keys: here the output is its bias."""
    masks, theirs = MASKS["padding"], pytorchs(True)
    ours = InItsConventions(theirs, masks, "per head")
    inputs = drawn(masks, True, 2, 3, 4)
    inputs["key_padding_mask"][1] = True
    wanted, wanted_weights = called(theirs, inputs, "per head")
    output, weights = ours(**inputs)
    assert wanted[1].isnan().all()
    assert torch.equal(output[1], theirs.out_proj.bias.expand_as(output[1]))
    assert not weights[1].any()
    close(output[0], wanted[0])
    close(weights[0], wanted_weights[0])
