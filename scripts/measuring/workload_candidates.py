"""Candidates of a workload of `scripts/bench_peers`: our graph, the peers and the rooflines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
from msgspec.structs import replace

from attn_export.errors import AttnExportError, one_line
from attn_export.graph.load import load_graph
from attn_export.graph.lower import DECODE, lower
from attn_export.graph.save import save_graph
from attn_export.parts.benchmarks.bundle_candidates import (
    FRESH_PROCESS_FROM,
    gemm_rooflines,
    read_rooflines,
)
from attn_export.parts.benchmarks.measurements import Candidate
from attn_export.parts.benchmarks.own_graphs import as_candidate, graph_options, make_graph
from attn_export.parts.benchmarks.peers import peers_of
from attn_export.schema import GraphFile
from measuring.dims import Dims
from measuring.goals import OURS, ROOF, Workload

# -- our graph in a dialect ---------------------------------------------------------------------


def lowered_graphs(canonical: Path, dialect: str, folder: Path) -> dict[str, GraphFile]:
    """Lower a canonical graph to a dialect, and write the results.

    Args:
        canonical: The file of the canonical graph.
        dialect: One of `DIALECTS`.
        folder: The folder to write to.

    Returns:
        The graphs by phase: ``""`` for any length and, if the dialect has it, ``"decode"`` for one
        new token.

    Raises:
        GraphError: If the dialect cannot express the graph.
    """
    written = {}
    for key, form in lower(load_graph(canonical), dialect).items():
        name = f"{canonical.stem}.{'.'.join(filter(None, (dialect, key)))}.onnx"
        save_graph(form.model, folder / name)
        written[key] = replace(form.file, name=name)
    return written


def form_for(forms: Mapping[str, GraphFile], sizes: Mapping[str, int]) -> GraphFile:
    """Return the graph for these sizes, preferably that for one new token.

    Args:
        forms: The lowered graphs by phase.
        sizes: Sizes of the axes, by name.
    """
    special = forms.get(DECODE)
    return special if special is not None and special.takes(sizes) else forms[""]


# -- our graph of attention without projections --------------------------------------------------

PREFILL_GRAPH = """
<ir_version: 11, opset_import: ["" : 23]>
attention (
    float[batch, query_len, {query_width}] query,
    float[batch, query_len, {key_width}] key,
    float[batch, query_len, {key_width}] value
) => (float[batch, query_len, {query_width}] output) {{
    [attention] output = Attention
        <is_causal = {causal}, q_num_heads = {num_heads}, kv_num_heads = {num_kv_heads}>
        (query, key, value)
}}
"""

DECODE_GRAPH = """
<ir_version: 11, opset_import: ["" : 24]>
attention (
    float[batch, {num_heads}, query_len, {head_dim}] query,
    float[batch, {num_kv_heads}, query_len, {head_dim}] key,
    float[batch, {num_kv_heads}, query_len, {head_dim}] value,
    float[batch, {num_kv_heads}, capacity, {head_dim}] past_key,
    float[batch, {num_kv_heads}, capacity, {head_dim}] past_value,
    int64[batch] past_length
) => (
    float[batch, {num_heads}, query_len, {head_dim}] output,
    float[batch, {num_kv_heads}, capacity, {head_dim}] present_key,
    float[batch, {num_kv_heads}, capacity, {head_dim}] present_value
) {{
    present_key = TensorScatter <axis = 2> (past_key, key, past_length)
    present_value = TensorScatter <axis = 2> (past_value, value, past_length)
    new = Shape <start = 2, end = 3> (query)
    filled = Add (past_length, new)
    [attention] output = Attention <is_causal = 1>
        (query, present_key, present_value, , , , filled)
}}
"""
"""A decoding step. Opset 24 is the first with TensorScatter and with the last input."""


def save_core(dims: Dims, path: Path) -> Path:
    """Write a canonical graph of attention without projections; return its path.

    With a past, the graph decodes: queries and the output are [B, H, L, D], and new keys and
    values are written into caches [B, Hkv, capacity, D]. Without one it computes a whole prompt:
    queries and the output are [B, L, H * D].

    Args:
        dims: Sizes of the attention.
        path: The file to write.
    """
    text = (DECODE_GRAPH if dims.past_len else PREFILL_GRAPH).format(
        num_heads=dims.num_heads, num_kv_heads=dims.num_kv_heads, head_dim=dims.head_dim,
        query_width=dims.num_heads * dims.head_dim, key_width=dims.num_kv_heads * dims.head_dim,
        causal=int(dims.causal),
    )  # fmt: skip
    onnx.save(onnx.parser.parse_model(text), path)
    return path


# -- candidates ---------------------------------------------------------------------------------


DIALECT = "ort"
PLAIN = "measuring.plain_attention:make_plain"
"""The function that makes the layer in plain PyTorch."""


def workload_candidates(workload: Workload, folder: Path) -> list[Candidate]:
    """Return the candidates of a workload.

    Args:
        workload: The workload to measure.
        folder: The folder for graphs. Those that are there already are used again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dims = workload.dims
    ours = _ours(dims, folder)
    return [ours, *_peers(dims, folder), *_rooflines(workload, folder)]


def _ours(dims: Dims, folder: Path) -> Candidate:
    try:
        return _lowered(dims, folder)
    except (AttnExportError, RuntimeError) as error:
        return Candidate(OURS, "ours", "graph", {}, dims.work, reason=one_line(error))


def _lowered(dims: Dims, folder: Path) -> Candidate:
    canonical = folder / "ours.onnx"
    if dims.embed_dim:
        make_graph({"function": "measuring.exports:canonical", "spec": layer_spec(dims)}, canonical)
    else:
        save_core(dims, canonical)
    form = form_for(lowered_graphs(canonical, DIALECT, folder), dims.sizes)
    in_place = bool(dims.past_len) and "past_length" in _inputs_of(folder / form.name)
    return as_candidate(
        OURS, folder, form, dims.inputs(in_place=in_place), dims.outputs(), dims.work
    )


def layer_spec(dims: Dims) -> dict[str, Any]:
    """Return the fields of the spec of a whole layer, without biases."""
    return {
        "embed_dim": dims.embed_dim, "num_heads": dims.num_heads,
        "num_kv_heads": dims.num_kv_heads, "head_dim": dims.head_dim, "bias": "none",
        "causal": dims.causal, "cache": "in-place" if dims.past_len else "none",
    }  # fmt: skip


def _peers(dims: Dims, folder: Path) -> list[Candidate]:
    large, decodes = dims.score_bytes >= FRESH_PROCESS_FROM, bool(dims.past_len)
    fields = {"dims": dataclasses.asdict(dims)}
    export = {"function": "measuring.plain_attention:bare_plain", **fields}
    feeds = dims.inputs(in_place=False), dims.outputs()
    bare = graph_options(folder / "bare.onnx", *feeds, export=export)
    options = {"module": PLAIN, "layer": fields, "graph": bare, "static": decodes}
    return peers_of(options, dims.work, decodes=decodes, large=large)


def _rooflines(workload: Workload, folder: Path) -> list[Candidate]:
    if workload.dims.past_len:
        return read_rooflines(folder)
    if any(goal.against == ROOF for goal in workload.goals):
        width = workload.dims.num_heads * workload.dims.head_dim
        return gemm_rooflines(folder, (workload.dims.query_len, width, width))
    return gemm_rooflines(folder)


def _inputs_of(file: Path) -> set[str]:
    import onnx

    return {value.name for value in onnx.load(file, load_external_data=False).graph.input}
