"""Norms and rotary positions of a model as the single nodes that ONNX has for them.

transformers writes both out in Python, each type of model in words of its own. What they mean is
found by value: they are replaced if the formula of a node gives the same numbers, else left.

Legend: B batch, L tokens, H heads, D head width, R rotated elements of a head.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROTATE = "apply_rotary_pos_emb"
"""The function of transformers' modules that rotates queries and keys."""

_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""The names that transformers gives to the addition to the variance."""


class SingleNodes:
    """The norms and rotations of a model that are single nodes in its exports.

    They are held by name, since a model may be copied.
    """

    _are_used = True

    def __init__(self, model: nn.Module) -> None:
        norms = ((name, _norm_offset(module)) for name, module in model.named_modules())
        self._norms = {name: offset for name, offset in norms if offset is not None}
        files = {type(module).__module__ for module in model.modules()}
        found = ((file, _rotation_of(vars(sys.modules[file]).get(_ROTATE))) for file in files)
        self._rotations = {file: rotation for file, rotation in found if rotation is not None}

    @contextlib.contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Let the model run with these nodes inside this block."""
        with contextlib.ExitStack() as stack:
            if not self._are_used:
                yield
                return
            for name, offset in self._norms.items():
                module: Any = model.get_submodule(name)
                module.forward = _norm(module, offset)
                stack.callback(vars(module).pop, "forward")
            for file, rotation in self._rotations.items():
                stack.enter_context(mock.patch.object(sys.modules[file], _ROTATE, rotation))
            yield

    def prove(self, run: Callable[[], Tensor]) -> None:
        """Change nothing any more if a run of the model gives other values than without the nodes.

        `run`: Returns outputs of the model, of any shape.
        """
        changed, self._are_used = run(), False
        self._are_used = _same([changed], [run()], roundings=1000)


def _same(values: Any, wanted: Any, roundings: int = 16) -> bool:
    """Return whether tensors are the same but for some roundings of their largest element."""
    return all(
        one.shape == other.shape
        and bool((one - other).abs().max() <= roundings * _unit(other) * other.abs().max())
        for one, other in zip(values, wanted, strict=True)
    )


def _unit(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


# -- RMS norms ------------------------------------------------------------------------------------


def _norm(module: nn.Module, offset: float) -> Callable[[Tensor], Tensor]:
    """Return the RMS norm of a module, whose factor is its weight and an offset."""

    def norm(x: Tensor) -> Tensor:
        weight: Any = module.weight
        factor = weight + offset if offset else weight
        return F.rms_norm(x, weight.shape, factor, _epsilon(module))

    return norm


def _epsilon(module: nn.Module) -> float | None:
    found = (vars(module).get(name) for name in _EPSILONS)
    return next((x for x in found if isinstance(x, float)), None)


def _norm_offset(module: nn.Module) -> float | None:
    """Return the offset of the weight in a module that is an RMS norm of the last axis, or None."""
    parameters = dict(module.named_parameters())
    is_of_torch = type(module).__module__.startswith("torch.")
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1 or is_of_torch:
        return None
    if _epsilon(module) is None:
        return None
    weight, draws = parameters["weight"], torch.Generator().manual_seed(0)
    # The last are so small that the addition to the variance decides.
    values = [
        (torch.randn(1, 3, len(weight), generator=draws) * size).to(weight.dtype)
        for size in (1.0, 30.0, 1e-3, 1e-5)
    ]
    with torch.inference_mode():
        try:
            wanted = [module(x) for x in values]
        except Exception:  # it takes other inputs
            return None
        for offset in (0.0, 1.0):
            if _same(map(_norm(module, offset), values), wanted):
                return offset
    return None


# -- rotary positions -----------------------------------------------------------------------------


def _rotation(
    original: Callable[..., Any], *, interleaved: bool, step: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that rotates queries and keys `[B, H, L, D]` by `RotaryEmbedding` nodes.

    `interleaved`: Whether pairs are 2i and 2i + 1, not i and i + R/2.
    `step`: The distance of the angles of neighbouring pairs in cosines and sines `[B, L, R]`, where
    each stands twice.
    """

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if more or options.get("unsqueeze_dim", 1) != 1:
            turned: tuple[Tensor, Tensor] = original(q, k, cos, sin, *more, **options)
            return turned
        if cos.shape[0] == 1:  # the same positions in all batch elements
            cos, sin = (angles.expand(q.shape[0], -1, -1) for angles in (cos, sin))
        R = cos.shape[-1]
        once = slice(0, None, 2) if step == 2 else slice(0, R // 2)

        def turn(x: Tensor) -> Tensor:
            return torch.onnx.ops.rotary_embedding(
                x, cos[..., once].to(x.dtype), sin[..., once].to(x.dtype),
                interleaved=interleaved, rotary_embedding_dim=R % x.shape[-1],
            )  # fmt: skip

        return turn(q), turn(k)

    return rotate


def _rotation_of(rotate: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return the same rotation by nodes; None if there is none."""
    if rotate is None:
        return None
    draws = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 16, generator=draws) for heads in (3, 1))
    for interleaved, step in itertools.product((False, True), (1, 2)):
        found = _rotation(rotate, interleaved=interleaved, step=step)
        same = []
        for pairs in (8, 4):  # the whole head, and one half of it, which some functions refuse
            angles = torch.rand(2, 3, pairs, generator=draws) * 6
            twice = [angles.repeat_interleave(2, -1), torch.cat([angles, angles], -1)][step % 2]
            try:
                wanted = rotate(q, k, twice.cos(), twice.sin())
            except (RuntimeError, TypeError):
                continue
            same.append(_same(found(q, k, twice.cos(), twice.sin()), wanted))
        if same and all(same):
            return found
    return None
