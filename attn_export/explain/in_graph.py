"""Known mistakes outside attention nodes: inputs, biases, norms, mask computation, precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx

from attn_export.explain.input_roles import axes_of, input_roles
from attn_export.explain.mistake import (
    ArrayChange,
    Mistake,
    Replacement,
    array_of,
    cache_scatters,
    change_value,
    join,
    keys_and_values,
    round_to_bfloat16,
    skip_node,
)
from attn_export.float64.evaluate import Evaluation, Values
from attn_export.tensorfile import Array

NORMS = frozenset(
    {"RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "LpNormalization"}
)
CAUSAL = "causal"
COMPARISONS: Mapping[str, np.ufunc | None] = {
    "LessOrEqual": np.less_equal, "Less": np.less, "GreaterOrEqual": np.greater_equal,
    "Greater": np.greater, "Trilu": None,
}  # fmt: skip
"""Operators that compute a mask from positions, with their comparison; Trilu compares nothing."""


def input_mistakes(evaluation: Evaluation, values: Values) -> Iterator[Mistake]:
    """Yield the mistakes of reading masks, caches and positions, which are graph inputs."""
    axes = {end.name: axes_of(end) for end in evaluation.proto.graph.input}
    batch = next(iter(axes.values()), [""])[0]
    for name, _, role in input_roles(evaluation, values):
        if role == "cache":
            yield from _cache_mistakes(name)
        elif role == "mask":
            yield from _mask_input_mistakes(name, axes[name], batch)
        elif role == "positions":
            yield from _position_mistakes(name)
        elif role == "lengths":
            yield from _length_mistakes(evaluation, name)


def _changed(kind: str, effect: str, name: str, change: ArrayChange) -> Mistake:
    """Return the mistake of changing one value of a graph."""
    return Mistake(kind, effect, name, change_value(name, change))


def _mask_input_mistakes(name: str, axes: Sequence[str], batch: str) -> Iterator[Mistake]:
    yield _changed("mask dropped", f"{name} is not applied", name, _show_all)
    yield _changed("mask inverted", f"True means masked in {name}", name, _invert)
    for axis, usual in ((-4, "batch row"), (-3, "head"), (-2, "query")):
        if len(axes) >= -axis:
            unit = "batch row" if batch and axes[axis] == batch else usual
            effect = f"{unit} 0 of {name} is used for every {unit}"
            change = functools.partial(_repeat_first, axis=axis)
            yield _changed(f"mask of one {unit}", effect, name, change)
    for shift, direction in ((1, "late"), (-1, "early")):
        effect = f"{name} is read one key too {direction}"
        yield _changed(
            "mask shifted", effect, name, functools.partial(np.roll, shift=shift, axis=-1)
        )
    effect = f"only -inf in {name} is applied, other values are ignored"
    yield _changed("mask values dropped", effect, name, _drop_finite_values)
    effect = f"the lowest finite number in {name} is treated as -inf"
    yield _changed("mask lowest is hidden", effect, name, _hide_lowest)


def _cache_mistakes(name: str) -> Iterator[Mistake]:
    yield _changed("past dropped", f"{name} is read as 0", name, np.zeros_like)
    effect = f"row 0 of {name} is used for the whole batch"
    yield _changed("past of one batch row", effect, name, lambda past: _repeat_first(past, 0))
    for by, way in ((-1, "late"), (1, "early")):
        effect = f"{name} is read one key too {way}"
        shift = functools.partial(np.roll, shift=by, axis=2)
        yield _changed("past shifted", effect, name, shift)


def _position_mistakes(name: str) -> Iterator[Mistake]:
    kind = "position offset"
    yield _changed(kind, f"{name} is 1 too high", name, lambda positions: positions + 1)
    yield _changed(kind, f"{name} is 1 too low", name, lambda positions: positions - 1)
    effect = f"{name} is not read: positions start at 0"
    yield _changed(kind, effect, name, lambda p: np.broadcast_to(np.arange(p.shape[-1]), p.shape))
    effect = f"batch row 0 of {name} is used for every batch row"
    yield _changed(kind, effect, name, functools.partial(_repeat_first, axis=0))


def _length_mistakes(evaluation: Evaluation, name: str) -> Iterator[Mistake]:
    """Yield wrong lengths of caches: wherever they are read, and where new tokens are written."""
    scatters = keys_and_values(cache_scatters(evaluation))
    for how, change in (
        ("is 1 too high", lambda lengths: lengths + 1),
        ("is 1 too low", lambda lengths: np.maximum(lengths - 1, 0)),
        ("of batch row 0 is used for every batch row", functools.partial(_repeat_first, axis=0)),
    ):
        yield _changed("cache length", f"{name} {how}", name, change)
        for what, nodes in scatters.items():
            written = [functools.partial(_write_at, evaluation, node, change) for node in nodes]
            effect = f"new {what} are written where {name} {how}"
            yield Mistake("cache length", effect, nodes[0].name, join(written))
    for what, nodes in scatters.items():
        effect = f"new {what} are not written to the cache"
        yield Mistake("cache not written", effect, nodes[0].name, join(map(skip_node, nodes)))


def _write_at(
    evaluation: Evaluation, node: onnx.NodeProto, change: ArrayChange, values: Values
) -> Mapping[str, Array]:
    """Return the cache that a TensorScatter writes at other lengths."""
    lengths = change(array_of(values, node.input[2]))
    return evaluation.compute_node(node, {**values, node.input[2]: lengths})


def value_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of leaving out biases and norms, and of wrong attention sinks."""
    added = set()
    for node in evaluation.nodes:
        if node.op_type in {"Add", "Gemm", "LayerNormalization"}:
            added.update(node.input)
        if node.op_type in NORMS:
            yield from _norm_mistakes(node)
    for name, array in evaluation.initializers.items():
        if array.ndim != 1 or array.dtype.kind != "f" or not array.any():
            continue
        if name in added:
            yield _changed("missing bias", f"{name} is not added", name, np.zeros_like)
            yield _changed("bias added twice", f"{name} is added twice", name, lambda a: 2 * a)
        if "sink" in name:
            effect = f"{name} are left out"
            yield _changed("missing sinks", effect, name, lambda a: np.full_like(a, -np.inf))
            yield _changed("wrong sinks", f"{name} are read as 0", name, np.zeros_like)


