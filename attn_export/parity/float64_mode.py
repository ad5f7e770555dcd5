"""Float64 truth of modules that use float32 internally.

Many norms and softmaxes compute in float32 for any type of their input. A float64 copy of
such a module is good to 1e-7 only, which is no truth for float32. Within `ComputeInFloat64`
every such request is answered in float64, and the places are kept. Large weights
(`large_weights.py`) are widened there as well, where they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_export.parity.large_weights import LESS, is_large, product
from attn_export.parity.operations import is_view, name_of
from attn_export.source_location import is_theirs, show


class ComputeInFloat64(TorchDispatchMode):
    """Mode that computes every operation in float64.

    Attributes:
        places: The lines at which the module used less, as ``file.py:12``, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        given = (args, dict(kwargs or {}))
        args, options = _mapped(torch.dtype, self._wide_dtype, given)
        if func._schema.is_mutable:  # what is written into has to stay what it is
            return func(*args, **options)
        if any(map(is_large, args)):
            if is_view(func) or name_of(func) == "_to_copy":  # one copy, not two
                return func(*args, **options)
            if name_of(func) in ("mm", "addmm") and is_large(args[-1]):
                return _product(func, args, options)
        wide_args, wide_options = _mapped(Tensor, _wide, (args, options))
        return _mapped(Tensor, _wide, func(*wide_args, **wide_options))

    def _wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in LESS:
            return dtype
        self.places[_place()] = None
        return torch.float64


def _mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with everything of a kind changed, in the containers that operators take.

    It takes a third of the time of `torch.utils._pytree`, which looks every container up.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(kind, change, part) for part in value)
    if type(value) is dict:
        return {name: _mapped(kind, change, part) for name, part in value.items()}
    return value


def _product(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Return the product of a matrix with a large one; ``args`` may begin with what is added."""
    *added, a = (_wide(x) for x in args[:-1])

    def multiply(a: Tensor, b: Tensor, part: slice) -> Tensor:
        found: Tensor = func(
            *(x[..., part] if x.shape[-1] > 1 else x for x in added), a, b, **options
        )
        return found

    return product(a, args[-1], lambda b: b, multiply)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in LESS else tensor


def _place() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_theirs(frame.f_code.co_filename):
            return show((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return ""
