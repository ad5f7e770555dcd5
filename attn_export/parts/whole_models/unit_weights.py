"""Weights that are in memory while a unit of a model runs: one of its layers, or a leaf.

The tensors of a checkpoint are views of mapped files, which take no memory of the process. In a
model by units, the large weights are placeholders; hooks read those of a unit before it runs, in
the type that the model computes in, and drop them after it. `in_step` lets many runs pass a unit
before the weights of the next one are read, so that the checkpoint is read once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_export.errors import ExportError, WeightsError
from attn_export.export.module_state import copy_module
from attn_export.export.unread_weights import UnreadWeights
from attn_export.heap import give_back, use_one_heap
from attn_export.temp_folders import joined_in_file

_WIDENED = 2**26
"""The largest number of elements of a weight that is widened to float64 when it is read. What is
computed of a larger one lies in a temporary file."""

_T = TypeVar("_T")

LARGE = 2**26
"""The number of weights, 256 MiB in float32, above which a model is large."""

_ALIKE = 2**28
"""The largest number of elements of a weight that stands in for others."""

_SMALL = 2**16
"""The largest number of elements of a weight that stays in memory."""


class _Files:
    """The files of a checkpoint, which must stay as they are while weights are read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known = {path: _state_of(path) for path in paths}

    def check(self) -> None:
        """Refuse to read on if a file is another one: a shorter one would end the process."""
        for path, known in self._known.items():
            if _state_of(path) != known:
                raise WeightsError(f"{path} was changed while it was read; start again")


def _state_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


class _Alike:
    """Weights that stand in for those of units that are like an earlier one.

    Attributes:
        is_on: Whether they do.
        is_refused: Whether they may not, since the model refused something with them.
        first: The first unit of each kind.
        kept: Weights by the shapes in their units, their paths and types.
    """

    def __init__(self) -> None:
        self.is_on = self.is_refused = False
        self.first = dict[Any, _Stored]()
        self.kept = dict[Any, Tensor]()


