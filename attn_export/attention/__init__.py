"""Attention in plain PyTorch: `Attention`, and functions that build it as MHA, MQA or GQA.

The functions have the names that papers use. They differ in the number of
key/value heads: H, 1, or one that the caller gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attn_export.attention.functional import scaled_dot_product_attention
from attn_export.attention.module import Attention
from attn_export.errors import ExportError
from attn_export.optional_parts import hooks
from attn_export.spec import AttentionSpec
from attn_export.spec.fields import SOFTMAX

__all__ = [
    "Attention",
    "GroupedQueryAttention",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "scaled_dot_product_attention",
    "seeded_attention",
]


def MultiHeadAttention(embed_dim: int, num_heads: int, **options: Any) -> Attention:  # noqa: N802
    """Return an `Attention` in which every query head has its own key/value head."""
    return Attention(AttentionSpec(embed_dim=embed_dim, num_heads=num_heads, **options))


def MultiQueryAttention(embed_dim: int, num_heads: int, **options: Any) -> Attention:  # noqa: N802
    """Return an `Attention` in which all query heads share one key/value head (Shazeer 2019)."""
    return GroupedQueryAttention(embed_dim, num_heads, 1, **options)


def GroupedQueryAttention(  # noqa: N802
    embed_dim: int, num_heads: int, num_kv_heads: int, **options: Any
) -> Attention:
    """Return an `Attention` in which H / Hkv query heads share a KV head (Ainslie et al. 2023)."""
    return Attention(
        AttentionSpec(
            embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, **options
        )
    )


# -- seeded weights -----------------------------------------------------------------------------


def seeded_attention(spec: AttentionSpec, seed: int = 0) -> Attention:
    """Return an `Attention` in eval mode whose random weights depend on a seed alone.

    The global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _make_layer(spec).eval()
        _make_norms_matter(module)
    return module


def _make_layer(spec: AttentionSpec) -> Attention:
    """Return the layer of a spec, of a part if it is not softmax attention."""
    if spec.kind == SOFTMAX:
        return Attention(spec)
    layers: dict[str, type[Attention]] = {k: v for of in hooks("LAYERS") for k, v in of.items()}
    if spec.kind not in layers:
        raise ExportError(
            f"kind = {spec.kind!r} needs the part {spec.kind}_attention, which is missing; install "
            "attn-export whole"
        )
    return layers[spec.kind](spec)


def _make_norms_matter(module: nn.Module) -> None:
    """Draw the weights of norms at random: with 1 and 0, a graph could leave them out unnoticed."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, (nn.RMSNorm, nn.LayerNorm)):
                layer.weight.normal_(1.0, 0.3)
                if isinstance(layer, nn.LayerNorm):
                    layer.bias.normal_(0.0, 0.3)
