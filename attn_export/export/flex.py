"""FlexAttention and the masks of `torch.nn.attention.bias` in users' modules.

PyTorch's functions get other code while a module is captured, since files of users hold the
functions themselves. FlexAttention becomes an `Attention` node if what its mods do to the scores is
a scale, a softcap, a bias or a mask, and else operations on the scores. Its reference is PyTorch's
own formula.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_export.attention.functional import add_bias
from attn_export.attention.onnx_attention import attention_node, emitting
from attn_export.errors import ExportError

_FLEX, _BIAS = "torch.nn.attention.flex_attention", "torch.nn.attention.bias"
_Mod = Callable[..., Tensor]
_T = TypeVar("_T")


# -- FlexAttention --------------------------------------------------------------------------------


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    shared = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query @ shared.transpose(-2, -1) * scale


_BY_NUMBER: ContextVar[bool] = ContextVar("attn_export_mods_by_number", default=False)
_AT_ONCE: set[_Mod] = set()
"""Mods that the last capture called once, for all numbers."""


def _modified(mod: _Mod, scores: Tensor | None, indices: list[Tensor], shape: Any) -> Tensor:
    """Return what a mod makes of the scores, or of the indices alone: broadcast to `shape`."""
    given = [] if scores is None else [scores]
    with contextlib.suppress(Exception):  # it takes numbers only, as a product of two vectors does
        if not _BY_NUMBER.get():
            _AT_ONCE.add(mod)  # even if it raises, since its operations stay in the program
            result = mod(*given, *indices)
            if torch.broadcast_shapes(result.shape, shape) == torch.Size(shape):
                return result
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    over_all = _vmap_for_bhqkv(mod, prefix=(0,) * len(given))
    with TransformGetItemToIndex(), _IndexByNumbers():
        return over_all(*given, *(index.flatten() for index in indices))


class _IndexByNumbers(TorchFunctionMode):
    """Mode that takes ``x[i, :]`` apart, since captures read the value of a single number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function."""
        is_tuple = func is Tensor.__getitem__ and isinstance(args[1], tuple)
        items: tuple[Any, ...] = args[1] if is_tuple else ()
        numbers = [isinstance(item, Tensor) and not item.dim() for item in items]
        if not any(numbers) or all(isinstance(item, (Tensor, int)) for item in items):
            return func(*args, **(kwargs or {}))
        x, axis = args[0], 0
        for place, item in enumerate(items):
            if numbers[place]:
                x = torch.ops.aten.index.Tensor(x, [None] * axis + [item])
            elif item is Ellipsis:
                axis = x.dim() - sum(later is not None for later in items[place + 1 :])
            else:
                x = x[(slice(None),) * axis + (item,)]
                axis += item is None or isinstance(item, slice)
        return x


def _captured_flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: _Mod | None = None,
    block_mask: Any = None, scale: float | None = None, *_: Any, **options: Any,
) -> Any:  # fmt: skip
    """Compute FlexAttention in a capture, as one `Attention` node where it can be."""
    from torch.nn.attention.flex_attention import noop_mask

    from attn_export.export.score_mods import ScoreWatch  # few modules call flex_attention

    B, H, L, D = query.shape
    S = key.shape[2]
    scale = 1 / math.sqrt(D) if scale is None else scale
    key, value = (x.expand(B, -1, -1, -1) if x.shape[0] != B else x for x in (key, value))
    scores = _scores(query, key, scale)
    indices = [
        torch.arange(n, device=query.device).view(-1, *[1] * after)
        for n, after in zip((B, H, L, S), (3, 2, 1, 0), strict=True)
    ]
    watch, shape = ScoreWatch(*indices[2:]), (B, H, L, S)
    watch.follow(scores)
    mask_mod, mask, modified = getattr(block_mask, "mask_mod", noop_mask), None, scores
    with watch:
        if mask_mod is not noop_mask:
            mask = _modified(mask_mod, None, indices, shape)
        if score_mod is not None:
            modified = _modified(score_mod, scores, indices, shape)
    form = watch.form(modified)
    kept = modified if mask is None else torch.where(mask, modified, -torch.inf)
    statistics = kept.logsumexp(-1), kept.amax(-1)
    if form is None or not emitting():
        return _with_statistics(_on_scores(kept, value), *statistics, options)
    masks = [m for m in (mask, form.mask) if m is not None]
    causal = len(masks) == 1 and watch.is_causal(masks[0])
    shown = None
    if masks and not causal:
        shown = masks[0] if len(masks) == 1 else masks[0] & masks[1]
    if form.bias is not None:
        bias = torch.as_tensor(form.bias, dtype=query.dtype)
        shown = add_bias(shown, bias)
    if shown is not None:
        shown = shown.expand(*shown.shape[:-2], L, S)
    scale *= form.scale * (form.cap or 1)
    factor = form.factor if scale > 0 else scale if form.factor is None else form.factor * scale
    query = query if factor is None else (query * factor).to(query.dtype)
    out = attention_node(
        query, key, value, shown,
        causal=causal, scale=scale if scale > 0 else 1.0, softcap=form.cap,
    )[0]  # fmt: skip
    return _with_statistics(out, *statistics, options)


def _on_scores(scores: Tensor, value: Tensor) -> Tensor:
    """Return the attention by its scores, written out. A row without keys gives 0."""
    weights = torch.where(scores == -torch.inf, scores.new_zeros(()), scores.softmax(-1))
    return weights.to(value.dtype) @ value.repeat_interleave(scores.shape[1] // value.shape[1], 1)


def _with_statistics(out: Tensor, lse: Tensor, top: Tensor, options: Mapping[str, Any]) -> Any:
    aux = options.get("return_aux")
    if aux is None:
        return (out, lse) if options.get("return_lse") else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if aux.lse else None, max_scores=top if aux.max_scores else None)


def _flex_by_torch(
    query: Tensor, key: Tensor, value: Tensor, score_mod: _Mod | None = None,
    block_mask: Any = None, scale: float | None = None, *_: Any, **options: Any,
) -> Any:  # fmt: skip
    """Compute FlexAttention by the formula of PyTorch, below its operator, which modes cannot."""
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import _identity, noop_mask

    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask_mod = getattr(block_mask, "mask_mod", noop_mask)
    out, *statistics = math_attention(
        query, key, value, score_mod or _identity, (mask_mod,), scale, {}
    )
    lse, top = (x * math.log(2) for x in statistics)
    return _with_statistics(out, lse, top, options)


# -- functions of PyTorch with other code ---------------------------------------------------------

# Code runs with the globals of the function that it is given to.


def _capturing(*args: Any, **options: Any) -> Any:
    from attn_export.export import flex

    return flex._captured_flex(*args, **options)


def _computing(*args: Any, **options: Any) -> Any:
    from attn_export.export import flex

    return flex._flex_by_torch(*args, **options)


def _block_mask(
    mask_mod: _Mod, _: Any, __: Any, Q_LEN: int, KV_LEN: int, *___: Any, **____: Any
) -> Any:
    """Return a block mask that holds its mask_mod only."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    none = torch.zeros(1, 1, 1, dtype=torch.int32)
    return BlockMask(
        (Q_LEN, KV_LEN), none, none[..., None], None, None, None, None, None, None,
        mask_mod=mask_mod,
    )  # fmt: skip


