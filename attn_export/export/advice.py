"""Errors for modules that cannot be exported, with advice on what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from attn_export.cases.draw import Sizes
from attn_export.errors import ExportError, one_line
from attn_export.export.subject import Subject
from attn_export.source_location import branching_line, line_in, line_of

if TYPE_CHECKING:
    from attn_export.export.module_state import Kept

ADVICE = (
    (
        r"argument 'is_causal' must be bool, not SymBool",
        "is_causal depends on a size",
        "pass a plain bool, or make the causal mask from the sizes and pass it as attn_mask",
    ),
    (
        r"Encountered aliasing during higher order op",
        "a loop whose step returns an input as it is, or reads two views of one tensor",
        "make them copies by x.clone()",
    ),
    (
        r"to have same metadata|same meta data",
        "a loop whose values change shape, type or strides in a step",
        "start it with contiguous tensors of the shape and type that the step returns",
    ),
    (
        r"(?s)Could not extract specialized integer.*while_loop",
        "a tensor as an index in a loop",
        "write x.index_select(1, i.view(1)) in place of x[:, i]",
    ),
    (
        r"data-dependent|Could not extract specialized",
        "a branch or a size depends on the values of a tensor",
        "use torch.where or a mask instead, or make the value a constant of the module",
    ),
    (
        r"only 4D query, key, and value",
        "F.scaled_dot_product_attention of inputs of unlike ranks",
        "reshape them to [B, H, L, D], and the result back",
    ),
    (
        r"\.numpy\(\) is not supported|can't call numpy\(\)",
        "numpy inside the module",
        "use torch operations",
    ),
    (
        r"Tensor subclass CausalBias",
        "a mask of torch.nn.attention.bias that is made outside forward",
        "make it in forward: causal_lower_right(q.shape[-2], k.shape[-2])",
    ),
    (
        r"unhashable type: non-nested SymInt",
        "a dict or set with a size as a key",
        "compute what it holds from the size in each call",
    ),
    (
        r"op='aten\.bucketize\b",
        "torch.bucketize whose boundaries are no constant",
        "count them: (values[..., None] >= boundaries).sum(-1) for right=True, else with >",
    ),
    (
        r"op='aten\.searchsorted\b",
        "torch.searchsorted, which has no ONNX form",
        "count them: (values[..., None] >= boundaries).sum(-1) for right=True, else with >",
    ),
    (
        r"(Linear|Conv\w*|Cell)Params|PackedParams|torch\.classes\.(quantized|rnn)",
        "a module quantized by torch.ao.quantization",
        "build the float module, and quantize the bundle (attn-export build --help)",
    ),
    (
        r"ScriptMethod|ScriptModule|ScriptFunction",
        "a module or function of torch.jit",
        "pass the module from before torch.jit.script or torch.jit.trace",
    ),
    (
        r"<OpOverload\(op='(?!aten|prims)(\w+)\.(\w+)'|"
        r"UnsupportedOperatorException: (?!aten|prims)(\w+)\.(\w+)",
        r"the custom operator \1\3::\2\4 has no ONNX form",
        r"pass Subject(…, translations={'\1\3::\2\4': function}), a function of torch operations",
    ),
    (
        r"no fake impl registered for <CustomOpDef\((\S+)\)>|Operator (\S+) does not support.*fake",
        r"the custom operator \1\2 cannot be captured",
        r"pass Subject(…, translations={'\1\2': function}), a function of torch operations",
    ),
    (
        r"aten\._?nested|NestedTensor|torch\.nested|Unable to cast NotImplemented to Tensor",
        "a nested tensor, which cannot be captured",
        "pad the sequences, and mask the padding",
    ),
    (
        r"aten\.(_to)?_?sparse|SparseTensor|torch\.sparse_",
        "a sparse tensor, which cannot be captured",
        "use a dense one (to_dense), and a mask",
    ),
    (
        r"UnsupportedOperatorException: aten\.(\w+)",
        r"torch.\1, which torch.export does not support",
        "write it with other torch operations",
    ),
    (
        r"numpy\.object_|integer or at least 1-dimensional|'SymInt' object cannot be interpreted",
        "numpy or Python code that computes with a size",
        "use torch operations, such as torch.arange, or make the result a buffer of the module",
    ),
    (
        r"No ONNX function found for <OpOverload\(op='\w+\.(\w+)'",
        r"torch.\1 of these types has no ONNX operator",
        "write it with other torch operations, or cast its inputs to one type first",
    ),
)
"""Rows of a pattern that matches an error's text, the construct that causes it, and what to write
instead. In the construct, \\1 is the first group of the pattern."""


_CONTROL_FLOW = {
    "map_impl": "the operations on the whole tensor",
    "cond": "both branches, and torch.where between them",
}
"""Advice on what to write instead of a control flow operator of torch."""


def refuse_untranslated(program: ExportedProgram) -> None:
    """Raise an error if a captured program has control flow, autocast, or sizes of values."""
    for node in program.graph.nodes:
        if str(node.target) == "aten.split_with_sizes.default" and _has_value(node.args[1]):
            raise ExportError(
                f"a tensor is split into sizes that are values of another{_lines_of([node])}, as "
                "of tokens by expert; such sizes are not supported: compute all, and multiply by "
                "a mask"
            )
        instead = _CONTROL_FLOW.get(str(node.target))
        first = getattr(node.args[0], "meta", {}).get("val") if node.args else None
        if instead and not isinstance(first, torch.SymBool):  # else it is a branch on a size
            name = str(node.target).removesuffix("_impl")
            raise ExportError(
                f"torch's control flow operator {name} cannot be checked"
                f"{_lines_of([node])}; write {instead}"
            )
        if str(node.target) == "wrap_with_autocast" and node.args[2]:
            dtype = str(node.args[1]).removeprefix("torch.")
            inner = getattr(program.graph_module, str(node.args[4].target), None)
            raise ExportError(
                f"the module computes in {dtype} by torch.autocast within forward"
                f"{_lines_of(inner.graph.nodes if inner else [])}; leave autocast to the caller, "
                f"or build the module in {dtype}"
            )


def _has_value(sizes: Iterable[Any]) -> bool:
    """Return whether one of several sizes is known only when the module runs."""
    found = (getattr(size, "meta", {}).get("val") for size in sizes)
    return any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in found)


def _lines_of(nodes: Iterable[Node]) -> str:
    """Return `` (file.py:12)``: the first line of the user's code that nodes come from, or ""."""
    lines = (line_in(str(node.meta.get("stack_trace", ""))) for node in nodes)
    line = next(filter(None, lines), "")
    return f" ({line})" if line else ""


