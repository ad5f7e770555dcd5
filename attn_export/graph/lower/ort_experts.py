"""Mixtures of experts as `MoE` of ONNX Runtime, which computes a token by its experts alone.

In the graph every expert computes all tokens, and the outputs that a token did not ask for are
multiplied by 0. `MoE` takes logits, of whose softmax it keeps the largest shares
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). Shares of any other
kind are given as their logarithms, and their sum is multiplied again.

Legend: T tokens, E experts, K experts of a token, H hidden size, I size between the products of an
expert.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from attn_export.dialect_names import MICROSOFT
from attn_export.graph.ir_helpers import (
    constant_array,
    constant_numbers,
    dims,
    nodes_of,
    producer_of,
    reference_model,
    value_before,
)
from attn_export.graph.lower.node_builder import Builder, take_over

_TOKENS = 3
"""The number of tokens of a trial."""

_SPREAD = 4.0
"""The size of what reaches the activation in a trial, which crosses limits such as 7."""

_MOST_VALUES = 40
"""The largest number of values from which an activation or the shares are computed."""

_Values = Mapping[ir.Value, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Experts:
    """The values of a mixture of experts in a graph.

    Attributes:
        x: The tokens, `[T, H]`.
        shares: The factors of the experts' outputs, `[T, E]`, of which K are not 0.
        weights: The weights of both products, `[E, 2I, H]` and `[E, H, I]`.
        biases: What is added to the products, `[E, 2I, 1]` and `[E, H, 1]`, or None.
        hidden: The first products, with their bias, `[E, 2I, T]`.
        inner: What the second products read, `[E, I, T]`.
        result: `[T, H]`.
    """

    x: ir.Value
    shares: ir.Value
    k: int
    weights: tuple[ir.Value, ir.Value]
    biases: tuple[ir.Value | None, ir.Value | None]
    hidden: ir.Value
    inner: ir.Value
    result: ir.Value


def fuse_experts(model: ir.Model) -> None:
    """Replace mixtures of experts whose numbers `MoE` returns."""
    for node in nodes_of(model, "ReduceSum"):
        experts = _read(node)
        activation = None if experts is None else _activation(experts)
        if experts is not None and activation is not None:
            _replace(model, experts, activation)


def _replace(model: ir.Model, e: _Experts, activation: Mapping[str, float]) -> None:
    node = e.result.producer()
    assert node is not None  # which was read
    op = Builder(model, node)
    biases = [None if x is None else op("Squeeze", x, op.ints(-1)) for x in e.biases]
    logits, normalised = _logits(e) or (op("Log", e.shares), None)
    result = op(
        "MoE", e.x, logits, e.weights[0], biases[0], e.weights[1], biases[1], domain=MICROSOFT,
        k=e.k, activation_type="swiglu", swiglu_fusion=1,
        normalize_routing_weights=int(normalised is not False), **activation,
    )  # fmt: skip
    if normalised is None:
        result = op("Mul", result, op("ReduceSum", e.shares, op.ints(-1), keepdims=1))
    # ONNX Runtime 1.31.1 gives it the buffer of its first input, which it reads afterwards, if no
    # node reads that later.
    take_over(e.result, op("Where", op.array(np.array([True])), result, e.x))


# -- reading --------------------------------------------------------------------------------------


def _read(total: ir.Node) -> _Experts | None:
    """Return the mixture of experts that a sum over the experts ends."""
    product = producer_of(total.inputs[0], "Mul")
    readers = [use.node for use in total.outputs[0].uses()]
    if product is None or len(readers) != 1 or readers[0].op_type != "Transpose":
        return None
    if constant_numbers(total.inputs[1]) != [0] or total.attributes.get_int("keepdims"):
        return None
    for out, factor in itertools.permutations(product.inputs):
        second, shares = _product(out), value_before(value_before(factor, "Unsqueeze"), "Transpose")
        inner = None if second is None else second.inputs[1]
        hidden = None if inner is None else _first_product(inner)
        first = _product(hidden)
        x = None if first is None else value_before(first.inputs[1], "Transpose")
        if second is None or shares is None or inner is None or hidden is None or first is None:
            continue
        k, weights = _count(shares), [node.inputs[0] for node in (first, second)]
        if k and x is not None:
            biases, (w1, w2) = (_bias(hidden), _bias(out)), weights
            assert w1 is not None
            assert w2 is not None
            return _Experts(x, shares, k, (w1, w2), biases, hidden, inner, readers[0].outputs[0])
    return None


def _product(value: ir.Value | None) -> ir.Node | None:
    """Return the product with weights `[E, out, in]` that a value is, before a bias."""
    add = producer_of(value, "Add")
    node = producer_of(value if add is None else add.inputs[0], "MatMul")
    weight = None if node is None else node.inputs[0]
    if weight is None or weight.const_value is None or len(dims(weight)) != 3:
        return None
    return node if weight.dtype == ir.DataType.FLOAT else None


def _bias(value: ir.Value | None) -> ir.Value | None:
    add = producer_of(value, "Add")
    return None if add is None else add.inputs[1]


def _first_product(inner: ir.Value) -> ir.Value | None:
    """Return the products, with their bias, from which an activation is computed."""
    # A sum with a bias comes before the product in it.
    return next((x for x in _before(inner) if _product(x) is not None), None)


def _count(shares: ir.Value) -> int:
    """Return how many experts a token has, where shares are put into places `[T, K, E]`, or 0."""
    placed = value_before(shares, "ReduceSum")
    size = dims(placed)[1:2] if placed is not None and len(dims(placed)) == 3 else ()
    return size[0] if size and isinstance(size[0], int) else 0


def _before(value: ir.Value) -> list[ir.Value]:
    """Return the values that are no constants from which a value is computed, the nearest first."""
    found = [value]
    for x in found:
        node = x.producer()
        if node is None or _product(x) is not None or len(found) > _MOST_VALUES:
            continue
        inputs = (y for y in node.inputs if y is not None and y.const_value is None)
        found += [y for y in dict.fromkeys(inputs) if y not in found]
    return found


# -- trials ---------------------------------------------------------------------------------------


def _activation(e: _Experts) -> dict[str, float] | None:
    """Return the attributes with which `MoE` gives the same numbers in a trial, or None."""
    random = np.random.default_rng(0)
    E, _, H = _sizes(e.weights[0])
    given = {e.x: _drawn(random, (_TOKENS, H)), e.shares: _shares(random, E, e.k)}
    for weight, size in zip(e.weights, (_SPREAD, 1.0), strict=True):
        given[weight] = _weights(random, _sizes(weight), size)
    given |= {b: _drawn(random, _sizes(b)) for b in e.biases if b is not None}
    hidden, inner, result = _run(given, (e.hidden, e.inner, e.result)) or (None,) * 3
    if hidden is None or inner is None or result is None:
        return None
    numbers = sorted({abs(x) for x in _constants(e)})
    for alpha, beta, limit in itertools.product(
        [1.0, *numbers], [0.0, *numbers], [np.inf, *numbers]
    ):
        if _same(_swiglu(hidden, alpha, beta, limit), inner) and _same(
            _sum(e, given, inner), result
        ):
            found = {"activation_alpha": alpha, "activation_beta": beta}
            return found if limit == np.inf else {**found, "swiglu_limit": limit}
    return None


def _swiglu(hidden: np.ndarray, alpha: float, beta: float, limit: float) -> np.ndarray:
    """Return the activation of `MoE`, `[E, I, T]`, of which every other row is a gate."""
    gates, linear = np.minimum(hidden[:, ::2], limit), hidden[:, 1::2].clip(-limit, limit)
    given: np.ndarray = gates / (1 + np.exp(-alpha * gates)) * (linear + beta)
    return given


def _sum(e: _Experts, given: _Values, inner: np.ndarray) -> np.ndarray:
    """Return the sum of the experts' outputs."""
    bias = e.biases[1]
    out = given[e.weights[1]] @ inner + (0 if bias is None else given[bias])
    total: np.ndarray = np.einsum("eht,te->th", out, given[e.shares])
    return total


