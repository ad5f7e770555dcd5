"""Dispatch modes that record the operations of a PyTorch run, its threads, and random numbers."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from attn_export.float64 import ReferenceStep

EXACT = frozenset({
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "arange",
    "argmax", "argmin", "argsort", "bincount", "bucketize", "cat", "ceil", "chunk", "clamp",
    "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "detach", "diagonal",
    "embedding", "empty", "empty_like", "expand", "fill", "flip", "floor", "full", "full_like",
    "gather", "histc", "index", "index_put", "index_select", "lift_fresh", "masked_fill", "max",
    "maximum", "min", "minimum", "neg", "new_empty", "new_full", "new_ones", "new_zeros", "ones",
    "ones_like", "permute", "relu", "repeat", "repeat_interleave", "reshape", "roll", "round",
    "scalar_tensor", "scatter", "searchsorted", "select", "select_scatter", "sign", "slice",
    "slice_scatter", "sort", "split", "split_with_sizes", "squeeze", "stack", "t", "topk",
    "transpose", "tril", "triu", "trunc", "unbind", "unfold", "unsqueeze", "view", "where", "zero",
    "zeros", "zeros_like",
})  # fmt: skip
"""Exact operations: they move, choose or compare elements."""

RANKING = frozenset({"sort", "topk"})
"""Operations that may return equal values in any order."""

CHOOSING = frozenset({
    "amax", "amin", "aminmax", "cummax", "cummin", "kthvalue", "max", "median", "min", "mode",
    "nanmedian", "sort", "topk",
})  # fmt: skip
"""Operations that choose an element. Of elements with NaN PyTorch takes NaN, and ONNX Runtime's
ReduceMax another."""


_WITH_FLEX = ("torch.nn.attention.flex_attention", "torch.nn.attention.bias")


class OperationMode(TorchDispatchMode):
    """Base class of modes that intercept every PyTorch operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that the mode is never compiled, so no guard against it has to run each time."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        return self._operation(func, args, dict(kwargs or {}))

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; subclasses must implement this."""
        raise NotImplementedError


class RoundingRecorder(OperationMode):
    """Mode that records the operations that round.

    Attributes:
        steps: The names of the operations, in order, each with the eps of its result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, float]] = []

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        name = name_of(func)
        if rounds(name, func, out):
            first = out if isinstance(out, Tensor) else out[0]
            self.steps.append((name, torch.finfo(first.dtype).eps))
        return out


@functools.cache
def name_of(func: Any) -> str:
    """Return the name of an operation, without the underscore of in-place variants."""
    name = str(func._schema.name).rpartition("::")[2]
    return name.rstrip("_") if func._schema.is_mutable else name


def rounds(name: str, func: Any, out: Any) -> bool:
    """Return whether an operation returns floating numbers that it computed."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if name in EXACT or not isinstance(first, Tensor) or not first.is_floating_point():
        return False
    return not is_view(func)


def makes_integers(out: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation makes integers of floating numbers."""
    is_whole = isinstance(out, Tensor) and not out.is_floating_point() and out.dtype != torch.bool
    return is_whole and any(isinstance(x, Tensor) and x.is_floating_point() for x in args)


@functools.cache
def is_view(func: Any) -> bool:
    """Return whether an operation returns a view of its input."""
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


# -- every value of a module in its float64 run, with the line of user code behind it ----------


_MOST_STEPS = 5000
"""The largest number of operations that are recorded: a loop over tokens has many."""


class Recording(OperationMode):
    """Mode that records the results of operations.

    `place`: Returns the place in the model of the operation that runs.
    `most`: The number of elements above which a tensor is not recorded.

    Attributes:
        steps: The recorded values, in the order of the run.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], place: Callable[[], str] | None = None,
        most: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__()
        self._most = most
        self.steps: list[ReferenceStep] = []
        self._place = place
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id may be used again once its tensor is freed
        for name, tensor in tensors.items():
            self._add(name, "", tensor, ())

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from attn_export.source_location import user_line

        out = func(*args, **kwargs)
        if len(self.steps) < _MOST_STEPS:
            flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
            reads = tuple(self._numbers[id(x)] for x in flat if id(x) in self._numbers)
            place = None if self._place is None else self._place()
            line = user_line() if place is None else f"{place}, {user_line()}" if place else ""
            if name_of(func) == "addmm":  # a product and a sum in graphs
                self._add("mm", line, args[1] @ args[2], reads)
                reads = (*reads, len(self.steps) - 1)
            for result in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(result, Tensor):
                    self._add(name_of(func), line, result, reads)
        return out

    def _add(self, operation: str, line: str, tensor: Tensor, reads: tuple[int, ...]) -> None:
        from attn_export.float64 import ReferenceStep  # few runs record any

        if tensor.numel() > self._most:
            return
        self._numbers[id(tensor)] = len(self.steps)
        self._alive.append(tensor)
        value = tensor.detach().cpu()
        array = value.double().numpy() if value.is_floating_point() else value.numpy()
        self.steps.append(ReferenceStep(operation, line, np.array(array), reads))


# -- random numbers for runs that round at random -----------------------------------------------


class RandomNumbers:
    """Source of random numbers from one table; drawing each takes as long as the products."""

    SIZE = 1 << 20

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return uniform random numbers between -1 and 1, float64 of a shape."""
        return self._view(_table(self.SIZE)[0], shape)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return random numbers of the standard normal distribution, float64 of a shape."""
        return self._view(_table(self.SIZE)[1], shape)

    def _view(self, table: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a view of the table from a random start; rows of large shapes overlap."""
        count, half = math.prod(shape), self.SIZE // 2
        start = int(torch.randint(half, (1,), generator=self._generator))
        if count <= half:
            return table[start : start + count].view(tuple(shape))
        width = shape[-1]
        rows = count // width
        step = (half - width) // rows
        if step < 1:
            return table.repeat(-(-count // self.SIZE))[:count].view(tuple(shape))
        strides = [step * math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
        return table.as_strided(tuple(shape), (*strides, 1), start)


@functools.cache
def _table(size: int) -> tuple[Tensor, Tensor]:
    """Return uniform and normal random numbers, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.rand(size, **options).mul_(2).sub_(1), torch.randn(size, **options)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch use so many threads inside this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def math_backend(*modes: AbstractContextManager[Any] | None) -> Iterator[None]:
    """Run modules by PyTorch's math backend, without gradients, in modes: the last is innermost."""
    # Inference mode would show products with weights to modes before they are taken apart.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), contextlib.ExitStack() as stack:
        if not sys.modules.keys().isdisjoint(_WITH_FLEX):
            from attn_export.export.flex import flex_in_modes

            stack.enter_context(flex_in_modes())
        for mode in modes:
            if mode is not None:
                stack.enter_context(mode)
        yield