class _Stored:
    """The weights of a unit, as the checkpoint has them, by their paths in it.

    Attributes:
        number: The place of the unit in the model.
        kind: Its path in the model, without the numbers of layers.
        types: The types that its weights are rounded to, before they are widened.
        changed: Functions that return rows of weights in place of those of the checkpoint, in
            float32. Copies of the model share them.
    """

    def __init__(
        self, number: int, kind: str, weights: dict[str, Tensor], files: _Files, alike: _Alike
    ) -> None:
        self.number, self.weights, self._files, self.alike = number, weights, files, alike
        self.kind = kind
        self._like = kind, *((path, tuple(weight.shape)) for path, weight in weights.items())
        alike.first.setdefault(self._like, self)
        self.types = {path: weight.dtype for path, weight in weights.items()}
        self.changed = dict[str, Callable[[slice], Tensor]]()
        self._made = dict[Any, Tensor]()

    def __deepcopy__(self, _: Any) -> Self:
        return self  # views of mapped files

    def read(self, path: str, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return rows of a weight in a type."""
        if not self.alike.is_on or self.weights[path].numel() > _ALIKE:
            return self._read_of(self, path, dtype, rows)
        key = self._like, path, dtype
        if key not in self.alike.kept:
            self.alike.kept[key] = self._read_of(self.alike.first[self._like], path, dtype)
        return self.alike.kept[key][rows]

    def _read_of(
        self, unit: _Stored, path: str, dtype: torch.dtype, rows: slice = slice(None)
    ) -> Tensor:
        self._files.check()
        weight, own, changed = unit.weights[path], self.types[path], unit.changed.get(path)

        def read(rows: slice) -> Tensor:
            narrow = weight[rows].to(own) if changed is None else changed(rows)
            return narrow.to(dtype)

        is_made = changed is not None or {weight.dtype, own} != {dtype}
        if weight.numel() <= _WIDENED or not is_made:
            return read(rows)
        key = path, own, dtype, changed
        if key not in unit._made:
            if rows != slice(None):
                return read(rows)
            unit._made[key] = _in_file(weight.shape, dtype, read)
        return unit._made[key][rows]

    def rounded(self, dtypes: Mapping[str, torch.dtype]) -> _Stored:
        """Return the same weights in a copy that has them in other types."""
        copy = _Stored(self.number, self.kind, self.weights, self._files, self.alike)
        copy.changed, copy._made = self.changed, self._made
        copy.types = {
            path: own if torch.promote_types(own, dtypes[path]) == dtypes[path] else dtypes[path]
            for path, own in self.types.items()
        }
        return copy


def _in_file(shape: Sequence[int], dtype: torch.dtype, read: Callable[[slice], Tensor]) -> Tensor:
    """Return a weight that lies in a temporary file, of which some rows are read at a time."""
    step = max(_WIDENED // (4 * math.prod(shape[1:])), 1)
    pieces = (read(slice(start, start + step)) for start in range(0, shape[0], step))
    array = joined_in_file(piece.contiguous().view(torch.uint8).numpy() for piece in pieces)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it cannot be written
        return torch.from_numpy(array).view(dtype).view(tuple(shape))


@contextlib.contextmanager
def converted_in_files() -> Iterator[None]:
    """Let weights that transformers makes of several tensors, or rounds, be in files in a block."""
    loading: Any = import_module("transformers.core_model_loading")
    converter, materialize = loading.WeightConverter, loading._materialize_copy
    convert = converter.convert

    def in_files(*args: Any, **kwargs: Any) -> dict[str, Any]:
        made: dict[str, Any] = convert(*args, **kwargs)
        for name, found in made.items():
            weight = found[0] if isinstance(found, list) else found
            if weight.numel() > _SMALL:
                made[name] = _in_file(weight.shape, weight.dtype, weight.__getitem__)
        return made

    def in_type(tensor: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        read: Tensor = tensor[...]  # a view of the mapped file
        if dtype in (None, read.dtype) or read.numel() <= _SMALL:
            found: Tensor = materialize(tensor, device, dtype)
            return found
        return _in_file(read.shape, dtype, lambda rows: read[rows].to(dtype))

    with (
        # One after another, so that experts do not lie in files of their own all at once.
        mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        mock.patch.object(converter, "convert", in_files),
        mock.patch.object(loading, "_materialize_copy", in_type),
    ):
        yield


def hold_by_unit(model: nn.Module, files: Iterable[Path]) -> None:
    """Let a model hold its large weights only while the unit that has them runs.

    `files`: Those of its checkpoint.
    """
    use_one_heap()
    watched, stand_ins = _Files(files), _Alike()
    holders = dict[int, nn.Parameter]()
    paths = {unit: re.sub(r"\d+", "", path) for path, unit in model.named_modules()}
    for number, unit in enumerate(_units(model, _read_elsewhere(model))):
        stored = dict[str, Tensor]()
        for path, owner, leaf, weight in _weights(unit):
            stored[path] = weight.detach()
            holder = holders.setdefault(id(weight), _placeholder(weight.shape, weight.dtype))
            owner._parameters[leaf] = holder
        unit._stored_weights = _Stored(number, paths[unit], stored, watched, stand_ins)  # type: ignore[assignment]
        unit.register_forward_pre_hook(_enter)
        unit.register_forward_hook(_leave, always_call=True)


def largest_unit(model: nn.Module) -> int:
    """Return the largest number of weights of a unit that are widened together."""
    units = [stored.weights.values() for _, stored in _stored(model)]
    sizes = [[x.numel() for x in unit if x.numel() <= _WIDENED] for unit in units]
    return max(map(sum, sizes), default=0)


@contextlib.contextmanager
def alike(model: nn.Module) -> Iterator[None]:
    """Let each unit of a model by units have the weights of the first one like it in this block.

    They are read once, so that what does not depend on weights, as the order of operations, is
    known soon. Copies of the model have them, too.
    """
    stand_ins = next((stored.alike for _, stored in _stored(model)), None)
    if stand_ins is None or stand_ins.is_on or stand_ins.is_refused:
        yield
        return
    stand_ins.is_on = True
    try:
        yield
    finally:
        stand_ins.is_on = False
        stand_ins.kept.clear()


def made_alike(model: nn.Module, make: Callable[[], _T]) -> _T:
    """Return what a function makes while units have weights alike; else with their own.

    Weights that stand in for others may overflow in float16 where a model's own do not.
    """
    try:
        with alike(model):
            return make()
    except ExportError:
        for _, stored in _stored(model):
            stored.alike.is_refused = True
        if not is_by_unit(model):
            raise
        return make()


def is_by_unit(model: nn.Module) -> bool:
    """Return whether a model holds its large weights only while their unit runs."""
    return any(map(is_placeholder, model.parameters()))


def copy_by_unit(model: nn.Module, dtype_of: Callable[[str, Tensor], torch.dtype]) -> nn.Module:
    """Return a copy of a model, by units or not, that computes in other floating types.

    `dtype_of`: Returns the type of a floating weight or buffer in the copy, by its path.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    dtypes = {name: dtype_of(name, x) for name, x in tensors if x.is_floating_point()}
    shared: dict[int, Any] = {
        id(weight): _placeholder(weight.shape, dtypes[name])
        for name, weight in tensors
        if is_placeholder(weight)
    }
    copy = copy_module(model, shared)
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        if name in dtypes and not is_placeholder(tensor):
            tensor.data = tensor.data.to(dtypes[name])
    for unit, stored in _stored(copy):
        held = {path: _holder(unit, path).dtype for path in stored.weights}
        unit._stored_weights = stored.rounded(held)  # type: ignore[assignment]
    return copy


def unread_weights(model: nn.Module) -> UnreadWeights:
    """Return the large weights of a model by units as they are captured and written."""
    readers = dict[int, tuple[nn.Parameter, Callable[[slice], Tensor]]]()
    for unit, stored in _stored(model):
        for path in stored.weights:
            holder = _holder(unit, path)
            read = functools.partial(stored.read, path, holder.dtype)
            readers[id(holder)] = holder, read
    return UnreadWeights([*readers.values()], functools.partial(alike, model))


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight by its path in a model, those of units as the checkpoint has them."""
    paths = {unit: path for path, unit in model.named_modules()}
    for unit, stored in _stored(model):
        for name, weight in stored.weights.items():
            yield f"{paths[unit]}.{name}" if paths[unit] else name, weight
    yield from (
        (name, weight) for name, weight in model.named_parameters() if not is_placeholder(weight)
    )


class ChangedWeights:
    """Weights of a model by units that are changed when they are read, also in its copies."""

    def __init__(self, model: nn.Module) -> None:
        self._units = list(_stored(model))
        self._places = {
            (id(owner), leaf): (unit, path)
            for unit, stored in self._units
            for path in stored.weights
            for owner, leaf in [_owner(unit, path)]
        }
        self._holders: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._last_unit: nn.Module | None = None
        self._kept = dict[Any, Tensor]()

    def read(self, owner: nn.Module, leaf: str) -> Tensor:
        """Return a weight by the module that has it, in memory."""
        unit, path = self._places[id(owner), leaf]
        stored: Any = unit._stored_weights
        weight: Tensor = stored.read(path, _holder(unit, path).dtype)
        return weight

    def change(self, owner: nn.Module, leaf: str, read: Callable[[slice], Tensor]) -> None:
        """Let a weight be another one, which no other place shares.

        `read`: Returns rows of it.
        """
        unit, path = self._places[id(owner), leaf]
        stored: Any = unit._stored_weights
        stored.changed[path] = functools.partial(self._read_once, unit, read)
        holder = _holder(unit, path)
        self._holders.append((owner, leaf, holder))
        owner._parameters[leaf] = _placeholder(holder.shape, holder.dtype)

    def _read_once(self, unit: nn.Module, read: Callable[[slice], Tensor], rows: slice) -> Tensor:
        """Return rows of a weight; a whole one is kept until it is asked for again.

        A float64 copy of a model asks for those that the model itself had just before it.
        """
        if self._last_unit is not unit:
            self._last_unit = unit
            self._kept.clear()
        if rows != slice(None):  # of a weight too large for memory
            return read(rows)
        return (
            self._kept.pop(read) if read in self._kept else self._kept.setdefault(read, read(rows))
        )

    def undo(self) -> None:
        """Let all weights be those of the checkpoint again."""
        for owner, leaf, holder in self._holders:
            owner._parameters[leaf] = holder
        for _, stored in self._units:
            stored.changed.clear()

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Let all weights be those of the checkpoint in this block."""
        before = [dict(stored.changed) for _, stored in self._units]
        try:
            for _, stored in self._units:
                stored.changed.clear()
            self._kept.clear()
            yield
        finally:
            for (_, stored), changed in zip(self._units, before, strict=True):
                stored.changed.update(changed)


def _units(module: nn.Module, stay: Collection[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield the repeated layers or their parts, and outside them modules with large weights.

    `stay`: Modules whose weights stay in memory.
    """
    if module in stay:
        return
    if any(weight.numel() > _SMALL for weight in module._parameters.values() if weight is not None):
        yield module
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            for layer in child:
                yield from _parts(layer)
        else:
            yield from _units(child, stay)


def _read_elsewhere(model: nn.Module) -> set[nn.Module]:
    """Return embeddings that other modules may read, and never call: small ones of positions."""
    uses = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    called: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        called = model.get_input_embeddings()  # type: ignore[operator]
    return {
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not called
        if uses[id(module.weight)] == 1 and module.weight.numel() <= 32 * _SMALL
    }


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Return a layer; if it is large, its linear layers, if they have all of its large weights."""
    weights = list(_weights(layer))
    owners = {owner: None for _, owner, _, _ in weights}
    is_large = sum(weight.numel() for *_, weight in weights) > _WIDENED
    # Others may read weights of modules that they do not call.
    return [*owners] if is_large and {*map(type, owners)} == {nn.Linear} else [layer]


def layer_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Return the lists of layers of a model: one, or those of an encoder and a decoder."""
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x) > 1]
    inner = {id(y) for x in lists for y in x.modules() if y is not x}
    return [list(x) for x in lists if id(x) not in inner]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that has one list of them; else none."""
    lists = layer_lists(model)
    return lists[0] if len(lists) == 1 else []


def _weights(unit: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield the large weights of a unit: the path in it, the module that has it, its name there."""
    for prefix, owner in unit.named_modules():
        for leaf, weight in owner._parameters.items():
            if weight is not None and weight.numel() > _SMALL:
                yield f"{prefix}.{leaf}" if prefix else leaf, owner, leaf, weight


def _placeholder(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """Return a weight of a shape and a type that takes no memory; NaN shows that it was read."""
    value = torch.full((), math.nan, dtype=dtype).expand(tuple(shape))
    return nn.Parameter(value, requires_grad=False)


def is_placeholder(weight: Tensor) -> bool:
    """Return whether a weight is in memory only while its unit runs."""
    return weight.numel() > _SMALL and not any(weight.stride())


def _load(unit: nn.Module) -> None:
    """Read the weights of a unit, in the type of their placeholders."""
    stored: Any = unit._stored_weights
    holders = vars(unit)["placeholders"] = dict[str, Any]()  # first, as reading may fail
    for path, weight in stored.weights.items():
        owner, leaf = _owner(unit, path)
        holder: Any = owner._parameters[leaf]
        # Larger ones are widened block by block, as they are multiplied, and rows when looked up.
        is_whole = holder.dtype != torch.float64 or weight.numel() <= _WIDENED
        is_whole &= type(unit) is not nn.Embedding
        narrow = torch.float32 if path in stored.changed else stored.types[path]
        read = stored.read(path, holder.dtype if is_whole else narrow)
        owner._parameters[leaf], holders[path] = nn.Parameter(read, requires_grad=False), holder


def _drop(unit: nn.Module) -> None:
    """Put the placeholders of the weights of a unit back, and give their memory back."""
    _drop_weights(unit)
    give_back()


def _drop_weights(unit: nn.Module) -> None:
    for path, holder in vars(unit).pop("placeholders").items():
        owner, leaf = _owner(unit, path)
        owner._parameters[leaf] = holder


def _stored(model: nn.Module) -> Iterator[tuple[nn.Module, _Stored]]:
    """Yield each unit of a model, with its weights."""
    for unit in model.modules():
        if isinstance(stored := getattr(unit, "_stored_weights", None), _Stored):
            yield unit, stored


def _holder(unit: nn.Module, path: str) -> nn.Parameter:
    owner, leaf = _owner(unit, path)
    holder = owner._parameters[leaf]
    assert holder is not None  # it is one of the unit's weights
    return holder


def _owner(unit: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module that has a weight, and the name of the weight there."""
    prefix, _, leaf = path.rpartition(".")
    return unit.get_submodule(prefix), leaf


# -- runs in step --------------------------------------------------------------------------------


def _enter(unit: nn.Module, _: Any) -> None:
    if torch.compiler.is_exporting():
        return
    run = _RUN.get()
    if run is not None:
        run.arrive(unit)
        return
    # In another thread, no mode of this run sees the operations.
    _THREADS.submit(_load, unit).result()


def _leave(unit: nn.Module, _: Any, outputs: Any) -> Any:
    if "placeholders" not in vars(unit):  # it is captured
        return outputs
    if type(unit) is nn.Embedding and isinstance(outputs, Tensor):
        outputs = outputs.to(vars(unit)["placeholders"]["weight"].dtype)
    if _RUN.get() is None:
        _drop(unit)
    return outputs


_AT_ONCE = 500
"""The largest number of runs that pass a unit together."""

_THREADS = ThreadPoolExecutor(2 * _AT_ONCE)  # a run in step may start others
"""The threads of all runs. They are used again, as libraries keep memory for each new one."""


class _Stopped(BaseException):
    """A run that is given up, since another one failed."""


class _Run:
    """One of the runs in step, in a thread that stands still while another one works.

    Attributes:
        unit: The unit whose weights it waits for; None when it has ended.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.unit: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._goes, self._stands, self._is_stopped = threading.Event(), threading.Event(), False
        self._future = _THREADS.submit(contextvars.copy_context().run, self._work, function)

    def _work(self, function: Callable[[], Any]) -> None:
        _RUN.set(self)
        self._goes.wait()
        try:
            if not self._is_stopped:
                self.result = function()
        except BaseException as error:  # raised again in the thread of the caller
            self.error = error
        self.unit = None
        self._stands.set()

    def arrive(self, unit: nn.Module) -> None:
        """Stand still until the weights of a unit are there; called in its own thread."""
        self.unit = unit
        self._goes.clear()
        self._stands.set()
        if not self._is_stopped:  # else nobody lets it go on any more
            self._goes.wait()
        if self._is_stopped:
            raise _Stopped

    def go_on(self) -> None:
        """Let it work until it needs another unit, or ends."""
        self._stands.clear()
        self._goes.set()
        self._stands.wait()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Give it up."""
        self._is_stopped = True
        self._goes.set()
        self._future.result()


_RUN: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("run", default=None)
"""The run in step of this thread, if it is one."""


def in_step(
    functions: Sequence[Callable[[], _T]], started: Callable[[int], None] = lambda _: None
) -> list[_T]:
    """Run functions that run models by units, and return their results.

    `started`: Is told the number of each unit whose weights are read.

    One works at a time, in their order, until it needs a unit whose weights are not there. When all
    have come so far, the weights of the first of these units are read.
    """
    results = list[_T]()
    for start in range(0, len(functions), _AT_ONCE):
        results += _in_step(functions[start : start + _AT_ONCE], started)
    return results


def _in_step(functions: Sequence[Callable[[], _T]], started: Callable[[int], None]) -> list[_T]:
    # Runs set and reset this for the whole process, in turns.
    with sdpa_kernel(SDPBackend.MATH):
        runs = [_Run(function) for function in functions]
        loaded: nn.Module | None = None
        try:
            for run in runs:
                run.go_on()
            while waiting := [run for run in runs if run.unit is not None]:
                if all(run.unit is not loaded for run in waiting):
                    if loaded is not None:
                        _drop(loaded)
                    loaded = min((run.unit for run in waiting), key=_place)
                    started(_place(loaded)[0])
                    _load(loaded)
                for run in waiting:
                    if run.unit is loaded:
                        run.go_on()
        finally:
            for run in runs:
                run.stop()
            if loaded is not None:
                _drop(loaded)
    return [run.result for run in runs]


def _place(unit: nn.Module) -> tuple[int, int]:
    """Return the place of a unit in the order of loading: that of a float64 copy is the later."""
    stored: Any = unit._stored_weights
    dtypes = (weight.dtype for weight in unit.parameters())
    return stored.number, max((dtype.itemsize for dtype in dtypes), default=0)