def _logits(e: _Experts) -> tuple[ir.Value, bool] | None:
    """Return the logits of whose softmax the shares are the largest, and if these add up to 1."""
    E, random = _sizes(e.weights[0])[0], np.random.default_rng(1)
    logits = 2 * _drawn(random, (_TOKENS, E))
    likely = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    largest = likely * (likely >= np.sort(likely)[:, [-e.k]])
    for value in _before(e.shares)[1:]:
        found = _run({value: logits}, (e.shares,)) if dims(value)[1:] == (E,) else None
        for normalised in (False, True):
            sums = largest.sum(-1, keepdims=True) if normalised else 1
            if found and _same(found[0], largest / sums):
                return value, normalised
    return None


def _run(given: _Values, wanted: tuple[ir.Value, ...]) -> list[np.ndarray] | None:
    """Return values of the graph as ONNX's reference computes them, or None if it cannot."""
    nodes, values, constants = set[ir.Node](), [*wanted], dict[ir.Value, np.ndarray]()
    for x in values:
        node, array = x.producer(), constant_array(x) if x not in given else None
        if array is not None:
            constants[x] = array
        elif x not in given and (node is None or node.domain or len(nodes) > _MOST_VALUES):
            return None
        elif x not in given and node not in nodes and node is not None:
            nodes.add(node)
            values += [y for y in node.inputs if y is not None]
    graph = next(iter(nodes)).graph if nodes else None
    order = [node for node in graph or () if node in nodes]
    inputs = {**given, **constants}
    try:
        model = reference_model(order, inputs, wanted)
        return list(model.run(None, {str(x.name): array for x, array in inputs.items()}))
    except Exception:  # graphs from other tools may hold anything
        return None


def _constants(e: _Experts) -> Iterator[float]:
    """Yield the numbers that the activation reads."""
    for value in _before(e.inner):
        node = value.producer()
        for x in () if node is None else node.inputs:
            tensor = None if x is None else x.const_value
            if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.size == 1:
                yield float(tensor.numpy().item())


def _shares(random: np.random.Generator, experts: int, k: int) -> np.ndarray:
    """Return random shares `[T, E]`, of which K are not 0."""
    order = random.permuted(np.tile(np.arange(experts), (_TOKENS, 1)), axis=1)
    return (0.1 + random.random((_TOKENS, experts), np.float32)) * (order < k)


def _weights(random: np.random.Generator, shape: tuple[int, ...], size: float) -> np.ndarray:
    """Return random weights, those of neighbouring experts moved by a row, in little memory."""
    E, rows, columns = shape
    table = _drawn(random, (E + rows, columns)) * np.float32(size * columns**-0.5)
    return np.lib.stride_tricks.sliding_window_view(table, rows, axis=0)[:E].transpose(0, 2, 1)


def _drawn(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape, np.float32)


def _sizes(value: ir.Value) -> tuple[int, ...]:
    return tuple(int(str(size)) for size in dims(value))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    close = one.shape == other.shape and np.abs(one - other).max() <= 1e-4 * np.abs(other).max()
    return bool(close)
