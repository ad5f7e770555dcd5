"""What the usual functions of flash_attn, xformers and PyTorch's varlen attention compute.

The packages need not be installed. Their arguments are documented in
https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py and
https://facebookresearch.github.io/xformers/components/ops.html.

Legend: B batch, H query heads, Hkv key/value heads, L query length, S key length, D head width,
T tokens of all sequences, N sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from attn_export.attention import functional
from attn_export.attention.onnx_attention import attention_node, emitting

# -- attention in their layout --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Operands of attention: queries `[B, L, H, D]`, keys and values `[B, S, Hkv, D]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None = None
    softcap: float | None = None

    def attend(self, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Return the attention, `[B, L, H, D]`. A query without keys gets 0."""
        q, k, v = (x.transpose(1, 2) for x in (self.query, self.key, self.value))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        if mask is not None:
            mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
        if not emitting():
            out, _ = functional.scaled_dot_product_attention(
                q, k, v, mask, causal=causal, scale=scale, softcap=self.softcap or None
            )
            return out.transpose(1, 2)
        if mask is not None:
            mask = mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])
        nodes = attention_node(
            q, k, v, mask, causal=causal, scale=scale, softcap=self.softcap or None
        )
        return nodes[0].transpose(1, 2)

    def log_sums(self, mask: Tensor | None) -> Tensor:
        """Return the logarithm of the sum of exponentials of scores, float32 `[B, H, L]`."""
        q, k = self.query.transpose(1, 2), self.key.transpose(1, 2)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.transpose(-1, -2) * scale
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        if mask is not None:
            scores = scores + functional.add_bias(mask, scores.new_zeros(()))
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1)

    def distance(self) -> Tensor:
        """Return how far queries are behind keys, `[L, S]`; the last of both are at one place."""
        L, S = self.query.shape[1], self.key.shape[1]
        return torch.arange(L)[:, None] + (S - L) - torch.arange(S)


def _mask(
    distance: Tensor, shown: Tensor | None, window: Sequence[int], slopes: Tensor | None
) -> Tensor | None:
    """Return the mask `[…, L, S]` of a window and of slopes; None if it hides nothing.

    `distance`: From a query back to a key, `[…, L, S]`.
    `shown`: Which keys a query may attend to besides.
    `window`: How far a query sees back and ahead; below 0 without end.
    `slopes`: What heads subtract from scores for each step, `[H]` or `[B, H]`.
    """
    back, ahead = window
    if back >= 0:
        shown = functional.restrict(shown, distance <= back)
    if ahead >= 0:
        shown = functional.restrict(shown, distance >= -ahead)
    if slopes is None:
        return shown
    steps = distance.abs().to(slopes.dtype)
    return functional.add_bias(shown, -slopes[..., None, None] * steps)


# -- flash_attn and PyTorch's varlen attention ----------------------------------------------------

_Given = dict[str, Any]
"""The arguments of a call by name, without those that were left out."""


def _flash(given: _Given) -> tuple[Tensor, Tensor]:
    """Return the attention of queries `[B, L, H, D]`, and the logarithms of sums `[B, H, L]`."""
    heads, window, slopes = _operands(given)
    mask = _mask(heads.distance(), None, window, slopes)
    aligned = statically_known_true(heads.query.shape[1] == heads.key.shape[1])
    if slopes is None and window[0] < 0 and window[1] == 0 and aligned:
        return heads.attend(causal=True), heads.log_sums(mask)
    return heads.attend(mask), heads.log_sums(mask)