def _norm_mistakes(node: onnx.NodeProto) -> Iterator[Mistake]:
    effect = "its input is passed on as it is"
    yield Mistake("norm left out", effect, node.name, skip_node(node))
    if len(node.input) > 1:
        weight = node.input[1]
        effect = f"{weight} is not applied"
        yield Mistake("norm without weight", effect, node.name, change_value(weight, np.ones_like))


def mask_mistakes(evaluation: Evaluation, values: Values) -> Iterator[Mistake]:
    """Yield the mistakes of causal masks and windows that the graph computes from positions."""
    data_dependent = _data_dependent_values(evaluation)
    roles = input_roles(evaluation, values)
    cache = next((name for name, _, role in roles if role == "cache"), "")
    for node in evaluation.nodes:
        name = node.output[0]
        array = values.get(name)
        if node.op_type not in COMPARISONS or name in data_dependent:
            continue
        if array is None or array.ndim < 2 or array.dtype != np.bool_:
            continue
        kind = _mask_kind(node, array)
        unmasked = change_value(name, np.ones_like)
        yield Mistake(f"{kind} dropped", f"the {kind} mask is not applied", node.name, unmasked)
        shifts: list[tuple[str, Callable[[Values], int]]] = [
            ("one key too late", lambda _: 1), ("one key too early", lambda _: -1),
        ]  # fmt: skip
        if cache:
            how = "aligned as if there were no past"
            shifts.append((how, lambda values: -array_of(values, cache).shape[2]))
        for how, shift_of in shifts:
            shifted = _shift_mask(node, kind, shift_of)
            yield Mistake(f"{kind} offset", f"the {kind} mask is {how}", node.name, shifted)


def _mask_kind(node: onnx.NodeProto, array: Array) -> str:
    if node.op_type == "Trilu":
        return CAUSAL
    matrix = array.reshape(-1, *array.shape[-2:])[:1]
    if not matrix.size or matrix.all() or not matrix[0, :, 0].all():
        return "window"
    # The right edge of a window shows later keys: the last one but one query may see the last key.
    return "window" if matrix[0, -2:, -1].all() else CAUSAL


def _shift_mask(
    node: onnx.NodeProto, mask_kind: str, shift_of: Callable[[Values], int]
) -> Replacement:
    """Return a function that shifts a mask along the keys."""

    def replaced(values: Values) -> Mapping[str, Array]:
        visible = array_of(values, node.output[0])
        shifted = _shift_comparison(node, values, shift_of(values))
        if shifted is None:
            shifted = _shift_diagonals(visible, shift_of(values), beyond=mask_kind != CAUSAL)
        return {} if shifted is None else {node.output[0]: shifted}

    return replaced


