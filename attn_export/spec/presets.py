"""The specs behind ``--variant``: usual values of each variant, and the rule that it must meet."""

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
"""The values of every variant."""


def check_known(name: str) -> None:
    """Check that a variant is known.

    Raises:
        SpecError: If it is not.
    """
    if name not in VARIANTS:
        raise SpecError(f"unknown variant {name!r}; choose one of {', '.join(VARIANTS)}")


def usual_kv_heads(name: str, heads: int) -> int:
    """Return the key/value heads of a variant: 1 for MQA and MLA, H for MHA, a quarter for GQA.

    Args:
        name: The variant.
        heads: H. GQA has the divisor next below a quarter: 8 -> 2, 16 -> 4, 14 -> 2.
    """
    quarter = max(d for d in divisors(heads) if d <= max(2, heads // 4))
    return {"mha": heads, "gqa": quarter}.get(name, 1)


def usual_latent(embed_dim: int, heads: int) -> dict[str, Any]:
    """Return the fields of MLA in the proportions of DeepSeek-V2.

    Of D elements of a query two thirds are not rotated and one third is; the latent has the width
    of four such heads without rotation.

    Args:
        embed_dim: E.
        heads: H.
    """
    plain = max(embed_dim // heads, 4)
    turned = plain // 4 * 2
    return {
        "head_dim": plain + turned, "v_head_dim": plain, "kv_latent_dim": 4 * plain,
        "rotary": "interleaved", "rotary_dim": turned, "bias": "none",
    }  # fmt: skip


def check_variant(name: str, heads: int, kv_heads: int, latent: int) -> None:
    """Check that a spec is of its variant.

    Args:
        name: The variant.
        heads: H.
        kv_heads: Hkv.
        latent: C, 0 for none.

    Raises:
        SpecError: If a change made it another variant.
    """
    met = {"mha": kv_heads == heads, "mqa": kv_heads == 1, "mla": latent > 0}
    if not met.get(name, 1 < kv_heads < heads):
        raise SpecError(
            f"{name} with num_heads {heads} and num_kv_heads {kv_heads}: MHA has as "
            "many of both, MQA one K/V head, GQA a number between, MLA a latent; choose another "
            "variant"
        )