def _flash_varlen(given: _Given) -> tuple[Tensor, Tensor]:
    """Return the same for sequences one after the other: queries are `[T, H, D]`."""
    heads, window, slopes = _operands(given)
    ends = [given[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    (q_place, q_number), (k_place, k_number) = (
        _places(x.shape[0], bounds)
        for x, bounds in zip((heads.query, heads.key), ends, strict=True)
    )
    longer = ends[1].diff() - ends[0].diff()
    distance = (q_place + longer[q_number.clamp(max=longer.shape[0] - 1)])[:, None] - k_place
    mask = _mask(distance, q_number[:, None] == k_number, window, None)
    if slopes is not None:  # [H], or of each sequence
        if slopes.dim() == 2:
            slopes = slopes[q_number.clamp(max=slopes.shape[0] - 1)].T
        steps = distance.abs().to(slopes.dtype)
        slopes = slopes.view(slopes.shape[0], -1, 1)
        mask = functional.add_bias(mask, -slopes * steps)
    batch = dataclasses.replace(
        heads, query=heads.query[None], key=heads.key[None], value=heads.value[None]
    )
    return batch.attend(mask)[0], batch.log_sums(mask)[0]


def _places(count: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each token in its sequence, and the number of the sequence, `[T]`."""
    token = torch.arange(count)
    number = (token[:, None] >= ends[1:]).sum(-1)
    return token - ends[number], number


def _flash_with_cache(given: _Given) -> tuple[Tensor, Tensor]:
    """Return the attention to a cache `[B, S, Hkv, D]`, in which it puts new keys and values."""
    q, k_cache, v_cache = given["q"], given["k_cache"], given["v_cache"]
    B, S = k_cache.shape[:2]
    lengths = given.get("cache_seqlens")
    lengths = torch.as_tensor(S if lengths is None else lengths).long().expand(B)
    new = given.get("k")
    if new is not None:
        row = torch.arange(B)[:, None]
        at = lengths[:, None] + torch.arange(new.shape[1])
        k_cache[row, at], v_cache[row, at] = new, given["v"]
        lengths = lengths + new.shape[1]
    heads, window, slopes = _operands({**given, "k": k_cache, "v": v_cache})
    place = torch.arange(S)
    query_place = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1])
    distance = query_place[:, None, :, None] - place
    shown = (place < lengths[:, None])[:, None, None]
    mask = _mask(distance, shown, window, slopes)
    return heads.attend(mask), heads.log_sums(mask)


def _operands(given: _Given) -> tuple[_Heads, tuple[int, int], Tensor | None]:
    """Return the heads of a call, the window, and the slopes."""
    left, right = given.get("window_size") or (-1, -1)
    left = given.get("window_size_left", left)
    right = 0 if given.get("causal") else given.get("window_size_right", right)
    heads = _Heads(
        given["q"], given["k"], given["v"], given.get("softmax_scale"), given.get("softcap")
    )
    others = ("dropout_p", "block_table", "leftpad_k", "seqused_k", "cache_leftpad", "qv",
              "cache_batch_idx", "rotary_cos", "attention_chunk", "learnable_sink")  # fmt: skip
    for name in others:
        value = given.get(name)
        if value is not None and (isinstance(value, Tensor) or value):
            raise ValueError(f"{name} of flash attention has no translation; leave it out")
    return heads, (left, right), given.get("alibi_slopes")


def _function(compute: Callable[[_Given], Any], names: str, returns: str = "") -> Any:
    """Return a function with arguments of these names.

    `compute`: Returns the attention, and the logarithms of sums.
    `returns`: The option that asks for these and for a third value; "operator" for the four values
    of an operator.
    """

    def function(*args: Any, **options: Any) -> Any:
        given: _Given = dict(zip(names.split(), args, strict=False)) | options
        for packed in given.keys() & {"qkv", "kv"}:
            given |= dict(zip(packed, given.pop(packed).unbind(-3), strict=True))
        if "cu_seqlens" in given:
            given["cu_seqlens_q"] = given["cu_seqlens_k"] = given["cu_seqlens"]
        out, log_sums = compute(given)
        if returns == "operator":
            return out, log_sums, out.new_empty(0), torch.zeros(2, dtype=torch.int64)
        return (out, log_sums, None) if given.get(returns) else out

    return function


_TAIL = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic"
_ENDS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SIDES = "causal window_size_left window_size_right softcap alibi_slopes return_softmax"
_ASKED = "return_attn_probs"

_OF_FLASH: dict[str, Any] = {
    "flash_attn.flash_attn_func": _function(_flash, f"q k v {_TAIL} {_ASKED}", _ASKED),
    "flash_attn.flash_attn_kvpacked_func": _function(_flash, f"q kv {_TAIL} {_ASKED}", _ASKED),
    "flash_attn.flash_attn_qkvpacked_func": _function(_flash, f"qkv {_TAIL} {_ASKED}", _ASKED),
    "flash_attn.flash_attn_varlen_func": _function(
        _flash_varlen, f"q k v {_ENDS} {_TAIL} {_ASKED} block_table", _ASKED
    ),
    "flash_attn.flash_attn_varlen_kvpacked_func": _function(
        _flash_varlen, f"q kv {_ENDS} {_TAIL} {_ASKED}", _ASKED
    ),
    "flash_attn.flash_attn_varlen_qkvpacked_func": _function(
        _flash_varlen, f"qkv cu_seqlens max_seqlen {_TAIL} {_ASKED}", _ASKED
    ),
    "flash_attn.flash_attn_with_kvcache": _function(
        _flash_with_cache,
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
        "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes",
    ),
    "flash_attn::_flash_attn_forward": _function(
        _flash, f"q k v dropout_p softmax_scale {_SIDES}", "operator"
    ),
    "flash_attn::_flash_attn_varlen_forward": _function(
        _flash_varlen,
        f"q k v {_ENDS} dropout_p softmax_scale {_SIDES} block_table leftpad_k seqused_k",
        "operator",
    ),
    "torch.nn.attention.varlen.varlen_attn": _function(
        lambda given: _flash_varlen(
            {
                **given, "q": given["query"], "k": given["key"], "v": given["value"],
                "softmax_scale": given.get("scale"), "cu_seqlens_q": given["cu_seq_q"],
                "cu_seqlens_k": given["cu_seq_k"],
            }
        ),
        "query key value cu_seq_q cu_seq_k max_q max_k",
    ),
}  # fmt: skip


# -- xformers -------------------------------------------------------------------------------------


def _memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, **unused: Any,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Return the attention of `[B, L, H, D]`, of `[B, L, D]` with one head, or of groups of heads.

    `attn_bias`: Float, as of the scores; or an object whose `materialize` makes one.
    """
    if p:
        raise ValueError(f"p is {p}; pass 0 outside training")
    axes, shape = query.dim(), query.shape
    if axes == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
    elif axes == 5:  # the heads of a group may be one, expanded
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
    B, L, H, _ = query.shape
    if attn_bias is not None and not isinstance(attn_bias, Tensor):
        sizes = (B, H, L, key.shape[1])
        attn_bias = attn_bias.materialize(sizes, dtype=query.dtype, device=query.device)
    elif attn_bias is not None:
        attn_bias = attn_bias.flatten(1, 2) if axes == 5 else attn_bias
        attn_bias = attn_bias.unsqueeze(1) if axes == 3 else attn_bias
        attn_bias = attn_bias.to(query.dtype)
    return _Heads(query, key, value, scale).attend(attn_bias).reshape(*shape[:-1], -1)


TRANSLATIONS: dict[str, Callable[..., Any]] = {
    **_OF_FLASH,
    "xformers.ops.memory_efficient_attention": _memory_efficient_attention,
}
"""PyTorch code by the names of operators and functions."""
