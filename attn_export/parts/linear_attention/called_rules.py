"""Functions of the gated delta rule that modules call, as one `LinearAttention` node.

Libraries name such functions and their steps as they like, but not the operands, which are those of
flash-linear-attention: https://github.com/fla-org/flash-linear-attention. A function is taken for
the rule if it gives the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.attention import onnx_attention
from attn_export.parts.linear_attention.linear_layer import LinearHeads, attend

_Rule = Callable[..., tuple[Tensor, Tensor | None]]
_Use = tuple[bool, bool, bool]
"""Whether decays are of channels, heads of values share keys, and lengths are divided by."""

_SHORT = {"q": "query", "k": "key", "v": "value"}
_OPERANDS = ("query", "key", "value", "g", "beta")
_OPTIONS = {
    "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False,
    "chunk_size": 64,
}  # fmt: skip
_EPSILON = 1e-6
"""What is added to the square of a length."""

_TRIED = ((2, 1, False), (2, 5, True), (1, 67, True))
"""Batch, tokens, and whether there is a state, of the runs in which numbers are compared."""


@contextlib.contextmanager
def capturing(module: nn.Module) -> Iterator[None]:
    """Replace the functions of the rule that the code of a module calls, inside this block."""
    names = {
        type(part).__module__ for part in module.modules() if type(part).__module__[:6] != "torch."
    }
    found = [
        (vars(sys.modules[name]), key, value, uses)
        for name in sorted(names & sys.modules.keys())
        for key, value in vars(sys.modules[name]).items()
        if (uses := _uses(value))
    ]
    try:
        for where, key, function, uses in found:
            where[key] = functools.partial(_as_node, function, uses)
        yield
    finally:
        for where, key, function, _ in found:
            where[key] = function


def _uses(value: object) -> frozenset[_Use]:
    """Return the uses in which a function computes the gated delta rule; none for other values."""
    if not inspect.isfunction(value):
        return frozenset()
    names = {_SHORT.get(name, name) for name in inspect.signature(value).parameters}
    return _proven(value) if names.issuperset(_OPERANDS) else frozenset()


@functools.cache
def _proven(function: _Rule) -> frozenset[_Use]:
    either = (False, True)
    uses = itertools.product(either, either, either)
    return frozenset(use for use in uses if all(_agrees(function, use, *t) for t in _TRIED))


def _agrees(function: _Rule, use: _Use, B: int, L: int, past: bool) -> bool:
    wide, shared, by_length = use
    random, Hk, Hv = torch.Generator().manual_seed(L), 2, 4 if shared else 2
    q, k, v, g, beta, state = (
        torch.randn(*shape, generator=random)
        for shape in (
            (B, L, Hk, 8), (B, L, Hk, 8), (B, L, Hv, 6), (B, L, Hv, *[8] * wide), (B, L, Hv),
            (B, Hv, 8, 6),
        )
    )  # fmt: skip
    if by_length:
        k[:, ::2] *= 1e-3  # so that what is added to lengths shows
    else:
        k /= k.norm(dim=-1, keepdim=True)  # or the state would grow
    options = {
        "initial_state": state if past else None, "output_final_state": True,
        "use_qk_l2norm_in_kernel": by_length,
    }  # fmt: skip
    operands = (q, k, v, -g.abs(), beta.sigmoid())
    long = {short: name for name, short in _SHORT.items()}
    has = inspect.signature(function).parameters
    names = [name if name in has else long.get(name, name) for name in _OPERANDS]
    try:
        with torch.no_grad():
            given = function(**dict(zip(names, operands, strict=True)), **options)
            expected = _gated_delta_rule(dict(zip(_OPERANDS, operands, strict=True)) | options)
            pairs: Any = zip(given, expected, strict=True)
            return all(x.shape == y.shape and torch.allclose(x, y, 1e-3, 1e-5) for x, y in pairs)
    except Exception:  # it takes other operands than the rule
        return False


def _as_node(function: _Rule, uses: frozenset[_Use], *args: Any, **kwargs: Any) -> Any:
    """Return the results of one node, or those of a function in a use that was not proven."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    others = given.keys() - {*_OPERANDS, *_OPTIONS, *_SHORT, "kwargs"}
    bound.apply_defaults()
    named = _OPTIONS | {_SHORT.get(name, name): x for name, x in bound.arguments.items()}
    g, key, value = named["g"], named["key"], named["value"]
    use = None if g is None else (
        g.dim() == 4, key.shape[2] != value.shape[2], bool(named["use_qk_l2norm_in_kernel"])
    )  # fmt: skip
    if use not in uses or any(given[name] is not None for name in others):
        return function(*args, **kwargs)
    return _gated_delta_rule(named)


def _gated_delta_rule(named: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the attention `[B, L, H, Dv]`, and the state `[B, H, D, Dv]` if it is wanted."""
    q, k, v, g, beta = (named[name] for name in _OPERANDS)
    H, D, dtype = v.shape[2], q.shape[-1], q.dtype
    if k.shape[2] != H:  # the operator shares states, not keys
        q, k = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    q, k, v, g, beta = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v, g, beta)
    )
    if named["use_qk_l2norm_in_kernel"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + _EPSILON).sqrt() for x in (q, k))
    compute: Any = _emit if onnx_attention.emitting() else _computed
    packed = (x.flatten(2) for x in (q, k, v))
    attended, state = compute(*packed, named["initial_state"], g.flatten(2), beta, D**-0.5)
    wanted = state if named["output_final_state"] else None
    return attended.unflatten(-1, (H, -1)).to(dtype), wanted


def _emit(
    q: Tensor, k: Tensor, v: Tensor, past: Tensor | None, g: Tensor, beta: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    H = beta.shape[-1]
    return attend(q, k, v, past, g, beta, LinearHeads(H, H, "gated_delta", scale))


_computed = torch.library.custom_op("attn_export::gated_delta_rule", _emit, mutates_args=())
"""What `_emit` does, as one operation of any length in a captured program."""


@_computed.register_fake
def _shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    H = others[2].shape[-1]
    state = q.new_empty(q.shape[0], H, k.shape[-1] // H, v.shape[-1] // H)
    return q.new_empty(*q.shape[:2], v.shape[-1]), state
