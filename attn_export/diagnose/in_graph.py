"""Known mistakes around attention: inputs, biases, norms, positions, precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from attn_export.diagnose.mistake import ROUNDED, Mistake, change_value, shift_diagonals
from attn_export.tensorfile import Array

if TYPE_CHECKING:
    import onnx

    from attn_export.diagnose.evaluate import Evaluation, Rounding, Values

NORMS = frozenset(
    {"RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "LpNormalization"}
)
CAUSAL = "causal"
COMPARING: Mapping[str, np.ufunc | None] = {
    "LessOrEqual": np.less_equal, "Less": np.less, "GreaterOrEqual": np.greater_equal,
    "Greater": np.greater, "Trilu": None,
}  # fmt: skip


def input_mistakes(evaluation: Evaluation, values: Values) -> Iterator[Mistake]:
    """Yield the mistakes of masks and caches as graph inputs.

    Args:
        evaluation: The right graph.
        values: The values of any case: they show the role of an input.
    """
    for end in evaluation.proto.graph.input:
        array = values.get(end.name)
        if array is None or end.name in evaluation.initializers:
            continue
        if end.name.startswith("past_") and array.ndim == 4:
            yield from _cache(end.name)
        elif array.dtype == np.bool_ or "mask" in end.name:
            yield from _mask(end.name, array.ndim)
        elif "position" in end.name and array.dtype.kind == "i":
            yield from _positions(end.name)


def _mask(name: str, ndim: int) -> Iterator[Mistake]:
    def mistake(kind: str, says: str, of: Callable[[Array], Array]) -> Mistake:
        return Mistake(kind, says.format(name), name, change_value(name, of))

    yield mistake("mask dropped", "{} is not applied", _all_visible)
    yield mistake("mask inverted", "True means masked in {}", _inverted)
    for axis, what in ((-4, "batch row"), (-3, "head"), (-2, "query")):
        if ndim < -axis:
            continue
        says = f"{what} 0 of {{}} is used for all of them"
        yield mistake(f"mask of one {what}", says, functools.partial(_first_of, axis=axis))
    for by, way in ((1, "late"), (-1, "early")):
        says = f"{{}} is read one key too {way}"
        yield mistake("mask shifted", says, functools.partial(np.roll, shift=by, axis=-1))
    yield mistake(
        "mask values dropped",
        "of {} only -inf counts, its other values are dropped",
        _values_dropped,
    )
    yield mistake(
        "mask lowest is hidden", "the lowest number is taken for -inf in {}", _lowest_hidden
    )


def _cache(name: str) -> Iterator[Mistake]:
    yield Mistake("past dropped", f"{name} is read as 0", name, change_value(name, np.zeros_like))
    yield Mistake(
        "past of one batch row", f"row 0 of {name} is used for the whole batch", name,
        change_value(name, lambda past: _first_of(past, 0)),
    )  # fmt: skip


def _positions(name: str) -> Iterator[Mistake]:
    for by in (1, -1):
        yield Mistake(
            "position offset",
            f"{name} counts {by:+d}",
            name,
            change_value(name, functools.partial(np.add, by)),
        )
    yield Mistake(
        "position offset", f"{name} is not read: positions start at 0", name,
        change_value(name, lambda p: np.broadcast_to(np.arange(p.shape[-1]), p.shape)),
    )  # fmt: skip


def value_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of leaving out biases, norms and sinks."""
    used: dict[str, list[onnx.NodeProto]] = {}
    for node in evaluation.nodes:
        for name in node.input:
            used.setdefault(name, []).append(node)
        if node.op_type in NORMS:
            yield from _norm(node)
    for name, array in evaluation.initializers.items():
        if array.ndim != 1 or array.dtype.kind != "f" or not array.any():
            continue
        if any(
            node.op_type in {"Add", "Gemm", "LayerNormalization"} for node in used.get(name, ())
        ):
            says = f"{name} is not added"
            yield Mistake("missing bias", says, name, change_value(name, np.zeros_like))
        if "sink" in name:
            says = f"{name} are left out"
            yield Mistake(
                "missing sinks", says, name, change_value(name, lambda a: np.full_like(a, -np.inf))
            )
            yield Mistake(
                "wrong sinks", f"{name} are read as 0", name, change_value(name, np.zeros_like)
            )


def _norm(node: onnx.NodeProto) -> Iterator[Mistake]:
    def left_out(values: Values) -> Mapping[str, Array]:
        array = values[node.input[0]]
        assert array is not None
        return {node.output[0]: array}

    yield Mistake("norm left out", "its input is passed on as it is", node.name, left_out)
    if len(node.input) > 1:
        weight = node.input[1]
        says = f"{weight} is not applied"
        yield Mistake("norm without weight", says, node.name, change_value(weight, np.ones_like))


