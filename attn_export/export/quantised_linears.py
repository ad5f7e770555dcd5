"""Linear layers whose weights are integers: rounded in the module, and stored so in its graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from attn_export.errors import ExportError, UsageError, WeightsError, counted, first_few, printable
from attn_export.export.mapped_weights import PARTS
from attn_export.export.module_state import copy_module
from attn_export.graph.ir_helpers import (
    add_initializer,
    add_lazy,
    nodes_of,
    optional_input,
    set_type,
)
from attn_export.graph.lower.node_builder import Builder, take_over
from attn_export.quality import FLOATING, Budget, kept_notes
from attn_export.quantiser import NEAREST, ORDER, QuantisedWeight, quantise

_BLOCKS = {"int4": (32, 16), "int8": (0,)}
"""The numbers of inputs that may share a scale, by the dtype of weights; 0 for all of an output."""

WIDEST = "int8"
"""The widest type of integers."""

_LEAST_SQNR = {"int4": 6.0, "int8": 20.0}
"""The default budget in dB. Outputs sum up what all layers round, and random weights show most."""


def default_budget(dtype: str) -> Budget:
    """Return the limit of the distance from the weights before, if the user gives none."""
    return Budget("sqnr", _LEAST_SQNR[dtype])


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A weight that is rounded, and how it lies in memory as `[in, out]`: in elements."""

    weight: QuantisedWeight
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_read_by(self, array: np.ndarray) -> bool:
        """Return whether a view of the weight is `[in, out]`, as its integers are."""
        sizes = zip(array.shape, array.strides, self.strides, strict=False)
        return array.shape == self.shape and all(
            size == 1 or stride == own * array.itemsize for size, stride, own in sizes
        )


