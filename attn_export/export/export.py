"""Export of a subject to the canonical graph, by `torch.onnx.export`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from itertools import zip_longest
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from attn_export.attention.onnx_attention import emit_canonical_attention
from attn_export.attention.positions import NARROW
from attn_export.cases.draw import ANY, largest
from attn_export.errors import ExportError, printable
from attn_export.export.capture import TRACE_MINIMUM, check_capture
from attn_export.export.module_state import (
    Kept,
    computed_weights,
    copy_module,
    drop_kept_tensors,
    find_kept_tensors,
    preserve_state,
)
from attn_export.export.subject import Layer, Subject
from attn_export.export.translations import (
    cast_subtracted_integers,
    decompose_complex,
    import_newer_operators,
    least_opset,
    skip_empty_decomposition,
    translations,
    without_parsing,
)
from attn_export.graph import Graph, IrGraph
from attn_export.graph.axis_names import BOUNDS, name_axes, name_output_axes
from attn_export.graph.canonical import canonicalize
from attn_export.graph.ir_helpers import store_in_narrow_types
from attn_export.graph.unread import read_when_needed
from attn_export.optional_parts import hooks

# -- subjects in narrow types -------------------------------------------------------------------


def in_float32(subject: Subject) -> Subject:
    """Return a subject with its weights and inputs widened to float32."""
    if subject.in_float32 is not None:
        return subject.in_float32()
    wide = {n: t.float() if t.dtype in NARROW else t for n, t in subject.inputs.items()}
    float32_subject = Subject(
        copy_module(subject.module).float(), subject.tree.rebuild(wide), subject.axes,
        subject.outputs,
    )  # fmt: skip
    of_axes = "relations", "sums", "example_sizes", "bounds", "with_least"
    float32_subject = float32_subject.having(
        **{name: getattr(subject, name) for name in (*of_axes, "function", "operators")}
    )
    try:
        with torch.inference_mode():
            float32_subject.call(float32_subject.module, float32_subject.inputs)
    except ExportError as error:
        raise ExportError(
            f"in its float32 copy, {error}; write .to(x.dtype) for types that are fixed, and "
            "make constants buffers"
        ) from error
    return float32_subject


def export(subject: Subject) -> IrGraph:
    """Export a subject to the canonical graph.

    Weights, inputs and outputs in bfloat16 keep their type, but the graph computes in float32.
    """
    if subject.stored_dtype:
        exported = _export(subject)
        weights = exported.model.graph.initializers.items()
        unread = [
            n
            for n, x in weights
            if isinstance(x.const_value, ir.LazyTensor) and x.const_value.shape.rank() > 1
        ]
        store_in_narrow_types(exported.model, dict.fromkeys(unread, subject.stored_dtype))
        return exported
    narrow_dtypes = subject.narrow_dtypes()
    if narrow_dtypes and subject.in_float32 is None:
        _check_same_operations(subject)
    if "bfloat16" not in narrow_dtypes.values():
        return _export(subject)
    # Few runtimes compute in bfloat16; ONNX Runtime's CPU provider does not.
    exported = _export(in_float32(subject))
    from attn_export.export.mapped_weights import PARTS  # few builds need it

    packed = {
        n: "bfloat16" for n, v in exported.model.graph.initializers.items() if PARTS in v.meta
    }
    store_in_narrow_types(exported.model, {**packed, **narrow_dtypes})
    return dataclasses.replace(exported, in_bfloat16=lambda: _export(subject).model)


def _check_same_operations(subject: Subject) -> None:
    """Raise an error if a module has other operations in float32, in which it is built first."""
    with _quiet():
        narrow_operations, wide_operations = (
            _operations(_capture(s)) for s in (subject, in_float32(subject))
        )
    if narrow_operations != wide_operations:
        other = next(
            (a for a, b in zip_longest(narrow_operations, wide_operations) if a != b), None
        )
        raise ExportError(
            f"the module does other things in {next(iter(subject.narrow_dtypes().values()))} than "
            f"in float32 ({other or 'it ends early'}); write it without looking at the dtype"
        )


def _operations(program: ExportedProgram) -> list[str]:
    """Return the operators of a program, with their numeric arguments, except casts."""
    operations = []
    for node in program.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and not re.search(r"\._?to(_copy)?\b|_assert", name):
            numbers = [x for x in node.args if isinstance(x, (bool, int, float))]
            operations.append(f"{name}{numbers or ''}")
    return operations


def _export(subject: Subject) -> IrGraph:
    unread = subject.unread.at_addresses() if subject.unread else contextlib.nullcontext()
    with _quiet(), unread:
        with subject.alike():
            program = _checked_program(subject)
        model = _translate(subject, program)
        name_axes(model, subject.axes)
        _name_shared_weights(model, subject)
        origins = canonicalize(model, subject.outputs, subject.relations)
        model.graph.meta[BOUNDS] = subject.bounds
        name_output_axes(model, subject.output_shapes)
        notes = subject.rewrite(model) if subject.rewrite is not None else None
        if subject.unread is not None:
            read_when_needed(model)
        outputs = {value.name: value for value in model.graph.outputs}
        model.graph.outputs[:] = [outputs[name] for name in subject.outputs]
    model.producer_name, model.producer_version = "attn-export", None
    model.graph.name = "attention"
    return Graph(model, origins=origins, notes=tuple(notes or ()))


def _checked_program(subject: Subject) -> ExportedProgram:
    def attempt() -> ExportedProgram:
        program = _capture(subject)
        if not isinstance(subject, Layer):
            from attn_export.export.advice import refuse_untranslated

            refuse_untranslated(program)
        check_capture(subject, program, lambda: _capture(subject, emit=False))
        return program

    try:
        if isinstance(subject, Layer):
            return attempt()
        from attn_export.export.flex import again_with_mods_by_number

        return again_with_mods_by_number(attempt)
    except ExportError as error:
        from attn_export.export.naming_advice import naming_advice

        if advice := naming_advice(subject):
            problem = re.split("; |…", str(error))[0]
            raise ExportError(f"{printable(problem, 140)}; {advice}") from error
        raise


def _capture(subject: Subject, *, emit: bool = True) -> ExportedProgram:
    kept: Kept = [] if isinstance(subject, Layer) else find_kept_tensors(subject)
    try:
        with (
            drop_kept_tensors(subject.module, kept), _as_parts_capture(subject),
            emit_canonical_attention(emit=emit), computed_weights(subject.module),
            of_tensors(subject) as (arguments, shapes),
        ):  # fmt: skip
            return torch.export.export(
                subject.module, (), arguments, dynamic_shapes=shapes, strict=False
            )
    except Exception as error:
        from attn_export.export.advice import capture_error

        raise capture_error(subject, error, kept) from error


@contextlib.contextmanager
def _as_parts_capture(subject: Subject) -> Iterator[None]:
    """Replace functions that a user's module calls, inside this block."""
    with contextlib.ExitStack() as stack:
        if not isinstance(subject, Layer):
            from attn_export.export.flex import flex_in_capture
            from attn_export.export.loops import loops_in_capture

            stack.enter_context(_without_caches(subject.module))
            stack.enter_context(flex_in_capture())
            stack.enter_context(loops_in_capture())
            for capturing in hooks("capturing"):
                stack.enter_context(capturing(subject.module))
        yield


