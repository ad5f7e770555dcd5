"""Kinds of overflows and underflows, planted in graphs so that float64 hardly notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from measuring.float16_runs import Graph, overflows
from measuring.range_edits import Edited, NoPlaceError
from measuring.range_models import CAUSAL

LARGEST = 65504.0


@dataclasses.dataclass
class Plant:
    """What was planted: words, and the names of the values and nodes that are right to blame."""

    what: str
    blame: set[str]


def _named(*nodes: NodeProto) -> set[str]:
    return {name for node in nodes for name in (node.name, *node.output)}


def scores(g: Edited, *, beyond: bool) -> Plant:
    _, product = g.attention()
    size = g.random.uniform(1.3, 6) if beyond else g.random.uniform(0.3, 0.7)
    factor = size * LARGEST / g.top(product.output[0])
    both = g.name == "whisper" or g.random.random() < 0.5
    for value in product.input[: 1 + both]:
        g.scale(value, factor ** (1 / (1 + both)))
    reader = next(n for n in g.graph.node if product.output[0] in n.input)
    if reader.op_type == "Mul" and reader.input[1] in g.weights:
        g.own(reader, 1, lambda x: x / factor)
    else:
        g.behind(product, "Mul", 1 / factor)
    return Plant(f"queries{' and keys' * both} times {factor:.3g}, the scale ÷ it", _named(product))


def softmax(g: Edited, *, beyond: bool) -> Plant:
    node, product = g.attention()
    x, small = node.input[0], beyond and g.random.random() < 0.5
    if small:
        shift = g.top(x) + g.random.uniform(17.5, 22)
        node.input[0] = g.add(node, "Sub", x, g.constant(np.float32(shift))).output[0]
        what = f"scores - {shift:.3g}, so that all exponentials are 0"
    else:
        wanted = g.random.uniform(12, 16) if beyond else g.random.uniform(5, 9)
        top = float(g.reference[x].max())
        bent = g.made(x)
        is_capped = g.name == "gemma2" and bent is not None
        factor = np.arctanh(wanted / 50) / np.arctanh(top / 50) if is_capped else wanted / top
        g.scale(product.input[0], factor)
        what = f"scores up to {wanted:.3g}"
    exp = g.add(node, "Exp", node.input[0])
    total = g.add(node, "ReduceSum", exp.output[0], g.constant(np.array([-1])), keepdims=1)
    node.op_type = "Div"
    del node.attribute[:]
    node.input[:] = [exp.output[0], total.output[0]]
    return Plant(f"no maximum subtracted, {what}", _named(exp))


def squares(g: Edited, *, beyond: bool) -> Plant:
    pows = [n for n in g.of("Pow") if float(g.array(n.input[1])) == 2]
    inner = []
    for node in pows[1:-1]:
        source = g.made(node.input[0])
        source = (
            g.made(source.input[0])
            if source is not None and source.op_type == "Reshape"
            else source
        )
        if source is not None and source.op_type == "MatMul":
            inner.append(node)
    size = g.random.uniform(4, 60) if beyond else g.random.uniform(0.2, 0.6)
    place = g.pick(["embedding", "last", *["inner"] * bool(inner) * 2])
    pow_ = {"embedding": pows[0], "last": pows[-1], "inner": g.pick(inner or pows)}[place]
    factor = (size * LARGEST) ** 0.5 / float(np.abs(g.reference[pow_.input[0]]).max())
    if place == "embedding":
        words = next(n for n in g.of("Gather") if n.input[1] == "input_ids")
        g.own(words, 0, lambda w: w * factor)
    elif place == "last":
        residual = g.made(pow_.input[0])
        assert residual is not None
        last = g.made(residual.input[1])
        if g.name in ("mixtral", "gemma2") or last is None:
            raise NoPlaceError
        g.scale(residual.input[1], factor)
    else:
        g.scale(pow_.input[0], factor)
    return Plant(f"{place} times {factor:.3g} before a norm", _named(pow_))


def mask(g: Edited, *, beyond: bool) -> Plant:
    node, _ = g.attention()
    site = g.made(node.input[0])
    assert site is not None
    number = float(g.pick([-1e9, -3.4e38, -1e6]))
    if not beyond:
        return _harmless_mask(g, site, number)
    kind = g.pick(["constant", "twice", "sum", "factor"] if g.name in CAUSAL else ["factor"])
    if kind == "constant":
        name = g.own(site, 2, lambda _: number)
        return Plant(f"masked scores are {number:.3g}, some rows are masked", {name, *_named(site)})
    if kind in ("twice", "sum"):
        number = -1e38 if kind == "twice" else -float(g.random.uniform(35000, 60000))
        name = g.constant(np.float32(number))
        mask_ = g.add(site, "Where", site.input[0], g.constant(np.float32(0)), name)
        once = g.add(site, "Add", site.input[1], mask_.output[0])
        site.op_type = "Add"
        site.input[:] = [once.output[0], mask_.output[0]]
        blame = {name, *_named(mask_)} if kind == "twice" else _named(site)
        return Plant(f"a mask of {number:.3g} is added twice", blame)
    given = g.add(site, "Cast", "attention_mask", to=1)
    given = g.add(site, "Unsqueeze", given.output[0], g.constant(np.array([1, 2])))
    inverse = g.add(site, "Sub", g.constant(np.float32(1)), given.output[0])
    name = g.constant(np.float32(number))
    bias = g.add(site, "Mul", inverse.output[0], name)
    if g.name in CAUSAL:
        site.input[1] = g.add(site, "Add", site.input[1], bias.output[0]).output[0]
    else:
        site.input[1] = bias.output[0]
    return Plant(f"(1 - mask) times {number:.3g} is added", {name, *_named(bias)})


def _harmless_mask(g: Edited, site: NodeProto, number: float) -> Plant:
    owner = site if site.op_type == "Where" else g.made(site.input[1])
    assert owner is not None
    g.own(owner, 2, lambda _: number)
    return Plant(f"masked scores are {number:.3g}, no row is masked", set())


def rope(g: Edited, *, beyond: bool) -> Plant:
    angle = next(n for n in g.of("Mul") if n.input[1].endswith("inv_freq"))
    if not beyond:
        raise NoPlaceError
    if g.random.random() < 0.5:
        start = int(g.random.integers(70_000, 300_000))
        g.inputs["position_ids"] = g.inputs["position_ids"] + start
        cast = g.made(angle.input[0])
        assert cast is not None
        return Plant(f"positions from {start} on", _named(cast))
    power = int(g.random.integers(17, 22))
    name = g.own(angle, 1, lambda w: w * 2.0**-power)
    g.behind(angle, "Div", 2.0**-power)
    return Plant(f"frequencies times 2^-{power}", {name, *_named(angle)})


def residual(g: Edited, *, beyond: bool) -> Plant:
    adds = [
        n for n in g.of("Add") if any(n.output[0] in r.input for r in g.of("LayerNormalization"))
    ]
    places = [n for n in adds if _rows(g, n.input[1]) > g.reference[n.output[0]].shape[-1]]
    first, second = sorted(g.random.choice(len(places), 2, replace=False))
    one, two = places[first], places[second]
    column = int(g.random.integers(g.reference[one.output[0]].shape[-1]))
    share = g.random.uniform(0.5, 0.9) * LARGEST
    g.scale(one.input[1], share / np.abs(g.reference[one.input[1]][..., column]).max(), column)
    g.reference = Graph(g.model).reference(g.inputs)
    before, part = (g.reference[two.input[i]][..., column] for i in (0, 1))
    at = np.unravel_index(np.argmax(np.abs(before) * np.abs(part)), before.shape)
    size = (g.random.uniform(1.1, 1.6) if beyond else g.random.uniform(0.75, 0.95)) * LARGEST
    factor = (np.sign(before[at]) * size - before[at]) / part[at]
    g.scale(two.input[1], factor, column)
    return Plant(f"channel {column} of two layers adds up to {size:.0f}", _named(two))


def _rows(g: Edited, value: str) -> int:
    try:
        node, at, _ = g.matrix(value)
    except NoPlaceError:
        return 0
    return int(g.array(node.input[at]).shape[0])


def offset(g: Edited, *, beyond: bool) -> Plant:
    node = g.pick(g.of("LayerNormalization"))
    x, axes = node.input[0], g.constant(np.array([-1]))
    far = g.random.uniform(300, 1500) if beyond else g.random.uniform(5, 20)
    wide = far / (g.random.uniform(3, 12) if beyond else 0.3)
    scaled = g.add(node, "Mul", x, g.constant(np.float32(wide / g.reference[x].std())))
    x = g.add(node, "Add", scaled.output[0], g.constant(np.float32(far))).output[0]
    square = g.add(node, "Mul", x, x)
    mean_square = g.add(node, "ReduceMean", square.output[0], axes).output[0]
    mean = g.add(node, "ReduceMean", x, axes).output[0]
    square_mean = g.add(node, "Mul", mean, mean).output[0]
    variance = g.add(node, "Sub", mean_square, square_mean).output[0]
    variance = g.add(node, "Add", variance, g.constant(np.float32(1e-5))).output[0]
    deviation = g.add(node, "Sqrt", variance).output[0]
    centred = g.add(node, "Sub", x, mean).output[0]
    normal = g.add(node, "Div", centred, deviation).output[0]
    normal = g.add(node, "Mul", normal, node.input[1]).output[0]
    bias = node.input[2]
    node.op_type = "Add"
    del node.attribute[:]
    node.input[:] = [normal, bias]
    return Plant(f"E[x²] - E[x]² of x around {far:.0f} ± {wide:.0f}", _named(square))


def experts(g: Edited, *, beyond: bool) -> Plant:
    share = g.pick(
        [n for n in g.of("Div") if "TopK" in (m.op_type for m in [g.made(n.input[0])] if m)]
    )
    behind = list(g.graph.node)[list(g.graph.node).index(share) :]
    total = next(n for n in behind if n.op_type == "ReduceSum")
    part = g.made(g.made(total.input[0]).input[0])  # type: ignore[union-attr]
    down = [n for n in behind if n.op_type == "GatherND"][1]
    more = g.random.uniform(2.5, 4)
    channel, tops = _channel(g, [part.output[0], part.input[0], total.output[0]], more)  # type: ignore[union-attr]
    ratio = tops[2] / max(tops[:2])
    size = g.random.uniform(1.03, 0.98 * ratio) if beyond else g.random.uniform(0.4, 0.8)
    factor = size * LARGEST / tops[2]

    def scaled(w: np.ndarray) -> np.ndarray:
        w = w.copy()
        w[:, channel] *= factor
        return w

    g.own(down, 0, scaled)
    g.behind(share, "Mul", more)
    smaller = np.full(g.reference[total.output[0]].shape[-1], 1 / more)
    smaller[channel] /= factor
    g.behind(g.behind(total, "Mul", smaller**0.5), "Mul", smaller**0.5)
    return Plant(f"channel {channel} of experts times {factor:.3g}, the sum ÷ it", _named(total))


def _channel(g: Edited, values: list[str], more: float) -> tuple[int, list[float]]:
    """Return the channel in which a sum is largest beside its parts, and the largest of each."""
    part, single, total = (np.abs(g.reference[v]).max(axis=0) for v in values)
    part, total = part * more, total * more
    best = int(np.argmax(total / np.maximum(part, single)))
    if total[best] < 1.06 * max(part[best], single[best]):
        raise NoPlaceError
    return best, [float(x[best]) for x in (part, single, total)]


KINDS: dict[str, Callable[..., Plant]] = {
    f.__name__: f for f in (scores, softmax, squares, mask, rope, residual, offset, experts)
}


def beyond_limits(model: onnx.ModelProto, reference: dict[str, Any]) -> Iterator[set[str]]:
    """Yield the names for each value that leaves float16, in the order of the graph."""
    weights = {t.name for t in model.graph.initializer}
    for node in model.graph.node:
        for name in (*(x for x in node.input if x in weights), *node.output):
            x = reference[name]
            if isinstance(x, np.ndarray) and x.dtype.kind == "f" and overflows(x):
                yield {name} if name in weights else _named(node)
