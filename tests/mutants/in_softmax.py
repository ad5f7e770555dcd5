"""Faults of softmax, of what is hidden, and of rows that see nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx
from graph_surgery import Graph
from mutants.in_sizes import axes_of, holds
from mutants.mutant import Change, Mutant, Setting
from mutants.planting import (
    Make,
    Path,
    Planter,
    Value,
    either,
    float_values,
    graph_at,
    graphs_of,
    input_value,
    plant,
)
from onnx import numpy_helper

HIDDEN = (-30.0, -100.0, -1e4, -1e9, -1e30, -3.4e38)
LIMITS = (30, 60, 80)


def softmax_by_parts(*, maximum: bool = True, more: float = 0.0, axis: int = -1) -> Make:
    """Return what makes a softmax of scores, with a fault."""

    def make(p: Planter, x: str) -> str:
        along = np.array([axis])
        if maximum:
            top = p("ReduceMax", x, along)
            # A row of nothing but -inf is NaN in a softmax; the graph replaces it.
            x = p("Sub", x, top)
        raised = p("Exp", x)
        total = p("ReduceSum", raised, along)
        return p("Div", raised, p("Add", total, more) if more else total)

    return make


def at_softmax(path: Path, name: str, make: Make, where: Make) -> Change:
    """Return a change that puts other numbers in the place of those of a Softmax."""

    def change(model: onnx.ModelProto) -> None:
        node = graph_at(model, path).one("Softmax", name)
        scores, out = node.input[0], node.output[0]
        value = next(v for v in float_values(model) if (v.path, v.name) == (path, out))
        plant(model, value, lambda p, right: p("Where", where(p, right), make(p, scores), right))

    return change


def _clipped(limit: float) -> Make:
    def make(p: Planter, x: str) -> str:
        hidden = p("Equal", x, -np.inf)
        return p("Softmax", p("Where", hidden, x, p("Clip", x, -limit, limit)), axis=-1)

    return make


def _instead_of_hidden(hidden: float) -> Make:
    def make(p: Planter, x: str) -> str:
        # The lowest number of a narrow type, where this is beyond it.
        filled = max(hidden, float(np.finfo(p.dtype).min))
        return p("Softmax", p("Where", p("Equal", x, -np.inf), filled, x), axis=-1)

    return make


SOFTMAX: tuple[tuple[str, str, Make], ...] = (
    ("a", "softmax without its maximum", softmax_by_parts(maximum=False)),
    ("i", "softmax sum + 1e-3", softmax_by_parts(more=1e-3)),
    ("j", "softmax over another axis", softmax_by_parts(axis=-2)),
    *(("a", f"scores clipped at {limit}", _clipped(float(limit))) for limit in LIMITS),
    *(("a", f"{hidden:g} for -inf", _instead_of_hidden(hidden)) for hidden in HIDDEN),
)


def calls(setting: Setting) -> dict[str, Make]:
    """Return the calls in which a fault is planted: graphs have branches for some of them."""

    def flash(p: Planter, _: str) -> str:
        found = [holds(p, setting, ("B", "==", 1))]
        if "P" in axes_of(setting):
            found.append(holds(p, setting, ("P", "==", 0)))
        return either(p, found, "Or")

    found: dict[str, Make] = {"": lambda p, _: p.constant(np.array([True]))}
    if not setting.decodes:
        found[" where B is 1 or P 0"] = flash
        found[" elsewhere"] = lambda p, x: p("Not", flash(p, x))
    return found


def in_softmax(setting: Setting) -> Iterator[Mutant]:
    """Yield faults of softmax, of hidden scores, of guards, and of rows that see nothing."""
    for path, graph in graphs_of(setting.model):
        for node, (where, which) in itertools.product(graph.all("Softmax"), calls(setting).items()):
            for row, kind, make in SOFTMAX:
                yield Mutant(
                    kind, row, f"{kind}{where}: {node.name}",
                    at_softmax(path, node.name, make, which),
                )  # fmt: skip
        yield from _hidden(path, graph)
        yield from _guards(path, graph)
    yield from _rows(setting)


def _hidden(path: Path, graph: Graph) -> Iterator[Mutant]:
    for tensor in graph.proto.initializer:
        array = numpy_helper.to_array(tensor)
        if array.size != 1 or array.dtype.kind in "ib" or array.reshape(-1)[0] != -np.inf:
            continue
        for value in HIDDEN:

            def change(model: onnx.ModelProto, name=tensor.name, value=value) -> None:
                graph_at(model, path).set_initializer(name, lambda a: _filled(a, value))

            yield Mutant(f"{value:g} for -inf", "a", f"{value:g} for -inf: {tensor.name}", change)
            yield Mutant(
                f"{value:g} for -inf, no guard", "b", f"{value:g} for -inf, no guard",
                _both(change, lambda model: _without_guards(model, path)),
            )  # fmt: skip


def _filled(array: np.ndarray, value: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = np.full_like(array, value)
    # The lowest number of a narrow type, where the value is beyond it.
    return np.maximum(found, np.finfo(array.dtype).min) if array.dtype.kind == "f" else found


def _both(*changes: Change) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for each in changes:
            each(model)

    return change


def _zeros(graph: Graph) -> set[str]:
    return {
        t.name
        for t in graph.model.graph.initializer
        if not any(t.dims) and t.data_type in (1, 10, 16) and not numpy_helper.to_array(t).any()
    }


def guards_of(graph: Graph) -> list[tuple[onnx.NodeProto, int]]:
    """Return nodes that put 0 in the place of a value, and which input that value is."""
    zeros = _zeros(graph)
    return [
        (node, 3 - at)
        for node in graph.all("Where")
        for at in (1, 2)
        if node.input[at] in zeros and node.input[3 - at] not in {
            t.name for t in graph.model.graph.initializer
        }
    ]  # fmt: skip


def _without_guards(model: onnx.ModelProto, path: Path) -> None:
    for node, at in guards_of(graph_at(model, path)):
        _leave_out(node, at)


def _leave_out(node: onnx.NodeProto, at: int) -> None:
    kept = node.input[at]
    node.op_type = "Identity"
    del node.input[:]
    node.input.append(kept)


def _guards(path: Path, graph: Graph) -> Iterator[Mutant]:
    for number, (node, _) in enumerate(guards_of(graph)):

        def change(model: onnx.ModelProto, number=number) -> None:
            _leave_out(*guards_of(graph_at(model, path))[number])

        yield Mutant("guard of masked rows removed", "a", f"no guard: {node.name}", change)


# -- rows that see nothing -----------------------------------------------------------------------

FILLS: dict[str, float] = {"NaN": float("nan"), "an average": 0.05}
WHERE = ("all", "first", "middle", "last", "B 1", "L 1", "S >= 16")


def _rows(setting: Setting) -> Iterator[Mutant]:
    """Yield faults of rows of the mask that hide all keys, at what the last projection takes."""
    graph = Graph(setting.model)
    mask = input_value(setting.model, "attn_mask")
    ends = [n for n in graph.nodes if "output" in n.output or n.name.startswith("out_proj")]
    attended = next((n.input[0] for n in ends if n.op_type == "MatMul"), None)
    if mask is None or attended is None:
        return
    value = next(v for v in float_values(setting.model) if v.operator == "MatMul")
    place = Value((), attended, value.dtype, "MatMul", 3)
    for fill in FILLS:
        for where in WHERE:
            make = _wrong_rows(mask, FILLS[fill], where)
            yield Mutant(
                f"{fill} for masked rows", "b", f"{fill} for masked rows, {where}",
                lambda model, make=make: plant(model, place, make),
            )  # fmt: skip


def _wrong_rows(mask: Value, fill: float, where: str) -> Make:
    def make(p: Planter, x: str) -> str:
        seen = mask.name
        if mask.dtype != np.bool_:
            seen = p("Not", p("IsInf", p("Cast", seen, to=1), detect_positive=0))
        some = p("ReduceMax", p("Cast", seen, to=1), np.array([-1]))  # [B, H, L, 1] or less
        none = p("Equal", some, np.float32(0))
        flat = p("Cast", p("ReduceMax", p("Cast", none, to=1), np.array([1]), keepdims=0), to=9)
        size = p.size("query", 0)
        total = p.size("attn_mask", mask.rank - 1)
        conditions = [flat, *_chosen(p, where, size, total)]
        return p("Where", either(p, conditions), fill, x)

    return make


def _chosen(p: Planter, where: str, batch: str, keys: str) -> list[str]:
    one = np.array([1])
    rows = p("Unsqueeze", p.counted("query", 0), np.array([1, 2]))
    queries = p("Unsqueeze", p.counted("query", 1), np.array([1]))
    L = p.size("query", 1)
    both = {
        "first": (np.array([0]), np.array([0])),
        "middle": (p("Div", batch, np.array([2])), p("Div", L, np.array([2]))),
        "last": (p("Sub", batch, one), p("Sub", L, one)),
    }
    if where in both:
        row, query = both[where]
        return [p("Equal", rows, row), p("Equal", queries, query)]
    return {
        "all": [],
        "B 1": [p("Equal", batch, one)],
        "L 1": [p("Equal", L, one)],
        "S >= 16": [p("GreaterOrEqual", keys, np.array([16]))],
    }[where]
