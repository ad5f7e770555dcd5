"""Float64 runs in which every operation rounds at random: how far rounding can take an output.

An implementation that is right differs from the truth by its rounding errors, and by nothing else.
A running error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sec. 3.3)
carries a bound on them along with the computation. Its statistical form (sec. 2.8; Higham and Mary,
2019), in which n roundings add up to sqrt(n) and not to n, says how large they are in practice.
Here they are drawn, as in Monte Carlo arithmetic (Parker, 1997): each run is what another
implementation might have given, with sums taken term by term, which no implementation exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_export.parity.float64_mode import ComputeInFloat64, is_large, product, widened
from attn_export.parity.operations import (
    RANKING,
    OperationMode,
    RandomNumbers,
    Steps,
    name_of,
    rounds,
)

DEVIATION = 0.4
"""The standard deviation of one rounding error, in units of u·|x|: errors are uniform within half a
unit in the last place, and |x| lies anywhere between two powers of 2."""

MAX_ERROR = 1e300
"""The largest error of one rounding; it is finite, so that infinity plus an error is no NaN."""

PRODUCTS = frozenset({"addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"})
ADDED_UP = PRODUCTS | {"convolution", "mean", "sum"}
"""Operations of which each result is a sum of many terms."""

SIMPLE = frozenset({
    "cos", "div", "exp", "expm1", "gelu", "log", "mul", "pow", "reciprocal", "rsqrt", "sigmoid",
    "silu", "sin", "sqrt", "square", "tanh",
})  # fmt: skip
"""Operations on single elements, which round their result once."""

APPROXIMATE = frozenset({"expm1", "gelu", "log", "pow", "sigmoid", "silu", "tanh"})
MOST_CHECKED = 2**15
"""The most elements of a result that is looked at for whole numbers."""

APPROXIMATION_ERROR = 4.0
"""The largest error of an approximation, in units of one rounding: libraries state 2 to 5."""

ATTENTION = frozenset({"_safe_softmax", "_softmax", "bmm", "baddbmm"})
"""Operations that PyTorch's attention computes in float32, and a graph in the type that it has."""


