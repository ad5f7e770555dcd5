"""A graph that ONNX Runtime runs in slices, with the weights of one in memory.

All runs pass a slice before the next one is loaded. The outputs of the last are the whole graph's;
what a runtime fuses across two slices is not seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper

from attn_export.errors import lacking, one_line, printable
from attn_export.graph.load import load_proto, mapped_data, names_read, refuse_bad_data
from attn_export.heap import give_back
from attn_export.runtimes.protocol import Engine, Facts
from attn_export.temp_folders import on_disk

if TYPE_CHECKING:
    from attn_export.results import Arrays


_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
NARROW_INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Successive nodes of a graph.

    Attributes:
        takes: The values of earlier slices that it reads.
        gives: Its values that later slices read, and its outputs of the graph.
        weight: The large weight of its one product, of which it is given columns; or "".
    """

    nodes: Sequence[onnx.NodeProto]
    takes: Sequence[str]
    gives: Sequence[str]
    weight: str = ""


class SlicedEngine(Engine):
    """A graph of which one slice is loaded at a time.

    `graph`: Its file.
    `most`: The bytes of weights of a slice.
    `facts`: Those of the sessions of all slices.
    `load`: Returns an engine for the bytes of a model whose external data lie beside the graph, and
        for the bytes of its floating weights. Those of integers need the layout of their kernels.
    """

    def __init__(
        self, graph: Path, most: int, load: Callable[[bytes, int], Engine], facts: Facts
    ) -> None:
        self._load_model, self._facts, self._model = load, facts, load_proto(graph)
        self._graph, self._most = graph, most
        self._slices = list(_cut(self._model, most))
        self._made = dict[bytes, dict[str, np.ndarray] | Exception]()

    def expect(
        self, runs: Iterable[tuple[Arrays, Mapping[str, str]]], advance: Callable[[], None]
    ) -> None:
        """Make all runs that `run` is going to be asked for.

        `advance`: Is called after each run of a slice.
        """
        values = {_key(inputs, bound): (dict(inputs), bound) for inputs, bound in runs}
        outputs = {output.name for output in self._model.graph.output}
        errors = dict[bytes, Exception]()
        for number, part in enumerate(self._slices):
            engine: Engine | None = None
            read_later = {name for each in self._slices[number + 1 :] for name in each.takes}
            for key, (held, bound) in values.items():
                if key in errors:
                    continue
                try:
                    if engine is None:
                        engine = self._load_model(*self._model_of(part, held))
                        engine = self._in_columns(engine, part.weight) if part.weight else engine
                    taken = {name: held[name] for name in part.takes}
                    # Its outputs that share the buffer of one of its inputs.
                    own = {n: x for n, x in bound.items() if n in part.gives and x in part.takes}
                    made = engine.run(taken, own)
                    held |= {n: x if n in read_later else on_disk(x) for n, x in made.items()}
                    advance()
                except Exception as error:
                    errors[key] = self._with_size(error, part)
                    held.clear()
                for name in held.keys() - read_later - outputs:
                    del held[name]
            del engine
            give_back()
        for key, (held, _) in values.items():
            self._made[key] = errors.get(key) or {name: held[name] for name in outputs}

    def run(self, inputs: Arrays, bound: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Return the outputs of one run, by name."""
        key = _key(inputs, bound)
        if key not in self._made:
            self.expect([(inputs, bound)], lambda: None)
        found = self._made.pop(key)
        if isinstance(found, Exception):
            raise RuntimeError(one_line(found))
        return {output.name: found[output.name] for output in self._model.graph.output}

    def facts(self) -> Facts:
        """Return the facts of the run, with the number of slices."""
        return {**self._facts, "slices": len(self._slices)}

    def _with_size(self, error: Exception, part: _Slice) -> Exception:
        """Return an error that says which memory would do, if that is what lacks."""
        if lacking(error) != "memory":
            return error
        read = {name for node in part.nodes for name in names_read(node)} - {part.weight}
        size = sum(_bytes_of(x) for x in self._model.graph.initializer if x.name in read)
        if size <= self._most:  # it is what the slice computes that lacks memory
            return error
        named = printable(part.nodes[-1].name or part.nodes[-1].output[0], 100)
        return MemoryError(
            f"{one_line(error)}; the slice that ends with {named} has {size / 2**30:.2f} GiB of "
            f"weights: --memory {math.ceil(2 * size / 2**30) + 1}GiB holds it"
        )

    def _in_columns(self, engine: Engine, name: str) -> Engine:
        """Return a product that is given some columns of its weight at a time."""
        refuse_bad_data(self._model, self._graph)
        tensor = next(x for x in self._model.graph.initializer if x.name == name)
        weight = mapped_data(tensor, self._graph.parent, np.dtype(np.float16))
        step = max(self._most // (32 * len(weight)), 1)

        def run(inputs: Arrays) -> dict[str, np.ndarray]:
            parts = [
                engine.run({**inputs, name: weight[:, at : at + step].copy()}, {})
                for at in range(0, weight.shape[1], step)
            ]
            return {n: np.concatenate([part[n] for part in parts], -1) for n in parts[0]}

        return Engine(run, {})

    def _model_of(self, part: _Slice, values: Arrays) -> tuple[bytes, int]:
        """Return the bytes of the model of a slice, for values of some types.

        Returns:
            Them, and the number of bytes of its floating weights.
        """
        graph = self._model.graph
        known = {each.name: each for each in (*graph.input, *graph.output, *graph.value_info)}
        read = {name for node in part.nodes for name in names_read(node)}
        inputs = [known.get(name) or _described(name, values[name]) for name in part.takes]
        ends = {each.name: each for each in graph.output}
        outputs = [ends.get(name) or onnx.ValueInfoProto(name=name) for name in part.gives]
        model = onnx.ModelProto()
        model.ir_version = self._model.ir_version
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        model.graph.name = graph.name
        model.graph.node.extend(part.nodes)
        weights = [x for x in graph.initializer if x.name in read]
        if part.weight:
            of = next(x for x in weights if x.name == part.weight)
            inputs.append(helper.make_tensor_value_info(of.name, of.data_type, [of.dims[0], None]))
            outputs = [onnx.ValueInfoProto(name=name) for name in part.gives]
            weights.remove(of)
        model.graph.initializer.extend(weights)
        model.graph.sparse_initializer.extend(
            x for x in graph.sparse_initializer if x.values.name in read
        )
        model.graph.input.extend(inputs)
        model.graph.output.extend(outputs)
        made = {name for node in part.nodes for name in node.output} - set(part.gives)
        # Those of a product in columns have the sizes of all columns.
        described = () if part.weight else graph.value_info
        model.graph.value_info.extend(x for x in described if x.name in made)
        return model.SerializeToString(), weights_in(model, _FLOATS)


def weights_in(model: onnx.ModelProto, types: Collection[int]) -> int:
    """Return the bytes of the weights of a graph that are of some types."""
    return sum(_bytes_of(x) for x in model.graph.initializer if x.data_type in types)


def _cut(model: onnx.ModelProto, most: int) -> Iterator[_Slice]:
    """Yield the slices of a graph, each with weights of at most `most` bytes if nodes allow it.

    A cut is where the fewest values cross it. Nodes that compute constants are in each slice that
    reads them.
    """
    graph = model.graph
    sizes = {x.name: _bytes_of(x) for x in graph.initializer}
    constants = {*sizes, *(x.values.name for x in graph.sparse_initializer)}
    fixed = dict[str, onnx.NodeProto]()  # nodes that read constants alone, by output
    nodes = list[onnx.NodeProto]()
    for node in graph.node:
        if all(name in constants or name in fixed for name in names_read(node) if name):
            fixed |= dict.fromkeys(node.output, node)
        else:
            nodes.append(node)
    reads = [_with_constants(node, fixed) for node in nodes]
    weights = [sum(sizes.get(name, 0) for name in names) for names in reads]
    last_use = {name: at for at, names in enumerate(reads) for name in names}
    maker = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    crossing = [0] * (len(nodes) + 1)
    for name, at in maker.items():
        for cut in range(at + 1, last_use.get(name, at) + 1):
            crossing[cut] += 1
    outputs = [x.name for x in graph.output]
    columns = {
        at: name for at, node in enumerate(nodes)
        if weights[at] > most and (name := _narrow_factor(node, fixed, graph.initializer))
    }  # fmt: skip
    alone = sorted({0, len(nodes), *columns, *(at + 1 for at in columns)})
    stops = list[int]()
    for first, end in itertools.pairwise(alone):
        places = _places(weights[first:end], crossing[first : end + 1], most)
        stops += [*(first + place for place in places), end]
    start = 0
    for stop in stops:
        inside = range(start, stop)
        made = {name for at in inside for name in nodes[at].output if name}
        read = {name for at in inside for name in reads[at]}
        needed = {id(fixed[name]) for name in read if name in fixed}
        if stop == len(nodes):
            needed |= {id(fixed[name]) for name in outputs if name in fixed}
            made |= {name for name in outputs if name in fixed}
        taken = sorted(name for name in read - made - fixed.keys() - constants if name)
        given = sorted(n for n in made if last_use.get(n, -1) >= stop or n in outputs)
        own = [node for node in graph.node if id(node) in needed]
        yield _Slice([*own, *nodes[start:stop]], taken, given, columns.get(start, ""))
        start = stop


def _narrow_factor(
    node: onnx.NodeProto, fixed: Mapping[str, onnx.NodeProto], weights: Iterable[onnx.TensorProto]
) -> str:
    """Return the weight of a product, widened or not, if it is float16 in a file; else ""."""
    name = node.input[1] if node.op_type == "MatMul" else ""
    if name in fixed and fixed[name].op_type == "Cast":
        name = fixed[name].input[0]
    found = (x for x in weights if x.name == name and x.data_location == TensorProto.EXTERNAL)
    is_narrow = any(x.data_type == TensorProto.FLOAT16 and len(x.dims) == 2 for x in found)
    return name if is_narrow else ""


def _places(weights: Sequence[int], crossing: Sequence[int], most: int) -> Iterator[int]:
    """Yield the indices of the nodes before which a graph is cut."""
    start = 0
    while sum(weights[start:]) > most:
        held = list(itertools.accumulate(weights[start:]))
        fitting = [start + n for n, size in enumerate(held, 1) if most / 2 <= size <= most]
        # A node of more weights than that is in a slice of its own.
        after = start + 1 + next(n for n, size in enumerate(held) if size >= most / 2)
        start = min(fitting or [after], key=lambda cut: (crossing[cut], -cut))
        if start < len(weights):
            yield start


def _with_constants(node: onnx.NodeProto, fixed: Mapping[str, onnx.NodeProto]) -> set[str]:
    """Return what a node reads, and what the constants are computed from that it reads."""
    names, left = set[str](), [*names_read(node)]
    while left:
        name = left.pop()
        if name not in names:
            names.add(name)
            left += names_read(fixed[name]) if name in fixed else []
    return names - {""}


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """Return the size of a weight in memory: floating ones are widened to float32."""
    count = int(np.prod(tensor.dims, dtype=np.int64))
    if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4):
        return count // 2
    if tensor.data_type in _FLOATS:
        return 4 * count
    return count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _described(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    """Return the description of a value of the type and the rank of an array."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is no tensor, and lies between two slices; give --whole")
    dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, dtype, [None] * array.ndim)


def _key(inputs: Arrays, bound: Mapping[str, str]) -> bytes:
    """Return what tells runs apart."""
    digest = hashlib.sha256(repr(sorted(bound.items())).encode())
    for name in sorted(inputs):
        array = np.ascontiguousarray(inputs[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.ndim and array.size else array.tobytes())
    return digest.digest()
