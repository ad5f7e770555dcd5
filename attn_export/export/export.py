"""Subject → canonical graph, through `torch.onnx.export`, once."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from inspect import Parameter, Signature
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from attn_export.attention import Attention
from attn_export.attention.onnx_attention import OPSET, emit_canonical_attention
from attn_export.attention.positions import NARROW
from attn_export.errors import ExportError
from attn_export.export.capture import TRACE_MINIMUM, check_capture
from attn_export.export.module_state import copied
from attn_export.export.subject import Subject
from attn_export.export.translations import complex_in_pairs, translations
from attn_export.graph.axis_names import name_axes
from attn_export.graph.canonical import canonicalize
from attn_export.graph.ir_helpers import narrow
from attn_export.parity.draw import MAX_SIZE

if TYPE_CHECKING:
    from attn_export.export.kept_state import Kept

# -- a subject of narrow types in float32 -------------------------------------------------------


def in_float32(subject: Subject) -> Subject:
    """Return a subject with its weights and inputs widened to float32.

    Raises:
        ExportError: If the module does not run so.
    """
    spec = dataclasses.replace(subject.spec, dtype="float32") if subject.spec else None
    wide = {n: t.float() if t.dtype in NARROW else t for n, t in subject.inputs.items()}
    twin = Subject(
        copied(subject.module).float(), subject.tree.rebuild(wide), subject.axes, subject.outputs,
        relations=subject.relations, spec=spec,
    )  # fmt: skip
    twin.bounds, twin.function = subject.bounds, subject.function
    try:
        with torch.inference_mode():
            twin.call(twin.module, twin.inputs)
    except ExportError as error:
        raise ExportError(
            f"in its float32 copy, {error}; write .to(x.dtype) for types that are fixed, and "
            "make constants buffers"
        ) from error
    return twin


@dataclasses.dataclass(frozen=True)
class Exported:
    """A canonical graph and where each of its nodes came from (``package/file.py:line``).

    Attributes:
        model: The graph.
        origins: The origins, by name of the node.
        in_bfloat16: Returns the graph that computes in bfloat16, where `model` casts it to float32.
    """

    model: ir.Model
    origins: dict[str, str]
    in_bfloat16: Callable[[], ir.Model] | None = None


def export(subject: Subject) -> Exported:
    """Export a subject to the canonical graph.

    Where something is bfloat16, it is so in the graph, which computes in float32.

    Raises:
        ExportError: If the module cannot be captured for every size that its axes may have,
            or has no ONNX form.
    """
    narrow_dtypes = subject.narrow_dtypes()
    if narrow_dtypes and subject.spec is None:
        _refuse_look_at_dtype(subject)
    if "bfloat16" not in narrow_dtypes.values():
        return _exported(subject)
    # Few runtimes compute in bfloat16, ONNX Runtime's CPU does not.
    exported = _exported(in_float32(subject))
    narrow(exported.model, narrow_dtypes)
    return dataclasses.replace(exported, in_bfloat16=lambda: _exported(subject).model)


def _refuse_look_at_dtype(subject: Subject) -> None:
    """Refuse a module that computes differently in narrow types: it is built in float32 first."""
    with _undisturbed():
        own, wide = (_operations(_capture(s)) for s in (subject, in_float32(subject)))
    if own != wide:
        other = next((a for a, b in zip_longest(own, wide) if a != b), None)
        raise ExportError(
            f"the module does other things in {next(iter(subject.narrow_dtypes().values()))} than "
            f"in float32 ({other or 'it ends early'}); write it without looking at the dtype"
        )


def _operations(program: ExportedProgram) -> list[str]:
    """Return a program's operators and their numbers, without casts."""
    found = []
    for node in program.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and not re.search(r"\._?to(_copy)?\b|_assert", name):
            numbers = [x for x in node.args if isinstance(x, (bool, int, float))]
            found.append(f"{name}{numbers or ''}")
    return found


def _exported(subject: Subject) -> Exported:
    with _undisturbed():
        program = _capture(subject)
        if subject.spec is None:
            from attn_export.export.advice import refuse_untranslated

            refuse_untranslated(program)
        check_capture(subject, program, lambda: _capture(subject, emit=False))
        model = _translate(subject, program)
        name_axes(model, subject.axes)
        _name_shared_weights(model, subject)
        order = subject.outputs if subject.spec else subject.returned_order()
        origins = canonicalize(model, order, subject.relations)
        if isinstance(subject.module, Attention) and subject.module.integers:
            from attn_export.graph.quantised_weights import store_integers

            activations = subject.module.spec.activations
            store_integers(model, subject.module.integers, activations=activations)
        outputs = {value.name: value for value in model.graph.outputs}
        model.graph.outputs[:] = [outputs[name] for name in subject.outputs]
    model.producer_name, model.producer_version = "attn-export", None
    model.graph.name = "attention"
    return Exported(model, origins)