def capture_error(subject: Subject, error: Exception, kept: Kept) -> ExportError:
    """Return the error for a failure of `torch.export`."""
    if kept:
        names = ", ".join(dict.fromkeys(name for _, name in kept))
        return _explained(
            error,
            f"the module keeps {names} from call to call, which would fix its size in the graph, "
            "and cannot be captured without; make it in each call",
        )
    fixed = re.search(
        r"L\['(\w+)'\]\.size\(\)\[(\d+)\] as dynamic.* constant \((\d+)\)", str(error)
    )
    if fixed and fixed[1] in subject.tree.keywords:
        return fixed_axis_error(subject, subject.tree.keywords[fixed[1]], int(fixed[2]), fixed[3])
    original = error
    scripted = next(
        (n for n, m in subject.module.named_modules() if isinstance(m, torch.jit.ScriptModule)),
        None,
    )
    if scripted is not None and re.search(
        "takes .* positional argument|multiple values for argument", str(error)
    ):
        error = TypeError("ScriptModule")
    if any("torch/nested/" in file for file, *_ in traceback.extract_tb(error.__traceback__)):
        error = TypeError("torch.nested")
    problem, line = "torch.export cannot capture the module", line_of(original)
    vectors = [n for n, x in subject.inputs.items() if x.dim() == 1 and not x.is_floating_point()]
    if vectors and "data-dependent" in str(error):
        return ExportError(
            f"{problem}{f' at {line}' if line else ''}: a branch or a size depends on values; if "
            f"{vectors[0]} splits packed sequences, mask the tokens of other sequences in one "
            "attention instead, and draw valid inputs by Subject(…, inputs=function)"
        )
    return _explained(error, problem, line)


