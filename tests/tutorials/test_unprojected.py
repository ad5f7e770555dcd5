"""Attention without projections: softmax(X Xᵀ) X, and scaled dot-product attention.

Each system is a function, wrapped in a module that also gives the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from built import Built, built, close
from torch import Tensor, nn

from attn_export import attention

pytestmark = pytest.mark.xdist_group("test_unprojected")  # what it makes is shared

C = 6
SIZES = ((2, 3, 4), (1, 1, 1), (3, 7, 1), (1, 1, 9), (2, 19, 12))
"""B, L, S. Self-attention takes L alone. The first one is traced."""

Outputs = tuple[Tensor, Tensor]


def self_attention(tokens: Tensor) -> Outputs:
    """Compute softmax(X Xᵀ) X for X `[B, L, C]`."""
    weights = (tokens @ tokens.mT).softmax(-1)  # [B, L, L]
    return weights @ tokens, weights


def scaled(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
    """Compute Vaswani et al. 2017, eq. 1, for one head: `[B, L, C]` and twice `[B, S, C]`."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)  # [B, L, S]
    return weights @ value, weights


def scaled_and_masked(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Outputs:
    """Compute `scaled` with the keys for which `attn_mask [B, L, S]` is True."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    hidden = ~attn_mask
    nothing = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, -torch.inf).masked_fill(nothing, 0.0).softmax(-1)
    weights = weights.masked_fill(nothing, 0.0)
    return weights @ value, weights


def ours(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Outputs:
    """Call `attn_export.attention.scaled_dot_product_attention` with one head."""
    attended, weights = attention.scaled_dot_product_attention(
        query.unsqueeze(1),
        key.unsqueeze(1),
        value.unsqueeze(1),
        None if attn_mask is None else attn_mask.unsqueeze(1),
        scale=1 / math.sqrt(C),
        need_weights=True,
    )
    return attended.squeeze(1), weights.squeeze(1)


def ours_of_itself(tokens: Tensor) -> Outputs:
    """Compute softmax(X Xᵀ) X with this package: scale 1, and X three times."""
    x = tokens.unsqueeze(1)
    attended, weights = attention.scaled_dot_product_attention(x, x, x, scale=1, need_weights=True)
    return attended.squeeze(1), weights.squeeze(1)


class SelfSystem(nn.Module):
    """A function as a module: an export needs inputs by name."""

    def __init__(self, function: Callable[..., Outputs]) -> None:
        super().__init__()
        self.function = function

    def forward(self, tokens: Tensor) -> Outputs:
        return self.function(tokens)


class CrossSystem(SelfSystem):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        return self.function(query, key, value)


class MaskedSystem(SelfSystem):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Outputs:
        return self.function(query, key, value, attn_mask)


@dataclasses.dataclass(frozen=True)
class Row:
    module: nn.Module
    inputs: tuple[str, ...]
    reference: Callable[..., Tensor]


def torch_of_itself(tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(tokens, tokens, tokens, scale=1.0)


CROSS = ("query", "key", "value")
MASKED = (*CROSS, "attn_mask")
SYSTEMS = {
    "softmax(XX^T)X": Row(SelfSystem(self_attention), ("tokens",), torch_of_itself),
    "ours of itself": Row(SelfSystem(ours_of_itself), ("tokens",), torch_of_itself),
    "scaled": Row(CrossSystem(scaled), CROSS, F.scaled_dot_product_attention),
    "ours": Row(CrossSystem(ours), CROSS, F.scaled_dot_product_attention),
    "scaled, masked": Row(MaskedSystem(scaled_and_masked), MASKED, F.scaled_dot_product_attention),
    "ours, masked": Row(MaskedSystem(ours), MASKED, F.scaled_dot_product_attention),
}
AXES = {
    "tokens": {0: "batch", 1: "query_len"},
    "query": {0: "batch", 1: "query_len"},
    "key": {0: "batch", 1: "key_len"},
    "value": {0: "batch", 1: "key_len"},
    "attn_mask": {0: "batch", 1: "query_len", 2: "key_len"},
}


def drawn(names: tuple[str, ...], B: int, L: int, S: int) -> dict[str, Tensor]:
    """Draw inputs by name. In a mask, the last query of each batch sees nothing."""
    random = torch.Generator().manual_seed(B * L * S)
    found: dict[str, Tensor] = {}
    for name in names:
        if name == "attn_mask":
            found[name] = torch.rand(B, L, S, generator=random) < 0.6
            found[name][:, -1] = False
        else:
            length = S if name in ("key", "value") else L
            found[name] = torch.randn(B, length, C, generator=random)
    return found


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Row, Built]:
    row = SYSTEMS[request.param]
    folder = tmp_path_factory.mktemp("unprojected")
    axes = {name: AXES[name] for name in row.inputs}
    example = drawn(row.inputs, *SIZES[0])
    return row, built(row.module, folder, example, axes, ["output", "weights"])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.every(24)
def test_each_row_of_weights_sums_to_1_in_eager_and_in_onnx_runtime(system, size):
    row, graph = system
    inputs = drawn(row.inputs, *size)
    sees_something = inputs["attn_mask"].any(-1) if "attn_mask" in inputs else torch.tensor(1.0)
    for output, weights in (row.module(**inputs), graph.run(**inputs)):
        assert output.isfinite().all()
        assert (weights >= 0).all()
        sums = weights.sum(-1)
        close(sums, sees_something.expand_as(sums).to(sums.dtype))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_pytorchs_own_attention_in_eager_and_in_onnx_runtime(system, size):
    row, graph = system
    inputs = drawn(row.inputs, *size)
    wanted = row.reference(**inputs)
    values = inputs.get("value", inputs.get("tokens"))
    for output, weights in (row.module(**inputs), graph.run(**inputs)):
        close(output, wanted)
        close(weights @ values, wanted)


@pytest.mark.parametrize("system", ["softmax(XX^T)X", "ours of itself"], indirect=True)
def test_without_positions_the_order_of_tokens_means_nothing(system):
    """Permute tokens, which gives the same outputs in that other order."""
    _, graph = system
    tokens = drawn(("tokens",), 2, 8, 8)["tokens"]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    output, weights = graph.run(tokens=tokens)
    moved, moved_weights = graph.run(tokens=tokens[:, order])
    close(moved, output[:, order])
    close(moved_weights, weights[:, order][:, :, order])


def test_pytorchs_own_function_alone_passes_as_it_is(tmp_path: Path):
    """Without weights to give, the attention is one call of PyTorch's, on `[B, H, L, D]`."""

    class Alone(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)

    shapes = {"query": (2, 3, 4, C), "key": (2, 3, 5, C), "value": (2, 3, 5, C)}
    example = {name: torch.randn(shape) for name, shape in shapes.items()}
    axes = {"query": {0: "batch", 2: "query_len"}, "key": {0: "batch", 2: "key_len"}}
    axes["value"] = axes["key"]
    graph = built(Alone(), tmp_path, example, axes, ["output"])
    inputs = {name: torch.randn(1, 3, n, C) for name, n in zip(CROSS, (1, 11, 11), strict=True)}
    close(graph.run(**inputs)[0], Alone()(**inputs))
