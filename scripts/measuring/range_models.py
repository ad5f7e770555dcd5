"""Eight graphs of transformers with written-out attention, their weights, and their inputs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
import transformers
from onnx import numpy_helper
from transformers import exporters

_BATCH, _LENGTH, _WIDTH, _VOCABULARY = 2, 32, 256, 256
MASKED = -10000.0
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 256,
    "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 64}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED | {"query_pre_attn_scalar": 64, "sliding_window": 16}),
    "mixtral": ("MixtralForCausalLM", _GROUPED | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 128,
        "intermediate_size": 128, "head_dim": 32,
    }),
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": _VOCABULARY, "n_embd": _WIDTH, "n_head": 4, "n_layer": 4, "n_positions": 256,
    }),
    "bert": ("BertForMaskedLM", _SIZES),
    "t5": ("T5EncoderModel", {
        "vocab_size": _VOCABULARY, "d_model": _WIDTH, "d_kv": 64, "d_ff": 512, "num_layers": 4,
        "num_heads": 4,
    }),
    "whisper": ("WhisperModel", {
        "d_model": _WIDTH, "encoder_layers": 6, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
        "num_mel_bins": 16, "max_source_positions": 32, "vocab_size": _VOCABULARY,
        "pad_token_id": 0, "decoder_start_token_id": 1,
    }),
}  # fmt: skip
NAMES = tuple(_MODELS)
CAUSAL = ("llama", "qwen3", "gemma2", "mixtral", "gpt2")


def export(name: str, path: Path) -> None:
    """Write the graph of a model, with random weights and fixed shapes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    class_name, sizes = _MODELS[name]
    class_: Any = getattr(transformers, class_name)
    config = class_.config_class(**sizes)
    config._attn_implementation, config.use_cache = "eager", False
    torch.manual_seed(0)
    model = class_(config).eval()
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")
    given = {n: torch.from_numpy(x) for n, x in inputs_of(name, np.random.default_rng(0)).items()}
    kit: Any = exporters
    exporter = kit.OnnxExporter()
    with contextlib.redirect_stdout(io.StringIO()):
        exported = exporter.export(
            model.encoder if name == "whisper" else model, given, kit.OnnxConfig(dynamic=False)
        )
    onnx_ir.save(exported.program, path)


def inputs_of(name: str, random: np.random.Generator, *, padded: bool = True) -> dict[str, Any]:
    """Return inputs: words, a mask with some padding on the left, positions; or sounds."""
    if name == "whisper":
        return {"input_features": random.normal(0, 1, (_BATCH, 16, 64)).astype(np.float32)}
    shape = (_BATCH, _LENGTH)
    mask = np.ones(shape, np.int64)
    if padded:
        mask[0, : random.integers(2, 7)] = 0
    inputs = {"input_ids": random.integers(3, _VOCABULARY, shape), "attention_mask": mask}
    if name in CAUSAL:
        inputs["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    if name == "bert":
        inputs["token_type_ids"] = np.zeros(shape, np.int64)
    return inputs


def with_weights(model: onnx.ModelProto, name: str, random: np.random.Generator) -> None:
    """Draw the matrices of a graph anew, and let its masks fit float16."""
    graph = model.graph
    weights = {t.name: t for t in graph.initializer}
    readers = ("MatMul", "Gemm", "Gather", "GatherND", "Conv")
    for node in graph.node:
        for tensor in (
            weights.pop(x) for x in node.input if x in weights and node.op_type in readers
        ):
            old = numpy_helper.to_array(tensor)
            if old.ndim < 2 or old.dtype != np.float32:
                continue
            fan_in = (
                old.shape[0]
                if old.ndim == 2
                else old[0].size
                if node.op_type == "Conv"
                else old.shape[-1]
            )
            size = max(float(old.std()), fan_in**-0.5 if name != "t5" else 0)
            new = random.normal(0, size, old.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    for tensor in graph.initializer:
        if tensor.data_type == 1 and not tensor.dims and numpy_helper.to_array(tensor) < -1e30:
            tensor.CopyFrom(numpy_helper.from_array(np.array(MASKED, np.float32), tensor.name))
    if name in CAUSAL:  # rows that are masked in all places stay so in float16
        made = {n.output[0]: n for n in graph.node}
        for node in list(graph.node):
            mask = made.get(node.input[1]) if node.op_type == "Add" else None
            if mask is not None and mask.op_type == "Where":
                node.op_type = "Where"
                node.input[:] = [mask.input[0], node.input[0], mask.input[2]]