def translation_error(error: Exception, program: ExportedProgram) -> ExportError:
    """Return the error for a failure of `torch.onnx.export`, with the line of the failing node."""
    named = re.search(r"translating node %(\w+)", " ".join(map(str, _chain(error))))
    traces = {
        node.name: str(node.meta.get("stack_trace", "")) for node in program.graph.nodes if named
    }
    trace = traces.get(named[1], "") if named else ""
    # torch's decomposition of bucketize fails, and its error does not name it.
    if "Unknown fx arg type" in str(error):
        for node in program.graph.nodes:
            if str(node.target).startswith("aten.bucketize"):
                error = NotImplementedError("op='aten.bucketize'")
                trace = str(node.meta.get("stack_trace", ""))
                break
    return _explained(error, "the module has no ONNX form", line_in(trace))


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


def _explained(error: Exception, problem: str, line: str = "") -> ExportError:
    """Return an error with the line and the cause of another."""
    line = line or line_of(error)
    at = f" at {line}" if line else ""
    return ExportError(f"{problem}{at}: {_cause_of(error)}")


def _cause_of(error: Exception) -> str:
    """Return the matching row of `ADVICE`, or else the text of the first cause."""
    chain = _chain(error)
    text = " ".join(map(str, chain))
    for pattern, construct, instead in ADVICE:
        match = re.search(pattern, text)
        if match:
            return f"{match.expand(construct)}; {match.expand(instead)}"
    return one_line(chain[-1])


# -- errors for axes whose sizes a module restricts ---------------------------------------------


def fixed_axis_error(subject: Subject, name: str, axis: int, size: str) -> ExportError:
    """Return the error for an axis that the module restricts to one size."""
    label = subject.axes[name].get(axis)
    if any(isinstance(part, torch.jit.ScriptModule) for part in subject.module.modules()):
        return ExportError(
            f"axis {label!r} ({name}.shape[{axis}]) was fixed at {size} by a module of torch.jit; "
            "pass the module from before torch.jit.script or torch.jit.trace"
        )
    at = branch_at(subject, {label: int(size) + 1}) if label and size.isdigit() else ""
    return ExportError(
        f"axis {label!r} ({name}.shape[{axis}]) was fixed at {size} by the module{at}; write it so "
        "that it works for every size, a loop by torch._higher_order_ops.scan, or leave the axis "
        "without a name"
    )


def bound_advice(subject: Subject, sizes: Sizes, is_right: Callable[[Sizes], bool]) -> str:
    """Return which bound of an axis to write, so that no sizes are wrong; "" if none is found."""
    changed: dict[str, int] = {}
    for label, known in subject.example_sizes.items():
        other = sizes.get(label, known)
        if label in subject.sums or other == known:
            continue
        changed[label] = other
        if is_right(changed):
            continue  # of several axes, the last one that matters has the bound
        works, fails = known, other
        while abs(fails - works) > 1:
            middle = (works + fails) // 2
            if is_right({**changed, label: middle}):
                works = middle
            else:
                fails = middle
        if not is_right({**changed, label: works}) or (
            works == known and not is_right({**changed, label: 2 * known - fails})
        ):
            return ""  # not the size alone decides
        side, end = ("from", "min") if fails < works else ("up to", "max")
        return (
            f"; it works with {label} {side} {works}: to leave out other sizes, write "
            f"Axis({label!r}, {end}={works}) for the name of that axis"
        )
    return ""


def branch_at(subject: Subject, changed: Sizes) -> str:
    """Return `` (file.py:12)``: the line of the module where changed sizes take another branch."""

    def run(sizes: Sizes) -> Callable[[], object]:
        inputs = subject.draw(sizes, "branch")
        return lambda: subject.call(subject.module, inputs)

    with torch.inference_mode():
        line = branching_line(run(subject.example_sizes), run(subject.sizes_with(changed)))
    return f" ({line})" if line else ""
