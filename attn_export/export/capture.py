"""Checks of a captured program: its ranges, and for a user's module its numbers at many sizes.

`torch.export` records guards on sizes, but the program ignores them: `if x.shape[1] > 8`, traced at
6, becomes the False branch for all sizes. The program also records ranges that became narrower.
Neither shows every branch on 0, on 1 or on equal sizes, so the outputs of a user's module are
compared with those of the program.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.export import ExportedProgram

from attn_export.cases.draw import ANY, Interface, Sizes, add_sums, by_role, is_quick, is_within
from attn_export.cases.plan import covering_sizes
from attn_export.errors import ExportError, one_line
from attn_export.export.subject import Subject
from attn_export.export.trees import is_close
from attn_export.interface import axes_in

_MOST_NARROWED = 8
"""The number of sizes that are tried at each end of those outside the range of a program."""

_READ_ANEW = 4
"""The number of sizes that are tried of a program whose weights are not in memory."""

TRACE_MINIMUM = 2
"""The least size that `torch.export` assumes for dynamic axes. The program may be right for 0 and 1
as well; for users' modules `_check_numbers` tests 1, and 0 for a past."""


def check_capture(
    subject: Subject, program: ExportedProgram, in_torch: Callable[[], ExportedProgram]
) -> None:
    """Check the ranges of a captured program, and for a user's module its numbers at many sizes.

    `in_torch`: Captures the module again, with our attention as PyTorch operations: PyTorch cannot
    run a program with ONNX nodes.
    """

    def runnable() -> torch.nn.Module:
        module: Any = (in_torch() if _emits_onnx_nodes(program) else program).module(
            check_guards=False
        )
        module.validate_inputs = False  # it rejects sums below 4, as if each term were at least 2
        captured: torch.nn.Module = module
        return captured

    _check_ranges(subject, program, runnable)
    if subject.traits.is_attention:
        return  # a layer of ours: the judge compares all its sizes, on every runtime
    _check_repeatable(subject)
    _check_numbers(subject, program, runnable())


def _check_ranges(
    subject: Subject, program: ExportedProgram, runnable: Callable[[], torch.nn.Module]
) -> None:
    """Raise an error if an axis is fixed, or its range is narrower than that of the subject."""
    checked: set[tuple[str, str]] = set()
    minima = add_sums(dict.fromkeys(subject.example_sizes, TRACE_MINIMUM), subject.relations)
    for name, axis, label, size in _dynamic_axes(subject, program):
        if not isinstance(size, torch.SymInt):
            from attn_export.export.advice import fixed_axis_error

            raise fixed_axis_error(subject, name, axis, str(size))
        allowed = program.range_constraints.get(size.node.expr)
        # Several inputs may have the axis; a large module takes seconds at the end of its range.
        if allowed is None or (label, str(allowed)) in checked:
            continue
        checked.add((label, str(allowed)))
        # The minimum of a sum of axes, such as total_len, is the sum of their minima. The program
        # may hold the sum as an expression of symbols, or as a symbol of its own.
        sizes = subject.bounds.get(label, ANY)
        lowest = max(sizes[0], minima[label], TRACE_MINIMUM * len(size.node.expr.free_symbols))
        narrow = int(allowed.lower) > lowest
        # Infinity is an object of sympy or one of torch, which are not equal.
        beyond = None if str(allowed.upper) in {"int_oo", "oo"} else int(allowed.upper) + 1
        below = [n for n in range(int(allowed.lower)) if n in sizes] if narrow else []
        above = [] if beyond is None else [n for n in (beyond, 2 * beyond + 1) if n in sizes]
        # The branch may change no output, as one that only makes a tensor contiguous. And
        # `torch.export` assumes that no slice of an axis is as short as 1, where it broadcasts.
        # `runnable` is another program than one with ONNX nodes; cases have the two least sizes.
        if len(below) > 2 and _emits_onnx_nodes(program):
            differing: Sizes | None = {label: below[-1]}
        else:
            differing = _first_difference(subject, label, [*below, *above], runnable)
        if differing is not None:
            from attn_export.export.advice import branch_at

            raise ExportError(
                f"axis {label!r} ({name}.shape[{axis}]) was narrowed to "
                f"[{allowed.lower}, {allowed.upper}]{branch_at(subject, differing)}: the module "
                "takes another branch outside that range, which the graph would not have; remove "
                "the branch on the size"
                + (
                    _bound_advice(subject, runnable(), differing)
                    or ", or leave the axis without a name"
                )
            )


def _dynamic_axes(
    subject: Subject, program: ExportedProgram
) -> list[tuple[str, int, str, int | torch.SymInt]]:
    """Return the input, index, name and size in the program of every dynamic axis; sums come last.

    A restriction of a sum usually comes from one of its terms, which the error must name.
    """
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    axes = [
        (name, axis, label, placeholders[str(node)].meta["val"].shape[axis])
        for name, node in zip(subject.inputs, program.graph_signature.user_inputs, strict=True)
        for axis, label in subject.axes[name].items()
    ]
    return sorted(axes, key=lambda entry: entry[2] in subject.relations)


