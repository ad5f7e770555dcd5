"""Graphs and inputs of probes: one node of attention each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_export.dialect_names import ORT, PORTABLE, STANDARD
from attn_export.errors import GraphError
from attn_export.parity.contents import FUTURE, VALUES
from attn_export.parity.draw import generator
from attn_export.parity.fixed_cases import content_case
from attn_export.parity.mask_contents import LOWEST, MASKS
from attn_export.spec import AttentionSpec, Input
from attn_export.tensorfile import ArrayDict
from attn_export.tensorproto import CODES

if TYPE_CHECKING:
    import onnx


# -- graphs: one node of attention each ---------------------------------------------------------

H, HKV, D = 4, 2, 16
"""Query heads, K/V heads, width: 1/√D is a power of 2, so that scaling rounds nothing."""

MICROSOFT = "com.microsoft"

IR_VERSION = 10
"""The first that opset 23 goes with."""


@dataclasses.dataclass(frozen=True)
class ProbeGraph:
    """A node of attention between inputs and outputs.

    Attributes:
        name: Unique among the graphs.
        mask: The type of the mask, ``"bool"`` or ``"float"``; "" where there is none.
        past: Whether it has a past, and gives the present.
        lengths: Whether an input gives the number of valid keys of each row.
        attributes: The attributes of the node.
        dtype: Of queries, keys and values.
        opset: Of ai.onnx.
        grouped_query: Whether the node is `GroupQueryAttention` of com.microsoft.
    """

    name: str
    mask: str = ""
    past: bool = False
    lengths: bool = False
    attributes: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    opset: int = 23
    grouped_query: bool = False

    @property
    def dialect(self) -> str:
        """The dialect that has the node."""
        return ORT if self.grouped_query else STANDARD

    @property
    def causal(self) -> bool:
        """Return whether the node hides later keys."""
        return bool(self.attributes.get("is_causal"))


def write_graph(graph: ProbeGraph, dialect: str, folder: Path) -> Path | None:
    """Write a graph in a dialect; the file, or None if the dialect cannot express it.

    Args:
        graph: The graph.
        dialect: The dialect to write.
        folder: The folder of the file.
    """
    path = folder / f"{graph.name}.{dialect}.onnx".replace(" ", "-")
    if dialect == graph.dialect:
        import onnx

        onnx.save(_model(graph), path)
        return path
    written = write_graph(graph, graph.dialect, folder)
    if dialect != PORTABLE or written is None:
        return None
    # Only where it is needed: it takes 0.3 s to import.
    from attn_export.graph.load import load_graph
    from attn_export.graph.lower import lower
    from attn_export.graph.save import save_graph

    try:
        save_graph(lower(load_graph(written), PORTABLE)[""].model, path)
    except GraphError:
        return None
    return path


def _model(graph: ProbeGraph) -> onnx.ModelProto:
    from onnx import helper

    inputs = _grouped_query_inputs() if graph.grouped_query else _inputs(graph)
    query = inputs["query"]
    outputs = {"output": query}
    if graph.past:
        outputs |= dict.fromkeys(("present_key", "present_value"), _heads("total_len", graph))
    given = [name if name in inputs else "" for name in _slots(graph)]
    while not given[-1]:
        given.pop()
    domain = MICROSOFT if graph.grouped_query else ""
    attributes: dict[str, Any] = dict(graph.attributes)
    operator = "GroupQueryAttention" if graph.grouped_query else "Attention"
    node = helper.make_node(
        operator, given, list(outputs), name="attention", domain=domain, **attributes
    )
    made = helper.make_graph([node], "attention", _ends(inputs), _ends(outputs))
    opsets = [helper.make_opsetid("", graph.opset)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    return helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION)


Typed = tuple[str, list[str | int]]
"""A dtype and the axes."""


def _slots(graph: ProbeGraph) -> tuple[str, ...]:
    if graph.grouped_query:
        return ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total")
    return ("query", "key", "value", "attn_mask", "past_key", "past_value", "lengths")


def _heads(length: str, graph: ProbeGraph) -> Typed:
    return graph.dtype, ["batch", HKV, length, D]


def _inputs(graph: ProbeGraph) -> dict[str, Typed]:
    new = _heads("key_len", graph)
    found: dict[str, Typed] = {
        "query": (graph.dtype, ["batch", H, "query_len", D]), "key": new, "value": new,
    }  # fmt: skip
    if graph.mask:
        dtype = "bool" if graph.mask == "bool" else graph.dtype
        found["attn_mask"] = dtype, ["batch", 1, "query_len", "key_len"]
    if graph.past:
        found |= dict.fromkeys(("past_key", "past_value"), _heads("past_len", graph))
    if graph.lengths:
        found["lengths"] = "int64", ["batch"]
    return found


def _grouped_query_inputs() -> dict[str, Typed]:
    past: Typed = ("float32", ["batch", HKV, "past_len", D])
    new: Typed = ("float32", ["batch", "query_len", HKV * D])
    return {
        "query": ("float32", ["batch", "query_len", H * D]), "key": new, "value": new,
        "past_key": past, "past_value": past,
        "seqlens_k": ("int32", ["batch"]), "total": ("int32", []),
    }  # fmt: skip


def _ends(typed: Mapping[str, Typed]) -> list[onnx.ValueInfoProto]:
    from onnx import helper

    return [
        helper.make_tensor_value_info(name, CODES[dtype], shape)
        for name, (dtype, shape) in typed.items()
    ]


# -- inputs: the semantic cases of a build if there is one, else similar random ones ------------

B, L = 2, 3


def case_of_a_build(name: str, *, mask: str = "none", past: bool = False) -> ArrayDict:
    """Return the inputs of a build's case, as inputs of its `Attention` node.

    The projections of a layer's tokens are drawn as the tokens are.

    Args:
        name: Contents of `cases.contents`.
        mask: As in a spec.
        past: Whether there is one, and the layer is causal.
    """
    given = _cases(mask, past)[name]
    heads = {name: _heads_apart(given[name], count) for name, count in
             {"query": H, "key": HKV, "value": HKV}.items()}  # fmt: skip
    return {**heads, **{name: array for name, array in given.items() if name not in heads}}


@functools.cache
def _cases(mask: str, past: bool) -> dict[str, ArrayDict]:
    spec = AttentionSpec(
        embed_dim=H * D, num_heads=H, num_kv_heads=HKV, attn_mask=mask, causal=past,
        cache="append" if past else "none",
    )  # fmt: skip
    layer = spec.inputs()
    new = Input(("batch", "query_len", HKV * D))
    inputs = {"query": layer["query"], "key": new, "value": new} | layer
    contents = [*VALUES, FUTURE, *(MASKS if spec.mask else ())]
    contents += [LOWEST] if spec.mask and spec.mask.dtype == "float" else []
    cases = [content_case(content, inputs, spec, spec.sums) for content in contents]
    return {case.name: dict(case.inputs) for case in cases}


def _heads_apart(x: np.ndarray, heads: int) -> np.ndarray:
    """Reshape `[B, L, heads · D]` to `[B, heads, L, D]`."""
    split = x.reshape(*x.shape[:2], heads, -1)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def drawn(
    name: str, *, batch: int = B, queries: int = L, keys: int = L, past: int = 0
) -> ArrayDict:
    """Draw normal queries, keys and values; with a past of `past` keys if that is not 0.

    Args:
        name: Of the probe; the numbers depend on it.
        batch: B.
        queries: L.
        keys: New ones.
        past: P.
    """
    rng = generator("fingerprint", name)

    def normal(heads: int, length: int) -> np.ndarray:
        return rng.standard_normal((batch, heads, length, D)).astype(np.float32)

    found = {"query": normal(H, queries), "key": normal(HKV, keys), "value": normal(HKV, keys)}
    if past:
        found |= {"past_key": normal(HKV, past), "past_value": normal(HKV, past)}
    return found
