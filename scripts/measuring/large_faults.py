"""Faults in graphs of large models, planted in copies that share the weights of the right one."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.external_data_helper import set_external_data
from onnx.helper import tensor_dtype_to_np_dtype


class Wrong:
    """A copy of a bundle with faults, which shares its weights."""

    def __init__(self, bundle: Path, folder: Path, seed: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(bundle, folder, copy_function=os.link)
        self.path, self._random = folder / "model.onnx", np.random.default_rng(seed)
        self.model = onnx.load(self.path, load_external_data=False)
        self.weights = {w.name: w for w in self.model.graph.initializer}

    def plant(self, kind: str, place: str) -> None:
        """Plant a fault in a place, which is one of `PLACES`, or as in `layer 3`."""
        layer = PLACES[place][1] if place in PLACES else f"layers.{place.split()[1]}."
        if kind in NODE_FAULTS:
            operator, part, edit = NODE_FAULTS[kind]
            edit(self._node(operator, rf"{re.escape(layer.rstrip('.'))}[./].*{part}"))
        elif kind == "weights of another layer":
            name = self._draw(layer, matrices=True)
            number = int(layer.split(".")[1])
            other = name.replace(layer, f"layers.{number - 1 if number else 1}.")
            self._take_from(name, other)
        elif kind == "shifted by a row":
            name = next(n for n in self.weights if layer in n)
            for entry in self.weights[name].external_data:
                if entry.key == "offset":
                    entry.value = str(int(entry.value) + 4 * self.weights[name].dims[1])
        else:
            name = self._draw(layer, matrices=kind in MATRIX_FAULTS)
            self._put(name, {**MATRIX_FAULTS, **NORM_FAULTS}[kind](self._array(name)))

    def save(self) -> None:
        """Write the graph, in place of the link to that of the bundle."""
        self.path.unlink()
        self.path.write_bytes(self.model.SerializeToString())

    def _node(self, operator: str, name: str) -> onnx.NodeProto:
        nodes: Iterable[onnx.NodeProto] = self.model.graph.node
        return next(n for n in nodes if n.op_type == operator and re.search(name, n.name))

    def _draw(self, layer: str, *, matrices: bool) -> str:
        found = {n: len(w.dims) for n, w in self.weights.items() if layer in n}
        return str(self._random.choice([n for n, rank in found.items() if (rank == 2) is matrices]))

    def _array(self, name: str) -> np.ndarray:
        weight = self.weights[name]
        if not weight.external_data:
            return onnx.numpy_helper.to_array(weight).copy()
        stored = {entry.key: entry.value for entry in weight.external_data}
        file, dtype = (
            self.path.parent / stored["location"],
            tensor_dtype_to_np_dtype(weight.data_type),
        )
        array = np.fromfile(file, dtype, math.prod(weight.dims), offset=int(stored["offset"]))
        return array.reshape(weight.dims)

    def _take_from(self, name: str, other: str) -> None:
        weight = onnx.TensorProto()
        weight.CopyFrom(self.weights[other])
        weight.name = name
        self.weights[name].CopyFrom(weight)

    def _put(self, name: str, array: np.ndarray) -> None:
        file = self.path.parent / f"wrong-{len(list(self.path.parent.iterdir()))}.bin"
        array.tofile(file)
        weight = self.weights[name]
        weight.raw_data = b""  # which the next call asks for
        set_external_data(weight, file.name, 0, array.nbytes)
        weight.ClearField("raw_data")


def set_attribute(name: str, change: Callable[[Any], Any]) -> Callable[[onnx.NodeProto], None]:
    """Return a function that changes an attribute of a node."""

    def edit(node: onnx.NodeProto) -> None:
        old = next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), 0)
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, change(old))])

    return edit


def drop_residual(node: onnx.NodeProto) -> None:
    """Add the second input twice."""
    node.input[0] = node.input[1]


def exchange_halves(node: onnx.NodeProto) -> None:
    """Exchange the first two outputs."""
    node.output[0], node.output[1] = node.output[1], node.output[0]


NODE_FAULTS: dict[str, tuple[str, str, Callable[[onnx.NodeProto], None]]] = {
    "attention 1 % sharper": ("Attention", "", set_attribute("scale", lambda x: 1.01 * x)),
    "attention not causal": ("Attention", "", set_attribute("is_causal", lambda _: 0)),
    "rotary interleaved": ("RotaryEmbedding", "", set_attribute("interleaved", lambda _: 1)),
    "epsilon of 0.01": ("RMSNormalization", "", set_attribute("epsilon", lambda _: 0.01)),
    "residual dropped": ("Add", r"(?<=\d/)Add", drop_residual),
    "gate and up exchanged": ("Split", "mlp", exchange_halves),
}
"""The operator of a node, a pattern in its name, and the edit."""

MATRIX_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "matrix 1 % larger": lambda x: np.float32(1.01) * x,
    "two heads exchanged": lambda x: np.concatenate([x[:, 64:128], x[:, :64], x[:, 128:]], 1),
    "a row of zeros": lambda x: np.concatenate([x[:3], 0 * x[3:4], x[4:]]),
    "in int8": lambda x: np.round(x / np.abs(x).max() * 127) * (np.abs(x).max() / 127),
}
NORM_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "norm 1 % larger": lambda x: np.float32(1.01) * x,
    "norm of ones": np.ones_like,
}
KINDS = (*NODE_FAULTS, *MATRIX_FAULTS, *NORM_FAULTS, "weights of another layer")
PLACES = {
    "the embeddings": ("shifted by a row", "embed_tokens"),
    "what follows the layers": ("norm 1 % larger", "model.norm."),
}
"""The fault of each place outside the layers, and a part of the name of its weights."""
