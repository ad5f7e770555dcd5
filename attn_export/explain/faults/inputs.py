"""Known faults of graph inputs, biases, norms, computed masks and the precision of products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx

from attn_export.explain.faults.fault import (
    VERDICT,
    Changes,
    Fault,
    GraphPlace,
    Locator,
    array_of,
    node_place,
    plain,
    plus,
    repeat_first,
    roll,
    round_to_bfloat16,
    rows,
    step,
    times,
    together,
)
from attn_export.explain.input_roles import InputRole, axes_of, input_roles
from attn_export.float64.attention_steps import StepChange, Steps
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

# -- places -------------------------------------------------------------------------------------


@functools.cache
def inputs(role: InputRole, unit: str = "") -> Locator:
    """Return what finds the graph inputs of a role, and with an axis of a unit, if one is given."""

    def places(evaluation: Evaluation, values: Values) -> Iterator[GraphPlace]:
        axes = {end.name: axes_of(end) for end in evaluation.proto.graph.input}
        batch = next(iter(axes.values()), [""])[0]
        for name, _, found in input_roles(evaluation, values):
            units = {
                "batch row" if batch and axes[name][axis] == batch else usual: axis
                for axis, usual in ((-4, "batch row"), (-3, "head"), (-2, "query"))
                if len(axes[name]) >= -axis
            }
            if found == role and (not unit or unit in units):
                yield GraphPlace(name, name, {"value": name}, {"units": units})

    return places


def _positions(evaluation: Evaluation, values: Values) -> Iterator[GraphPlace]:
    """Find positions, and say of graphs that rotate within the contrib operator whose fault it is.

    ONNX Runtime documents that the operator takes the positions of the first sequence.
    """
    is_fused = any(
        node.op_type == "GroupQueryAttention"
        and any(given.name == "do_rotary" and given.i for given in node.attribute)
        for node in evaluation.nodes
    )
    documented = ", as ONNX Runtime documents of GroupQueryAttention" if is_fused else ""
    verdict = {VERDICT: "the fusion is wrong"} if is_fused else {}
    for place in inputs("positions")(evaluation, values):
        given = {**place.given, "documented": documented, **verdict}
        yield dataclasses.replace(place, given=given)


def lengths(evaluation: Evaluation, values: Values) -> Iterator[GraphPlace]:
    """Find lengths of caches: wherever they are read, and where new tokens are written by them."""
    for place in inputs("lengths")(evaluation, values):
        yield place
        for writes in _cache_writes(evaluation):
            text = f"new {writes.name} are written where {place.name}"
            yield GraphPlace(text, writes.node, compute=writes.compute)


def writes(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find where new keys, new values, and both are written to a cache."""
    return _cache_writes(evaluation)


def _scatters(evaluation: Evaluation) -> dict[str, onnx.NodeProto]:
    """Return the nodes that write a cache: a TensorScatter by ``"keys"``, another by ``"values"``.

    Return an empty dict unless there is exactly one of each.
    """
    scatters = {}
    for name, past in (("keys", "past_key"), ("values", "past_value")):
        found = [n for n in evaluation.nodes if n.op_type == "TensorScatter" and n.input[0] == past]
        if len(found) == 1:
            scatters[name] = found[0]
    return scatters if len(scatters) == 2 else {}


def _cache_writes(evaluation: Evaluation) -> Iterator[GraphPlace]:
    """Yield where a cache is written: steps are ``value``, the lengths, and ``written``."""
    parts = [
        (name, scatter.name, functools.partial(_write, evaluation, scatter))
        for name, scatter in _scatters(evaluation).items()
    ]
    if parts:
        both = together([compute for *_, compute in parts])
        yield GraphPlace("keys and values", parts[0][1], given={"tags": {"both"}}, compute=both)
    for name, node, compute in parts:
        yield GraphPlace(name, node, given={"tags": set()}, compute=compute)


def _write(
    evaluation: Evaluation, node: onnx.NodeProto, values: Values, changes: Changes
) -> Mapping[str, Array]:
    past, _, lengths = (array_of(values, name) for name in node.input[:3])
    at = Steps(changes, {"past": past})
    moved = {**values, node.input[2]: at.set("value", lengths)}
    name = node.output[0]
    return {name: at.set("written", evaluation.compute_node(node, moved)[name])}