def _dynamic(subject: Subject, label: str) -> Any:
    """Return a dynamic axis for `torch.export`, with the bounds of the subject, if it has any."""
    allowed = subject.bounds.get(label, ANY)
    limits = {"min": allowed[0]} if allowed[0] > TRACE_MINIMUM else {}
    return Dim.DYNAMIC(**limits, **({"max": high} if (high := largest(allowed)) else {}))


def _name_shared_weights(model: ir.Model, subject: Subject) -> None:
    """Rename weights that several submodules share to their first name in `named_parameters`."""
    initializers = model.graph.initializers
    first_names: dict[int, str] = {}
    for name, parameter in subject.module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name and name in initializers and first not in initializers:
            initializers[name].name = first


def _translate(subject: Subject, program: ExportedProgram) -> ir.Model:
    table = translations() | subject.operators.to_onnx()
    try:
        program = decompose_complex(program)
        cast_subtracted_integers(program)
        if isinstance(subject, Layer):
            skip_empty_decomposition(program)
        with without_parsing():
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                input_names=list(subject.inputs),
                opset_version=least_opset(program),
                # The exporter's optimiser renames weights and fuses rotary embeddings wrongly for
                # batches over 1; `canonicalize` makes the useful changes.
                optimize=False,
                custom_translation_table=table,
                verbose=False,
            )
    except Exception as error:
        from attn_export.export.advice import translation_error

        raise translation_error(error, program) from error
    if onnx_program is None:
        raise ExportError("torch.onnx.export returned nothing")
    import_newer_operators(onnx_program.model)
    return onnx_program.model


@contextlib.contextmanager
def of_tensors(subject: Subject) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Let the module take and return tensors alone, inside this block.

    Its `forward` is a function with exactly these keyword parameters, which returns the outputs in
    their order: `torch.export` knows few classes, and no shapes of what goes into ``**kwargs``.

    Yields:
        The inputs of the example and their dynamic shapes, by parameter.
    """
    module, keywords = subject.module, subject.tree.keywords
    forward = module.forward

    def of_tensors(**tensors: Tensor) -> list[Tensor]:
        inputs = {name: tensors[word] for word, name in keywords.items()}
        arguments = subject.tree.rebuild(inputs)
        with subject.operators.in_capture():
            returned = forward(**arguments)
        return list(subject.results.read(returned, arguments).values())

    parameters = [Parameter(word, Parameter.KEYWORD_ONLY) for word in keywords]
    of_tensors.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    # Dim.DYNAMIC instead of named Dims, which cannot express total_len = past_len + query_len.
    # `check_capture` raises the errors that named Dims would raise.
    shapes = {
        word: {axis: _dynamic(subject, label) for axis, label in axes.items()} or None
        for word, axes in ((word, subject.axes[name]) for word, name in keywords.items())
    }
    with preserve_state(module):
        module.forward = of_tensors
        yield {word: subject.inputs[name] for word, name in keywords.items()}, shapes


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disable gradients, console output, garbage collection and PyTorch's cache of fake tensors.

    Tracing creates millions of live objects, which the collector would traverse repeatedly, for a
    third of the whole time. With dynamic axes the cache rarely hits, and filling it takes a fifth
    of the time.
    """
    from torch._dynamo import config  # importing it takes as long as the rest of torch.export

    collecting = gc.isenabled()
    gc.disable()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # With gradients enabled, PyTorch decomposes attention with a mask that requires gradients
        # into operations for its backward pass, which cannot be exported.
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


@contextmanager
def _without_caches(module: nn.Module) -> Iterator[None]:
    """Take functools.lru_cache off the functions of a module's files, inside this block.

    A size that is traced cannot be a key, and what is made of it is of no use later.
    """
    kinds = {type(part) for part in module.modules()}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    files = {id(file): file for kind in kinds if (file := sys.modules.get(kind.__module__))}
    before: list[tuple[Any, str, Any]] = [
        (owner, name, value)
        for owner in (*kinds, *files.values())
        for name, value in vars(owner).items()
        if isinstance(value, functools._lru_cache_wrapper)
    ]
    try:
        for owner, name, value in before:
            setattr(owner, name, value.__wrapped__)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
