"""Proof that a captured program is the module at every size, not only at the traced one.

`torch.export` drops guards silently: `if x.shape[1] > 8`, traced at 6, becomes the False
branch for all sizes. Narrowed ranges are read from the program; branches on 0, 1 and on
equal sizes leave no trace there, so the program is run and compared in numbers.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from attn_export.cases.draw import draw_inputs
from attn_export.cases.sizes import Sizes, axis_names, lattice
from attn_export.errors import ExportError, one_line
from attn_export.subject import Subject
from attn_export.subject.tensors import to_torch

TRACE_MINIMUM = 2
"""`torch.export` assumes dynamic sizes of at least 2, which holds for 0 and 1 as well unless
the numbers below say otherwise."""


def check_capture(subject: Subject, program: ExportedProgram) -> None:
    """Compare what was captured with what was asked for.

    Raises:
        ExportError: If an axis is fixed or narrowed (it is named, with its range), or if the
            program computes something else than the module at some size.
    """
    _check_ranges(subject, program)
    if not _emits_onnx_nodes(program):
        _check_numbers(subject, program)


def _check_ranges(subject: Subject, program: ExportedProgram) -> None:
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    leaves = zip(subject.tree.names, program.graph_signature.user_inputs, strict=True)
    for name, node_name in leaves:
        if name is None:  # a constant
            continue
        shape = placeholders[str(node_name)].meta["val"].shape
        for axis, label in subject.axes[name].items():
            size = shape[axis]
            if not isinstance(size, torch.SymInt):
                raise fixed_axis(subject, name, axis, str(size))
            allowed = program.range_constraints.get(size.node.expr)
            if allowed is None:
                continue
            # A sum of axes, such as total_len, has the sum of their minima.
            lowest = TRACE_MINIMUM * len(size.node.expr.free_symbols)
            if int(allowed.lower) > lowest or not _is_unbounded(allowed.upper):
                raise ExportError(
                    f"axis {label!r} ({name}.shape[{axis}]) was narrowed to "
                    f"[{allowed.lower}, {allowed.upper}]: the module takes another branch outside "
                    "that range, which the graph would not have; remove the branch on the size"
                )


def fixed_axis(subject: Subject, name: str, axis: int, size: str) -> ExportError:
    """The error for an axis that the module allows one size only."""
    return ExportError(
        f"axis {subject.axes[name].get(axis)!r} ({name}.shape[{axis}]) was fixed at {size} by the "
        "module; write it so that it works for every size, or do not name the axis"
    )


def _is_unbounded(bound: object) -> bool:
    # Infinity is sympy's own or one of torch's, which are different objects.
    return str(bound) in {"int_oo", "oo"}


def _emits_onnx_nodes(program: ExportedProgram) -> bool:
    """Whether the program holds ONNX nodes, which cannot be run here.

    Ours does: every one of its sizes is compared by the judge, on every runtime.
    """
    return any("onnx_symbolic" in str(node.target) for node in program.graph.nodes)


def _check_numbers(subject: Subject, program: ExportedProgram) -> None:
    captured = program.module(check_guards=False)
    wanted_inputs = subject.input_values()
    names = axis_names(wanted_inputs, subject.relations)
    for sizes in lattice(names, subject.relations):
        words = ("capture", str(sizes))
        inputs = to_torch(draw_inputs(wanted_inputs, sizes, seed_words=words))
        with torch.inference_mode():
            wanted = subject.call(subject.module, inputs)
            try:
                got = subject.call(captured, inputs)
            except Exception as error:
                raise _differs(sizes, one_line(error)) from error
        for name, tensor in wanted.items():
            if got[name].shape != tensor.shape:
                raise _differs(
                    sizes, f"{name} is {list(got[name].shape)}, not {list(tensor.shape)}"
                )
            if not torch.allclose(got[name], tensor, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise _differs(sizes, f"{name} differs from the module's")


def _differs(sizes: Sizes, what: str) -> ExportError:
    at = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    return ExportError(
        f"the captured program is not the module at {at}: {what}; a branch on a size was captured "
        "for one side only; write it without the branch"
    )
