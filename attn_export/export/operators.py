"""Operators and functions of other libraries in users' modules, and PyTorch code in their place.

A module may call an operator that a library registers, or a function that runs a kernel of its own.
Captures and float64 runs call PyTorch code instead: a translation of the user or of a part, or else
the Python code that the operator itself runs. Eager runs call the operator, if it runs here.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from attn_export.errors import ExportError, UsageError, one_line
from attn_export.export.trees import is_close
from attn_export.optional_parts import hooks

Translations = Mapping[str, Callable[..., Any]]
"""Functions by the names of operators, ``"namespace::name"``, or of Python functions."""

_OWN = {
    "aten", "attn_export", "higher_order", "onnx", "onnx_symbolic", "prim", "prims", "torchvision",
    "transformers",
}  # fmt: skip
"""Namespaces of operators that the exporter or this package translates."""

_NAME = re.compile(r"\w+::\w+|\w+(\.\w+)+")


class Operators:
    """Operators and functions of other libraries that a module calls.

    Args:
        given: The user's translations.
        any_called: Whether the module may call any: layers of ours do not.

    Attributes:
        called: The names of those that the module called.
        missing: Those that do not run here, each with the reason.

    Raises:
        UsageError: If a name or a function cannot be one.
    """

    def __init__(self, given: Translations | None, any_called: bool = True) -> None:
        self.given = dict(given or {})
        for name, function in self.given.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or not callable(function):
                raise UsageError(
                    "translations gives functions to operators or functions by name, as in "
                    f"{{'namespace::name': function}}; got {name!r}: {function!r}"
                )
        self.called: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self._mode: _Mode | None = None
        self._ran = not any_called
        self._always: frozenset[str] = frozenset()

    # -- contexts --

    def in_run(self) -> AbstractContextManager[None]:
        """Call the operators in this block, and PyTorch code for float64 and for missing ones."""
        return self._within(capturing=False)

    def in_capture(self) -> AbstractContextManager[None]:
        """Call PyTorch code in place of the operators in this block."""
        return self._within(capturing=True)

    @contextlib.contextmanager
    def _within(self, *, capturing: bool) -> Iterator[None]:
        if self._ran and not self.called:
            yield
            return
        before = self._mode
        self._mode = _Mode(self, capturing=capturing)
        try:
            with self._other_code(), self._mode:
                yield
            self._ran = True
        finally:
            self._mode = before

    @contextlib.contextmanager
    def _other_code(self) -> Iterator[None]:
        """Give other code to the Python functions that have translations, inside this block."""
        before, codes = dict(_CALLS), {f: f.__code__ for f in self._functions}
        try:
            for function, (name, own) in self._functions.items():
                _CALLS[name] = functools.partial(self.call, name, own)
                function.__code__ = _code_that_calls(name, function)
            yield
        finally:
            for function, code in codes.items():
                function.__code__ = code
            _CALLS.clear()
            _CALLS.update(before)

    # -- what is called --

    @functools.cached_property
    def _known(self) -> dict[str, Callable[..., Any]]:
        """Return the translations of the parts and of the user."""
        return {
            **{n: function for table in hooks("TRANSLATIONS") for n, function in table.items()},
            **self.given,
        }

    @functools.cached_property
    def _functions(self) -> dict[FunctionType, tuple[str, Callable[..., Any]]]:
        """Return the loaded Python functions with a translation: the name, and a copy of each."""
        loaded = {name: _loaded(name) for name in self._known if "::" not in name}
        return {f: (name, _copy(f)) for name, f in loaded.items() if isinstance(f, FunctionType)}

    def call(self, name: str, own: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Return the result of an operator or a function, or of the code in its place."""
        self.called[name] = own
        assert self._mode is not None
        capturing, written = self._mode.capturing, self._known.get(name)
        tensors = (x for x in tree_leaves((args, options)) if isinstance(x, Tensor))
        wide = any(x.dtype in (torch.float64, torch.complex128) for x in tensors)
        if written is not None and not _is_onnx(written):
            if not (capturing or wide or name in self._always):
                try:
                    return own(*args, **options)
                except Exception as error:
                    self.missing[name] = one_line(error)
            with self._mode:  # which is disabled in the call of an operator
                return written(*args, **options)
        if written is None and (capturing or wide):
            with contextlib.suppress(Exception), self._mode:  # it needs values, or uses numpy
                return _python_code(own, args, options)(*args, **options)
        return _in_any_type(own, args, options) if wide else own(*args, **options)

    def to_onnx(self) -> dict[OpOverload, Callable[..., Any]]:
        """Return the translations to ONNX, by operator.

        Raises:
            UsageError: If the module does not call what has a translation.
        """
        unknown = [name for name in self.given if name not in self.called]
        if unknown:
            calls = f"it calls {', '.join(self.called)}" if self.called else "it calls no such"
            raise UsageError(
                f"translations names {unknown[0]}, which the module does not call; {calls}"
            )
        return {
            # Its Python function, since a function of another opset than the graph's is refused.
            overload: getattr(self.given[name], "function", self.given[name])
            for name, own in self.called.items()
            if _is_onnx(self.given.get(name)) and isinstance(own, (OpOverload, OpOverloadPacket))
            for overload in (getattr(_packet(own), n) for n in _packet(own).overloads())
        }

    # -- what is said of it --

    def notes(self) -> tuple[str, ...]:
        """Return notes on operators that do not run here."""
        return tuple(
            f"{name} does not run here ({reason}): PyTorch code with its meaning is its reference"
            for name, reason in self.missing.items()
        )

    def check_translations(
        self, run: Callable[[Mapping[str, int]], Mapping[str, Tensor]], sizes: Iterable[Any]
    ) -> None:
        """Raise an ExportError if a translation of the user is not what the module runs.

        `run`: Returns the outputs of the module at sizes of its axes.
        """
        names = [name for name in self.given if not _is_onnx(self.given[name])]
        for name, each in ((name, each) for each in sizes for name in names):
            with torch.inference_mode():
                expected = run(each)
                self._always = frozenset([name])
                try:
                    got = run(each)
                finally:
                    self._always = frozenset()
            for output, tensor in expected.items():
                if not is_close(got[output], tensor):
                    at = ", ".join(f"{axis} = {size}" for axis, size in each.items())
                    raise ExportError(
                        f"the translation of {name} is not {name}: with it, {output} differs from "
                        f"the module's at {at}; correct the function in translations"
                    )