def _first_difference(
    subject: Subject, label: str, sizes: Sequence[int], runnable: Callable[[], torch.nn.Module]
) -> Sizes | None:
    """Return the first of some sizes of an axis at which the program is not the module, or None.

    The module itself may raise at some, as beyond a table of positions.
    """
    axes = axes_in(subject.relations.get(label, label))
    tried = [*sizes[:_MOST_NARROWED], *sizes[_MOST_NARROWED:][-_MOST_NARROWED:]]
    captured = None
    for size in tried:
        # Of a sum, one term after the other takes what the sum exceeds the smallest terms by.
        sums = {label: subject.relations.get(label, label)}
        least = add_sums(dict.fromkeys(axes, 1), sums)[label]
        for axis in axes:
            changed = {**dict.fromkeys(axes, 1), axis: 1 + size - least}
            if changed[axis] < 0 or not subject.runs_with(changed, "outside"):
                continue
            captured = captured or runnable()
            if _difference(subject, captured, subject.sizes_with(changed)):
                return changed
    return None


def _emits_onnx_nodes(program: ExportedProgram) -> bool:
    """Return whether the program holds ONNX nodes, which PyTorch cannot run."""
    return any("onnx_symbolic" in str(node.target) for node in program.graph.nodes)


def _check_repeatable(subject: Subject) -> None:
    """Raise an error if a module is no pure function, but random."""
    with torch.inference_mode():
        first, second = (
            {n: t.clone() for n, t in subject.call(subject.module, subject.inputs).items()}
            for _ in range(2)
        )
    for name, tensor in first.items():
        if not is_close(second[name], tensor):
            raise ExportError(
                f"the module gives another {name} for the same inputs; take out what is random or "
                "kept between calls"
            )


def sizes_to_try(subject: Subject) -> Iterator[dict[str, int]]:
    """Yield sizes that together show branches on sizes."""
    roles, inputs = subject.roles, subject.input_descriptions()
    planned = by_role(Interface(inputs, {}, sums=subject.sums, bounds=subject.bounds, roles=roles))
    found = map(roles.sizes, covering_sizes(planned.axes, planned.sums, planned.bounds))
    yield from (sizes for sizes in found if is_quick(subject, sizes))


def _check_numbers(subject: Subject, program: ExportedProgram, captured: torch.nn.Module) -> None:

    tried = sizes_to_try(subject)
    # Each run reads all of its weights again. Cases of many sizes are judged later.
    for sizes in itertools.islice(tried, _READ_ANEW) if subject.unread else tried:
        try:
            difference = _difference(subject, captured, sizes)
        except ExportError as error:
            raise ExportError(f"{error}{_bound_advice(subject, captured, sizes)}") from error
        if difference:
            raise _difference_error(subject, captured, sizes, difference)
    for breaking in broken_guards(subject, program):
        try:
            difference = _difference(subject, captured, breaking)
        except ExportError:
            continue  # the module itself raises at these sizes
        if difference:
            raise _difference_error(subject, captured, breaking, difference)


def _difference(subject: Subject, captured: torch.nn.Module, sizes: Sizes) -> str:
    """Describe how the captured program differs from the module at these sizes; "" if not."""
    inputs = subject.draw(sizes, "capture", str(sizes))
    with torch.inference_mode():
        expected = subject.call(subject.module, inputs)
        try:
            given = {word: inputs[name] for word, name in subject.tree.keywords.items()}
            with _reading(subject):
                got = dict(zip(subject.outputs, captured(**given), strict=True))
        except Exception as error:
            return f"it raised {one_line(error)}"
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            return f"{name} is {list(got[name].shape)}, not {list(tensor.shape)}"
        if not is_close(got[name], tensor):
            return f"{name} differs from the module's"
    return ""


def _reading(subject: Subject) -> AbstractContextManager[object]:
    """Let the captured program read weights that are in files, one operation at a time."""
    if subject.unread is None:
        return contextlib.nullcontext()
    from attn_export.export.unread_weights import ReadWeights

    return ReadWeights()


def _bound_advice(subject: Subject, captured: torch.nn.Module, sizes: Sizes) -> str:
    """Return the bound that leaves out sizes at which a program is wrong; "" if none is found."""
    from attn_export.export.advice import bound_advice

    def is_right(changed: Sizes) -> bool:
        with contextlib.suppress(ExportError):
            return not _difference(subject, captured, subject.sizes_with(changed))
        return False  # the module itself raises

    return bound_advice(subject, sizes, is_right)