def _shift_comparison(node: onnx.NodeProto, values: Values, shift: int) -> Array | None:
    """Repeat a comparison with each key's position changed by `shift`; None if not of positions."""
    compare = COMPARISONS[node.op_type]
    operands = [x for name in node.input if (x := values[name]) is not None]
    if compare is None or len(operands) != 2 or any(x.dtype.kind != "i" for x in operands):
        return None
    differences = np.asarray(operands[0] - operands[1])
    steps = np.unique(np.diff(differences, axis=-1))
    if len(steps) != 1 or abs(steps[0]) != 1:
        return None
    return np.asarray(compare(differences - shift * steps[0], 0))


def _shift_diagonals(visible: Array, shift: int, *, beyond: bool) -> Array | None:
    """Shift a mask `[..., L, S]` left by `shift` diagonals; None if it depends on more than j - i.

    `beyond` states whether keys further ahead of the query than any key of the mask are visible.
    """
    L, S = visible.shape[-2:]
    if not visible.size:
        return visible
    matrix = visible.reshape(-1, L, S)[0]
    if not (visible == matrix).all():
        return None
    by_diagonal = np.concatenate([matrix[::-1, 0], matrix[0, 1:]])  # j - i from -(L - 1) to S - 1
    diagonal = np.arange(S) - np.arange(L)[:, None] + L - 1
    if not (by_diagonal[diagonal] == matrix).all():
        return None
    shifted = diagonal - shift
    selected = by_diagonal[np.clip(shifted, 0, L + S - 2)]
    return np.broadcast_to(np.where(shifted > L + S - 2, beyond, selected), visible.shape)


def _data_dependent_values(evaluation: Evaluation) -> set[str]:
    """Return the names of values that depend on contents of graph inputs, not only on shapes."""
    initial = set(evaluation.initializers)
    dependent = {e.name for e in evaluation.proto.graph.input if e.name not in initial}
    for node in evaluation.nodes:
        if node.op_type not in {"Shape", "Size"} and not dependent.isdisjoint(node.input):
            dependent.update(node.output)
    return dependent


def precision_mistakes(evaluation: Evaluation) -> Iterator[Mistake]:
    """Yield the mistakes of rounding the operands of all matrix products to a narrower type."""
    for name, rounding in (
        ("bfloat16", round_to_bfloat16),
        ("10 mantissa bits, as TF32 and float16 have", _tf32),
    ):
        effect = f"products are computed from operands in {name}"
        outputs = functools.partial(_round_products, evaluation, rounding)
        yield Mistake("low precision", effect, "", outputs)


def _round_products(
    evaluation: Evaluation, rounding: ArrayChange, values: Values
) -> Mapping[str, Array]:
    """Return the outputs of a graph in which the floating operands of every product are rounded."""

    def rounded(array: Array) -> Array:
        return rounding(array) if array.dtype.kind == "f" else array

    steps = dict.fromkeys(("queries", "keys", "values", "weights"), lambda x, _: rounded(x))
    computed = dict(values)
    for node in evaluation.nodes:
        if node.op_type == "Attention":
            computed |= evaluation.attention(node, computed, steps)
            continue
        operands = {}
        if node.op_type in {"MatMul", "Gemm"}:
            operands = {n: rounded(a) for n in node.input if (a := computed.get(n)) is not None}
        computed |= evaluation.compute_node(node, {**computed, **operands})
    return evaluation.outputs_of(computed)


# -- changes


def _show_all(mask: Array) -> Array:
    return np.ones_like(mask) if mask.dtype == np.bool_ else np.zeros_like(mask)


def _invert(mask: Array) -> Array:
    return ~mask if mask.dtype == np.bool_ else np.where(np.isneginf(mask), 0.0, -np.inf)


def _repeat_first(array: Array, axis: int) -> Array:
    if not array.shape[axis]:
        return array
    return np.broadcast_to(np.take(array, [0], axis=axis), array.shape)


def _drop_finite_values(mask: Array) -> Array:
    return mask if mask.dtype == np.bool_ else np.where(np.isneginf(mask), mask, 0.0)


def _hide_lowest(mask: Array) -> Array:
    return mask if mask.dtype == np.bool_ else np.where(mask < -1e29, -np.inf, mask)


def _tf32(array: Array) -> Array:
    """Round to 10 mantissa bits as TF32, half to even; the result is float64."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    is_odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + np.uint32(0x0FFF) + is_odd) & np.uint32(0xFFFFE000)
    return rounded.view(np.float32).astype(np.float64)
