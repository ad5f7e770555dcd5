"""Graphs of probes, each with one attention node, and inputs for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from attn_export.cases import draw
from attn_export.cases.draw import Interface
from attn_export.cases.fixed_cases import pattern_case
from attn_export.cases.plan import Groups
from attn_export.dialect_names import MICROSOFT, ORT, PORTABLE, STANDARD
from attn_export.errors import GraphError
from attn_export.float64.attention_steps import split_heads
from attn_export.interface import Input
from attn_export.spec import AttentionSpec
from attn_export.tensorfile import ArrayDict
from attn_export.tensorproto import CODES

# -- graphs: one node of attention each ---------------------------------------------------------

H, HKV, D = 4, 2, 16
"""Numbers of query and K/V heads, and the head width, for which scaling by 1/√D is exact."""

ATTENTION_INPUTS: tuple[str, ...] = (
    "query", "key", "value", "attn_mask", "past_key", "past_value", "lengths",
)  # fmt: skip
"""The names of inputs of probes, in the order of the inputs of `Attention`."""

_IR_VERSION = 10
"""The first IR version that allows opset 23."""


@dataclasses.dataclass(frozen=True)
class ProbeGraph:
    """Description of a graph of one attention node.

    Attributes:
        name: A name that is unique among the graphs.
        mask: The type of the mask, ``"bool"`` or ``"float"``; "" if there is none.
        past: Whether the node has past keys and values as inputs, and present ones as outputs.
        lengths: Whether an input holds the number of valid keys of each batch element.
    """

    name: str
    mask: str = ""
    past: bool = False
    lengths: bool = False
    attributes: Mapping[str, int | float | str] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    opset: int = 23
    operator: str = "Attention"

    @property
    def dialect(self) -> str:
        """The dialect that has the node."""
        return ORT if self.operator == "GroupQueryAttention" else STANDARD


def write_graph(graph: ProbeGraph, dialect: str, folder: Path) -> Path | None:
    """Return the written file of a graph in a dialect; None if the dialect cannot express it.

    Only `Attention` has a portable form here: that of another operator does not show what a runtime
    means by it.
    """
    path = folder / f"{graph.name}.{dialect}.onnx".replace(" ", "-")
    if dialect == graph.dialect:
        onnx.save(make_model(graph), path)
        return path
    written = write_graph(graph, graph.dialect, folder)
    if dialect != PORTABLE or graph.operator != "Attention" or written is None:
        return None
    # Imported here because it takes 0.3 s.
    from attn_export.graph.load import load_graph
    from attn_export.graph.lower import lower
    from attn_export.graph.save import save_graph

    try:
        save_graph(lower(load_graph(written), PORTABLE)[""].model, path)
    except GraphError:
        return None
    return path


def make_model(graph: ProbeGraph) -> onnx.ModelProto:
    """Return the model of a graph, in the dialect that has its node."""
    inputs, names = _ENDS[graph.operator]
    typed = inputs(graph)
    outputs = {"output": typed["query"]}
    if graph.operator == "LinearAttention":
        outputs["present_state"] = _STATE
    elif graph.past:
        outputs |= dict.fromkeys(("present_key", "present_value"), _cache("total_len", graph))
    domain = MICROSOFT if graph.dialect == ORT else ""
    node_inputs = [name if name in typed else "" for name in names]
    while not node_inputs[-1]:
        node_inputs.pop()
    attributes: dict[str, Any] = dict(graph.attributes)
    node = helper.make_node(
        graph.operator, node_inputs, list(outputs), name="attention", domain=domain, **attributes
    )
    onnx_graph = helper.make_graph([node], "attention", _value_infos(typed), _value_infos(outputs))
    opsets = [helper.make_opsetid("", graph.opset)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    return helper.make_model(onnx_graph, opset_imports=opsets, ir_version=_IR_VERSION)


def _cache(length: str, graph: ProbeGraph) -> Input:
    return Input(("batch", HKV, length, D), graph.dtype)


def _inputs(graph: ProbeGraph) -> dict[str, Input]:
    new = _cache("key_len", graph)
    query = Input(("batch", H, "query_len", D), graph.dtype)
    inputs = {"query": query, "key": new, "value": new}
    if graph.mask:
        dtype = "bool" if graph.mask == "bool" else graph.dtype
        inputs["attn_mask"] = Input(("batch", 1, "query_len", "key_len"), dtype)
    if graph.past:
        inputs |= dict.fromkeys(("past_key", "past_value"), _cache("past_len", graph))
    if graph.lengths:
        inputs["lengths"] = Input(("batch",), "int64")
    return inputs


def _grouped_query_inputs(graph: ProbeGraph) -> dict[str, Input]:
    """Return the inputs of `GroupQueryAttention` with a past, in their order."""
    past, new = _cache("past_len", graph), Input(("batch", "query_len", HKV * D))
    return {
        "query": Input(("batch", "query_len", H * D)), "key": new, "value": new,
        "past_key": past, "past_value": past,
        "seqlens_k": Input(("batch",), "int32"), "total": Input((), "int32"),
    }  # fmt: skip


_STATE = Input(("batch", HKV, D, D))


def linear_inputs(graph: ProbeGraph) -> dict[str, Input]:
    """Return the inputs of `LinearAttention` by its rule, in their order."""
    rule = str(graph.attributes["update_rule"])

    def tokens(heads: int, width: int = D) -> Input:
        return Input(("batch", "query_len", heads * width), graph.dtype)

    inputs = {"query": tokens(H), "key": tokens(HKV), "value": tokens(HKV)}
    if graph.past:
        inputs["past_state"] = _STATE
    if "gated" in rule:
        inputs["decay"] = tokens(HKV, 1)
    if "delta" in rule:
        inputs["beta"] = tokens(HKV, 1)
    return inputs


_ENDS: Mapping[str, tuple[Callable[[ProbeGraph], dict[str, Input]], tuple[str, ...]]] = {
    "Attention": (_inputs, ATTENTION_INPUTS),
    "GroupQueryAttention": (
        _grouped_query_inputs,
        ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total"),
    ),
    "LinearAttention": (
        linear_inputs, ("query", "key", "value", "past_state", "decay", "beta"),
    ),
}  # fmt: skip
"""What gives the inputs of each operator, and the names of all of them in their order."""


def _value_infos(typed: Mapping[str, Input]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, CODES[end.dtype], end.shape)
        for name, end in typed.items()
    ]


# -- inputs: the semantic cases of a build if there is one, else similar random ones ------------

B, L = 2, 3


def case_inputs(name: str, *, mask: str = "none", past: bool = False) -> ArrayDict:
    """Return inputs of an `Attention` node with the input pattern of a test case of `build`.

    Queries, keys and values, which a layer would compute from its tokens, are drawn as tokens are.
    """
    layer_inputs = _cases(mask, past)[name]
    counts = {"query": H, "key": HKV, "value": HKV}
    heads = {name: split_heads(layer_inputs[name], count) for name, count in counts.items()}
    return {**heads, **{name: array for name, array in layer_inputs.items() if name not in heads}}


@functools.cache
def _cases(mask: str, past: bool) -> dict[str, ArrayDict]:
    spec = AttentionSpec(
        embed_dim=H * D, num_heads=H, num_kv_heads=HKV, attn_mask=mask, causal=past,
        cache="append" if past else "none",
    )  # fmt: skip
    layer = spec.inputs()
    new = Input(("batch", "query_len", HKV * D))
    inputs = {"query": layer["query"], "key": new, "value": new} | layer
    interface = Interface(inputs, {}, spec.traits, spec.sums)
    groups = Groups.of(interface)
    cases = [pattern_case(pattern, interface) for pattern in (*groups.values, *groups.masks)]
    return {case.name: dict(case.inputs) for case in cases}


def draw_inputs(
    name: str, *, batch: int = B, queries: int = L, keys: int = L, past: int = 0
) -> ArrayDict:
    """Return queries, keys and values from a normal distribution, float32 `[B, heads, len, D]`."""
    sizes = {"batch": batch, "query_len": queries, "key_len": keys, "past_len": past}
    inputs = _inputs(ProbeGraph(name, past=past > 0))
    return draw.draw_inputs(inputs, sizes, seed_words=("fingerprint", name))