def mask_mistakes(evaluation: Evaluation, values: Values) -> Iterator[Mistake]:
    """Yield the mistakes of causal masks and windows that the graph computes from positions.

    Args:
        evaluation: The graph, evaluated in float64.
        values: All values of the graph, by name.
    """
    of_data = _depends_on_data(evaluation)
    past = values.get("past_key")
    for node in evaluation.nodes:
        name = node.output[0]
        array = values.get(name)
        if node.op_type not in COMPARING or name in of_data or array is None or array.ndim < 2:
            continue
        if array.dtype != np.bool_:
            continue
        what = _what(node, array)
        drop = change_value(name, np.ones_like)
        yield Mistake(f"{what} dropped", f"the {what} mask is not applied", node.name, drop)
        for by, way in ((1, "late"), (-1, "early")):
            says = f"the {what} mask is one key too {way}"
            moved = _moved(node, what, functools.partial(_always, by))
            yield Mistake(f"{what} offset", says, node.name, moved)
        if past is not None:
            says = f"the {what} mask is aligned as if there were no past"
            yield Mistake(f"{what} offset", says, node.name, _moved(node, what, _before_past))


def _what(node: onnx.NodeProto, array: Array) -> str:
    if node.op_type == "Trilu":
        return CAUSAL
    matrix = array.reshape(-1, *array.shape[-2:])[:1]
    return CAUSAL if matrix.size and matrix[0, :, 0].all() and not matrix.all() else "window"


def _moved(
    node: onnx.NodeProto, what: str, by: Callable[[Values], int]
) -> Callable[[Values], Mapping[str, Array]]:
    """Return a change that shifts a mask by some keys."""

    def replaced(values: Values) -> Mapping[str, Array]:
        visible = values[node.output[0]]
        assert visible is not None
        found = _compared_again(node, values, by(values))
        if found is None:
            found = shift_diagonals(visible, by(values), beyond=what != CAUSAL)
        return {} if found is None else {node.output[0]: found}

    return replaced


def _compared_again(node: onnx.NodeProto, values: Values, by: int) -> Array | None:
    """Return a comparison of positions with keys shifted left; None if it is no comparison."""
    compare = COMPARING[node.op_type]
    operands = [x for name in node.input if (x := values[name]) is not None]
    if compare is None or len(operands) != 2 or any(x.dtype.kind != "i" for x in operands):
        return None
    apart = np.asarray(operands[0] - operands[1])
    steps = np.unique(np.diff(apart, axis=-1))
    if len(steps) != 1 or abs(steps[0]) != 1:
        return None
    return np.asarray(compare(apart - by * steps[0], 0))


def _always(by: int, _: Values) -> int:
    return by


def _before_past(values: Values) -> int:
    past = values["past_key"]
    assert past is not None
    return -int(past.shape[2])


def _depends_on_data(evaluation: Evaluation) -> set[str]:
    """Return the values that depend on the contents of tensors, not on their shapes alone."""
    initial = set(evaluation.initializers)
    found = {e.name for e in evaluation.proto.graph.input if e.name not in initial}
    for node in evaluation.nodes:
        if node.op_type not in {"Shape", "Size"} and not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def precision_mistakes() -> Iterator[Mistake]:
    """Yield the mistakes of rounding the operands of all products in the graph."""
    for name, rounding in (
        ("bfloat16", _through(ml_dtypes.bfloat16)),
        ("10 bits of precision, as TF32 and float16 have", _tf32),
    ):
        says = f"products are computed from operands in {name}"
        yield Mistake("low precision", says, "", rounding=rounding, share=ROUNDED)


# -- changes


def _all_visible(mask: Array) -> Array:
    return np.ones_like(mask) if mask.dtype == np.bool_ else np.zeros_like(mask)


def _inverted(mask: Array) -> Array:
    return ~mask if mask.dtype == np.bool_ else np.where(np.isneginf(mask), 0.0, -np.inf)


def _first_of(array: Array, axis: int) -> Array:
    if not array.shape[axis]:
        return array
    return np.broadcast_to(np.take(array, [0], axis=axis), array.shape)


def _values_dropped(mask: Array) -> Array:
    return mask if mask.dtype == np.bool_ else np.where(np.isneginf(mask), mask, 0.0)


def _lowest_hidden(mask: Array) -> Array:
    return mask if mask.dtype == np.bool_ else np.where(mask < -1e29, -np.inf, mask)


def _through(dtype: type[np.generic]) -> Rounding:
    def rounding(array: Array) -> Array:
        if array.dtype.kind != "f":
            return array
        return array.astype(np.float32).astype(dtype).astype(np.float64)

    return rounding


def _tf32(array: Array) -> Array:
    if array.dtype.kind != "f":
        return array
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    kept = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(
        0xFFFFE000
    )
    return kept.view(np.float32).astype(np.float64)
