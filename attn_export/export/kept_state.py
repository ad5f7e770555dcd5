"""State that a user's module keeps between calls, which no graph has: found by calls, and refused.

A copy of the module is called with the same inputs twice, in two orders, and after inputs of other
sizes. What a module only remembers, such as a table that grows with the longest input, changes no
result and stays as it is when the same call is repeated. Where each repeated call changes
something, the module is called many times more.
"""

from __future__ import annotations

import contextlib
import functools
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_export.cases.draw import clamp_sizes, may_try
from attn_export.errors import AttnExportError, ExportError, first_few
from attn_export.export.module_state import copy_module
from attn_export.export.nested import children_of, set_child
from attn_export.export.trees import is_close

_LONG, _SCALE = 67, 4.0
"""The size of axes in long inputs, and the factor on their numbers: a maximum may be kept."""

_ORDERS = ("EELLSSELSE", "11SLE")
"""The calls of two copies: of the example, long, short, and with all sizes 1."""

_FEW = ("EESE",)
"""The calls of a large module."""

_MOST_REPEATED, _FAR = 100, (1000, 10**6)
"""How often a call that changes the module is repeated, and how many more calls are imagined."""

_SHARED = 2**18
"""The number of elements from which weights are no part of the state, and are shared by copies."""

_MOST_PLACES = 20_000

State = dict[str, Any]
"""What a module holds, by place: ``layers.0.cache.keys``."""

_Returned = Mapping[str, Tensor] | str
"""What a call returned, or the type of what it raised."""

_ADVICE = "make it an input and an output, as the past and present of a cache, or compute it anew"


def unused_copy(module: nn.Module) -> nn.Module | None:
    """Return a copy that shares large weights only; None of modules of ours, which keep nothing."""
    if type(module).__module__.startswith(f"{__package__.partition('.')[0]}."):
        return None
    shared = (p for p in module.parameters() if p.numel() > _SHARED)
    with contextlib.suppress(Exception):  # the oracle copies it, too, and says why
        return copy_module(module, {id(parameter): parameter for parameter in shared})
    return None


@torch.inference_mode()
def refuse_kept_state(subject: Any, fresh: nn.Module | None) -> list[str]:
    """Raise an error if what a module keeps between calls changes its results.

    `fresh`: A copy of the module that was never called, or None: nothing is checked.

    Returns:
        Notes on what changes in each call, but did not change results.
    """
    if fresh is None:
        return []
    try:
        inputs = _inputs(subject)
    except Exception:  # what cannot be drawn is refused where it is needed
        return []
    copies = fresh, unused_copy(fresh)
    trials = [_Trial(subject, each, inputs) for each in copies if each is not None]
    orders = _ORDERS if "L" in inputs else _FEW
    with torch.random.fork_rng(devices=[]):
        first: dict[str, _Returned] = {}
        for trial, order in zip(trials, orders, strict=False):
            for kind in filter(inputs.__contains__, order):
                trial.call(kind, first)
                if isinstance(first["E"], str):
                    return []  # `Subject.call` raises it again
        return [note for trial in trials for note in trial.repeat(first)][:1]