class RandomRounding(OperationMode):
    """Round the results of float64 operations at random, as a narrower type would round them.

    Args:
        eps: The distance from 1 to the next number of the narrower type.
        sums: The same of the type in which sums of products are kept.
        seed: The seed of the random numbers.
        copies: The number of runs stacked along the batch axis. They differ by rounding alone, so
            the sizes of terms are measured in the first.
        steps: The operations of the module in its own types, by `recorded_steps`, where these are
            not all the same. The run falls back to `eps` where it takes another operation.
        widening: A mode that computes the operations in float64. It must not be entered: it would
            see what is computed for the rounding too, which takes most of the time.

    Attributes:
        ranks: Whether an operation ran that gives equal values in an order of its own.
    """

    def __init__(
        self,
        eps: float,
        sums: float,
        seed: int,
        *,
        copies: int = 1,
        steps: Steps = (),
        widening: ComputeInFloat64 | None = None,
    ) -> None:
        super().__init__()
        self._unit, self._sums = eps / 2, sums / 2
        self._copies = copies
        self._steps = iter(steps)
        self._random = RandomNumbers(seed)
        self.ranks = False
        self._widening = widening

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        name = name_of(func)
        self.ranks |= name in RANKING
        out = self._of_one_copy(name, func, args)
        out = self._compute(func, args, kwargs) if out is None else out
        if not rounds(name, func, out) or self._is_whole_numbered(out):
            return out
        if self._widening:
            args = tuple(x if is_large(x) else widened(x) for x in args)
        found = self._run(name, func, out, args, kwargs)
        return out.copy_(found) if func._schema.is_mutable else found

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._widening:
            return self._widening.compute(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_whole_numbered(self, out: Any) -> bool:
        """Return whether results are whole numbers, such as positions, which are exact."""
        if not isinstance(out, Tensor) or not 0 < out.numel() <= MOST_CHECKED:
            return False
        return bool((out == out.round()).all()) and float(out.abs().max()) <= 1 / self._unit

    def _of_one_copy(self, name: str, func: Any, args: Sequence[Any]) -> Tensor | None:
        """Return a product of rows that are still alike in all runs, computed for one of them."""
        if name not in ("addmm", "mm") or self._copies == 1:
            return None
        a = args[-2]
        rows = a.shape[0] // self._copies
        if rows * self._copies != a.shape[0] or not torch.equal(a[:rows], a[rows : 2 * rows]):
            return None
        found: Tensor = self._compute(func, (*args[:-2], a[:rows], args[-1]), {})
        return found.repeat(self._copies, 1)

    def _run(
        self, name: str, func: Any, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        unit = self._unit_of(name)
        if name == "gelu":
            # It ends in 0 by a difference of two numbers of the size of its input.
            noise = self._random.uniform(out.shape)
            out = torch.addcmul(out, args[0].abs(), noise, value=unit)
        if name in SIMPLE:
            return self.rounded(out, APPROXIMATION_ERROR * unit if name in APPROXIMATE else unit)
        if name in ("add", "sub"):
            return self._addition(out, args, unit)
        if name in ("_softmax", "_safe_softmax"):
            return self._softmax(out, args[1], unit)
        if name in ADDED_UP:
            terms = _terms(name, out, args, self._copies, min(self._sums, unit))
            return self._sum(out, *terms, unit)
        if not func._schema.is_mutable:
            # Norms, say: they amplify the rounding of their inputs as much as that of their sums.
            out = self._compute(func, [self.rounded(x, unit) for x in args], kwargs)
        if name == "native_layer_norm":
            return self._layer_norm(out, args[3], unit)
        if name == "native_group_norm":
            return self._group_norm(out, args[2], unit)
        if isinstance(out, Tensor):
            return self.rounded(out, unit)
        return type(out)(self.rounded(x, unit) for x in out)

    def _unit_of(self, name: str) -> float:
        expected, eps = next(self._steps, ("", 0.0))
        if expected == name and name not in ATTENTION:
            return eps / 2
        if expected == name:
            return self._unit
        self._steps = iter(())
        return self._unit

    def rounded(self, x: Any, unit: float | None = None) -> Any:
        """Return `x` with each element rounded, if it is a float64 tensor.

        Args:
            x: Anything.
            unit: The largest relative error. Default: that of the narrower type.
        """
        unit = self._unit if unit is None else unit
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return x
        return x * torch.add(1, self._random.uniform(x.shape), alpha=unit)

    def _sum(self, out: Tensor, squares: Tensor, count: Tensor | float, unit: float) -> Tensor:
        """Round sums of terms that are added one after the other.

        A partial sum of k random terms is sqrt(k) terms large, or k of `count` parts of the result
        where all terms have one sign. The squares of all partial sums, each of which is rounded,
        add up to count / 2 times the squares of the terms, and count / 3 times that of the result.
        """
        partial = (count / 2 * squares + count / 3 * out.square()).sqrt_()
        # A mask that is added in the product (baddbmm) leaves -inf, which rounds nothing.
        partial.masked_fill_(out.isinf(), 0.0)
        noise = self._random.normal(out.shape)
        found = torch.addcmul(out, noise, partial, value=DEVIATION * min(self._sums, unit))
        # The last partial sum is the result.
        return self.rounded(found, unit) if self._sums < unit else found

    def _softmax(self, out: Tensor, axis: int, unit: float) -> Tensor:
        """Round a softmax: each power by itself, their sum for the whole row."""
        row = self._random.normal(out.sum(axis, keepdim=True).shape)
        count = out.shape[axis] if out.dim() else 1
        size = DEVIATION * min(self._sums, unit) * math.sqrt(count / 3)
        return torch.addcmul(self.rounded(out, 2 * unit), out, row, value=size)

    def _layer_norm(
        self, out: tuple[Tensor, ...], bias: Tensor | None, unit: float
    ) -> tuple[Tensor, ...]:
        """Round a layer norm before its bias is added, and again after that.

        The difference, the variance, its root and two products are rounded. A bias that nearly
        cancels the product leaves their errors in a small result. ONNX Runtime takes the variance
        as the mean square less the squared mean, which loses digits where the mean is large.
        """
        normed, mean, inverse = out
        product = normed if bias is None else normed - bias
        noise = APPROXIMATION_ERROR * self._random.uniform(product.shape)
        noise += self._random.uniform(mean.shape) * (mean * inverse).square_()
        found = torch.addcmul(normed, product, noise, value=unit)
        return self.rounded(found, unit), mean, inverse

    def _group_norm(
        self, out: tuple[Tensor, ...], bias: Tensor | None, unit: float
    ) -> tuple[Tensor, ...]:
        """Round a group norm as a layer norm: each group `[N, G, …]` is a row."""
        normed, mean, inverse = out
        rows = (*mean.shape, -1)
        if bias is not None:
            bias = bias.view(1, -1, *[1] * (normed.dim() - 2)).expand_as(normed).reshape(rows)
        parts = (normed.reshape(rows), mean.unsqueeze(-1), inverse.unsqueeze(-1))
        return self._layer_norm(parts, bias, unit)[0].view(normed.shape), mean, inverse

    def _addition(self, out: Tensor, args: Sequence[Any], unit: float) -> Tensor:
        """Round a sum of two, by no more than either of them: -1e30 + 1 is -1e30."""
        if any(_hides_only(x, out) for x in args[:2]):
            return out
        limit = out.abs().mul_(unit).clamp_(max=MAX_ERROR)
        for x in args[:2]:
            size = x.abs() if isinstance(x, Tensor) else torch.tensor(abs(x), dtype=out.dtype)
            torch.minimum(limit, size, out=limit)
        return torch.addcmul(out, limit, self._random.uniform(out.shape))


def _hides_only(x: Any, out: Tensor) -> bool:
    """Return whether `x` is a mask of 0 and -inf, which rounds nothing."""
    if not isinstance(x, Tensor) or 4 * x.numel() > out.numel():
        return False
    return bool(((x == 0) | x.isneginf()).all())


def _terms(
    name: str, out: Tensor, args: Sequence[Any], copies: int, unit: float
) -> tuple[Tensor, Tensor | float]:
    """Return the sum of squares of the terms of which each result is the sum, and their number.

    Args:
        name: The name of the operation.
        out: Its results.
        args: Its arguments.
        copies: See `RandomRounding`.
        unit: The largest relative error of one rounding of a partial sum.
    """
    if name in PRODUCTS:
        a, b = args[-2:]
        if copies == 1 or a.shape[0] % copies:
            return _terms_of_product(a, b, unit)
        first = slice(a.shape[0] // copies)
        found = _terms_of_product(a[first], b if b.dim() == 2 else b[first], unit)
        squares, count = (x.repeat(copies, *[1] * (x.dim() - 1)) for x in found)
        return squares, count
    x = args[0].double()
    if name == "convolution":
        weight, _, *rest = args[1:]
        weight = weight.double()
        squares = torch.ops.aten.convolution(x.square(), weight.square(), None, *rest)
        return squares, weight[0].numel()
    count = max(x.numel() / max(out.numel(), 1), 1)
    axes = args[1] if len(args) > 1 and args[1] else list(range(x.dim()))
    squares = torch.where(x.isfinite(), x, 0.0).square().sum(axes, keepdim=True)
    return squares.reshape(out.shape) / (1 if name == "sum" else count**2), count


def _terms_of_product(a: Tensor, b: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of the terms of each element of a @ b, and their number.

    Adding a term rounds the partial sum, or loses the term where that is smaller: zeros add
    nothing, and a term that is 1 / unit times smaller than the largest next to nothing.
    """
    sizes = a.double().abs()
    count = (sizes > unit * sizes.amax(-1, keepdim=True)).sum(-1).to(sizes.dtype)
    squares = sizes.square_()
    if is_large(b) and b.dim() == 2:
        found = product(squares, b, Tensor.square_, lambda a, part, _: a @ part)
        return found, count.unsqueeze(-1)
    return squares @ b.double().square(), count if b.dim() == 1 else count.unsqueeze(-1)
