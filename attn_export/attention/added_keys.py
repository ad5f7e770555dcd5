"""Keys of no token after all others: `add_bias_kv` and `add_zero_attn` of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_export.attention import masking
from attn_export.spec import AttentionSpec


class AddedKeys(nn.Module):
    """A learned key and value, and a key and value of 0, as far as a spec has them.

    They come after all other keys, in this order, and every query sees them: no mask hides them
    (`torch.nn.MultiheadAttention`).

    Args:
        spec: Its `add_bias_kv` and `add_zero_attn` are used.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.add_bias_kv:
            Hkv, D, Dv = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
            self.bias_k = nn.Parameter(nn.init.xavier_normal_(torch.empty(Hkv, D)))
            self.bias_v = nn.Parameter(nn.init.xavier_normal_(torch.empty(Hkv, Dv)))

    def forward(
        self, key: Tensor, value: Tensor, mask: Tensor | None, L: int, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys `[B, Hkv, S, D]`, values and mask with the added keys appended.

        The mask that comes back holds the causal one too.

        Args:
            key: `[B, Hkv, S, D]`.
            value: `[B, Hkv, S, Dv]`.
            mask: The mask that broadcasts to `[B, H, L, S]`, or None.
            L: The number of queries.
            causal: Whether query i sees keys up to P + i only.
        """
        count = self.spec.added_keys
        if causal:
            mask = masking.restrict(mask, masking.causal(L, key.shape[2], key.device))
        if mask is not None:
            visible: bool | float = True if mask.dtype == torch.bool else 0.0
            mask = torch.cat([mask, mask.new_full((*mask.shape[:-1], count), visible)], dim=-1)
        if self.spec.add_bias_kv:
            key = torch.cat([key, _of_every_batch(self.bias_k, key)], dim=2)
            value = torch.cat([value, _of_every_batch(self.bias_v, value)], dim=2)
        if self.spec.add_zero_attn:
            key, value = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value))
        return key, value, mask


def _of_every_batch(one: Tensor, like: Tensor) -> Tensor:
    """Expand `[Hkv, D]` to `[B, Hkv, 1, D]`."""
    return one[None, :, None, :].expand(like.shape[0], -1, -1, -1)