def _inputs(subject: Any) -> dict[str, Mapping[str, Tensor]]:
    """Return inputs by kind: of the example, long, short, and with all sizes 1."""
    example = subject.example_sizes
    weights = sum(parameter.numel() for parameter in subject.module.parameters())
    batches = {axes[0] for axes in subject.axes.values() if 0 in axes}
    free = [name for name in example if name not in subject.sums]

    def drawn(kind: str, *choices: Mapping[str, int]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for changed in choices:
            sizes = subject.sizes_with(clamp_sizes(changed, subject.bounds))
            if sizes != example and may_try(weights, sizes, subject.sums):
                yield kind, subject.draw(sizes, "kept", kind)
                return

    longer = {n: example[n] + 1 if n in batches else 2 * example[n] + 1 for n in free}
    inputs: dict[str, Mapping[str, Tensor]] = {"E": subject.inputs}
    inputs |= drawn("S", {n: 1 for n in free if n not in batches})
    if may_try(weights, longer, subject.sums):
        long = {n: size if n in batches else _LONG for n, size in longer.items()}
        inputs |= drawn("L", long, longer)
        inputs |= drawn("1", dict.fromkeys(free, 1))
    if "L" in inputs and not subject.function:
        inputs["L"] = {
            n: x * _SCALE if x.is_floating_point() else x for n, x in inputs["L"].items()
        }
    return inputs


class _Trial:
    """Calls of one copy of a module, which goes on with what the calls before left in it.

    Attributes:
        before: The state after the last call; {} before the first.
        last: The kind of the last call.
        changing: By place, the last two values of what a repeated call changed, and its kind.
    """

    def __init__(
        self, subject: Any, module: nn.Module, inputs: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        self.subject, self.module, self.inputs = subject, module, inputs
        self.start, self.before = dict(_state(module)), State()
        self.last, self.changing = "", dict[str, tuple[Any, Any, str]]()

    def call(self, kind: str, first: dict[str, _Returned]) -> None:
        """Call with inputs of a kind; raise an error unless the outcome is that of its first."""
        seeds = _seeds()
        outcome = self._outcome(kind)
        after = dict(_state(self.module))
        if kind == self.last:
            for place, value in after.items():
                if self.before.get(place) != value:
                    self.changing[place] = (self.before.get(place), value, kind)
        draws = seeds != _seeds()
        self.before, self.last = after, kind
        difference = _difference(first.setdefault(kind, outcome), outcome)
        if difference:
            raise self._error(difference, draws=draws)

    def _outcome(self, kind: str) -> _Returned:
        from attn_export.export.loops import run_keeping_state, short_loops

        subject, inputs = self.subject, self.inputs[kind]
        run = functools.partial(run_keeping_state, self.module)
        in_run = subject.operators.in_run()
        try:
            with short_loops():
                outputs = subject.results.of(lambda a: run(a, in_run), subject.tree, inputs)
            return {name: tensor.clone() for name, tensor in outputs.items()}
        except AttnExportError as error:
            return type(error.__cause__ or error).__name__

    def _error(self, difference: str, *, draws: bool) -> ExportError:
        """Return an error that names what changed."""
        problem = f"the module {difference} for the same inputs"
        changed = self.changing or [
            place for place, value in self.before.items() if self.start.get(place) != value
        ]
        if draws and not self.changing:
            return ExportError(f"{problem}; it draws random numbers: make them an input")
        if changed:
            return ExportError(
                f"{problem}; it keeps {self._named(changed)} between calls: {_ADVICE}"
            )
        return ExportError(
            f"{problem}; it keeps something outside of its attributes between calls, as in a "
            f"global or a closure: {_ADVICE}"
        )

    def _named(self, changed: Iterable[str]) -> str:
        """Return the first of the places that changed: what was there before, the outermost."""
        places = sorted(changed, key=lambda at: (at not in self.start, at.count("."), at))
        return first_few([at for at in places if at in self.start] or places)

    def repeat(self, first: dict[str, _Returned]) -> list[str]:
        """Repeat calls that change something, and go on as after many more of them."""
        changing = dict(self.changing)
        for kind in dict.fromkeys(kind for _, _, kind in changing.values()):
            for _ in range(_MOST_REPEATED if "L" in self.inputs else len(self.inputs)):
                self.call(kind, first)
        for count in _FAR if changing else ():
            for place, (old, new, _) in changing.items():
                _advance(self.module, place, old, new, count)
            for kind in self.inputs:
                self.call(kind, first)
        if not changing:
            return []
        return [
            f"each call changes {self._named(changing)} of the module; no result that was tried "
            "depends on it, and the graph does not have it"
        ]


def _difference(first: _Returned, outcome: _Returned) -> str:
    """Return how an outcome differs from the first with the same inputs; "" if it does not."""
    if isinstance(first, str) or isinstance(outcome, str):
        raised = first if isinstance(first, str) else outcome
        both = isinstance(first, str) and isinstance(outcome, str)
        return "" if both else f"raises {raised} in some calls, and not in others,"
    names = (name for name, tensor in first.items() if not is_close(outcome[name], tensor))
    return next((f"gives another {name}" for name in names), "")


# -- what a module holds ---------------------------------------------------------------------------


def _seeds() -> tuple[Any, ...]:
    """Return the states of the global random generators."""
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), repr(of_numpy), random.getstate()


def _state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds by place, as values that can be compared."""
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", module)]
    for _ in range(_MOST_PLACES):
        if not stack:
            return
        place, value = stack.pop()
        children = _children(value)
        if children is None:
            yield place, _token(value)
        elif id(value) not in seen:
            seen.add(id(value))
            yield place, len(children)
            stack += [(f"{place}.{key}" if place else str(key), child) for key, child in children]


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if not isinstance(value, nn.Module):
        return None if (found := children_of(value)) is None else list(found)
    parts = value._parameters, value._buffers, value._modules
    own = ((n, v) for n, v in vars(value).items() if all(v is not part for part in parts))
    small = ((n, p) for n, p in value._parameters.items() if p is None or p.numel() <= _SHARED)
    return [*own, *small, *value._buffers.items(), *value._modules.items()]


def _token(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, complex)) or value is None:
        return value if value == value else "nan"
    try:
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return value.dtype, tuple(value.shape), raw if len(raw) < _SHARED else zlib.crc32(raw)
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, zlib.crc32(value.tobytes())
        if isinstance(value, (set, frozenset)):
            return frozenset(map(repr, value))
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, random.Random):
            return value.getstate()
    except Exception:
        return type(value)  # of a kind that shows no bytes
    return type(value)


def _advance(module: nn.Module, place: str, old: Any, new: Any, count: int) -> None:
    """Change a number, or a tensor in place, as so many more calls would."""
    *path, last = place.split(".")
    try:
        owner = functools.reduce(_child, path, module)
        value = _child(owner, last)
        if isinstance(value, Tensor):
            (dtype, shape, *raw), (_, __, *before) = new, old
            now, then = (
                torch.frombuffer(bytearray(x[0]), dtype=dtype).reshape(shape) for x in (raw, before)
            )
            value.add_((now - then) * count)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            set_child(owner, last, value + (new - old) * count)
    except Exception:
        return  # what is no number stays


def _child(owner: Any, key: str) -> Any:
    return next(child for name, child in _children(owner) or () if str(name) == key)
