"""Specs for ``--variant``: the usual values of each variant, and the rule that it must meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attn_export.errors import SpecError
from attn_export.spec.rules import divisors

VARIANTS: Final = ("mha", "mqa", "gqa", "mla")

USUAL: Final[Mapping[str, Any]] = {
    "embed_dim": 512, "num_heads": 8, "causal": True, "attn_mask": "bool[B,1,1,S]",
    "cache": "append",
}  # fmt: skip
"""Values that all variants have by default."""


def check_known(name: str) -> None:
    """Check that a variant exists.

    Raises:
        SpecError: If it does not.
    """
    if name not in VARIANTS:
        raise SpecError(f"unknown variant {name!r}; choose one of {', '.join(VARIANTS)}")


def usual_kv_heads(name: str, heads: int) -> int:
    """Return the key/value heads of a variant: 1 for MQA and MLA, H for MHA, a quarter for GQA.

    Args:
        name: The variant.
        heads: H. GQA has the largest divisor of H up to H / 4, but at least 2 if H is even:
            8 -> 2, 16 -> 4, 14 -> 2.
    """
    quarter = max(d for d in divisors(heads) if d <= max(2, heads // 4))
    return {"mha": heads, "gqa": quarter}.get(name, 1)


def usual_latent(embed_dim: int, heads: int) -> dict[str, Any]:
    """Return the fields of MLA in the proportions of DeepSeek-V2.

    One third of the D elements of a query is rotated. The latent is four times as wide as the other
    two thirds.

    Args:
        embed_dim: E.
        heads: H.
    """
    plain = max(embed_dim // heads, 4)
    rotated = plain // 4 * 2
    return {
        "head_dim": plain + rotated, "v_head_dim": plain, "kv_latent_dim": 4 * plain,
        "rotary": "interleaved", "rotary_dim": rotated, "bias": "none",
    }  # fmt: skip


def check_variant(name: str, heads: int, kv_heads: int, latent: int) -> None:
    """Check that the dimensions of a spec are those of its variant.

    Args:
        name: The variant.
        heads: H.
        kv_heads: Hkv.
        latent: C, 0 for none.

    Raises:
        SpecError: If they are not, since a field was changed.
    """
    is_variant = {"mha": kv_heads == heads, "mqa": kv_heads == 1, "mla": latent > 0}
    if not is_variant.get(name, 1 < kv_heads < heads):
        raise SpecError(
            f"{name} with num_heads {heads} and num_kv_heads {kv_heads}: MHA has as "
            "many of both, MQA one K/V head, GQA a number between, MLA a latent; choose another "
            "variant"
        )
