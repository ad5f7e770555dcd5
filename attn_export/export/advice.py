"""Errors for what cannot be exported, with the alternatives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from attn_export.errors import ExportError, one_line
from attn_export.export.subject import Subject
from attn_export.parity.draw import Sizes
from attn_export.source_location import branching_line, line_in, line_of

if TYPE_CHECKING:
    from attn_export.export.kept_state import Kept

ADVICE = (
    (
        r"argument 'is_causal' must be bool, not SymBool",
        "is_causal depends on a size",
        "pass a plain bool, or make the causal mask from the sizes and pass it as attn_mask",
    ),
    (
        r"data-dependent|Could not extract specialized",
        "a branch or a size depends on the values of a tensor",
        "use torch.where or a mask instead, or make the value a constant of the module",
    ),
    (
        r"only 4D query, key, and value",
        "F.scaled_dot_product_attention of inputs that are not 4-D",
        "reshape them to [B, H, L, D], and the result back",
    ),
    (
        r"\.numpy\(\) is not supported|can't call numpy\(\)",
        "numpy inside the module",
        "use torch operations",
    ),
    (
        r"Found <class '(?:\w+\.)*(\w+)'> in output",
        r"it returns a \1",
        "return the tensors in it, as tuples, lists or dicts, or none of it (use_cache=False)",
    ),
    (
        r"Tensor subclass CausalBias",
        "a mask of torch.nn.attention.bias, which cannot be captured",
        "pass is_causal=True where there are as many keys as queries, else a bool attn_mask",
    ),
    (
        r"unhashable type: non-nested SymInt",
        "a dict or set that is asked for a size",
        "compute what it holds from the size in each call",
    ),
)
"""Text of an error, the construct (of which \\1 is a part), and what to write instead."""


FLEX = (
    "flex_attention has no ONNX form; call F.scaled_dot_product_attention, with what score_mod and "
    "block_mask do as attn_mask"
)


def refuse_untranslated(program: ExportedProgram) -> None:
    """Refuse a program with flex_attention, or with autocast within it.

    Args:
        program: The captured program.

    Raises:
        ExportError: If it has; names the line and what to write instead.
    """
    for node in program.graph.nodes:
        if str(node.target) == "flex_attention":
            raise ExportError(f"{FLEX}{_lines_of([node])}")
        if str(node.target) == "wrap_with_autocast" and node.args[2]:
            dtype = str(node.args[1]).removeprefix("torch.")
            inner = getattr(program.graph_module, str(node.args[4].target), None)
            raise ExportError(
                f"the module computes in {dtype} by torch.autocast within forward"
                f"{_lines_of(inner.graph.nodes if inner else [])}; leave autocast to the caller, "
                f"or build the module in {dtype}"
            )


def _lines_of(nodes: Iterable[Node]) -> str:
    """Return `` (file.py:12)``: the first line of the user's behind nodes of a program."""
    found = (line_in(str(node.meta.get("stack_trace", ""))) for node in nodes)
    line = next(filter(None, found), "")
    return f" ({line})" if line else ""


def not_captured(subject: Subject, error: Exception) -> ExportError:
    """Return the error for a failure of `torch.export`.

    Args:
        subject: The subject.
        error: The error.
    """
    fixed = re.search(
        r"L\['(\w+)'\]\.size\(\)\[(\d+)\] as dynamic.* constant \((\d+)\)", str(error)
    )
    if fixed and fixed[1] in subject.axes:
        return fixed_axis(subject, fixed[1], int(fixed[2]), fixed[3])
    return _explained(error, "torch.export cannot capture the module")


def not_forgotten(kept: Kept, error: Exception) -> ExportError:
    """Return the error for a module that cannot do without the tensors that it keeps.

    Args:
        kept: The tensors.
        error: The error of the capture without them.
    """
    names = ", ".join(dict.fromkeys(name for _, name in kept))
    return _explained(
        error,
        f"the module keeps {names} from call to call, which would fix its size in the graph, and "
        "cannot be captured without; make it in each call",
    )


def not_translated(error: Exception, program: ExportedProgram) -> ExportError:
    """Return the error for a failure of `torch.onnx.export`, which names the untranslated node.

    Args:
        error: The error.
        program: The captured program.
    """
    named = re.search(r"translating node %(\w+)", " ".join(map(str, _chain(error))))
    traces = {
        node.name: str(node.meta.get("stack_trace", "")) for node in program.graph.nodes if named
    }
    trace = traces.get(named[1], "") if named else ""
    return _explained(error, "the module has no ONNX form", line_in(trace))


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def _explained(error: Exception, what: str, line: str = "") -> ExportError:
    line = line or line_of(error)
    at = f" at {line}" if line else ""
    chain = _chain(error)
    said = " ".join(map(str, chain))
    for pattern, construct, instead in ADVICE:
        found = re.search(pattern, said)
        if found:
            return ExportError(f"{what}{at}: {found.expand(construct)}; {instead}")
    return ExportError(f"{what}{at}: {one_line(chain[-1])}")


# -- errors for axes that a module does not leave free ------------------------------------------


def fixed_axis(subject: Subject, name: str, axis: int, size: str) -> ExportError:
    """Return the error for an axis that the module restricts to one size.

    Args:
        subject: The subject.
        name: The input.
        axis: The index of the axis.
        size: The only size that the module allows.
    """
    label = subject.axes[name].get(axis)
    at = branch_at(subject, {label: int(size) + 1}) if label and size.isdigit() else ""
    return ExportError(
        f"axis {label!r} ({name}.shape[{axis}]) was fixed at {size} by the module{at}; write it so "
        "that it works for every size, or do not name the axis"
    )


def out_of_reach(subject: Subject, sizes: Sizes, error: ExportError) -> ExportError:
    """Return the error for a module that raises at some sizes, with the bound that avoids them.

    Args:
        subject: The subject that has the module.
        sizes: The sizes at which it did.
        error: The error that it raised.
    """

    def runs(label: str, size: int) -> bool:
        try:
            inputs = subject.draw(subject.sizes_with({label: size}), "reach")
            with torch.inference_mode():
                subject.call(subject.module, inputs)
        except ExportError:
            return False
        return True

    for label, known in subject.example_sizes.items():
        other = sizes.get(label, known)
        if label in subject.sums or other == known or runs(label, other):
            continue
        right, wrong = known, other
        while abs(wrong - right) > 1:
            middle = (right + wrong) // 2
            right, wrong = (middle, wrong) if runs(label, middle) else (right, middle)
        bound = f"min={right}" if wrong < right else f"max={right}"
        return ExportError(
            f"{error}; it runs with {label} {'from' if wrong < right else 'up to'} {right}: write "
            f"Axis({label!r}, {bound}) for the name of that axis"
        )
    return error


def branch_at(subject: Subject, changed: Sizes) -> str:
    """Return `` (file.py:12)``: the line of the module at which these sizes branch off.

    Args:
        subject: Whose module is run: at the example's sizes, and at others.
        changed: The sizes that differ from the example's.
    """

    def run(sizes: Sizes) -> Callable[[], object]:
        inputs = subject.draw(sizes, "branch")
        return lambda: subject.call(subject.module, inputs)

    with torch.inference_mode():
        line = branching_line(run(subject.example_sizes), run(subject.sizes_with(changed)))
    return f" ({line})" if line else ""
