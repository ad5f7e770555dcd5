"""Masks: the keys that a query may attend to, the bias on their scores, and added keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_export.spec import AttentionSpec
from attn_export.spec.inputs import MASK_FLOOR

MASK_FLOOR_FLOAT16 = -6e4
"""`MASK_FLOOR` for float16, which ends at 65504."""


def clamp_mask(mask: Tensor | None) -> Tensor | None:
    """Return a float mask with finite values clamped to at least `MASK_FLOOR`; keep a bool mask."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    floor = MASK_FLOOR_FLOAT16 if mask.dtype == torch.float16 else MASK_FLOOR
    return torch.where(mask == -torch.inf, mask, mask.clamp(min=floor))


def causal_mask(L: int, S: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool `[L, S]`: query i sees keys up to S - L + i.

    Args:
        L: The number of queries.
        S: The number of keys.
        device: The device of the mask.
    """
    return torch.ones(L, S, dtype=torch.bool, device=device).tril(S - L)


def restrict(mask: Tensor | None, shown: Tensor | None) -> Tensor | None:
    """Return `mask` with every key hidden that the bool mask `shown` does not show.

    Args:
        mask: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
        shown: Bool, broadcasts to `[B, H, L, S]`: True where a key may be seen.
    """
    if mask is None or shown is None:
        return shown if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & shown
    return torch.where(
        shown, mask, torch.full((), -torch.inf, dtype=mask.dtype, device=mask.device)
    )


def add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return `mask` as a float mask with `bias` added to the scores.

    Args:
        mask: Bool or float, broadcasts to `[B, H, L, S]`; None for no mask.
        bias: Float, broadcasts to `[B, H, L, S]`.
    """
    if bias is None:
        return mask
    if mask is None:
        return bias
    return restrict(bias, mask) if mask.dtype == torch.bool else mask + bias


def as_float(mask: Tensor | None, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
    """Expand a mask to additive scores of `shape` `[B, H, L, S]` in the dtype of `like`.

    Args:
        mask: A bool or float mask, or None.
        shape: `[B, H, L, S]`.
        like: A tensor of the wanted dtype and device.
    """
    zeros = like.new_zeros(shape)
    added = add_bias(mask, zeros)
    return zeros if added is None else added.expand(shape)


# -- additional keys at the end: `add_bias_kv` and `add_zero_attn` of PyTorch ---------------------


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
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        L: int,
        *,
        causal: bool,
        mixed: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys `[B, Hkv, S, D]`, values and mask with the added keys appended.

        The mask that comes back holds the causal one too.

        Args:
            key: `[B, Hkv, S, D]`.
            value: `[B, Hkv, S, Dv]`.
            mask: The mask that broadcasts to `[B, H, L, S]`, or None.
            L: The number of queries.
            causal: Whether query i sees keys up to P + i only.
            mixed: Applied to a learned key as to all others: a rotation, or nothing.
        """
        count = self.spec.added_keys
        if causal:
            mask = restrict(mask, causal_mask(L, key.shape[2], key.device))
        if mask is not None:
            visible: bool | float = True if mask.dtype == torch.bool else 0.0
            mask = torch.cat([mask, mask.new_full((*mask.shape[:-1], count), visible)], dim=-1)
        if self.spec.add_bias_kv:
            key = torch.cat([key, _of_every_batch(mixed(self.bias_k), key)], dim=2)
            value = torch.cat([value, _of_every_batch(self.bias_v, value)], dim=2)
        if self.spec.add_zero_attn:
            key, value = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (key, value))
        return key, value, mask


def _of_every_batch(one: Tensor, like: Tensor) -> Tensor:
    """Expand `[Hkv, D]` to `[B, Hkv, 1, D]`."""
    return one[None, :, None, :].expand(like.shape[0], -1, -1, -1)
