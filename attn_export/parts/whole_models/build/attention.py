"""Attention and masks of a model of transformers, by functions of our own.

transformers calls a function for each attention, which emits one `Attention` node, and one for each
mask, which is a function of positions that transformers gives.

Legend: B batch, L new tokens, S keys, such as the capacity of the caches, H query heads, Hkv
key/value heads, D head width, Dv value head width, T tokens of an encoder.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attn_export.attention import functional, onnx_attention
from attn_export.errors import ExportError
from attn_export.parts.whole_models.build.experts import EXPERTS

_NAME = "attn_export"
"""The name of our attention and masks in transformers."""


@dataclasses.dataclass
class Call:
    """One run of a model.

    Attributes:
        past_length: The number of keys in the caches of each batch element, int64 `[B]`; None if
            there are no caches.
        encoded: The tokens of the encoder that are no padding, bool or int64 `[B, T]`, in a decoder
            that sees them.
        crossed: The keys of these tokens in the layers that see them.
        causal: The masks that are causal and hide no more.
        attended: The modules that called our attention, in their order.
        hides: Whether a layer hides tokens that are no padding.
        padding: The masks of padding that the model made.
        cut: How often the hidden states were reduced to the positions whose logits are wanted.
        seen: What the cache says that it holds, if models ask beyond masks and positions.
        appends: Whether caches grow by the new tokens, and are not written in place.
    """

    past_length: Tensor | None
    encoded: Tensor | None = None
    crossed: list[Tensor] = dataclasses.field(default_factory=list)
    causal: list[Tensor] = dataclasses.field(default_factory=list)
    attended: list[nn.Module] = dataclasses.field(default_factory=list)
    hides: bool = False
    padding: list[Tensor] = dataclasses.field(default_factory=list)
    cut: int = 0
    seen: int | Tensor = 0
    appends: bool = False


class OwnAttentionError(ExportError):
    """Error for a type of model of whose layers some attend without calling our function."""

    def __init__(self, kind: str, layers: int, calls: int) -> None:
        own = f"of {layers} layers, {calls} call transformers' AttentionInterface"
        many = f"its {layers} layers attend {calls} times; models with stages are not supported"
        super().__init__(f"{kind} has attention of its own: {own if calls <= layers else many}")


CALL: ContextVar[Call] = ContextVar("attn_export_whole_model")


@contextlib.contextmanager
def attending(model: PreTrainedModel, call: Call) -> Iterator[None]:
    """Let a model call our attention inside this block, and experts that can be exported."""
    fields = {"_attn_implementation": _NAME, "_experts_implementation": EXPERTS}
    parts = (vars(part).get("config") for part in model.modules())
    configs = {id(config): config for config in parts if hasattr(config, next(iter(fields)))}
    with contextlib.ExitStack() as stack:
        stack.callback(CALL.reset, CALL.set(call))
        for config in configs.values():
            for name, value in fields.items():
                stack.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        yield


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None, **_: Any,
) -> Tensor | None:  # fmt: skip
    """Return transformers' mask of a layer, bool `[B, 1, L, S]`, for pasts of unequal lengths."""
    call, length = CALL.get(), CALL.get().past_length
    is_full = mask_function == bidirectional_mask_function
    if call.encoded is not None and is_full and attention_mask is not None:
        length = None  # of the encoder's tokens
    if length is None and is_full:
        if attention_mask is None:
            return None
        return attention_mask[:, None, None].expand(batch_size, 1, q_length, kv_length)
    new = torch.arange(q_length)[None] if length is None else functional.positions(length, q_length)
    shown: Tensor = mask_function(
        torch.arange(batch_size)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        new[:, None, :, None],
        torch.arange(kv_length)[None, None, None],
    ).expand(batch_size, 1, q_length, kv_length)
    if mask_function == causal_mask_function:
        call.causal.append(shown)
    call.hides = True
    if length is None and attention_mask is not None:
        return shown & attention_mask[:, None, None]
    if attention_mask is not None:  # some models make one, in which nothing is padding
        call.padding.append(attention_mask)
    return shown


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention of a layer, `[B, L, H, Dv]`.

    `key`: `[B, Hkv, S, D]`, such as the written cache.
    `value`: `[B, Hkv, S, Dv]`.
    `attention_mask`: Bool, or added to the scores; None if the layer shows all keys.
    `s_aux`: The sink of each head, `[H]`.
    `position_bias`: Added to the scores, `[B or 1, H, L, S]`.
    """
    call = CALL.get()
    call.attended.append(module)
    is_crossed = any(key is crossed for crossed in call.crossed)
    length = None if is_crossed or call.appends else call.past_length
    causal = any(attention_mask is mask for mask in call.causal) and position_bias is None
    causal &= not call.appends  # the node would count from the first key
    mask = functional.clamp_mask(attention_mask)
    if is_crossed and not _has_bias(module):
        position_bias = None  # zeros
    if position_bias is not None:
        mask = functional.add_bias(mask, position_bias)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options: Any = {"scale": scale, "softcap": softcap}
    if onnx_attention.emitting() and s_aux is None:
        attended = onnx_attention.attention_node(
            query, key, value, None if causal else mask, past_length=length, causal=causal,
            **options,
        )[0]  # fmt: skip
    else:
        if length is not None:
            written = functional.visible_keys(length, query.shape[2], key.shape[2], causal=False)
            mask = functional.restrict(mask, written)
        if s_aux is not None and onnx_attention.emitting():
            attend: Any = onnx_attention.sink_attention_nodes
        else:
            attend = functional.scaled_dot_product_attention
        attended, _ = attend(query, key, value, mask, sinks=s_aux, causal=False, **options)
    return attended.transpose(1, 2).contiguous(), None


def _has_bias(module: nn.Module) -> bool:
    return bool(getattr(module, "has_relative_attention_bias", True))


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, _mask)