def _capture(subject: Subject, *, emit: bool = True) -> ExportedProgram:
    # Dim.DYNAMIC rather than named Dims: those cannot say total_len = past_len + query_len.
    # What they would refuse is refused by `check_capture` instead.
    dynamic = {
        name: {axis: _dynamic(subject, label) for axis, label in axes.items()} if axes else None
        for name, axes in subject.axes.items()
    }
    shapes = subject.tree.dynamic_shapes(dynamic)
    arguments = subject.tree.rebuild(subject.inputs)
    kept: Kept = []
    forgotten: AbstractContextManager[None] = contextlib.nullcontext()
    if subject.spec is None:
        from attn_export.export.kept_state import kept_between_calls, without

        kept = kept_between_calls(subject)
        forgotten = without(subject.module, kept)
    try:
        with (
            forgotten, emit_canonical_attention(emit=emit),
            _signature(subject.module, arguments),
        ):  # fmt: skip
            return torch.export.export(
                subject.module, (), arguments, dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        from attn_export.export.advice import not_captured, not_forgotten

        raise (not_forgotten(kept, error) if kept else not_captured(subject, error)) from error


def _dynamic(subject: Subject, label: str) -> Any:
    """Return the hint for a dynamic axis; bounds that tracing needs are passed on."""
    low, high = subject.bounds.get(label, (1, MAX_SIZE))
    limits = {"min": low} if low > TRACE_MINIMUM else {}
    return Dim.DYNAMIC(**limits, **({"max": high} if high < MAX_SIZE else {}))


def _name_shared_weights(model: ir.Model, subject: Subject) -> None:
    """Call a weight that several parts share by its first name, as `named_parameters` does."""
    named = subject.module.named_parameters(remove_duplicate=False)
    first: dict[int, str] = {}
    for name, parameter in named:
        known = first.setdefault(id(parameter), name)
        held = model.graph.initializers
        if known != name and name in held and known not in held:
            held[name].name = known


def _translate(subject: Subject, program: ExportedProgram) -> ir.Model:
    try:
        onnx_program = torch.onnx.export(
            complex_in_pairs(program),
            dynamo=True,
            input_names=list(subject.inputs),
            opset_version=_opset(program),
            # The exporter's optimiser renames weights and fuses rotary embeddings wrongly for
            # batches over 1; `canonicalize` does what is wanted of it.
            optimize=False,
            custom_translation_table=translations(),
            verbose=False,
        )
    except Exception as error:
        from attn_export.export.advice import not_translated

        raise not_translated(error, program) from error
    if onnx_program is None:
        raise ExportError("torch.onnx.export returned nothing")
    return onnx_program.model


def _opset(program: ExportedProgram) -> int:
    """Return the least opset that has the ONNX nodes which our own attention emitted."""
    versions = [node.kwargs.get("version") for node in program.graph.nodes]
    return max([OPSET, *(version for version in versions if isinstance(version, int))])


@contextlib.contextmanager
def _signature(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Give `forward` a signature of exactly these named arguments.

    `torch.export` cannot find the shapes of what goes into ``**kwargs``.
    """
    forward, own = module.forward, "forward" in vars(module)

    def named(**arguments: Any) -> Any:
        return forward(**arguments)

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
    named.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    module.forward = named
    try:
        yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Suppress gradients, console output, garbage collection and a cache that costs time.

    Tracing makes millions of live objects. The collector would traverse them repeatedly for a third
    of the whole time. PyTorch's cache of shapes misses so often where axes are dynamic that filling
    it takes a fifth of the time.
    """
    from torch._dynamo import config  # which takes as long to import as the rest of torch.export

    collecting = gc.isenabled()
    gc.disable()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # With gradients on, PyTorch decomposes attention whose mask has weights differently: into
        # operations for its backward pass, which cannot be exported.
        with (
            torch.no_grad(),
            config.patch(fake_tensor_cache_enabled=False),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if collecting:
            gc.enable()
