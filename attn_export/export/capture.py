"""Proof that a captured program is the module at every size, not only at the traced one.

`torch.export` drops guards silently: `if x.shape[1] > 8`, traced at 6, becomes the False
branch for all sizes. Narrowed ranges are read from the program; branches on 0, 1 and on
equal sizes leave no trace there, so the program is run and compared in numbers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

from attn_export.errors import ExportError, one_line
from attn_export.export.subject import Subject
from attn_export.parity.draw import MAX_SIZE, Sizes, add_sums, is_within
from attn_export.parity.plan import covering_sizes

# -- conditions on sizes under which a captured program is the module ---------------------------

# `torch.export` keeps the module's conditions on sizes as guards, and drops them in the program.
# Each is broken here once, on purpose: if the program is still the module there, it did not matter.


SIZE = re.compile(r"L((?:\['?[^\]]+'?\])+)\.size\(\)\[(\d+)\]")
ORDINARY = (1, 2, 3, 5, 16, 33, 64, 100)
LARGEST = 1 << 20
"""Largest product of the dynamic axes for a size that breaks a guard."""


def broken_guards(subject: Subject, program: ExportedProgram) -> Iterator[Sizes]:
    """Yield, for every guard, the least of the tried sizes that break it, if one does.

    Args:
        subject: Whose axes give the guard its words, and whose example the sizes not in it.
        program: The captured program.
    """
    for guard in getattr(program, "_guards_code", []):
        axes: dict[str, str] = {}

        def worded(found: re.Match[str], axes: dict[str, str] = axes) -> str:
            keys = re.findall(r"\['?([^\]']+)'?\]", found[1])
            name, axis = ".".join(keys), int(found[2])
            label = subject.axes.get(name, {}).get(axis)
            if label is None:
                shape = subject.inputs[name].shape if name in subject.inputs else ()
                return str(shape[axis]) if axis < len(shape) else found[0]
            axes[label] = f"s{len(axes)}" if label not in axes else axes[label]
            return axes[label]

        code = SIZE.sub(worded, guard)
        if axes and "L[" not in code:
            found = _breaking(code, axes, subject)
            if found is not None:
                yield found


def _breaking(code: str, axes: dict[str, str], subject: Subject) -> Sizes | None:
    numbers = {int(n) for n in re.findall(r"\d+", re.sub(r"\bs\d+\b", "", code)) if len(n) < 7}
    near = {n + step for n in numbers for step in (-1, 0, 1)} | {math.isqrt(n) + 1 for n in numbers}
    tried = sorted({n for n in near if 1 <= n <= LARGEST} | set(ORDINARY))
    free = [label for label in subject.example_sizes if label not in subject.relations]
    varied = [label for label in free if label in axes or set(axes) & subject.relations.keys()]
    combinations = [
        dict(zip(varied, sizes, strict=True))
        for sizes in itertools.product(tried, repeat=len(varied))
        if math.prod(sizes) <= LARGEST
    ]
    for changed in sorted(combinations, key=lambda sizes: math.prod(sizes.values())):
        sizes = subject.sizes_with(changed)
        if not is_within(sizes, subject.bounds):
            continue
        values = {variable: sizes[label] for label, variable in axes.items()}
        try:
            holds = eval(code, {"__builtins__": {}, "math": math, "min": min, "max": max}, values)
        except Exception:
            return None  # written in words of torch's own
        if not holds:
            return sizes
    return None


# -- proof that a captured program is the module at every size, not only at the traced one ------

TRACE_MINIMUM = 2
"""`torch.export` assumes dynamic sizes of at least 2, which holds for 0 and 1 as well unless
the numbers below say otherwise."""


def check_capture(
    subject: Subject, program: ExportedProgram, in_torch: Callable[[], ExportedProgram]
) -> None:
    """Compare the captured program with the request.

    Args:
        subject: The subject that has the module.
        program: The captured program.
        in_torch: Captures it again, with our own attention as PyTorch operations: a program that
            holds ONNX nodes cannot be run here.

    Raises:
        ExportError: If an axis is fixed or narrowed (it is named, with its range), if the program
            computes something else than the module at some size, or if the module is no function.
    """

    def runnable() -> torch.nn.Module:
        found: Any = (in_torch() if _emits_onnx_nodes(program) else program).module(
            check_guards=False
        )
        found.validate_inputs = False  # it refuses sums below 4, as if their terms were at least 2
        module: torch.nn.Module = found
        return module

    _check_ranges(subject, program, runnable)
    if subject.spec is not None:
        return  # ours: every one of its sizes is compared by the judge, on every runtime
    _check_repeatable(subject)
    _check_numbers(subject, program, runnable())


def _check_ranges(
    subject: Subject, program: ExportedProgram, runnable: Callable[[], torch.nn.Module]
) -> None:
    settled: set[tuple[str, str]] = set()
    minima = add_sums(dict.fromkeys(subject.example_sizes, TRACE_MINIMUM), subject.relations)
    for name, axis, label, size in _dynamic_axes(subject, program):
        if not isinstance(size, torch.SymInt):
            from attn_export.export.advice import fixed_axis

            raise fixed_axis(subject, name, axis, str(size))
        allowed = program.range_constraints.get(size.node.expr)
        # Several inputs have the axis; a large module takes seconds at the end of its range.
        if allowed is None or (label, str(allowed)) in settled:
            continue
        settled.add((label, str(allowed)))
        # A sum of axes, such as total_len, has the sum of their minima, be it known to be that
        # sum or only to be no less.
        low, high = subject.bounds.get(label, (1, MAX_SIZE))
        lowest = max(low, minima[label], TRACE_MINIMUM * len(size.node.expr.free_symbols))
        narrow = int(allowed.lower) > lowest
        bounded = not _is_unbounded(allowed.upper) and int(allowed.upper) < high
        beyond = int(allowed.upper) + 1 if bounded else max(int(allowed.lower) - 1, 0)
        if narrow or (bounded and not _raises(subject, {label: beyond})):
            further = [{label: size} for size in (beyond, 2 * beyond + 1) if size <= high]
            if bounded and not narrow and _is_the_module(subject, runnable(), further):
                continue  # the branch changes nothing: it makes a tensor contiguous, say
            from attn_export.export.advice import branch_at

            at = branch_at(subject, {label: beyond})
            raise ExportError(
                f"axis {label!r} ({name}.shape[{axis}]) was narrowed to "
                f"[{allowed.lower}, {allowed.upper}]{at}: the module takes another branch "
                "outside that range, which the graph would not have; remove the branch on the "
                "size"
            )


def _dynamic_axes(
    subject: Subject, program: ExportedProgram
) -> list[tuple[str, int, str, int | torch.SymInt]]:
    """Return every input, axis and its name, with its size in the program; sums come last.

    A restriction of a sum mostly comes from one of its terms, and the error must name that term.
    """
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    leaves = zip(subject.tree.names, program.graph_signature.user_inputs, strict=True)
    found = [
        (name, axis, label, placeholders[str(node)].meta["val"].shape[axis])
        for name, node in leaves
        if name is not None  # a constant has none
        for axis, label in subject.axes[name].items()
    ]
    return sorted(found, key=lambda entry: entry[2] in subject.relations)


def _is_the_module(subject: Subject, captured: torch.nn.Module, sizes: Iterable[Sizes]) -> bool:
    return not any(_difference(subject, captured, subject.sizes_with(each)) for each in sizes)


def _raises(subject: Subject, changed: Sizes) -> bool:
    """Return whether the module raises too, as at the end of its table of positions."""
    try:
        inputs = subject.draw(subject.sizes_with(changed), "beyond")
        with torch.inference_mode():
            subject.call(subject.module, inputs)
    except ExportError:
        return True
    return False


def _is_unbounded(bound: object) -> bool:
    # Infinity is sympy's own or one of torch's, which are different objects.
    return str(bound) in {"int_oo", "oo"}


def _emits_onnx_nodes(program: ExportedProgram) -> bool:
    """Return whether the program holds ONNX nodes, which PyTorch cannot run."""
    return any("onnx_symbolic" in str(node.target) for node in program.graph.nodes)


def _check_repeatable(subject: Subject) -> None:
    """Refuse a module that draws random numbers or changes its inputs: it is no function."""
    given = {name: tensor.clone() for name, tensor in subject.inputs.items()}
    with torch.inference_mode():
        first = {n: t.clone() for n, t in subject.call(subject.module, given).items()}
        for name, tensor in subject.inputs.items():
            if not _same(given[name], tensor):
                raise ExportError(
                    f"the module changes its input {name} in place; work on a copy of it"
                )
        second = subject.call(subject.module, {n: t.clone() for n, t in given.items()})
    for name, tensor in first.items():
        if not _same(second[name], tensor):
            raise ExportError(
                f"the module gives another {name} for the same inputs; take out what is random or "
                "kept between calls"
            )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=1e-4, atol=1e-5, equal_nan=True
    )


def _check_numbers(subject: Subject, program: ExportedProgram, captured: torch.nn.Module) -> None:
    for sizes in covering_sizes(list(subject.example_sizes), subject.relations, subject.bounds):
        try:
            difference = _difference(subject, captured, sizes)
        except ExportError as error:
            from attn_export.export.advice import out_of_reach

            raise out_of_reach(subject, sizes, error) from error
        if difference:
            raise _differs(subject, captured, sizes, difference)
    for breaking in broken_guards(subject, program):
        try:
            difference = _difference(subject, captured, breaking)
        except ExportError:
            continue  # where the module itself raises, it has no branch
        if difference:
            raise _differs(subject, captured, breaking, difference)


def _difference(subject: Subject, captured: torch.nn.Module, sizes: Sizes) -> str:
    """Return the difference between the captured program and the module at these sizes, or ""."""
    inputs = subject.draw(sizes, "capture", str(sizes))
    with torch.inference_mode():
        wanted = subject.call(subject.module, inputs)
        try:
            got = subject.call(captured, inputs)
        except Exception as error:
            return one_line(error)
    for name, tensor in wanted.items():
        if got[name].shape != tensor.shape:
            return f"{name} is {list(got[name].shape)}, not {list(tensor.shape)}"
        if not _same(got[name], tensor):
            return f"{name} differs from the module's"
    return ""


def _differs(subject: Subject, captured: torch.nn.Module, sizes: Sizes, what: str) -> ExportError:
    """Return an error that names the single responsible axis, if any, and the branching line."""
    from attn_export.export.advice import branch_at

    example = subject.example_sizes
    alone = [
        subject.sizes_with({name: size})
        for name, size in sizes.items()
        if not subject.relations and name in example
    ]
    guilty = next((s for s in alone if _difference(subject, captured, s)), sizes)
    shown = {n: s for n, s in guilty.items() if guilty is sizes or s != example[n]}
    at = ", ".join(f"{name} = {size}" for name, size in shown.items())
    if any(getattr(part, "use_nested_tensor", False) for part in subject.module.modules()):
        return ExportError(
            f"the captured program is not the module at {at}: {what}; nn.TransformerEncoder leaves "
            "out padded positions in its fast path; pass enable_nested_tensor=False to it"
        )
    return ExportError(
        f"the captured program is not the module at {at}: {what}; a branch on a size"
        f"{branch_at(subject, guilty)} was captured for one side only; write it without the branch"
    )
