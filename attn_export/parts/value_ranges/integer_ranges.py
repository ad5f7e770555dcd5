"""Weights and activations of products beside integers of 8 or 4 bits: range, outliers, clipping."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attn_export.errors import UsageError
from attn_export.parts.value_ranges.float_formats import FORMATS
from attn_export.parts.value_ranges.lockstep import Lockstep
from attn_export.parts.value_ranges.rounded_run import RoundedRun, Seen
from attn_export.parts.value_ranges.streamed_graph import StreamedGraph
from attn_export.quantiser import RANGES, quantise
from attn_export.runtimes.run_options import Progress
from attn_export.tensorfile import Array, to_float64

_PRODUCTS = ("MatMul", "Gemm")
_BLOCKS = (128, 32)
_COMMON = 99.99
"""The share in percent of the elements of an activation that are not clipped by one choice."""

_DISTANT = 6.0
"""The distance from 0 in root mean squares from which on an element is an outlier."""


@dataclasses.dataclass(frozen=True)
class IntegerFacts:
    """A weight or an activation, and how well integers stand for it.

    Attributes:
        value: The name of the value.
        node: The name of the node that reads it.
        kind: ``"weight"`` or ``"activation"``.
        largest: The largest magnitude.
        spread: The largest magnitude over the root mean square.
        outliers: The share of elements that are 6 root mean squares or more from 0.
        channels: The largest magnitude of the widest channel over that of the median one.
        sqnr: The signal to noise in dB of each choice of scales.
        clipped: The share of elements beyond the scale that the graph has; None if it has none.
    """

    value: str
    node: str
    kind: str
    largest: float
    spread: float
    outliers: float
    channels: float
    sqnr: Mapping[str, float]
    clipped: float | None = None

    @property
    def best(self) -> float:
        """The signal to noise of the best choice."""
        return max(self.sqnr.values())


@dataclasses.dataclass(frozen=True)
class IntegerResult:
    """What products of a graph read, the hardest to quantise first."""

    graph: str
    dtype: str
    facts: Sequence[IntegerFacts]
    notes: Sequence[str]
    holds: bool = True

    @property
    def measured(self) -> dict[str, float]:
        """What limits may be set for."""
        return {"sqnr": min(facts.best for facts in self.facts)}


def integer_facts(
    graph: StreamedGraph, sets: Sequence[Mapping[str, Array]], dtype: str, progress: Progress
) -> list[IntegerFacts]:
    """Return facts on what products read, the hardest to quantise first.

    `dtype`: ``"int8"`` or ``"int4"``.
    """
    found = [*_weights(graph, dtype), *_Activations(graph, dtype).facts(sets, progress)]
    if not found:
        raise UsageError(
            f"{graph.path} has no MatMul or Gemm in floats; --dtype float16 takes any graph"
        )
    return sorted(found, key=lambda facts: facts.best)


def _weights(graph: StreamedGraph, dtype: str) -> Iterator[IntegerFacts]:
    weights = graph.weights()
    for n, node in enumerate(graph.nodes):
        if node.op_type not in _PRODUCTS or node.input[1] not in weights:
            continue
        array = to_float64(graph.weight(node.input[1]))
        turned = any(a.name == "transB" and a.i for a in node.attribute)
        if array.ndim == 2 and np.isfinite(array).all():
            yield _facts_of_weight(
                (node.input[1], graph.name_of(n)), array.T if turned else array, dtype
            )


def _facts_of_weight(names: tuple[str, str], weight: Array, dtype: str) -> IntegerFacts:
    """Return facts on a weight `[in, out]`."""
    power, high = float(np.square(weight).sum()), RANGES[dtype][1]
    largest = float(np.abs(weight).max(initial=0.0))
    sqnr = {"one scale": _decibels(power, _noise(weight, largest / high, dtype))}
    blocks = {f"blocks of {size}": size for size in _BLOCKS if not len(weight) % size}
    for name, size in {"a scale per channel": 0, **blocks}.items():
        rounded = quantise(weight.astype(np.float32), dtype, size, symmetric=True)
        difference = rounded.dequantised().astype(np.float64) - weight
        sqnr[name] = _decibels(power, float(np.square(difference).sum()))
    mean = math.sqrt(power / weight.size) if weight.size else 0.0
    channels = np.abs(weight).max(0)
    return IntegerFacts(
        *names, "weight", largest, largest / mean if mean else 0.0,
        float((np.abs(weight) >= _DISTANT * mean).mean()) if mean else 0.0,
        float(channels.max() / (np.median(channels) or 1.0)), sqnr,
    )  # fmt: skip


class _Activations:
    """What products read beside weights, over all sets of inputs, in two passes."""

    def __init__(self, graph: StreamedGraph, dtype: str) -> None:
        self._graph, self._dtype, self._high = graph, dtype, RANGES[dtype][1]
        self._lockstep = Lockstep(graph, FORMATS["float16"])
        self._readers = dict(self._read_by_products())
        self._given = dict(self._given_scales())
        self._largest: dict[str, float] = defaultdict(float)
        self._common: dict[str, float] = defaultdict(float)
        self._widest: dict[str, Array] = {}
        self._sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def facts(
        self, sets: Sequence[Mapping[str, Array]], progress: Progress
    ) -> Iterator[IntegerFacts]:
        """Yield the facts: the first pass finds the ranges, the second the noise."""
        progress.expect(2 * len(sets))
        for observe in (self._add_range, self._add_noise):
            for inputs in sets:
                self._lockstep.run(inputs, [self._lockstep.wide()], observe)
                progress.advance("looking at activations")
        for name, sums in self._sums.items():
            power, count = sums.pop("power"), sums.pop("count")
            distant, clipped = sums.pop("outliers"), sums.pop("clipped", None)
            mean, channels = math.sqrt(power / count), self._widest[name]
            yield IntegerFacts(
                name, self._graph.name_of(self._readers[name]), "activation",
                self._largest[name], self._largest[name] / mean if mean else 0.0, distant / count,
                float(channels.max() / (np.median(channels) or 1.0)),
                {choice: _decibels(power, noise) for choice, noise in sums.items()},
                None if clipped is None else clipped / count,
            )  # fmt: skip

    def _read_by_products(self) -> Iterator[tuple[str, int]]:
        weights = self._graph.weights()
        for n, node in enumerate(self._graph.nodes):
            names = node.input[:2] if node.op_type in _PRODUCTS else ()
            yield from ((name, n) for name in names if name not in weights)
            if node.op_type == "QuantizeLinear" and node.input[0] not in weights:
                yield node.input[0], n

    def _add_range(self, _: RoundedRun, seen: Seen) -> None:
        if seen.name not in self._readers or not seen.made.size or seen.made.dtype.kind != "f":
            return
        sizes = np.abs(seen.made)
        name, width = seen.name, sizes.shape[-1] if sizes.ndim else 1
        rows = sizes.reshape(-1, width)
        self._largest[name] = max(self._largest[name], float(sizes.max()))
        self._common[name] = max(self._common[name], float(np.percentile(sizes, _COMMON)))
        widest = rows.max(0)
        known = self._widest.get(name, widest)
        self._widest[name] = np.maximum(known, widest) if known.shape == widest.shape else widest

    def _add_noise(self, _: RoundedRun, seen: Seen) -> None:
        if seen.name not in self._largest or seen.made.dtype.kind != "f" or not seen.made.size:
            return
        x, sums = seen.made, self._sums[seen.name]
        sums["power"] += float(np.square(x).sum())
        sums["count"] += x.size
        mean = math.sqrt(float(np.square(x).mean()))
        sums["outliers"] += int((np.abs(x) >= _DISTANT * mean).sum()) if mean else 0
        rows = np.abs(x).max(-1, keepdims=True) if x.ndim else np.abs(x)
        scales: dict[str, float | Array] = {
            "one scale": self._largest[seen.name] / self._high,
            f"one scale, {_COMMON} % within": self._common[seen.name] / self._high,
            "a scale per token": np.where(rows > 0, rows, 1.0) / self._high,
        }
        given = self._given.get(seen.name)
        if given is not None:
            scales["the graph's scale"] = given
            low, high = RANGES[self._dtype]
            steps = np.rint(x / given)
            sums["clipped"] += int(((steps < low) | (steps > high)).sum())
        for choice, scale in scales.items():
            sums[choice] += _noise(x, scale, self._dtype)

    def _given_scales(self) -> Iterator[tuple[str, float]]:
        """Yield the values that QuantizeLinear reads, with its scale where it is one number."""
        weights = self._graph.weights()
        for node in self._graph.nodes:
            if node.op_type == "QuantizeLinear" and node.input[1] in weights:
                scale = self._graph.weight(node.input[1])
                if scale.size == 1:
                    yield node.input[0], float(scale.reshape(()))


def _noise(x: Array, scale: float | Array, dtype: str) -> float:
    """Return the sum of squared errors of an array that is rounded to integers times a scale."""
    low, high = RANGES[dtype]
    steps = scale if isinstance(scale, np.ndarray) else scale or 1.0
    return float(np.square(np.clip(np.rint(x / steps), low, high) * steps - x).sum())


def _decibels(power: float, noise: float) -> float:
    return 10 * math.log10(power / noise) if power > 0 and noise > 0 else math.inf
