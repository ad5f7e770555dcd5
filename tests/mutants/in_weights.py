"""Faults of weights: single elements, biases, and heads in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from mutants.in_operators import BIG
from mutants.mutant import Mutant, Setting
from mutants.planting import FLOATS, Path, graph_at, graphs_of
from onnx import numpy_helper

ELEMENTS = 6
"""The number of elements of each tensor that are changed, one at a time."""

OfArray = Callable[[np.ndarray], np.ndarray]


def in_weights(setting: Setting) -> Iterator[Mutant]:
    """Yield faults of each tensor of weights."""
    random = np.random.default_rng(1)
    for path, graph in graphs_of(setting.model):
        for tensor in graph.proto.initializer:
            if tensor.data_type not in (*FLOATS, onnx.TensorProto.BFLOAT16):
                continue
            array = numpy_helper.to_array(tensor)
            if array.size > BIG or tensor.name.endswith(".bias"):
                for kind, what, change in _of_tensor(tensor.name, array, setting, random):
                    yield Mutant(kind, "j", f"{what}: {tensor.name}", _set(path, tensor, change))
    names = {tensor.name for tensor in setting.model.graph.initializer}
    yield from _exchanged(names)


def _set(path: Path, tensor: onnx.TensorProto, change: OfArray):
    def changed(model: onnx.ModelProto) -> None:
        graph_at(model, path).set_initializer(tensor.name, change)

    return changed


def _of_tensor(
    name: str, array: np.ndarray, setting: Setting, random: np.random.Generator
) -> Iterator[tuple[str, str, OfArray]]:
    for at in random.choice(array.size, min(ELEMENTS, array.size), replace=False):
        yield "one weight + 1e-3", f"element {at} + 1e-3", _plus(int(at))
    yield "a tensor of weights times 1.01", "times 1.01", lambda a: (a * 1.01).astype(a.dtype)
    if array.ndim == 1:
        yield "bias dropped", "zeros", np.zeros_like
        yield "bias dropped", "the last eighth is zeros", _tail_lost
    if array.ndim == 2 and array.shape[0] == array.shape[1]:
        yield "weight transposed", "transposed", np.transpose
    for heads in {setting.heads, setting.kv_heads} - {1}:
        axis = 0 if name.startswith("out_proj") else array.ndim - 1
        width = array.shape[axis] // heads
        if array.shape[axis] % heads or not _is_split(name, heads, setting):
            continue
        for what, order in _orders(heads, setting):
            yield "heads in another order", what, _ordered(order, width, axis)


def _is_split(name: str, heads: int, setting: Setting) -> bool:
    if name.startswith(("k_proj", "v_proj")):
        return heads == setting.kv_heads
    return heads == setting.heads and name.endswith(".weight" if "out" in name else "")


def _orders(heads: int, setting: Setting) -> Iterator[tuple[str, np.ndarray]]:
    counted = np.arange(heads)
    yield "heads in reverse", counted[::-1]
    swapped = counted.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    yield "first and last head swapped", swapped
    if heads == setting.heads and 1 < setting.kv_heads < heads:
        yield "heads shared in turn", counted.reshape(setting.kv_heads, -1).T.reshape(-1)


def _ordered(order: np.ndarray, width: int, axis: int) -> OfArray:
    index = (order[:, None] * width + np.arange(width)).reshape(-1)
    return lambda a: a.take(index, axis=axis)


def _plus(at: int) -> OfArray:
    def change(array: np.ndarray) -> np.ndarray:
        found = array.copy()
        found.reshape(-1)[at] += 1e-3
        return found

    return change


def _tail_lost(array: np.ndarray) -> np.ndarray:
    found = array.copy()
    found[-max(len(found) // 8, 1) :] = 0
    return found


def _exchanged(names: set[str]) -> Iterator[Mutant]:
    for part in ("weight", "bias"):
        pair = [f"{of}_proj.{part}" for of in ("k", "v")]
        if set(pair) <= names:
            yield Mutant("k and v swapped", "j", f"{part}s of k and v swapped", _exchange(*pair))


def _exchange(one: str, other: str):
    def change(model: onnx.ModelProto) -> None:
        swapped = {one: other, other: one}
        for _, graph in graphs_of(model):
            for node in graph.nodes:
                node.input[:] = [swapped.get(name, name) for name in node.input]

    return change