class IntegerLinears:
    """Weights of linear layers that are integers in the graphs of their module."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, QuantisedWeight, bool]] = []
        """The modules that have them, their names there, and whether they are `[out, in]` there."""
        self._stored: dict[int, _Stored] = {}

    def located(self) -> Self:
        """Find the addresses of the parameters, as arrays of a captured graph are views of them.

        They differ while a module is captured whose weights are not in memory.
        """
        self._stored.clear()
        for layer, name, weight, by_output in self._places:
            parameter = layer.get_parameter(name).detach()
            rows = parameter.T if by_output else parameter
            self._stored[rows.data_ptr()] = _Stored(weight, tuple(rows.shape), rows.stride())
        return self

    def _of(self, array: np.ndarray) -> _Stored | None:
        return self._stored.get(array.__array_interface__["data"][0])

    def kind_of(self, array: np.ndarray) -> object:
        """Return how a weight is stored; those that are stored in one way can lie side by side."""
        stored = self._of(array)
        if stored is None:
            return None
        weight = stored.weight
        order = None if weight.order is None else weight.order.tobytes()
        return weight.dtype, weight.block, order

    def store(self, model: ir.Model) -> list[str]:
        """Store the weights of a graph that are rounded as integers.

        Returns:
            The names of those that it reads in another way than products do: they stay floating.
        """
        self.located()
        for node in nodes_of(model, "Gemm"):
            self._write_out(model, node)
        stored: dict[str, list[QuantisedWeight]] = {}
        left: list[str] = []
        for name, value in model.graph.initializers.items():
            if value.dtype != ir.DataType.FLOAT or value.const_value is None:
                continue
            arrays = value.meta.get(PARTS) or [value.const_value.numpy()]
            of = [self._of(array) for array in arrays]
            parts = [each for each in of if each is not None]
            if not parts or len(parts) < len(of):
                continue
            is_product = all(use.node.op_type == "MatMul" and use.idx == 1 for use in value.uses())
            is_product |= parts[0].weight.order is None  # else rows are in another order
            are_rows = (part.is_read_by(array) for part, array in zip(parts, arrays, strict=True))
            if is_product and all(are_rows):
                stored[name] = [part.weight for part in parts]
            else:
                left.append(name)
        _store_integers(model, stored)
        return left

    def _write_out(self, model: ir.Model, node: ir.Node) -> None:
        """Replace the Gemm of a linear layer, whose weight is rounded, by MatMul and Add."""
        x, weight, bias = (optional_input(node, index) for index in range(3))
        plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        if weight is None or weight.const_value is None or len(weight.uses()) > 1 or not plain:
            return
        array = weight.const_value.numpy()
        turned = node.attributes.get_int("transA", 0)
        if self._of(array) is None or x is None or turned:
            return
        if node.attributes.get_int("transB", 0):
            weight.const_value = ir.tensor(array.T, name=weight.name)
            weight.shape = ir.Shape(array.T.shape)
        op, out = Builder(model, node), node.outputs[0]
        product = set_type(op("MatMul", x, weight), ir.DataType.FLOAT, out.shape)
        take_over(out, product if bias is None else op("Add", product, bias))
        model.graph.remove(node, safe=True)


class QuantisedLinears(IntegerLinears):
    """The weights of a module's linear layers, rounded in place.

    Those of `nn.MultiheadAttention` are rounded, too. Weights that other layers share stay
    floating, except that of the `head`, which gets one of its own.

    Attributes:
        dtype: The type of most weights.
        kept: The types of those that have another one, by the paths of their modules.
        places: The modules whose weights are rounded, by path, and the names of weights there.
        notes: What was rounded, for the report.
    """

    def __init__(
        self, module: nn.Module, dtype: str, *, by_input: tuple[type[nn.Module], ...] = (),
        head: nn.Module | None = None, keep: Mapping[str, str] | None = None,
        rounding: str = NEAREST,
    ) -> None:  # fmt: skip
        """Round the weights.

        `by_input`: Further linear layers, whose weight is `[in, out]`.
        `keep`: Types of other weights, by names of modules, or ends or other parts of them: of
            several that fit, the last one counts.
        `rounding`: How scales of blocks are chosen.
        """
        if dtype not in _BLOCKS:
            raise UsageError(f"weights_dtype is {', '.join(_BLOCKS)} or none; got {dtype!r}")
        super().__init__()
        self.dtype, self._by_input, self._rounding = dtype, by_input, rounding
        self.places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._floats: list[tuple[nn.Module, str, nn.Parameter]] = []
        places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        fitting = [
            (path, layer, name)
            for path, layer in module.named_modules()
            for name in _names_of(layer, by_input)
            if layer.get_parameter(name).dtype == torch.float32
            and (layer is head or places[id(layer.get_parameter(name))] == 1)
        ]
        self.kept: dict[str, str] = {}
        for part, of_part in (keep or {}).items():
            # A part of a path, of whole words, is that of a module or of what holds it.
            paths = [path for path, *_ in fitting if f".{part}." in f".{path}."]
            self.kept |= dict.fromkeys(paths, of_part)
            if of_part not in (FLOATING, *_BLOCKS):
                given, types = printable(f"{part}={of_part}", 60), ", ".join(_BLOCKS)
                raise UsageError(f"keep {given!r}: the type is {types} or {FLOATING}")
            if not paths:
                raise UsageError(
                    f"keep {printable(part, 40)!r}: no weight that would be rounded is of this "
                    f"name; they are {first_few([path for path, *_ in fitting])}"
                )
        for path, layer, name in fitting:
            own_dtype = self.kept.get(path, dtype)
            if own_dtype != FLOATING:
                by_output = not isinstance(layer, by_input)
                weight = self.replace(
                    layer, name, self.form(path, layer, name, own_dtype), by_output
                )
                self._places.append((layer, name, weight, by_output))
                self.places.setdefault(path, []).append((layer, name))
        if not self._places:
            raise ExportError(
                "there are no linear layers in float32 to quantise; leave out --weights-dtype"
            )
        own = [x for _, _, x, _ in self._places if x.dtype == dtype]
        blocks = sorted({x.block for x in own if x.is_blocked})
        block = f"in blocks of {' and '.join(map(str, blocks))}" if blocks else "by output"
        share = sum(x.integers.size for x in own) / sum(x.numel() for x in module.parameters())
        self.notes = (
            f"{counted(len(own), 'weight')}, {share:.0%} of all numbers, are "
            f"{dtype} {block}; embeddings, norms and biases stay floating",
            *kept_notes(self.kept),
        )

    def form(self, path: str, layer: nn.Module, own_name: str, dtype: str) -> QuantisedWeight:
        """Return a weight of the module as integers."""
        name = f"{path}.{own_name}".lstrip(".")
        weight = self.read(layer, own_name)
        rows = weight.numpy() if isinstance(layer, self._by_input) else weight.numpy().T
        block = next((b for b in _BLOCKS[dtype] if not b or len(rows) % b == 0), None)
        if block is None:
            raise ExportError(
                f"{name} has {len(rows)} inputs, no multiple of 16; give --weights-dtype int8"
            )
        try:
            return quantise(rows, dtype, block, self._rounding)
        except ValueError as error:
            raise WeightsError(f"the weight {name} cannot be quantised: {error}") from error

    def read(self, layer: nn.Module, name: str) -> Tensor:
        """Return a weight of the module."""
        return layer.get_parameter(name).detach()

    def replace(
        self, layer: nn.Module, name: str, weight: QuantisedWeight, by_output: bool
    ) -> QuantisedWeight:
        """Let a layer have a weight that is rounded, and return what is stored of it."""
        self._floats.append((layer, name, layer.get_parameter(name)))
        exact = weight.by_output() if by_output else weight.dequantised()
        setattr(layer, name, nn.Parameter(torch.from_numpy(exact), requires_grad=False))
        return weight

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Let the module have its weights before rounding in this block."""
        parameters = [(layer.get_parameter(name), before) for layer, name, before in self._floats]
        rounded = [parameter.data for parameter, _ in parameters]
        try:
            for parameter, before in parameters:
                parameter.data = before.data
            yield
        finally:
            for (parameter, _), data in zip(parameters, rounded, strict=True):
                parameter.data = data

    def undo(self) -> None:
        """Let the module have its weights before rounding again; these integers are then no use."""
        for layer, name, before in self._floats:
            layer._parameters[name] = before


