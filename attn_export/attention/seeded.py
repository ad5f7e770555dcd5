"""The `Attention` of a spec, with weights that depend on a seed alone."""

from __future__ import annotations

import torch
from torch import nn

from attn_export.attention.module import Attention
from attn_export.spec import AttentionSpec


def seeded_attention(spec: AttentionSpec, seed: int = 0) -> Attention:
    """Return the module of a spec in eval mode, with random weights.

    The global random state is left as it was.

    Args:
        spec: The spec.
        seed: The seed of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Attention(spec).eval()
        _make_norms_matter(module)
    return module


def _make_norms_matter(module: nn.Module) -> None:
    """Give normalisations weights that show: those of 1 and 0 hide that they were left out."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, (nn.RMSNorm, nn.LayerNorm)):
                part.weight.normal_(1.0, 0.3)
                if isinstance(part, nn.LayerNorm):
                    part.bias.normal_(0.0, 0.3)