def _adjusted(self: Any, new_q_len: int, new_kv_len: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(self.mask_mod, None, None, new_q_len, new_kv_len)


def _upper_left(*size: int) -> Tensor:
    import torch

    return torch.ones(size, dtype=torch.bool).tril()


def _lower_right(*size: int) -> Tensor:
    import torch

    after = torch.arange(size[0])[:, None] + (size[1] - size[0])
    return torch.arange(size[1]) <= after


@contextlib.contextmanager
def _with_code(codes: Mapping[Any, Any]) -> Iterator[None]:
    before = {function: function.__code__ for function in codes}
    try:
        for function, other in codes.items():
            function.__code__ = other.__code__
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def flex_in_capture() -> AbstractContextManager[None]:
    """Let captures take FlexAttention and masks of `torch.nn.attention.bias` inside this block."""
    _AT_ONCE.clear()
    return _with_code(_codes(_capturing))


def again_with_mods_by_number(capture: Callable[[], _T]) -> _T:
    """Capture, and again with mods that are called for each number if they were called at once.

    A call for all numbers is wrong for a mod that sums over vectors, which have more axes then.
    """
    try:
        return capture()
    except ExportError:
        if not _AT_ONCE:
            raise
    token = _BY_NUMBER.set(True)
    try:
        return capture()
    finally:
        _BY_NUMBER.reset(token)


def flex_in_modes() -> AbstractContextManager[None]:
    """Let both run in modes that see every operation, inside this block."""
    return _with_code(_codes(_computing))


def _codes(attend: Any) -> dict[Any, Any]:
    codes: dict[Any, Any] = {}
    if (flex := sys.modules.get(_FLEX)) is not None:
        codes = {
            flex.flex_attention: attend,
            flex.create_block_mask: _block_mask,
            flex.BlockMask._adjust: _adjusted,
        }
    if (bias := sys.modules.get(_BIAS)) is not None:
        codes |= {bias.causal_upper_left: _upper_left, bias.causal_lower_right: _lower_right}
    return codes


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run functions of torch.compile, and FlexAttention, as PyTorch's operations in this block."""
    flex: Any = sys.modules.get(_FLEX)
    # The options are of kernels, of which those for the CPU give no largest scores.
    changed = {
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "_apply_kernel_options": lambda *_: {"BACKEND": "AUTO"},
    }
    before = {name: getattr(flex, name, None) for name in changed}
    compiles = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext():
        if flex is None:
            yield
            return
        vars(flex).update(changed)
        try:
            yield
        finally:
            vars(flex).update(before)
