"""Float64 runs in which every operation rounds at random, to sample the errors of an output.

A correct implementation differs from the reference only by its rounding errors. A running error
analysis (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sec. 3.3) computes a bound
on them along with the result. Its statistical form (sec. 2.8; Higham and Mary, 2019), in which n
roundings add up to sqrt(n) instead of n, estimates their usual size. Here the errors are drawn at
random, as in Monte Carlo arithmetic (Parker, 1997). Each run is the possible result of another
implementation, which adds the terms of sums one by one: no order of additions has larger errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attn_export.reference.float64_mode import (
    WHOLE,
    ComputeInFloat64,
    column_blocks,
    is_large,
    widen,
    widened_block,
)
from attn_export.reference.operations import (
    CHOOSING,
    RANKING,
    OperationMode,
    RandomNumbers,
    makes_integers,
    name_of,
    rounds,
)

_DEVIATION = 0.4
"""The standard deviation of one rounding error, in units of u·|x|, where u = eps / 2: errors
are uniform within half a unit in the last place, and |x| lies anywhere between two powers of 2."""

FLOAT16 = torch.finfo(torch.float16)
HUGE = 1e30
"""The size of numbers that stand for infinity in masks, next to which scores vanish."""

_PRODUCTS = frozenset({"addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"})
_ADDED_UP = _PRODUCTS | {"convolution", "mean", "sum"}
"""Operations whose results are sums of many terms."""

_SIMPLE = frozenset({
    "cos", "div", "exp", "expm1", "gelu", "log", "mul", "pow", "reciprocal", "rsqrt", "sigmoid",
    "silu", "sin", "softplus", "sqrt", "square", "tanh",
})  # fmt: skip
"""Operations on single elements, which round their result once."""

_APPROXIMATE = frozenset({
    "expm1", "gelu", "log", "pow", "sigmoid", "silu", "softplus", "tanh",
})  # fmt: skip
_MOST_CHECKED = 2**15
"""The largest number of elements of a result that is tested for being whole numbers."""

_APPROXIMATION_ERROR = 4.0
"""The error of operations in `_APPROXIMATE`, in units of one rounding: libraries state 2 to 5."""

_SEEN, _INSIDE = ("aten", "prims"), 8.0
"""Namespaces of operations that compute one thing, and the roundings within one of others."""

SCORES = frozenset({"bmm", "baddbmm"})
ATTENTION = SCORES | {"_safe_softmax", "_softmax"}
"""Operations that PyTorch's attention computes in float32, but a graph in its own type."""


