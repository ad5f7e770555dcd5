"""Projections of q, k and v that lie in one tensor, and apart.

Legend: H query heads, Hkv key/value heads, D head width, Dv value head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from attn_export.spec import AttentionSpec
from attn_export.weights.layouts import GROUPS, ROWS

PARTS: Final = ("q", "k", "v")


def split_packed(tensor: Tensor, spec: AttentionSpec, packing: str) -> list[Tensor]:
    """Return the rows of q, k and v.

    Args:
        tensor: `[H * D + Hkv * (D + Dv), ...]`.
        spec: H, Hkv, D and Dv.
        packing: `ROWS` or `GROUPS`, as in `layouts`.
    """
    H, Hkv, D, Dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    if packing == GROUPS:
        grouped = tensor.unflatten(0, (Hkv, -1))  # [Hkv, q_per_kv * D + D + Dv, ...]
        parts = grouped.split([spec.q_per_kv * D, D, Dv], dim=1)
        return [part.flatten(0, 1).contiguous() for part in parts]
    return [part.clone() for part in tensor.split([H * D, Hkv * D, Hkv * Dv])]


def as_packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of an `Attention` without `packed_qkv` to those of one with it."""
    packed = dict(weights)
    for kind in ("weight", "bias"):
        parts = [packed.pop(f"{side}_proj.{kind}", None) for side in PARTS]
        there = [part for part in parts if part is not None]
        if there:
            packed[f"qkv_proj.{kind}"] = torch.cat(there)
    return packed


def as_apart(weights: Mapping[str, Tensor], spec: AttentionSpec) -> dict[str, Tensor]:
    """Rename the weights of an `Attention` with `packed_qkv` to those of one without it."""
    apart = dict(weights)
    for kind in ("weight", "bias"):
        tensor = apart.pop(f"qkv_proj.{kind}", None)
        if tensor is not None:
            parts = split_packed(tensor, spec, ROWS)
            apart |= {f"{side}_proj.{kind}": part for side, part in zip(PARTS, parts, strict=True)}
    return apart