# -- operators ------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Mode in which operators of other libraries are called by `Operators.call`."""

    def __init__(self, operators: Operators, *, capturing: bool) -> None:
        super().__init__()
        self.operators, self.capturing = operators, capturing

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function."""
        options = kwargs or {}
        if isinstance(func, (OpOverload, OpOverloadPacket)):
            name = _packet(func)._qualified_op_name
            if name.partition("::")[0] not in _OWN or name in self.operators.given:
                return self.operators.call(name, func, *args, **options)
        return func(*args, **options)


def _packet(operator: OpOverload | OpOverloadPacket) -> OpOverloadPacket:
    return operator.overloadpacket if isinstance(operator, OpOverload) else operator


def _python_code(
    own: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the Python function that an operator runs; LookupError if it has none."""
    overload: Any = own
    if isinstance(own, OpOverloadPacket):
        overload = getattr(
            own, torch._C._jit_resolve_packet(_packet(own)._qualified_op_name, *args, **options)
        )
    for device in ("CPU", "CUDA"):
        key = getattr(torch._C.DispatchKey, device)
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), device):
            continue
        kernel: Any = torch.library.get_kernel(overload, device)
        # C++ cannot be followed; it may be registered without a file, as if in /dev/null.
        if not re.search(r"(\.(c\w*|h\w*|inc)|/dev/null):\d+", str(kernel)):
            return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(key))
    raise LookupError


def _in_any_type(own: Callable[..., Any], args: Any, options: Any) -> Any:
    """Return the result of an operator in float64, computed in float32 if it must be."""
    try:
        return own(*args, **options)
    except Exception:
        args, options = tree_map_only(
            Tensor, lambda x: x.float() if x.dtype == torch.float64 else x, (args, options)
        )
        return tree_map_only(
            Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, own(*args, **options)
        )


def _is_onnx(function: object) -> bool:
    """Return whether a function is one of onnxscript."""
    return hasattr(function, "function_ir")


# -- Python functions, which files of users hold themselves ---------------------------------------

_CALLS: dict[str, Callable[..., Any]] = {}
"""What functions with other code call."""


def _calls_another(*args: Any, **options: Any) -> Any:
    from attn_export.export import operators

    return operators._CALLS["its name"](*args, **options)


def _code_that_calls(name: str, function: FunctionType) -> CodeType:
    """Return code for a function that calls what `_CALLS` has under a name."""
    code = _calls_another.__code__
    constants = tuple(name if each == "its name" else each for each in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=function.__code__.co_freevars)


def _loaded(name: str) -> object:
    """Return what has a dotted name, if its module is loaded; None if not."""
    place, _, rest = name.rpartition(".")
    while place and place not in sys.modules:
        place, _, first = place.rpartition(".")
        rest = f"{first}.{rest}"
    found: object = sys.modules.get(place)
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