def _difference_error(
    subject: Subject, captured: torch.nn.Module, sizes: Sizes, difference: str
) -> ExportError:
    """Return an error that names the single responsible axis, if any, and the branching line."""
    from attn_export.export.advice import branch_at

    def run(sizes: Sizes) -> dict[str, torch.Tensor]:
        return subject.call(subject.module, subject.draw(sizes, "capture", str(sizes)))

    subject.operators.check_translations(run, sizes_to_try(subject))
    example = subject.example_sizes
    single_changes = [
        subject.sizes_with({name: size})
        for name, size in sizes.items()
        if not subject.relations and name in example
    ]
    cause = next((s for s in single_changes if _difference(subject, captured, s)), sizes)
    shown = {n: s for n, s in cause.items() if cause is sizes or s != example[n]}
    at = ", ".join(f"{name} = {size}" for name, size in shown.items())
    problem = f"the captured program is not the module at {at}: {difference}"
    if any(getattr(part, "use_nested_tensor", False) for part in subject.module.modules()):
        return ExportError(
            f"{problem}; nn.TransformerEncoder leaves out padded positions in its fast path; pass "
            "enable_nested_tensor=False to it"
        )
    return ExportError(
        f"{problem}; a branch on a size{branch_at(subject, cause)} was captured for one side only; "
        f"write it without the branch{_bound_advice(subject, captured, cause)}"
    )


# -- guards -------------------------------------------------------------------------------------

_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
"""An expression for a size of an input in the code of a guard."""

_ORDINARY, _LARGEST = (1, 2, 3, 5, 16, 33, 64, 100), 1 << 20
"""Sizes to try for any guard, and the largest product of the varied ones."""

_MOST_COMBINATIONS = 2**13
"""The largest number of combinations of sizes to try for a guard, the smallest first."""


def broken_guards(subject: Subject, program: ExportedProgram) -> Iterator[Sizes]:
    """Yield for each guard the smallest sizes that break it, if any of those to try do."""
    for guard in getattr(program, "_guards_code", []):
        code, axes = _with_variables(guard, subject)
        sizes = _breaking_sizes(code, axes, subject) if axes and "L[" not in code else None
        if sizes is not None:
            yield sizes


def _with_variables(guard: str, subject: Subject) -> tuple[str, dict[str, str]]:
    """Replace the sizes in the code of a guard; return the code, and the variable of each axis."""
    variables: dict[str, str] = {}

    def replacement(match: re.Match[str]) -> str:
        name, axis = subject.tree.keywords.get(match[1], ""), int(match[2])
        if (label := subject.axes.get(name, {}).get(axis)) is not None:
            return variables.setdefault(label, f"s{len(variables)}")
        shape = subject.inputs[name].shape if name in subject.inputs else ()
        return str(shape[axis]) if axis < len(shape) else match[0]

    return _SIZE.sub(replacement, guard), variables


def _breaking_sizes(code: str, axes: dict[str, str], subject: Subject) -> Sizes | None:
    """Return the smallest sizes for which a guard, a Python expression, is false, or None."""
    numbers = {int(n) for n in re.findall(r"\d+", re.sub(r"\bs\d+\b", "", code)) if len(n) < 7}
    near = {n + step for n in numbers for step in (-1, 0, 1)} | {math.isqrt(n) + 1 for n in numbers}
    tried = sorted({n for n in near if 1 <= n <= _LARGEST} | set(_ORDINARY))
    free = [label for label in subject.example_sizes if label not in subject.relations]
    varied = [label for label in free if label in axes or set(axes) & subject.relations.keys()]
    guard = compile(code.strip(), "guard", "eval")
    for chosen in _by_product(tried, len(varied)):
        sizes = subject.sizes_with(dict(zip(varied, chosen, strict=True)))
        if not is_within(sizes, subject.bounds):
            continue
        values = {variable: sizes[label] for label, variable in axes.items()}
        try:
            holds = eval(guard, {"__builtins__": {}, "math": math, "min": min, "max": max}, values)
        except Exception:
            return None  # the guard uses functions of torch
        if not holds:
            return sizes
    return None


def _by_product(tried: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """Yield so many sizes in all combinations, those of the smallest product first, up to a limit.

    Beyond the limit follow those in which one size, or all, are other than the smallest.
    """
    heap, seen = [(tried[0] ** count, (0,) * count)], {(0,) * count}
    for _ in range(_MOST_COMBINATIONS):
        if not heap:
            return
        product, indices = heapq.heappop(heap)
        yield tuple(tried[index] for index in indices)
        for at, index in enumerate(indices):
            following = (*indices[:at], index + 1, *indices[at + 1 :])
            if index + 1 == len(tried) or following in seen:
                continue
            seen.add(following)
            larger = product // tried[index] * tried[index + 1]
            if larger <= _LARGEST:
                heapq.heappush(heap, (larger, following))
    least = (tried[0],) * count
    ends = ((*least[:at], size, *least[at + 1 :]) for size in tried for at in range(count))
    equal = ((size,) * count for size in tried)
    yield from (sizes for sizes in (*ends, *equal) if math.prod(sizes) <= _LARGEST)
