"""Weights of a quantised graph: their integers, read, take the place of the model's own weights.

Legend: N rows of K elements; a weight is a matrix `[N, K]`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from attn_export.dialect_names import QUANTISED
from attn_export.errors import counted, first_few, one_line, printable
from attn_export.float64.integer_steps import dequantised, packed_weight, quantised_table
from attn_export.graph.accuracy_level import forbid_rounding, graphs_in, nodes_in, rounding_levels
from attn_export.graph.load import load_model, load_proto
from attn_export.temp_folders import scratch
from attn_export.tensorfile import Array

_NEAR = 0.5
"""The largest relative distance of a row from the row of the model that it was rounded from."""

_MOST_PIECES = 1024
"""The most parts of different parameters that a weight is packed from."""

_EXTERNAL_FROM = 2**30
"""The size in bytes from which a graph is written with external data."""

# -- the integers of a graph --------------------------------------------------------------------

_Constants = Sequence[Array | None]
_READERS: Mapping[str, tuple[tuple[int, ...], Callable[[_Constants, Mapping[str, Any]], Array]]] = {
    "MatMulNBits": ((1, 2, 3, 4), lambda arrays, of: packed_weight(arrays, of).T),
    "GatherBlockQuantized": ((0, 2, 3), quantised_table),
    "DequantizeLinear": ((0, 1, 2), lambda arrays, of: dequantised(
        *arrays, axis=of.get("axis", 1), block_size=of.get("block_size", 0))),  # type: ignore[arg-type]
}  # fmt: skip
"""By operator: the numbers of the inputs that hold a weight, and what dequantises them."""


@dataclasses.dataclass(frozen=True)
class _StoredIntegers:
    """What is quantised in a graph.

    Attributes:
        operators: The operators of quantised values.
        weights: What the integers stand for, with whether rows are looked up in it; by name.
        problem: Why that is not all that is rounded; "" if it is.
        rounds_inputs: Whether kernels may round the inputs of products to integers as well.
    """

    operators: tuple[str, ...]
    weights: Mapping[str, tuple[Array, bool]]
    problem: str
    rounds_inputs: bool


def quantised_operators(path: Path) -> tuple[str, ...]:
    """Return the operators of quantised values in a graph."""
    found = {node.op_type for node in nodes_in(load_proto(path))}
    return tuple(sorted(found & QUANTISED))


def read_integers(path: Path) -> _StoredIntegers:
    """Read the quantised weights of a graph."""
    model = load_model(path)
    nodes = list(nodes_in(model))
    tensors = {t.name: t for graph in graphs_in(model.graph) for t in graph.initializer}
    tensors |= {
        name: a.t
        for n in nodes
        if n.op_type == "Constant"
        for a in n.attribute
        for name in n.output
    }
    weights, problem, unread = dict[str, tuple[Array, bool]](), "", set[str]()
    operators = {node.op_type for node in nodes} & QUANTISED
    for node in (node for node in nodes if node.op_type in operators):
        numbers, read = _READERS.get(node.op_type, ((), None))
        names = [node.input[i] for i in numbers if i < len(node.input)]
        while names and not names[-1]:
            names.pop()
        if read is None or not tensors.keys() >= set(filter(None, names)):
            unread.add(node.op_type)
            continue
        try:
            of = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            arrays = [numpy_helper.to_array(tensors[name]) if name else None for name in names]
            weight = read(arrays, of)
        except Exception as error:  # as various as what may be wrong with a graph
            what = printable(f"{node.op_type} {node.name}", 100)
            problem = problem or f"{what} cannot be read: {one_line(error)}"
            continue
        readers = {n.op_type for n in nodes if not set(node.output).isdisjoint(n.input)}
        if node.op_type != "DequantizeLinear":
            readers = {node.op_type}
        for is_table in {reader.startswith("Gather") for reader in readers}:
            if weight.ndim > 1:
                weights[f"{names[0]}{' as a table' * is_table}"] = weight, is_table
            else:
                problem = problem or f"{printable(names[0], 100)} is no matrix"
    if unread:
        problem = f"{', '.join(sorted(unread))}: integers that are made while it runs are not read"
    rounds = next(rounding_levels(model), None) is not None
    return _StoredIntegers(tuple(sorted(operators)), weights, problem, rounds)


def rounds_inputs(path: Path) -> bool:
    """Return whether kernels may round the inputs of products of a graph to integers as well."""
    return next(rounding_levels(load_proto(path)), None) is not None


def rounded_block(path: Path) -> int:
    """Return how many inputs of a product kernels may round together; 0 if they round none."""
    model = load_proto(path)
    if next(rounding_levels(model), None) is None:
        return 0
    products = (node for node in nodes_in(model) if node.op_type == "MatMulNBits")
    return max((a.i for n in products for a in n.attribute if a.name == "block_size"), default=0)


@contextlib.contextmanager
def with_float_products(path: Path) -> Iterator[Path]:
    """Yield a copy of a graph whose kernels do not round the inputs of products."""
    model = load_model(path)
    forbid_rounding(model)
    with scratch() as folder:
        large = model.ByteSize() > _EXTERNAL_FROM
        onnx.save_model(model, folder / path.name, save_as_external_data=large)
        yield folder / path.name


# -- the parameters that they were rounded from -------------------------------------------------


class _Parameter:
    """A parameter, at all its places that look rows up in it, or at all others.

    Attributes:
        places: The modules that hold it, and its names there.
        rows: It as a matrix, and its transpose.
        norms: The squared norms of their rows.
    """

    def __init__(self, value: Tensor) -> None:
        self.places: list[tuple[nn.Module, str]] = []
        self._value = value.detach()
        self.rows = [x.flatten(0, -2) for x in (self._value, self._value.mT)]
        self.norms = [x.square().sum(1) for x in self.rows]

    def write(self, side: int, start: int, rows: Tensor) -> None:
        """Replace rows of the matrix or of its transpose, at all places."""
        value = getattr(*self.places[0])
        if value.data_ptr() == self._value.data_ptr():  # others may read it, too
            value = nn.Parameter(self._value.clone(), requires_grad=False)
            for module, name in self.places:
                setattr(module, name, value)
        target = (value.data, value.data.mT)[side]
        numbers = torch.arange(start, start + len(rows))
        target[torch.unravel_index(numbers, target.shape[:-1])] = rows.to(target.dtype)


def with_integers(model: nn.Module, stored: _StoredIntegers) -> tuple[nn.Module | None, str]:
    """Return a copy of a model with the weights of a graph.

    Returns:
        The copy; or None, and the weights that were rounded from no parameter of the model.
    """
    changed = copy.deepcopy(model)
    parameters: dict[tuple[int, bool], _Parameter] = {}
    for path, value in changed.named_parameters(remove_duplicate=False):
        if value.ndim > 1:
            place, _, name = path.rpartition(".")
            module = changed.get_submodule(place)
            key = id(value), isinstance(module, nn.Embedding)
            if key not in parameters:
                parameters[key] = _Parameter(value)
            parameters[key].places.append((module, name))
    missing = []
    for name, (array, is_table) in stored.weights.items():
        weight = torch.from_numpy(np.ascontiguousarray(array)).to(torch.float32)
        candidates = [x for (_, table), x in parameters.items() if table == is_table]
        for rows in (weight.flatten(0, -2), weight.mT.flatten(0, -2)):
            pieces = _pieces(rows, candidates)
            for parameter, side, start, part in pieces:
                parameter.write(side, start, rows[part])
            if pieces:
                break
        else:
            missing.append(name)
    if missing:
        return None, f"no parameter of the model is near {printable(first_few(missing), 200)}"
    return changed, ""


_Piece = tuple[_Parameter, int, int, slice]


def _pieces(rows: Tensor, parameters: Sequence[_Parameter]) -> list[_Piece]:
    """Return the rows of parameters that the rows of a weight are near to; [] if some are not.

    The place of the largest row that is left is found among all rows, and the rows around it must
    be near those around that place. So weights may be packed from several parameters, or be a part
    of one.
    """
    norms, pieces = rows.square().sum(1), list[_Piece]()
    left = torch.ones(len(rows), dtype=torch.bool)
    sides = [(p, side) for p in parameters for side in (0, 1)]
    sides = [(p, side) for p, side in sides if p.rows[side].shape[1] == rows.shape[1]]
    while left.any():
        at = int(torch.where(left, norms, -1.0).argmax())
        found = [piece for p, side in sides if (piece := _piece(p, side, rows, left, at))]
        if not found or len(pieces) == _MOST_PIECES:
            return []
        pieces.append(max(found, key=lambda piece: piece[3].stop - piece[3].start))
        left[pieces[-1][3]] = False
    return pieces


def _piece(parameter: _Parameter, side: int, rows: Tensor, left: Tensor, at: int) -> _Piece | None:
    """Return the rows around one that are near rows of a parameter; None if it is not itself."""
    others, norms = parameter.rows[side], parameter.norms[side]
    squares = norms - 2 * (others @ rows[at]) + rows[at].square().sum()
    ratios = torch.where(norms > 0, squares / norms, torch.inf)
    nearest = int(ratios.argmin())
    if not ratios[nearest] <= _NEAR**2:  # so that NaN is far
        return None
    by = nearest - at
    first, last = max(0, -by), min(len(rows), len(others) - by)
    apart = (rows[first:last] - others[first + by : last + by]).square().sum(1)
    # Rows that are almost 0 may have been rounded to 0.
    limit = norms[first + by : last + by] + 1e-4 * norms.mean()
    near = (apart <= _NEAR**2 * limit) & left[first:last]
    far = torch.nonzero(~near).flatten() + first
    start = int(far[far < at].max()) + 1 if (far < at).any() else first
    stop = int(far[far > at].min()) if (far > at).any() else last
    return parameter, side, start + by, slice(start, stop)


_EXACTLY = (
    ", in a copy of the graph with accuracy_level 1: its kernels may round inputs of products, "
    "which a budget, or verify of a bundle, judges"
)


@contextlib.contextmanager
def strict_judgement(
    model: nn.Module, path: Path, *, of_integers: bool = False
) -> Iterator[tuple[nn.Module | None, Path, str]]:
    """Yield a float model with the integers of a graph, the graph to run, and a note.

    The model is None if more than weights is rounded, or other weights: a budget alone judges it.

    `of_integers`: Whether the model has the integers of a checkpoint, which the graph must have.
    """
    if of_integers:
        with with_float_products(path) as exact:
            yield model, exact, f"judged by the integers of the checkpoint{_EXACTLY}"
        return
    stored = read_integers(path)
    changed, problem = (None, stored.problem) if stored.problem else with_integers(model, stored)
    if changed is None:
        yield None, path, f"judged by the budget alone: {problem}"
        return
    weights = f"{counted(len(stored.weights), 'weight')} of {', '.join(stored.operators)}"
    note = f"judged by the model with the integers of {weights}"
    if not stored.rounds_inputs:
        yield changed, path, note
        return
    note += _EXACTLY
    with with_float_products(path) as exact:
        yield changed, exact, note
