"""A transformer with what sentence-transformers adds to it: pooling, and layers on the vector.

Legend: B batch, L tokens, E width of tokens, V width of the vector.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export.bundle.text_inputs import VECTOR

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    f"torch.nn.modules.{name}": getattr(nn, name.rpartition(".")[2])
    for name in (
        "linear.Identity", "activation.GELU", "activation.ReLU", "activation.SiLU",
        "activation.Sigmoid", "activation.Tanh",
    )
}  # fmt: skip
"""The activations of `Dense` by their names in its config."""


def _summed(tokens: Tensor, weights: Tensor) -> Tensor:
    return (tokens * weights[..., None].to(tokens.dtype)).sum(1)


def _at(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the token at an index `[B]` of each batch element, `[B, E]`."""
    return tokens.gather(1, index[:, None, None].expand(-1, 1, tokens.shape[-1]))[:, 0]


def _count(weights: Tensor, tokens: Tensor) -> Tensor:
    # At least 1, so that an element that is all padding gives finite numbers in any type.
    return weights.sum(1, keepdim=True).clamp(min=1).to(tokens.dtype)


def _ranks(mask: Tensor) -> Tensor:
    """Return the number of each slot `[B, L]`, from 1 at the first token that is no padding."""
    return torch.arange(1, mask.shape[1] + 1) - first_token(mask)[:, None]


def first_token(mask: Tensor) -> Tensor:
    """Return the slot of the first token of each batch element, `[B]`."""
    length = mask.shape[1]
    return length - (mask * torch.arange(length, 0, -1)).amax(1).clamp(min=1)


def _last_token(mask: Tensor) -> Tensor:
    return (mask * torch.arange(1, mask.shape[1] + 1)).amax(1).clamp(min=1) - 1


def _largest(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill(mask[..., None] == 0, torch.finfo(tokens.dtype).min).amax(1)


POOLINGS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda tokens, mask: _at(tokens, first_token(mask)),
    "max": _largest,
    "mean": lambda tokens, mask: _summed(tokens, mask) / _count(mask, tokens),
    "mean_sqrt_len_tokens": lambda x, mask: _summed(x, mask) / _count(mask, x).sqrt(),
    "weightedmean": lambda tokens, mask: (
        _summed(tokens, mask * _ranks(mask)) / _count(mask * _ranks(mask), tokens)
    ),
    "lasttoken": lambda tokens, mask: _at(tokens, _last_token(mask)),
}
"""Poolings by name, from tokens `[B, L, E]` and a mask `[B, L]`. Padding has no influence, on
either side."""

POOLED: Mapping[str, str] = {
    "cls": "the first token", "max": "the maximum", "mean": "the mean",
    "mean_sqrt_len_tokens": "the sum over the root of the length",
    "weightedmean": "the weighted mean", "lasttoken": "the last token",
}  # fmt: skip
"""What poolings are called."""


class Pooling(nn.Module):
    """Makes a vector of the tokens of a text; those of several poolings are joined."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the vector `[B, V]` of tokens `[B, L, E]`."""
        return torch.cat([POOLINGS[mode](tokens, mask) for mode in self.modes], dim=-1)


class Dense(nn.Module):
    """A linear layer with an activation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: nn.Module) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias, requires_grad=False)
        self.activation = activation

    def forward(self, vector: Tensor) -> Tensor:
        """Return another vector."""
        changed: Tensor = self.activation(self.linear(vector))
        return changed


class Normalize(nn.Module):
    """Divides a vector by its length."""

    def forward(self, vector: Tensor) -> Tensor:
        """Return a vector of length 1."""
        return F.normalize(vector, dim=-1)


class SentenceModel(nn.Module):
    """A transformer, pooling, and layers on the vector, called as a model of transformers.

    `after`: The layers on the vector, in their order.
    """

    main_input_name = "input_ids"

    def __init__(self, transformer: Any, pooling: Pooling, after: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.transformer, self.pooling = transformer, pooling
        self.after = tuple(after)
        for name, layer in after.items():
            self.add_module(name, layer)

    @property
    def config(self) -> Any:
        """The config of the transformer."""
        return self.transformer.config

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        dtype: torch.dtype = self.transformer.dtype
        return dtype

    def can_generate(self) -> bool:
        """Return that it makes no text."""
        return False

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of the transformer."""
        embeddings: nn.Module = self.transformer.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> None:
        """Return that there is no head."""

    def _from_config(self, config: Any, **options: Any) -> SentenceModel:
        """Return a model of another config with the same layers on the vector."""
        other = type(self.transformer)._from_config(config, **options)
        return SentenceModel(
            other, self.pooling, {name: self.get_submodule(name) for name in self.after}
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None, position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the vector and the tokens `[B, L, E]`, by the names that exporters give them."""
        given = {
            "attention_mask": attention_mask, "token_type_ids": token_type_ids,
            "position_ids": position_ids,
        }  # fmt: skip
        options: dict[str, Any] = {n: x for n, x in given.items() if x is not None}
        if "use_cache" in inspect.signature(self.transformer.forward).parameters:
            options["use_cache"] = False
        tokens = self.transformer(input_ids=input_ids, **options).last_hidden_state
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vector = self.pooling(tokens, mask)
        for name in self.after:
            vector = self.get_submodule(name)(vector)
        return {VECTOR: vector, "last_hidden_state": tokens, "token_embeddings": tokens}
