"""Mixtures of experts of a model of transformers, in a form that reads weights where they are.

Every expert computes all tokens, and the outputs that a token did not ask for are multiplied by 0.
transformers' own form that can be exported copies the weights of an expert for each token.

Legend: T tokens, E experts, H hidden size, I size between the products of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

EXPERTS = "attn_export"
"""The name of this form in transformers."""


def _experts(module: Any, x: Tensor, index: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of the experts' outputs for each token, `[T, H]`.

    `x`: `[T, H]`.
    `index`: The experts of each token, `[T, K]`.
    `shares`: The factors of their outputs, `[T, K]`.
    """
    if not module.has_gate or module.has_post_expert_norm:
        own: Tensor = batched_mm_experts_forward(module, x, index, shares)
        return own
    first, second = module.gate_up_proj, module.down_proj
    bias = module.gate_up_proj_bias[..., None] if module.has_bias else None
    if module.is_transposed:
        first, second = first.transpose(1, 2), second.transpose(1, 2)
    if module.is_concatenated:
        first, bias = _interleaved(first), None if bias is None else _interleaved(bias)
    hidden = first @ x.T  # [E, 2I, T], gates and their factors in turns
    hidden = (hidden if bias is None else hidden + bias).transpose(1, 2)
    if module.is_concatenated:
        hidden = torch.cat([hidden[..., ::2], hidden[..., 1::2]], -1)
    out: Tensor = second @ module._apply_gate(hidden).transpose(1, 2)  # [E, H, T]
    out = out + module.down_proj_bias[..., None] if module.has_bias else out
    places = index[..., None] == torch.arange(first.shape[0])  # [T, K, E]
    used = torch.where(places, shares[..., None].to(out.dtype), 0.0).sum(1)
    return (out * used.T[:, None]).sum(0).T.contiguous()


def _interleaved(weight: Tensor) -> Tensor:
    """Return rows `[E, 2I, …]` that are one half after the other in turns."""
    halves: Tensor = weight.unflatten(1, (2, -1))
    return halves.transpose(1, 2).flatten(1, 2)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
