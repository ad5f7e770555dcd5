"""Graphs of `Attention` nodes as a user's module exports to, run on ONNX Runtime and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from ir_graphs import model_of, value, weight

Arrays = dict[str, np.ndarray]
Shape = Sequence[str | int]

H, D, DV = 4, 8, 6
SIZES = [(2, 3, 5), (1, 1, 1), (2, 1, 4), (1, 4, 1), (3, 5, 5), (2, 5, 3), (1, 7, 2)]
"""B, L, S: batches of 1 and more, one query, one key, L above and below S."""


def qkv(heads: int = H) -> list[ir.Value]:
    """Return the inputs q, k, v."""
    return [
        value("q", "batch", H, "query_len", D),
        value("k", "batch", heads, "key_len", D),
        value("v", "batch", heads, "key_len", DV),
    ]


def output(name: str = "y") -> ir.Value:
    return value(name, "batch", H, "query_len", DV)


def integers(name: str, *numbers: int) -> ir.Value:
    """Return a constant of int64."""
    return weight(name, np.array(numbers, np.int64))


def attention_model(
    mask: ir.Value | None = None,
    attributes: Mapping[str, object] | None = None,
    inputs: Sequence[ir.Value] | None = None,
) -> ir.Model:
    """Return a model of one Attention of graph inputs."""
    inputs, y = inputs or qkv(), output()
    given = [*inputs, mask] if mask is not None else [*inputs]
    node = ir.node("Attention", given, attributes, outputs=[y], name="attention")
    return model_of(given, [y], [node])


class Cached:
    """A graph that appends k and v to a past and attends to all of it. Its parts may be changed.

    Attributes:
        inputs: q, k, v, past_key, past_value, m.
        joins: The two Concat nodes.
        attention: The node that reads them.
    """

    def __init__(self, axis: int = 2, heads: int = H, **attributes: object) -> None:
        self.inputs = [
            *qkv(heads),
            value("past_key", "batch", heads, "past_len", D),
            value("past_value", "batch", heads, "past_len", DV),
            value("m", "batch", 1, "query_len", "total_len", dtype=ir.DataType.BOOL),
        ]
        q, k, v, past_key, past_value, m = self.inputs
        self.presents = [
            value("present_key", "batch", heads, "total_len", D),
            value("present_value", "batch", heads, "total_len", DV),
        ]
        self.joins = [
            ir.node("Concat", [past, new], {"axis": axis}, outputs=[present])
            for past, new, present in zip(
                (past_key, past_value), (k, v), self.presents, strict=True
            )
        ]
        self.y = output()
        given = [q, *self.presents] + ([] if "is_causal" in attributes else [m])
        self.attention = ir.node("Attention", given, attributes, outputs=[self.y])
        self.nodes = [*self.joins, self.attention]
        self.outputs = [self.y, *self.presents]
        self.initializers: list[ir.Value] = []

    def model(self) -> ir.Model:
        return model_of(self.inputs, self.outputs, self.nodes, self.initializers)


def draw(model: ir.Model, sizes: Mapping[str, int], seed: int = 0) -> Arrays:
    """Draw random inputs for a model; bool ones are 60 % True, and True for key 0."""
    rng, arrays = np.random.default_rng(seed), {}
    for given in model.graph.inputs:
        dims = [dim.value if isinstance(dim, ir.SymbolicDim) else dim for dim in given.shape]
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
        if given.dtype == ir.DataType.BOOL:
            arrays[given.name] = rng.random(shape) < 0.6
            arrays[given.name][..., :1] = True
        else:
            arrays[given.name] = rng.standard_normal(shape).astype(np.float32)
    return arrays


def run_ort(model: ir.Model, inputs: Arrays) -> list[np.ndarray]:
    """Return a model's outputs, after the checker has accepted it."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def torch_attention(inputs: Arrays, **options: object) -> np.ndarray:
    """Return PyTorch's attention of the inputs q, k, v and, if there is one, m."""
    q, k, v, *m = (torch.from_numpy(inputs[name]) for name in "qkvm" if name in inputs)
    mask = m[0] if m else None
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options).numpy()


def named(B: int, L: int, S: int) -> dict[str, int]:
    return {"batch": B, "query_len": L, "key_len": S}


def check_against_torch(model: ir.Model, change: Callable[[Arrays], None] | None = None, **options):
    """Assert that the model equals PyTorch at all `SIZES`."""
    for sizes in SIZES:
        inputs = draw(model, named(*sizes))
        if change is not None:
            change(inputs)
        (got,) = run_ort(model, inputs)
        np.testing.assert_allclose(got, torch_attention(inputs, **options), atol=2e-6, rtol=1e-5)
