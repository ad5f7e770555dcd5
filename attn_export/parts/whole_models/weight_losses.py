"""What rounding costs a quantised model: by cause, by layer and by projection.

A float64 copy of the model before rounding runs with some of its products rounded. Runs in which a
layer alone is rounded begin there, from what the float run gives: all of them together take half as
long as one for each layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attn_export.bundle.quality_vectors import Sums
from attn_export.parts.whole_models.unit_weights import in_step, is_by_unit, layers_of
from attn_export.quality import Loss, Quality
from attn_export.quantiser import BLOCK_LARGEST
from attn_export.results import Arrays
from attn_export.tensorfile import Array

DEAREST = 4
"""The number of layers of which each projection is measured."""

_PIECE = 2**24
"""The number of weights that are dequantised together."""


def products_of(model: nn.Module, changed: nn.Module, block: int) -> list[Product]:
    """Return the products of a model that have other weights in a changed copy of it.

    `block`: The inputs that are rounded together; 0 for none.
    """
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)):
            continue
        weight = changed.get_submodule(path).get_parameter("weight").detach()
        if not torch.equal(weight, module.weight):
            rows = weight.T if isinstance(module, Conv1D) else weight
            outputs, inputs = rows.shape
            own = block if block and inputs % block == 0 else 0
            found.append(Product(path, rows.__getitem__, (outputs, inputs), own))
    return found


@dataclasses.dataclass(frozen=True)
class Product:
    """A linear layer of a model, and what it multiplies if it is rounded.

    Attributes:
        path: That of the layer in the model.
        rows: Returns rows of its rounded weight, `[out, in]`.
        shape: The numbers of outputs and inputs.
        block: The inputs that are rounded to 8 bits together, where they are; 0 for none.
        stored_bytes: The bytes of its integers and scales, if they are known.
        order: That of the inputs whose blocks are rounded; None for their own.
    """

    path: str
    rows: Callable[[slice], Tensor]
    shape: tuple[int, int]
    block: int
    stored_bytes: int = 0
    order: Array | None = None

    def round_input(self, x: Tensor) -> Tensor:
        """Round the input to 8 bits in blocks of its last axis, as kernels do."""
        if self.order is None:
            return _round_in_blocks(x, self.block)
        rounded, order = torch.empty_like(x), torch.from_numpy(self.order)
        rounded[..., order] = _round_in_blocks(x[..., order], self.block)
        return rounded

    def multiply(self, x: Tensor, bias: Tensor | None, *, rounds_input: bool) -> Tensor:
        """Return the product with the rounded weight, and with the input rounded if wanted."""
        if rounds_input and self.block:
            x = self.round_input(x)
        outputs, inputs = self.shape
        step = max(_PIECE // inputs, 1)
        pieces = (slice(at, at + step) for at in range(0, outputs, step))
        result: Tensor = torch.cat([x @ self.rows(piece).to(x.dtype).T for piece in pieces], -1)
        return result if bias is None else result + bias


def _round_in_blocks(x: Tensor, block: int) -> Tensor:
    blocks: Tensor = x.unflatten(-1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / BLOCK_LARGEST, 1.0)
    return ((blocks / scale).round() * scale).flatten(-2)


@dataclasses.dataclass
class _Run:
    """A run of the copy with some of its products rounded.

    Attributes:
        rounded: These products, by path.
        start: The first layer that differs from the float run.
        passed: What each layer gives in the float run, and the keys and values that it caches.
    """

    rounded: Mapping[str, Product] = dataclasses.field(default_factory=dict)
    rounds_inputs: bool = False
    start: int = 0
    passed: dict[int, Any] = dataclasses.field(default_factory=dict)
    is_float: bool = False


_RUN: ContextVar[_Run | None] = ContextVar("weight_losses", default=None)


class WeightLosses:
    """Distances of the first output from the float model with some of its weights rounded.

    `model`: A float64 copy of the model before rounding, which gets hooks.
    `call`: Runs it, and returns its outputs by name.
    `cases`: The inputs of the cases in which distances are measured.
    """

    def __init__(
        self, model: nn.Module, call: Callable[[Arrays], Arrays], products: Sequence[Product],
        cases: Sequence[Arrays],
    ) -> None:  # fmt: skip
        self._model, self._call, self._cases = model, call, cases
        self.products = {product.path: product for product in products}
        layers = layers_of(model)
        paths = {id(module): path for path, module in model.named_modules()}
        self._layer_of = {
            paths[id(inner)]: at
            for at, layer in enumerate(layers)
            for inner in layer.modules()
            if paths[id(inner)] in self.products
        }
        self._names = {at: paths[id(layer)] for at, layer in enumerate(layers)}
        for path in self.products:
            model.get_submodule(path).register_forward_hook(functools.partial(_rounded, path))
        for number, layer in enumerate(layers):
            vars(layer)["forward"] = functools.partial(_skipping, number, layer.forward)
        self._passed: list[dict[int, Any]] = [{} for _ in cases]
        floats = [_Run(passed=passed, is_float=True) for passed in self._passed]
        self.floats = self._made([floats])[0]

    def groups(self) -> dict[str, list[str]]:
        """Return the paths of the products in each layer, and those outside by themselves."""
        found = dict[str, list[str]]()
        for path in self.products:
            layer = self._layer_of.get(path)
            found.setdefault(path if layer is None else self._names[layer], []).append(path)
        return found

    def of(self, groups: Sequence[Sequence[str]], *, rounds_inputs: bool = False) -> list[Loss]:
        """Return the loss if the products of a group alone are rounded, for each group."""
        return [
            self.loss("", outputs)
            for outputs in self.outputs(
                [{path: self.products[path] for path in group} for group in groups],
                rounds_inputs=rounds_inputs,
            )
        ]

    def outputs(
        self, choices: Sequence[Mapping[str, Product]], *, rounds_inputs: bool = False
    ) -> list[list[Arrays]]:
        """Return the outputs of each case, for each choice of products that are rounded."""
        return self._made([self._runs(rounded, rounds_inputs) for rounded in choices])

    def _runs(self, rounded: Mapping[str, Product], rounds_inputs: bool) -> list[_Run]:
        """Return the runs of each case with these products rounded."""
        after = len(self._names)
        start = min((self._layer_of.get(path, after) for path in rounded), default=after)
        return [_Run(rounded, rounds_inputs, start, passed) for passed in self._passed]

    def loss(self, part: str, outputs: Sequence[Arrays]) -> Loss:
        """Return the distance of the first output of some runs, one for each case."""
        sums, name = Sums(), next(iter(self.floats[0]))
        for f, q in zip(self.floats, outputs, strict=True):
            sums.add(f[name], q[name], as_logits=True)
        distance, logits = sums.distance(part), sums.logits(part)
        return Loss(part, distance.sqnr, logits.top1)

    def split(self, quality: Quality, *, rounds_inputs: bool, more: Sequence[Loss] = ()) -> Quality:
        """Return distances with where they come from, before what runtimes give.

        `more`: Losses by further causes.
        """
        causes = [("weights alone", False), ("with rounded inputs", True)][: 1 + rounds_inputs]
        made = self._made([self._runs(self.products, rounds) for _, rounds in causes])
        found = [self.loss(name, outputs) for (name, _), outputs in zip(causes, made, strict=True)]
        layers, projections = self.by_layer()
        return dataclasses.replace(
            quality, causes=(*found, *more), layers=tuple(layers), projections=tuple(projections)
        )

    def by_layer(self) -> tuple[list[Loss], list[Loss]]:
        """Return the losses of layers, and of projections in the dearest of them, dearest first."""
        groups = self.groups()
        layers = self._sorted(groups, self.of(list(groups.values())))
        within = [
            path for each in layers[:DEAREST] for path in groups[each.part]
            if len(groups[each.part]) > 1
        ]  # fmt: skip
        return layers, self._sorted(within, self.of([[path] for path in within]))

    def _sorted(self, names: Any, losses: Sequence[Loss]) -> list[Loss]:
        named = (dataclasses.replace(x, part=n) for n, x in zip(names, losses, strict=True))
        return sorted(named, key=lambda loss: loss.sqnr)

    def _made(self, runs: Sequence[Sequence[_Run]]) -> list[list[Arrays]]:
        """Return the outputs of runs, each of which is a list of one for each case."""
        flat = [
            functools.partial(self._make, run, case)
            for of_cases in runs
            for run, case in zip(of_cases, self._cases, strict=True)
        ]
        made = in_step(flat) if is_by_unit(self._model) else [make() for make in flat]
        count = len(self._cases)
        return [made[at : at + count] for at in range(0, len(made), count)]

    def _make(self, run: _Run, inputs: Arrays) -> Arrays:
        token = _RUN.set(run)
        try:
            return self._call(inputs)
        finally:
            _RUN.reset(token)


def _rounded(path: str, module: Any, given: tuple[Tensor, ...], _: Tensor) -> Tensor | None:
    """Return what a linear layer gives with its rounded weight, if it has it in this run."""
    run = _RUN.get()
    product = run.rounded.get(path) if run else None
    if run is None or product is None:
        return None
    bias = getattr(module, "bias", None)
    return product.multiply(given[0], bias, rounds_input=run.rounds_inputs)


def _skipping(number: int, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run a layer, unless it gives what it gives in the float run."""
    run = _RUN.get()
    caches = (getattr(value, "new", None) for value in (*given, *named.values()))
    new = next((cached for cached in caches if isinstance(cached, dict)), None)
    cached = {} if new is None else new
    if run is None or run.is_float or number >= run.start:
        before = set(cached)
        result = forward(*given, **named)
        if run is not None and run.is_float:
            run.passed[number] = result, {at: cached[at] for at in set(cached) - before}
        return result
    result, more = run.passed[number]
    cached.update(more)
    return result