class RandomRounding(OperationMode):
    """Mode that rounds the results of float64 operations at random, as a narrower type rounds.

    `copies`: The number of runs stacked along the batch axis. They differ by rounding alone, so the
    sizes of terms are measured in the first.
    `steps`: The operations of the module in its own types, by `RoundingRecorder`, if it has more
    than one type. From the first operation on that differs, `eps` is used.
    `widening`: A mode that computes the operations in float64. It must not be entered, or it would
    also process the operations that compute the rounding, which are most of them.

    Attributes:
        ranks: Whether an operation ran that may return equal values in any order, see `RANKING`.
        chooses: Whether an operation ran for which NaN has no defined result, see `CHOOSING`.
    """

    def __init__(
        self,
        eps: float,
        sums: float,
        seed: int,
        *,
        copies: int = 1,
        steps: Sequence[tuple[str, float]] = (),
        widening: ComputeInFloat64 | None = None,
    ) -> None:
        super().__init__()
        self._unit, self._sums = eps / 2, sums / 2
        self._copies = copies
        self._steps = iter(steps)
        self._random = RandomNumbers(seed)
        self.ranks = self.chooses = False
        self._widening = widening

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        self.ranks |= name in RANKING
        out = self._of_one_copy(name, func, args)
        out = self._compute(func, args, kwargs) if out is None else out
        self.chooses |= name in CHOOSING or makes_integers(out, args)
        if not rounds(name, func, out) or self._is_whole_numbered(out):
            return out
        if name == "mul" and any(map(_is_huge, args)):
            return out  # a mask of 0 and 1 times the lowest number, without overflow
        if self._widening:
            args = tuple(x if is_large(x) else widen(x) for x in args)
        noisy = self._round(name, func, out, args, kwargs)
        if func._schema.is_mutable and noisy is not out:  # an added mask leaves `out` as it is
            return out.copy_(noisy)
        return noisy

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._widening:
            return self._widening.compute(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_whole_numbered(self, out: Any) -> bool:
        """Return whether results are exact because they are whole numbers, such as positions."""
        if not isinstance(out, Tensor) or not 0 < out.numel() <= _MOST_CHECKED:
            return False
        return bool((out == out.round()).all()) and float(out.abs().max()) <= 1 / self._unit

    def _of_one_copy(self, name: str, func: Any, args: Sequence[Any]) -> Tensor | None:
        """Return a product, computed once for all runs, if its left operand is equal in all."""
        if name not in ("addmm", "mm") or self._copies == 1:
            return None
        a = args[-2]
        rows = a.shape[0] // self._copies
        if rows * self._copies != a.shape[0] or not torch.equal(a[:rows], a[rows : 2 * rows]):
            return None
        once: Tensor = self._compute(func, (*args[:-2], a[:rows], args[-1]), {})
        return once.repeat(self._copies, 1)

    def _round(
        self, name: str, func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the float64 result of an operation, rounded at random."""
        unit = self._next_unit(name) * (1 if func.namespace in _SEEN else _INSIDE)
        if name == "gelu":
            # For negative inputs it is a small difference of numbers as large as its input.
            noise = self._random.uniform(out.shape)
            out = torch.addcmul(out, args[0].abs(), noise, value=unit)
        if name in _SIMPLE:
            return self.rounded(out, _APPROXIMATION_ERROR * unit if name in _APPROXIMATE else unit)
        if name in ("add", "sub"):
            return self._addition(name, out, args, unit)
        if name in ("_softmax", "_safe_softmax"):
            return self._softmax(out, args[1], unit)
        if name in _ADDED_UP:
            terms = _terms(name, out, args, self._copies, min(self._sums, unit))
            return self._sum(_overflowed(name, out, unit), *terms, unit)
        if not func._schema.is_mutable:
            # Norms, for example, amplify rounding of their inputs as much as that of their sums.
            out = self._compute(func, [self.rounded(x, unit) for x in args], kwargs)
        if name == "native_layer_norm":
            return self._layer_norm(out, args[3], unit)
        if name == "native_group_norm":
            return self._group_norm(out, args[2], unit)
        if isinstance(out, Tensor):
            return self.rounded(out, unit)
        return type(out)(self.rounded(x, unit) for x in out)

    def _next_unit(self, name: str) -> float:
        """Return the largest relative error of the next operation, see `steps`."""
        expected, eps = next(self._steps, ("", 0.0))
        if expected != name:
            self._steps = iter(())
            return self._unit
        return self._unit if name in ATTENTION else eps / 2

    def rounded(self, x: Any, unit: float | None = None) -> Any:
        """Return `x` with each element rounded at random if it is a float64 tensor."""
        unit = self._unit if unit is None else unit
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return x
        return x * self._factors(x.shape, unit)

    def _factors(self, shape: Sequence[int], unit: float) -> Tensor:
        return torch.add(1, self._random.uniform(shape), alpha=unit)

    def _sum(self, out: Tensor, squares: Tensor, count: Tensor | float, unit: float) -> Tensor:
        """Round sums of `count` terms, whose squares add up to `squares`, added one by one."""
        # Each partial sum is rounded. A partial sum of k terms with random signs is about sqrt(k)
        # times as large as a term. If all terms have one sign, it is k / count times the result.
        # So the squares of all partial sums add up to count / 2 times the sum of squares of the
        # terms plus count / 3 times the square of the result.
        # In place, as logits of a large vocabulary take much memory.
        partial = squares.mul_(count / 2).add_(out.square().mul_(count / 3)).sqrt_()
        noise = self._random.normal(out.shape)
        size = _DEVIATION * min(self._sums, unit)
        noisy = torch.addcmul(out, noise, _without_huge(partial, out), value=size)
        # The last partial sum is rounded to the type of the result.
        return noisy.mul_(self._factors(out.shape, unit)) if self._sums < unit else noisy

    def _softmax(self, out: Tensor, axis: int, unit: float) -> Tensor:
        """Round a softmax: each exponential on its own, and their sum, shared by the row."""
        row = self._random.normal(out.sum(axis, keepdim=True).shape)
        count = out.shape[axis] if out.dim() else 1
        size = _DEVIATION * min(self._sums, unit) * math.sqrt(count / 3)
        return torch.addcmul(self.rounded(out, 2 * unit), out, row, value=size)

    def _layer_norm(
        self, out: tuple[Tensor, ...], bias: Tensor | None, unit: float
    ) -> tuple[Tensor, ...]:
        """Round a layer norm before its bias is added, and again after that."""
        normed, mean, inverse = out  # the last is that of the standard deviation
        product = normed if bias is None else normed - bias
        # The difference, the variance, its root and two products are rounded. If the bias nearly
        # cancels the product, their errors are large relative to the result.
        noise = _APPROXIMATION_ERROR * self._random.uniform(product.shape)
        # ONNX Runtime computes the variance as mean square, of terms added one by one, minus
        # squared mean: it loses digits if the mean is large.
        count = normed.numel() / max(mean.numel(), 1)
        of_sum = _DEVIATION * min(self._sums / unit, 1) * math.sqrt(count / 3)
        lost = self._random.uniform(mean.shape) + of_sum * self._random.normal(mean.shape)
        noise += lost * (mean * inverse).square_()
        noisy = torch.addcmul(normed, product, noise, value=unit)
        return self.rounded(noisy, unit), mean, inverse

    def _group_norm(
        self, out: tuple[Tensor, ...], bias: Tensor | None, unit: float
    ) -> tuple[Tensor, ...]:
        """Round a group norm as a layer norm over each group, `[N, G, …]`."""
        normed, mean, inverse = out
        rows = (*mean.shape, -1)
        if bias is not None:
            bias = bias.view(1, -1, *[1] * (normed.dim() - 2)).expand_as(normed).reshape(rows)
        grouped = (normed.reshape(rows), mean.unsqueeze(-1), inverse.unsqueeze(-1))
        return self._layer_norm(grouped, bias, unit)[0].view(normed.shape), mean, inverse

    def _addition(self, name: str, out: Tensor, args: Sequence[Any], unit: float) -> Tensor:
        """Round the sum of two operands by no more than the size of either: -1e30 + 1 is -1e30."""
        first, second = args[:2]
        if first is out:  # an addition in place
            first = out - second if name == "add" else out + second
        if any(_is_mask(x, out) for x in (first, second)):
            return out
        limit = out.abs().mul_(unit)
        for x in (first, second):
            size = torch.as_tensor(x, dtype=out.dtype).abs()  # it may be a mask, or a number
            torch.minimum(limit, size, out=limit)
        return torch.addcmul(out, _without_huge(limit, out), self._random.uniform(out.shape))


def _without_huge(errors: Tensor, out: Tensor) -> Tensor:
    """Return errors of results, 0 where a mask that was added makes a result huge, so exact."""
    if not abs(float(out.sum())) < HUGE:  # much faster than a test of each element
        errors.masked_fill_(out.abs() > HUGE, 0.0)
    return errors


def _overflowed(name: str, out: Tensor, unit: float) -> Tensor:
    """Return scores that are infinite where they are too large for float16, if that is the type."""
    if name not in SCORES or unit != FLOAT16.eps / 2:
        return out
    least = -FLOAT16.max if name == "bmm" else -math.inf  # the other may add a mask
    return out.masked_fill(out > FLOAT16.max, math.inf).masked_fill(out < least, -math.inf)


def _is_huge(x: Any) -> bool:
    """Return whether an operand is a single number beyond all scores, as the lowest float is."""
    return (not isinstance(x, Tensor) or not x.dim()) and abs(float(x)) > HUGE


def _is_mask(x: Any, out: Tensor) -> bool:
    """Return whether `x` is a mask of 0 and -inf that is expanded, whose addition is exact."""
    if not isinstance(x, Tensor) or 4 * x.numel() > out.numel():
        return False
    return bool(((x == 0) | x.isneginf()).all())


def _terms(
    name: str, out: Tensor, args: Sequence[Any], copies: int, unit: float
) -> tuple[Tensor, Tensor | float]:
    """Return the sum of squares of the terms of each result, and the number of terms."""
    if name in _PRODUCTS:
        a, b = args[-2:]
        if copies == 1 or a.shape[0] % copies:
            return _terms_of_product(a, b, unit)
        first = slice(a.shape[0] // copies)
        terms = _terms_of_product(a[first], b if b.dim() == 2 else b[first], unit)
        squares, count = (x.repeat(copies, *[1] * (x.dim() - 1)) for x in terms)
        return squares, count
    x = args[0].double()
    if name == "convolution":
        weight, _, *options = args[1:]
        weight = weight.double()
        squares = torch.ops.aten.convolution(x.square(), weight.square(), None, *options)
        return squares, weight[0].numel()
    count = max(x.numel() / max(out.numel(), 1), 1)
    axes = args[1] if len(args) > 1 and args[1] else list(range(x.dim()))
    squares = torch.where(x.isfinite(), x, 0.0).square().sum(axes, keepdim=True)
    return squares.reshape(out.shape) / (1 if name == "sum" else count**2), count


def _terms_of_product(a: Tensor, b: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of the terms of each element of a @ b, and the number of terms.

    `a` is `[..., M, K]`, `b` is `[..., K, N]` or `[K]`, and the numbers are `[..., M, 1]` or `[M]`.
    """
    # Zeros do not count, nor terms that are more than 1 / unit times smaller than the largest,
    # since adding them changes no partial sum.
    sizes = a.double().abs()
    count = (sizes > unit * sizes.amax(-1, keepdim=True)).sum(-1).to(sizes.dtype)
    if b.dim() != 2 or b.numel() <= WHOLE:
        sums = sizes.square_() @ b.double().square()
    elif b.numel() <= _MOST_SQUARES:
        sums = _SQUARES.times(sizes, b)
    else:
        squares = sizes.square_()
        # In place, since small results between freed blocks would keep these from being used again.
        sums = a.new_empty((len(a), b.shape[1]), dtype=torch.float64)
        for block in column_blocks(b):
            sums[:, block] = squares @ widened_block(b, block).square_()
    return sums, count if b.dim() == 1 else count.unsqueeze(-1)


class _Squares:
    """Squares of large weights, each kept while the weight is in memory.

    All cases are multiplied by a weight while it is there, and to square it takes longer than that.
    The sums are sizes of errors, for which float32 is enough: a half of the memory and time.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[StorageWeakRef, Tensor, Tensor]] = {}

    def times(self, sizes: Tensor, weight: Tensor) -> Tensor:
        """Return the product of the squares of sizes `[M, K]` and of a weight `[K, N]`."""
        largest, squares = self._of(weight)
        # Divided by the largest, so that squares are in the range of float32.
        most = sizes.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
        sums = (sizes / most).square_().float() @ squares
        return sums.double().mul_(largest.square()).mul_(most.square())

    def _of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest size in a weight, and the squares of the weight divided by it."""
        # A weak reference keeps the address of a storage from being used again.
        self._kept = {key: kept for key, kept in self._kept.items() if not kept[0].expired()}
        storage = weight.untyped_storage()
        version = 0 if weight.is_inference() else weight._version
        place = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
        key = storage._cdata, version, place
        if key not in self._kept:
            left = _MOST_SQUARES - weight.numel()
            while sum(squares.numel() for *_, squares in self._kept.values()) > left:
                del self._kept[next(iter(self._kept))]
            largest = torch.linalg.vector_norm(weight, math.inf).double()
            by = largest.clamp(min=torch.finfo(torch.float64).tiny)
            squares = torch.empty_like(weight, dtype=torch.float32)
            for block in column_blocks(weight):
                squares[:, block] = widened_block(weight, block).div_(by).square_()
            self._kept[key] = StorageWeakRef(storage), largest, squares
        return self._kept[key][1:]


_MOST_SQUARES = 2**26
"""The most squares that are kept: 256 MiB."""

_SQUARES = _Squares()
