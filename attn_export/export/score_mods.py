"""What a score_mod of FlexAttention does to the scores, found by following them through it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_export.attention.functional import restrict


@dataclasses.dataclass(frozen=True)
class _ScoreForm:
    """Scores as ``cap · tanh(factor · scale · score) + bias``, without tanh if `cap` is None.

    `factor` does not depend on the key. `mask` is True where the scores are kept, and -inf else.
    """

    scale: float = 1.0
    cap: float | None = None
    factor: Tensor | None = None
    bias: Any = None
    mask: Tensor | None = None

    def times(self, by: Any, *, divides: bool) -> _ScoreForm | None:
        """Return the form of a product or quotient; None if it is none."""
        if isinstance(by, Tensor):
            constant = by.dim() == 0 or by.shape[-1] == 1
            if not constant or self.cap is not None or self.mask is not None:
                return None
            by = 1 / by if divides else by
            changed: dict[str, Any] = {"factor": by if self.factor is None else self.factor * by}
        elif isinstance(by, (int, float)) and math.isfinite(by) and by:
            if by < 0 and self.mask is not None:
                return None
            by = 1 / by if divides else by
            name = "scale" if self.cap is None else "cap"
            changed = {name: getattr(self, name) * by}
        else:
            return None
        bias = None if self.bias is None else self.bias * by
        return dataclasses.replace(self, bias=bias, **changed)

    def plus(self, term: Any) -> _ScoreForm:
        """Return the form of a sum."""
        return dataclasses.replace(self, bias=term if self.bias is None else self.bias + term)

    def keeping(self, shown: Tensor) -> _ScoreForm:
        """Return the form with -inf where `shown` is False."""
        return dataclasses.replace(self, mask=restrict(self.mask, shown))


class ScoreWatch(TorchFunctionMode):
    """Mode that follows the scores through a score_mod, and causal masks by what they compare."""

    def __init__(self, query_index: Tensor, key_index: Tensor) -> None:
        self._indices = (query_index, key_index)
        self._forms: dict[int, _ScoreForm | None] = {}
        self._causal: set[int] = set()
        self._infinite: set[int] = set()
        self._alive: list[Any] = []  # an id may be used again once its tensor is freed

    def follow(self, scores: Tensor) -> None:
        """Follow a tensor of scores."""
        self._alive.append(scores)
        self._forms[id(scores)] = _ScoreForm()

    def form(self, x: Any) -> _ScoreForm | None:
        """Return what a value is of the scores that are followed; None if unknown."""
        return self._forms.get(id(x))

    def is_causal(self, mask: Tensor | None) -> bool:
        """Return whether a mask compares the indices themselves."""
        return id(mask) in self._causal

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and note what its result is."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "").strip("_")
        found = self._found(name, args, options)  # before a function in place changes its argument
        result = func(*args, **options)
        if isinstance(result, Tensor):
            self._alive.append(result)
            self._forms[id(result)] = found
            pair = args[:2] if name == "ge" else args[1::-1] if name == "le" else ()
            if len(pair) == 2 and pair[0] is self._indices[0] and pair[1] is self._indices[1]:
                self._causal.add(id(result))
            values = (*args, *options.values())
            if name in _FILLED and any(isinstance(x, float) and x == -math.inf for x in values):
                self._infinite.add(id(result))
        return result

    def _found(
        self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> _ScoreForm | None:
        forms = [self.form(x) for x in args]
        if not any(forms) or (options and name not in _KEEPING):
            return None
        if name in _KEEPING:
            return forms[0]
        if name == "tanh" and forms[0] and (forms[0].bias, forms[0].mask, forms[0].cap) == (
            None, None, None,
        ):  # fmt: skip
            return dataclasses.replace(forms[0], cap=1.0)
        if name == "where" and len(args) == 3:
            return self._chosen(args[0], args[1:], forms[1:])
        if name == "masked_fill" and forms[0] and self._is_minus_infinity(args[2]):
            return forms[0].keeping(~args[1])
        return _combined(name, args, forms) if len(args) == 2 else None

    def _chosen(
        self, shown: Tensor, args: Any, forms: list[_ScoreForm | None]
    ) -> _ScoreForm | None:
        """Return the form of ``torch.where(shown, *args)``."""
        first, second = forms
        if first and second:
            alike = dataclasses.replace(first, bias=None) == dataclasses.replace(second, bias=None)
            zero = args[0].new_zeros(())
            biases = [zero if f.bias is None else f.bias for f in (first, second)]
            chosen = torch.where(shown, *biases)
            return dataclasses.replace(first, bias=chosen) if alike else None
        if first:
            return first.keeping(shown) if self._is_minus_infinity(args[1]) else None
        return second.keeping(~shown) if second and self._is_minus_infinity(args[0]) else None

    def _is_minus_infinity(self, x: Any) -> bool:
        return id(x) in self._infinite if isinstance(x, Tensor) else x == -math.inf


_FILLED = ("full", "full_like", "new_full", "new_tensor", "scalar_tensor", "tensor")
_KEEPING = ("clone", "contiguous", "float", "to", "type_as")


def _combined(
    name: str, args: tuple[Any, ...], forms: list[_ScoreForm | None]
) -> _ScoreForm | None:
    """Return the form of arithmetic with one operand that is scores."""
    if all(forms):
        return None
    form, other = (forms[0], args[1]) if forms[0] else (forms[1], args[0])
    assert form is not None  # the caller has tested that one is
    if name in ("add", "radd", "iadd"):
        return form.plus(other)
    if name in ("mul", "multiply", "rmul", "imul"):
        return form.times(other, divides=False)
    if forms[0] and name in ("sub", "subtract", "isub"):
        return form.plus(-other)
    if forms[0] and name in ("div", "divide", "true_divide", "truediv", "itruediv"):
        return form.times(other, divides=True)
    return None
