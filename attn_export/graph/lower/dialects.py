"""List of the dialects, and conversion of a graph to one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

import onnx
import onnx_ir as ir
from msgspec.structs import replace
from onnx_ir.passes import common

from attn_export.dialect_names import CUDA, ORT, PORTABLE, STANDARD, check_dialects, graph_name
from attn_export.errors import GraphError
from attn_export.graph import Graph, IrGraph
from attn_export.graph.axis_names import common_axis, fix_axis
from attn_export.graph.fuse_cache import fuse_attention
from attn_export.graph.ir_helpers import dims, every_node, merge_equal_constants, nodes_of
from attn_export.graph.lower.caches import in_place_cache, is_bound
from attn_export.graph.lower.computed_masks import recognise_masks
from attn_export.graph.lower.opset18 import OPSET, to_opset18
from attn_export.graph.lower.ort import (
    appends_to_cache,
    fuse_for_ort,
    holds_values_transposed,
    lower_node,
)
from attn_export.graph.lower.portable import lower_to_portable
from attn_export.graph.lower.read import SWAP_LAST_AXES, attentions_of
from attn_export.graph.lower.tidy import drop_inner_shapes, tidy, with_types
from attn_export.graph.ort_compat import spread_masks, write_sigmoids
from attn_export.graph.requirements import features
from attn_export.optional_parts import hooks, parts
from attn_export.schema import GraphFile

DECODE, PREFILL = "decode", "prefill"
"""The phases of graphs for one query per batch element, and for batch size 1 (`cuda`)."""


class NotInHalfError(GraphError):
    """Error for a float32 graph that has a form for CUDA only in half precision."""

    def __init__(self) -> None:
        super().__init__(
            "the graph computes attention in float32, for which CUDA runs the standard dialect "
            "best; build it in float16 or bfloat16"
        )


@dataclasses.dataclass(frozen=True)
class Observed:
    """Shapes of the values of a graph in several runs.

    Attributes:
        axes: The sizes of each dynamic axis of the inputs in the runs, by name.
        shapes: The shapes of each value in the runs, by name.
    """

    axes: Mapping[str, tuple[int, ...]]
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]


_ATTENTION_OPSET, _NEWEST = 23, 24
"""The opset that introduced `Attention`, and the newest of which this folder knows operators."""

_FUSED = ("RMSNormalization", "LayerNormalization", "Sigmoid")
"""The operators that ONNX Runtime computes together with others."""

NOTHING_TO_LOWER = (
    "the graph has no Attention node; there is nothing to lower to the {dialect} dialect"
)


def lower(
    model: ir.Model, dialect: str, observed: Observed | None = None, *, packs_bytes: bool = False
) -> dict[str, IrGraph]:
    """Lower a graph to a dialect. The result shares the weights with the source.

    `model`: A model of any origin with ai.onnx `Attention` nodes, or, for the dialect ``ort``, with
    attention that is written out. It is not changed.
    `observed`: The shapes of the values in runs, for graphs of other exporters. Other forms of
    attention are then recognised for every dialect.
    `packs_bytes`: As for `multiply_integers`, in the dialect ``ort``.

    Returns:
        The graph under ``""``; in the dialects ``ort`` and ``cuda``, if there is a KV cache, also
        the graph for one query under ``"decode"``, and for CUDA the one for batch size 1 under
        ``"prefill"``.
    """
    (dialect,) = check_dialects([dialect])
    source, recognised = _with_recognised(_with_names(model.clone()), dialect, observed)
    _refuse_other_domains(source, dialect)
    _refuse_without_attention(source, dialect)
    nodes = [*nodes_of(source, "Attention"), *nodes_of(source, "RotaryEmbedding")]
    source = with_shapes(source, [x for node in nodes for x in node.inputs if x is not None])
    rewrite = REWRITES.get(dialect)
    if dialect == ORT:
        graphs = _to_ort(source, packs_bytes=packs_bytes)
    else:
        graphs = rewrite(source) if rewrite else _rewrite_of_part(source, dialect)
    return {
        phase: dataclasses.replace(_finish(lowered), recognised=recognised)
        for phase, lowered in graphs.items()
    }


def _with_names(model: ir.Model) -> ir.Model:
    """Return a graph of which each node has a name, for messages and the nodes in its place."""
    for node in every_node(model.graph):
        node.name = node.name or f"{node.op_type}_{next(x.name for x in node.outputs if x.name)}"
    return model


def _with_recognised(
    model: ir.Model, dialect: str, observed: Observed | None
) -> tuple[ir.Model, int]:
    """Return a graph in which parts have replaced other forms of attention, and their number."""
    if observed is None and not (dialect == ORT and nodes_of(model, "Softmax")):
        return model, 0
    count = 0
    for recognise in hooks("recognise"):
        model, more = recognise(model, dialect, observed)
        count += more
    return model, count


def _to_standard(model: ir.Model) -> dict[str, IrGraph]:
    return {"": describe(model, STANDARD, bound=bound_caches(model))}


def _to_portable(model: ir.Model) -> dict[str, IrGraph]:
    bound = bound_caches(model)
    for node in nodes_of(model, "Attention"):
        lower_to_portable(model, node)
    _lower_by_parts(model, PORTABLE)
    _raise_opset(model, OPSET)
    to_opset18(model)
    tidy(model)
    drop_inner_shapes(model)
    return {"": describe(model, PORTABLE, bound=bound)}


def _lower_by_parts(model: ir.Model, dialect: str) -> None:
    names = {node.op_type for node in model.graph if not node.domain}
    if not all(onnx.defs.has(name, _NEWEST) for name in names):
        for lower_newer in hooks("lower_newer"):
            lower_newer(model, dialect)


def describe(
    model: ir.Model,
    dialect: str,
    phase: str = "",
    *,
    fixed: dict[str, int] | None = None,
    layouts: dict[str, tuple[int, ...]] | None = None,
    bound: dict[str, str],
) -> IrGraph:
    """Return a graph with its description."""
    name = graph_name(dialect, phase)
    return Graph(model, GraphFile(name, dialect, fixed or {}, layouts or {}, bound))


def prepare_masks(model: ir.Model) -> None:
    """Replace masks and caches by what `Attention` does itself, as far as possible."""
    fuse_attention(model)
    recognise_masks(model)
    spread_masks(model)  # ONNX Runtime refuses masks whose query axis is 1


def _to_ort(model: ir.Model, *, packs_bytes: bool = False) -> dict[str, IrGraph]:
    prepare_masks(model)
    _lower_by_parts(model, ORT)
    bound, layouts = bound_caches(model), _cache_layouts(model)
    graphs = {"": describe(model.clone(), ORT, layouts=layouts, bound=bound)}
    for node in nodes_of(graphs[""].model, "Attention"):
        lower_node(graphs[""].model, node)
    length = query_axis(model)
    if length:
        decode = graphs[DECODE] = describe(
            model.clone(), ORT, DECODE, fixed={length: 1}, layouts=layouts, bound=bound
        )
        fix_axis(decode.model, length, 1)
        for node in nodes_of(decode.model, "Attention"):
            lower_node(decode.model, node, one_query=True)
    for lowered in graphs.values():
        tidy(lowered.model)
        if nodes_of(lowered.model, "ReduceSum"):
            from attn_export.graph.lower.ort_experts import fuse_experts

            fuse_experts(lowered.model)
        if any(nodes_of(lowered.model, name) for name in _FUSED):
            fuse_for_ort(lowered.model)
        write_sigmoids(lowered.model)
        if nodes_of(lowered.model, "DequantizeLinear"):
            from attn_export.graph.lower.integer_products import multiply_integers

            multiply_integers(lowered.model, packs_bytes=packs_bytes)
    return graphs


REWRITES: dict[str, Callable[[ir.Model], dict[str, IrGraph]]] = {
    STANDARD: _to_standard, PORTABLE: _to_portable, ORT: _to_ort,
}  # fmt: skip
"""The functions that rewrite a graph to each dialect of the core."""


def _rewrite_of_part(model: ir.Model, dialect: str) -> dict[str, IrGraph]:
    modules = {name: module for part in parts() for name, module in part.dialects.items()}
    if dialect not in modules:
        raise GraphError(f"this installation cannot lower graphs to the {dialect} dialect")
    graphs: dict[str, IrGraph] = import_module(modules[dialect]).rewrite(model)
    return graphs


def _refuse_other_domains(model: ir.Model, dialect: str) -> None:
    for node in every_node(model.graph):
        if node.domain not in ("", "ai.onnx") and dialect not in (ORT, CUDA):
            raise GraphError(
                f"{node.name}: {node.op_type} of {node.domain} is not in the {dialect} dialect; "
                "give the graph before it was lowered"
            )


def _refuse_without_attention(model: ir.Model, dialect: str) -> None:
    """Refuse a graph without `Attention`, unless only its opset changes to the portable one."""
    opset = model.graph.opset_imports.get("", OPSET)
    if nodes_of(model, "Attention") or nodes_of(model, "LinearAttention") or dialect == STANDARD:
        return
    if dialect in (ORT, CUDA) or opset <= OPSET:
        raise GraphError(NOTHING_TO_LOWER.format(dialect=dialect))


def bound_caches(model: ir.Model) -> dict[str, str]:
    """Return the graph outputs that may share the buffer of a graph input: present name to past."""
    bound = {}
    for node in nodes_of(model, "TensorScatter"):
        past, present = node.inputs[0], node.outputs[0]
        if past is not None and is_bound(past, present):
            bound[str(present.name)] = str(past.name)
    return bound


def _cache_layouts(model: ir.Model) -> dict[str, tuple[int, ...]]:
    layouts: dict[str, tuple[int, ...]] = {}
    for a in attentions_of(model):
        cache = in_place_cache(a)
        if cache is not None and holds_values_transposed(a, cache):
            layouts |= dict.fromkeys(
                (str(cache.past_value.name), str(a.value.name)), SWAP_LAST_AXES
            )
    return layouts


def query_axis(model: ir.Model) -> str:
    """Return the name of the query axis of all nodes with a cache; "" if it is not unique."""
    return common_axis(
        model, [dims(a.query)[-2] for a in attentions_of(model) if appends_to_cache(a)]
    )


def with_shapes(model: ir.Model, values: Iterable[ir.Value | None]) -> ir.Model:
    """Infer shapes with onnx, if one of these values has none."""
    if not any(value is None or value.shape is None for value in values):
        return model
    return with_types(model)


def _raise_opset(model: ir.Model, opset: int) -> None:
    if model.graph.opset_imports.get("", opset) < opset:  # of no graph of our own
        from attn_export.graph.lower.newer_opset import raise_opset

        raise_opset(model, opset)


def _finish(lowered: IrGraph) -> IrGraph:
    common.RemoveUnusedNodesPass()(lowered.model)
    nodes = ir.traversal.RecursiveGraphIterator(lowered.model.graph)
    has_attention = any(node.op_type == "Attention" and not node.domain for node in nodes)
    _raise_opset(lowered.model, _ATTENTION_OPSET if has_attention else OPSET)
    common.RemoveUnusedOpsetsPass()(lowered.model)
    merge_equal_constants(lowered.model)  # a constant of the module may equal one that was added
    file = replace(lowered.file, features=features(lowered.model))
    return dataclasses.replace(lowered, file=file)