def biases(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find vectors that are added."""
    adding = {"Add", "Gemm", "LayerNormalization"}
    added = {name for node in evaluation.nodes if node.op_type in adding for name in node.input}
    return (place for place in _vectors(evaluation) if place.name in added)


def sinks(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find attention sinks."""
    return (place for place in _vectors(evaluation) if "sink" in place.name)


def _vectors(evaluation: Evaluation) -> Iterator[GraphPlace]:
    for name, array in evaluation.initializers.items():
        if array.ndim == 1 and array.dtype.kind == "f" and array.any():
            yield GraphPlace(name, name, {"value": name})


NORMS = frozenset(
    {"RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "LpNormalization"}
)


def norms(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find norms, with their weight."""
    for node in evaluation.nodes:
        if node.op_type in NORMS:
            yield node_place(node, node.input[1] if len(node.input) > 1 else "")


CAUSAL, WINDOW = "causal", "window"
_COMPARISONS: Mapping[str, np.ufunc | None] = {
    "LessOrEqual": np.less_equal, "Less": np.less, "GreaterOrEqual": np.greater_equal,
    "Greater": np.greater, "Trilu": None,
}  # fmt: skip
"""Operators that compute a mask from positions, with their comparison; Trilu compares nothing."""


@functools.cache
def computed_masks(kind: str) -> Locator:
    """Return what finds masks of a kind that the graph computes from positions."""

    def places(evaluation: Evaluation, values: Values) -> Iterator[GraphPlace]:
        data_dependent = _data_dependent_values(evaluation)
        caches = [name for name, _, role in input_roles(evaluation, values) if role == "cache"]
        past = {"past": caches[0]} if caches else {}
        for node in evaluation.nodes:
            array = values.get(node.output[0])
            if node.op_type not in _COMPARISONS or node.output[0] in data_dependent:
                continue
            if array is None or array.ndim < 2 or array.dtype != np.bool_:
                continue
            if kind == (CAUSAL if node.op_type == "Trilu" else _mask_kind(array)):
                operands = dict(zip(("left", "right"), node.input, strict=False))
                given = {"compare": _COMPARISONS[node.op_type], "beyond": kind != CAUSAL}
                steps = {"visible": node.output[0], **operands, **past}
                yield GraphPlace("", node.name, steps, given)

    return places


def _mask_kind(array: Array) -> str:
    matrix = array.reshape(-1, *array.shape[-2:])[:1]
    if not matrix.size or matrix.all() or not matrix[0, :, 0].all():
        return WINDOW
    # The right edge of a window shows later keys: the last one but one query may see the last key.
    return WINDOW if matrix[0, -2:, -1].all() else CAUSAL


def _data_dependent_values(evaluation: Evaluation) -> set[str]:
    """Return the names of values that depend on contents of graph inputs, not only on shapes."""
    initial = set(evaluation.initializers)
    dependent = {e.name for e in evaluation.proto.graph.input if e.name not in initial}
    for node in evaluation.nodes:
        if node.op_type not in {"Shape", "Size"} and not dependent.isdisjoint(node.input):
            dependent.update(node.output)
    return dependent


def products(evaluation: Evaluation, _: Values) -> Iterator[GraphPlace]:
    """Find all matrix products as one place: the step is each of their floating operands."""
    yield GraphPlace("", "", compute=functools.partial(_change_operands, evaluation))


def _change_operands(
    evaluation: Evaluation, values: Values, changes: Changes
) -> Mapping[str, Array]:
    def changed(array: Array) -> Array:
        return np.asarray(changes["operand"](array, {})) if array.dtype.kind == "f" else array

    steps = dict.fromkeys(("queries", "keys", "values", "weights"), plain(changed))

    def compute(node: onnx.NodeProto, now: Values) -> Values:
        if node.op_type == "Attention":
            return evaluation.attention(node, now, steps)
        operands = {}
        if node.op_type in {"MatMul", "Gemm"}:
            operands = {n: changed(a) for n in node.input if (a := now.get(n)) is not None}
        return evaluation.compute_node(node, {**now, **operands})

    return evaluation.outputs_of(evaluation.walk(dict(values), compute))


# -- changes ------------------------------------------------------------------------------------


def _mask(of_bool: Any, of_float: Any) -> Changes:
    """Return the change of a mask by a function for its type."""
    return {"value": lambda m, _: of_bool(m) if m.dtype == np.bool_ else of_float(m)}


def _first_of(unit: str) -> StepChange:
    return lambda mask, at: repeat_first(at["units"][unit])(mask, at)


def _shifted(keys: int) -> StepChange:
    """Return the change that shifts a mask along the keys; 0 keys for minus the length of past."""

    def change(visible: Array, at: Mapping[str, Any]) -> Array:
        shift = keys or -at["past"].shape[2]
        shifted = _shift_comparison(at, shift)
        return _shift_diagonals(visible, shift, at) if shifted is None else shifted

    return change


def _shift_comparison(at: Mapping[str, Any], shift: int) -> Array | None:
    """Repeat a comparison with each key's position changed by `shift`; None if not of positions."""
    operands = [x for x in (at["left"], at.get("right")) if x is not None]
    if at["compare"] is None or len(operands) != 2 or any(x.dtype.kind != "i" for x in operands):
        return None
    differences = np.asarray(operands[0] - operands[1])
    steps = np.unique(np.diff(differences, axis=-1))
    if len(steps) != 1 or abs(steps[0]) != 1:
        return None
    return np.asarray(at["compare"](differences - shift * steps[0], 0))


def _shift_diagonals(visible: Array, shift: int, at: Mapping[str, Any]) -> Array:
    """Shift a mask `[..., L, S]` of j - i left by `shift` diagonals."""
    L, S = visible.shape[-2:]
    if not visible.size:
        return visible
    matrix = visible.reshape(-1, L, S)[0]
    by_diagonal = np.concatenate([matrix[::-1, 0], matrix[0, 1:]])  # j - i from -(L - 1) to S - 1
    diagonal = np.arange(S) - np.arange(L)[:, None] + L - 1
    if not (visible == matrix).all() or not (by_diagonal[diagonal] == matrix).all():
        raise ValueError("the mask depends on more than j - i")
    shifted = diagonal - shift
    selected = by_diagonal[np.clip(shifted, 0, L + S - 2)]
    # Keys further ahead of the query than any key of the mask are visible but to a causal mask.
    return np.broadcast_to(np.where(shifted > L + S - 2, at["beyond"], selected), visible.shape)


def _tf32(array: Array) -> Array:
    """Round to 10 mantissa bits as TF32, half to even; the result is float64."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0x0FFF) + is_odd) & np.uint32(0xFFFFE000)
    return rounded.view(np.float32).astype(np.float64)


# -- the table ----------------------------------------------------------------------------------

OFFSET, LENGTH = "position offset", "cache length"
ONES, ZEROS = plain(np.ones_like), plain(np.zeros_like)
LOW = "low precision"


def _same(mask: Array) -> Array:
    return mask


IN_INPUTS: Final = (
    *rows(inputs("mask"),
        ("mask dropped", "{} is not applied", _mask(np.ones_like, np.zeros_like)),
        ("mask inverted", "True means masked in {}",
         _mask(np.logical_not, lambda m: np.where(np.isneginf(m), 0.0, -np.inf)))),
    *(Fault(inputs("mask", unit), f"mask of one {unit}",
              f"{unit} 0 of {{}} is used for every {unit}",
              {"value": _first_of(unit)})
      for unit in ("batch row", "head", "query")),
    *rows(inputs("mask"),
        ("mask shifted", "{} is read one key too late", {"value": roll(1, -1)}),
        ("mask shifted", "{} is read one key too early", {"value": roll(-1, -1)}),
        ("mask values dropped", "only -inf in {} is applied, other values are ignored",
         _mask(_same, lambda m: np.where(np.isneginf(m), m, 0.0))),
        ("mask lowest is hidden", "the lowest finite number in {} is treated as -inf",
         _mask(_same, lambda m: np.where(m < -1e29, -np.inf, m)))),
    *rows(inputs("cache"),
        ("past dropped", "{} is read as 0", {"value": ZEROS}),
        ("past of one batch row", "row 0 of {} is used for the whole batch",
         {"value": repeat_first(0)}),
        ("past shifted", "{} is read one key too late", {"value": roll(-1, 2)}),
        ("past shifted", "{} is read one key too early", {"value": roll(1, 2)})),
    *rows(inputs("positions"),
        (OFFSET, "{} is 1 too high", {"value": plus(1)}),
        (OFFSET, "{} is 1 too low", {"value": plus(-1)}),
        (OFFSET, "{} is not read: positions start at 0",
         {"value": lambda p, _: np.broadcast_to(np.arange(p.shape[-1]), p.shape)})),
    *rows(_positions,
        (OFFSET, "batch row 0 of {} is used for every batch row{documented}",
         {"value": repeat_first(0)})),
    *rows(lengths,
        (LENGTH, "{} is 1 too high", {"value": plus(1)}),
        (LENGTH, "{} is 1 too low", {"value": lambda n, _: np.maximum(n - 1, 0)}),
        (LENGTH, "{} of batch row 0 is used for every batch row", {"value": repeat_first(0)})),
    *rows(writes, ("cache not written", "new {} are not written to the cache",
                   {"written": step("past")})),
    *rows(norms,
        ("norm left out", "its input is passed on as it is", {"output": step("input")}),
        ("norm without weight", "{} is not applied", {"weight": ONES})),
    *rows(biases,
        ("missing bias", "{} is not added", {"value": ZEROS}),
        ("bias added twice", "{} is added twice", {"value": times(2)})),
    *rows(sinks,
        ("missing sinks", "{} are left out", {"value": lambda s, _: np.full_like(s, -np.inf)}),
        ("wrong sinks", "{} are read as 0", {"value": ZEROS})),
)  # fmt: skip
"""Faults of graph inputs and of vectors."""

IN_COMPUTED_MASKS: Final = tuple(
    row for mask in (CAUSAL, WINDOW) for row in rows(computed_masks(mask),
        (f"{mask} dropped", f"the {mask} mask is not applied", {"visible": ONES}),
        (f"{mask} offset", f"the {mask} mask is one key too late", {"visible": _shifted(1)}),
        (f"{mask} offset", f"the {mask} mask is one key too early", {"visible": _shifted(-1)}),
        (f"{mask} offset", f"the {mask} mask is aligned as if there were no past",
         {"visible": _shifted(0)})))  # fmt: skip

IN_PRODUCTS: Final = rows(
    products,
    (LOW, "products are computed from operands in bfloat16", {"operand": round_to_bfloat16}),
    (LOW, "products are computed from operands in 10 mantissa bits, as TF32 and float16 have",
     {"operand": plain(_tf32)}),
)  # fmt: skip