def _names_of(layer: nn.Module, by_input: tuple[type[nn.Module], ...]) -> list[str]:
    """Return the names of the weights of a linear layer, or of the projections of attention."""
    names: tuple[str, ...] = ()
    if isinstance(layer, nn.MultiheadAttention):
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    elif isinstance(layer, (nn.Linear, *by_input)):
        names = ("weight",)
    return [name for name in names if layer._parameters.get(name) is not None]


def with_integers(subject: Any, dtype: str) -> Any:
    """Return a subject with the weights of linear layers as integers, in a copy of its module."""
    if subject.oracle is not None or subject.linears is not None:
        raise UsageError(
            "weights are rounded once; of a whole model, give from_model weights_dtype"
        )
    module = copy_module(subject.module)
    linears = QuantisedLinears(module, dtype)

    def store(model: ir.Model) -> list[str]:
        left = linears.store(model)
        return [f"in the graph these weights stay floating: {first_few(left)}"] if left else []

    return subject.having(
        module=module, linears=linears, budget=default_budget(dtype), rewrite=store,
        notes=(*subject.notes, *linears.notes),
    )  # fmt: skip


# -- weights as integers in a graph -------------------------------------------------------------


def _store_integers(model: ir.Model, weights: Mapping[str, Sequence[QuantisedWeight]]) -> None:
    """Store weights as integers, scales and zero points, which a DequantizeLinear reads.

    If the rows of a weight are in another order, the inputs of its products are put in it.

    `weights`: Each by its name, as the parts that lie side by side in it.
    """
    for name, parts in weights.items():
        float_weight = model.graph.initializers.pop(name)
        float_weight.name = f"{name}_float32"
        stored = _add_initializers(model, name, parts)
        _dequantise(model, name, parts[0], float_weight, stored)


def _add_initializers(
    model: ir.Model, name: str, parts: Sequence[QuantisedWeight]
) -> list[ir.Value]:
    """Add initialisers for integers, scales and, if there are any, zero points."""
    first = parts[0]
    outputs = sum(part.integers.shape[1] for part in parts)

    def add(name: str, dtype: ir.DataType, of: Callable[[QuantisedWeight], Any]) -> ir.Value:
        # One scale for each output is stored as a vector, which older opsets support, too.
        like = of(first)
        is_vector = len(like) == 1 and not first.is_blocked
        shape = [outputs] if is_vector else [len(like), outputs]

        def read() -> np.ndarray:
            beside = np.concatenate([of(part) for part in parts], axis=1)
            return beside[0] if is_vector else beside

        return add_lazy(model, name, dtype, shape, read)

    dtype = ir.DataType[first.dtype.upper()]
    stored = [
        add(name, dtype, lambda part: part.integers),
        add(f"{name}_scale", ir.DataType.FLOAT, lambda part: part.scales),
    ]
    if first.zero_points is not None:
        stored.append(add(f"{name}_zero_point", dtype, lambda part: part.zero_points))
    return stored


def _dequantise(
    model: ir.Model,
    name: str,
    weight: QuantisedWeight,
    float_weight: ir.Value,
    stored: list[ir.Value],
) -> None:
    """Replace a weight by the output of a DequantizeLinear for all readers."""
    layout = {"axis": 0, "block_size": weight.block} if weight.is_blocked else {"axis": 1}
    scope = name.rpartition(".")[0].replace(".", "/")
    node = ir.node("DequantizeLinear", stored, layout, name=f"{scope}/DequantizeLinear")
    output = set_type(node.outputs[0], ir.DataType.FLOAT, float_weight.shape)
    output.name = f"{node.name}.out"
    products = [use.node for use in float_weight.uses()]
    float_weight.replace_all_uses_with(output)
    model.graph.insert_before(model.graph[0], node)
    if weight.order is None:
        return
    order = add_initializer(model, f"{name}{ORDER}", weight.order, ir.DataType.INT64)
    for product in products:
        x = product.inputs[0]
        assert x is not None, name
        ordered = Builder(model, product)("Gather", x, order, axis=-1)
        product.replace_input_with(0, set_type(ordered, ir.DataType.FLOAT, x.shape))
