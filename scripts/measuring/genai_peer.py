"""Attention graph of a layer from the model builder of onnxruntime-genai, for CPUs.

It has int4 weights in blocks of 32, products that round their inputs to 8 bits, one product for q,
k and v, GroupQueryAttention with rotary, and a cache of float32.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attn_export.parts.benchmarks.feeds import Feed
from attn_export.parts.benchmarks.measurements import Candidate, Work
from attn_export.parts.benchmarks.own_graphs import graph_options

NAME = "onnxruntime-genai int4"
PACKAGE = "onnxruntime_genai"
HIDDEN, OUTPUT = "hidden", "output"
LAYER = "/model/layers.0"
PAST, PRESENT = "past_key_values.0", "present.0"
SMALL = 128
"""Width of the MLP and size of the vocabulary of the checkpoint, neither of which is measured."""


def genai(
    layer: Mapping[str, Any], sizes: Mapping[str, int], folder: Path, work: Work
) -> Candidate:
    """Return the candidate. Without the package it has a reason not to run.

    Args:
        layer: The fields of the layer's spec.
        sizes: The sizes of the axes.
        folder: A folder for the checkpoint and the graph, which are used again if they are there.
        work: The work of one run.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        reason = "install it: pip install --no-deps onnxruntime-genai"
        return Candidate(NAME, "peer", "graph", {}, work, reason=reason)
    B, L, S = sizes["batch"], sizes["query_len"], sizes["total_len"]
    E, H, kv = layer["embed_dim"], layer["num_heads"], layer["num_kv_heads"]
    cache = Feed((B, kv, S, E // H))
    inputs = {
        HIDDEN: Feed((B, L, E)), "attention_mask": Feed((B, S), "int64", 1.0),
        f"{PAST}.key": cache, f"{PAST}.value": cache,
    }  # fmt: skip
    bound = {f"{PRESENT}.{part}": f"{PAST}.{part}" for part in ("key", "value")}
    outputs = {OUTPUT: Feed((B, L, E))}
    options = graph_options(_graph(layer, folder), inputs, outputs, bound=bound)
    return Candidate(NAME, "peer", "graph", options, work)


def _graph(layer: Mapping[str, Any], folder: Path) -> Path:
    """Return the graph file of the layer's attention, which is written if it is missing."""
    file = folder / "attention.onnx"
    if file.exists():
        return file
    checkpoint, built = folder / "checkpoint", folder / "built"
    _write_checkpoint(layer, checkpoint)
    package = importlib.util.find_spec(PACKAGE)
    assert package is not None
    assert package.origin is not None
    builder = Path(package.origin).parent / "models" / "builder.py"
    subprocess.run(
        [
            sys.executable, str(builder), "-i", str(checkpoint), "-m", str(checkpoint),
            "-o", str(built), "-p", "int4", "-e", "cpu",
            "--extra_options", "exclude_embeds=true", "exclude_lm_head=true",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    model = ir.load(built / "model.onnx")
    _keep_attention(model)
    ir.save(model, file, external_data="attention.onnx.data")
    return file


def _write_checkpoint(layer: Mapping[str, Any], folder: Path) -> None:
    """Write a Llama checkpoint of one layer with random weights, and a tokenizer of four words."""
    config = LlamaConfig(
        hidden_size=layer["embed_dim"], num_attention_heads=layer["num_heads"],
        num_key_value_heads=layer["num_kv_heads"], intermediate_size=SMALL, vocab_size=SMALL,
        num_hidden_layers=1, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)


def _keep_attention(model: ir.Model) -> None:
    """Remove all nodes before the first norm's output and after the output projection, in place."""
    graph = model.graph
    values = {str(value.name): value for node in graph for value in node.outputs}
    normed = values[f"{LAYER}/input_layernorm/output_0"]
    hidden = ir.val(HIDDEN, ir.DataType.FLOAT, ir.Shape(["batch", "length", None]))
    normed.replace_all_uses_with(hidden)
    output = values[f"{LAYER}/attn/o_proj/MatMul/output_0"]
    output.name = OUTPUT
    kept = [output, *(value for value in graph.outputs if str(value.name).startswith(PRESENT))]
    graph.inputs[:] = [hidden, *(x for x in graph.inputs if x.name != "inputs_embeds")]
    graph.outputs[:] = kept
    common.RemoveUnusedNodesPass()(model)
