"""PyTorch's loops over tensors: `scan`, `associative_scan`, `while_loop` and `map`.

In a capture they become one operation with the body as a graph, which the exporter translates to
`Scan` or `Loop`. In other runs they are loops of Python, which PyTorch would compile for each size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_export.export.flex import uncompiled
from attn_export.export.module_state import preserve_state

_PACKAGE = "torch._higher_order_ops"


_MOST_STEPS, _MOST_TRIED = 2**14, 100
"""The largest number of steps of the loops of a run, which may not end for some values, and of one
that finds sizes for cases: each case runs a dozen times, one operation after the other."""

_left: ContextVar[int] = ContextVar("steps that are left", default=_MOST_STEPS)


def _module(name: str) -> Any:
    return sys.modules[f"{_PACKAGE}.{name}"]  # the package has functions of the same names


@contextlib.contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes of classes or modules inside this block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def run_plainly(
    module: nn.Module, arguments: Mapping[str, Any], operators: AbstractContextManager[Any]
) -> Any:
    """Call a user's module, uncompiled, and restore its state; `operators` are in force."""
    with preserve_state(module):
        return run_keeping_state(module, arguments, operators)


def run_keeping_state(
    module: nn.Module, arguments: Mapping[str, Any], operators: AbstractContextManager[Any]
) -> Any:
    """Call a user's module, uncompiled; `operators` are in force."""
    with uncompiled(), _loops_of_python(), operators:
        return module(**arguments)


@contextlib.contextmanager
def _loops_of_python() -> Iterator[None]:
    """Run loops as Python's, uncompiled, inside this block: modes see each operation."""
    scan, while_loop, mapped = (_module(name) for name in ("scan", "while_loop", "map"))

    def scanned(_: Any, combine: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
        _step(len(xs[0]))
        returned = None  # a step's results, nested as the loop's; those of captures are flat

        def step(*values: Any) -> Any:
            nonlocal returned
            returned = combine(*values)
            return returned

        flat = scan.generic_scan(step, init, xs, additional_inputs=additional_inputs)
        return pytree.tree_unflatten(flat, pytree.tree_structure(returned))

    def repeated(_: Any, condition: Any, body: Any, *args: Any, **options: Any) -> Any:
        def counted(*values: Any) -> Any:
            _step(1)
            return tuple(pytree.tree_leaves(body(*values)))

        flat = while_loop.while_loop_dense(condition, counted, *args, **options)
        # A loop without steps does not show how its values are nested. A capture's are not.
        given = inspect.getclosurevars(body).nonlocals if inspect.isfunction(body) else {}
        carried = given["in_spec"].child(0) if "in_spec" in given else None
        return pytree.tree_unflatten(flat, carried) if carried else flat

    def each(_: Any, *args: Any) -> Any:
        _step(len(args[1][0]))
        return mapped.map_dense(*args)

    def called(function: Any, args: Any, kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))

    token = _left.set(min(_left.get(), _MOST_STEPS))  # for this run
    with _replaced(
        (scan.ScanOp, "__call__", scanned),
        (while_loop.WhileLoopOp, "__call__", repeated),
        (mapped.MapImpl, "__call__", each),
        (_module("utils"), "_hop_compile_and_call", called),
    ):
        try:
            yield
        finally:
            _left.reset(token)


def _step(count: int) -> None:
    _left.set(_left.get() - count)
    if _left.get() < 0:
        raise RuntimeError("its loops take too many steps; end each after some number of them")


@contextlib.contextmanager
def short_loops() -> Iterator[None]:
    """Raise an error where loops of a run would take long, inside this block."""
    token = _left.set(min(_left.get(), _MOST_TRIED))
    try:
        yield
    finally:
        _left.reset(token)


@contextlib.contextmanager
def loops_in_capture() -> Iterator[None]:
    """Let captures take loops of any length, inside this block.

    PyTorch's own code of `associative_scan` halves the length until it is 1, and so captures a
    single length. And the compiler of a loop takes a length for a constant of the same size.
    """
    associative, config = _module("associative_scan"), torch.fx.experimental._config
    in_order = (associative, "generic_associative_scan", _in_order)
    with _replaced(in_order, (config, "use_duck_shape", False)):
        yield


def _in_order(
    combine: Any,
    leaves: Sequence[Tensor],
    dim: int = 0,  # noqa: ARG001 (the caller moves it to the front)
    additional_inputs: Sequence[Any] = (),
) -> list[Tensor]:
    """Return an associative scan along the first axis, one element after the other.

    `combine`: A `functools.partial` that combines two flat lists of elements, over a further axis.
    """
    over_axis = combine.keywords["combine_fn"]  # by torch.vmap, which scan cannot hold
    # While PyTorch is capturing, vmap's result does not tell which function it is of.
    closure = inspect.getclosurevars(over_axis).nonlocals
    of_one = getattr(over_axis, "__wrapped__", None) or closure["func"]
    single = functools.partial(combine, combine_fn=of_one)

    def step(
        before: list[Tensor], now: tuple[Tensor, list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        has_before, elements = now
        combined = pytree.tree_leaves(single(*before, *elements, *additional_inputs))
        kept = [torch.where(has_before, c, x) for c, x in zip(combined, elements, strict=True)]
        return kept, [x.clone() for x in kept]  # an operation may not return a tensor twice

    first = [leaf[0].clone(memory_format=torch.contiguous_format) for leaf in leaves]
    has_before = torch.arange(leaves[0].shape[0]) > 0
    _, scanned = _module("scan").scan(step, first, (has_before, list(leaves)))
    return list(scanned)
