"""Nodes of the operators that exporters of whole models write.

Legend: B batch, H query heads, HKV key/value heads, D channels of a head, L new tokens, P past
tokens, S all keys, E channels of a token.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

Array = np.ndarray
Operands = Mapping[str, Array | None]

H, HKV, D, E = 4, 2, 32, 24
MICROSOFT = "com.microsoft"


def normal(name: str, *shape: int) -> Array:
    """Return random numbers that depend on the name alone."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.standard_normal(shape).astype(np.float32)


def of(**shapes: Sequence[int]) -> dict[str, Array]:
    return {name: normal(name, *shape) for name, shape in shapes.items()}


def int32(*rows: Any) -> Array:
    return np.array(rows, np.int32)


def model_of(
    op: str, domain: str, operands: Operands, attributes: Mapping[str, Any], outputs: str
) -> onnx.ModelProto:
    given = {name: array for name, array in operands.items() if array is not None}
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in given.items()
    ]
    ends = [onnx.ValueInfoProto(name=name) for name in outputs.split()]
    read = [name if name in given else "" for name in operands]
    node = helper.make_node(op, read, outputs.split(" "), "node", domain=domain, **attributes)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(MICROSOFT, 1)]
    graph = helper.make_graph([node], "g", inputs, ends)
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


# -- attention with groups -----------------------------------------------------------------------


def angles(width: int = D) -> dict[str, Array]:
    turns = np.arange(32)[:, None] * 100.0 ** -np.linspace(0, 1, width // 2)
    return {"cos_cache": np.cos(turns, dtype="f"), "sin_cache": np.sin(turns, dtype="f")}


def grouped(
    L: int, past: Sequence[int], *, capacity: int = 0, packed: bool = False, **further: Any
) -> tuple[str, str, Operands, Mapping[str, Any], str]:
    """Return a GroupQueryAttention with past tokens of each batch element; arrays are inputs."""
    B, counts = len(past), np.array(past, np.int32) + L
    operands: dict[str, Array | None] = dict.fromkeys((
        "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
        "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink",
    ))  # fmt: skip
    operands |= of(query=(B, L, H * D), key=(B, L, HKV * D), value=(B, L, HKV * D))
    if packed:
        operands |= {"query": normal("packed", B, L, (H + 2 * HKV) * D), "key": None, "value": None}
    if max(past) or capacity:
        cache = (B, HKV, capacity or max(past), D)
        operands |= of(past_key=cache, past_value=cache)
    operands |= {"seqlens_k": counts - 1, "total_sequence_length": np.array(counts.max())}
    operands |= {name: value for name, value in further.items() if isinstance(value, np.ndarray)}
    attributes = {name: value for name, value in further.items() if name not in operands}
    known = {"num_heads": H, "kv_num_heads": HKV, **attributes}
    return "GroupQueryAttention", MICROSOFT, operands, known, "y keys values"


ROTARY = {"do_rotary": 1, **angles()}
SINK = normal("sink", H)
WINDOW = {"capacity": 6, "local_window_size": 4, "sliding_window_cache": 1}
GROUPED = {
    "prompt": grouped(4, [0, 0]),
    "one token": grouped(1, [5, 3]),
    "tokens after a past": grouped(3, [4]),
    "cache in place": grouped(1, [5, 3], capacity=9),
    "prompt in place": grouped(4, [0, 0], capacity=9, causal=1, qk_output=0),
    "all keys": grouped(4, [0, 0], causal=0),
    "all keys after a past": grouped(3, [4], causal=0),
    "packed": grouped(4, [0, 0], packed=True),
    "packed with rotary": grouped(1, [5, 3], packed=True, **ROTARY),
    "rotary prompt": grouped(4, [0, 0], **ROTARY),
    "rotary": grouped(1, [5, 3], **ROTARY),
    "rotary pairs": grouped(3, [4], **ROTARY, rotary_interleaved=1),
    "half rotary": grouped(1, [5, 3], do_rotary=1, **angles(D // 2)),
    "position": grouped(1, [5, 3], **ROTARY, position_ids=np.array([[9], [0]])),
    "positions of a prompt": grouped(3, [0, 0], **ROTARY, position_ids=np.array([[4, 5, 6]] * 2)),
    "positions after a past": grouped(3, [4], **ROTARY, position_ids=np.array([[8, 8, 2]])),
    "prompts of two lengths": grouped(4, [0, 0], **ROTARY, seqlens_k=int32(1, 3)),
    "window": grouped(6, [0, 0], local_window_size=3),
    "window after a past": grouped(3, [5], local_window_size=4),
    "window and bias": grouped(
        6, [0, 0], local_window_size=3, attention_bias=normal("added", 2, 1, 6, 6)),
    "softcap and scale": grouped(4, [0, 0], softcap=0.7, scale=0.4),
    "softcap and bias": grouped(
        3, [5], softcap=0.7, attention_bias=normal("added", 1, H, 3, 8)),
    "bias of each element": grouped(1, [5, 5], attention_bias=normal("added", 2, H, 1, 6)),
    "smooth": grouped(4, [0, 0], smooth_softmax=1),
    "sink": grouped(1, [5, 3], head_sink=SINK),
    "smooth sink in a window": grouped(
        6, [0, 0], head_sink=SINK, smooth_softmax=1, local_window_size=2, softcap=2.0),
    "cache of a window": grouped(1, [5, 3], **WINDOW),
    "dropped tokens": grouped(1, [9, 6], **WINDOW, **ROTARY),
    "dropped at once": grouped(5, [4], **WINDOW),
    "bias of dropped tokens": grouped(
        1, [9, 6], **WINDOW, attention_bias=normal("added", 1, H, 1, 10)),
    "prompt beyond a window": grouped(9, [0, 0], **WINDOW),
}  # fmt: skip


# -- other attention -----------------------------------------------------------------------------


def multi(
    L: int, S: int, *, P: int = 0, **further: Any
) -> tuple[str, str, Operands, Mapping[str, Any], str]:
    """Return a MultiHeadAttention; arrays are inputs."""
    operands: dict[str, Array | None] = dict.fromkeys((
        "query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key",
        "past_value",
    ))  # fmt: skip
    operands |= of(query=(2, L, H * D), key=(2, S, H * D), value=(2, S, H * 8))
    if P:
        operands |= of(value=(2, S, H * D), past_key=(2, H, P, D), past_value=(2, H, P, D))
    operands |= {name: value for name, value in further.items() if isinstance(value, np.ndarray)}
    attributes = {name: value for name, value in further.items() if name not in operands}
    return (
        "MultiHeadAttention",
        MICROSOFT,
        operands,
        {"num_heads": H, **attributes},
        "y keys values" if P else "y",
    )


def packed(*, P: int = 0, width: int = 3 * H * D, **further: Any) -> Any:
    """Return the Attention of com.microsoft over 5 tokens; arrays are inputs."""
    operands: dict[str, Array | None] = dict.fromkeys(
        ("input", "weights", "bias", "mask_index", "past", "attention_bias")
    )
    operands |= of(input=(2, 5, E), weights=(E, width), bias=(width,))
    operands["weights"] = operands["weights"] / 5
    if P:
        operands["past"] = normal("past", 2, 2, H, P, D)
    operands |= {name: value for name, value in further.items() if isinstance(value, np.ndarray)}
    attributes = {name: value for name, value in further.items() if name not in operands}
    return (
        "Attention",
        MICROSOFT,
        operands,
        {"num_heads": H, **attributes},
        "y present" if P else "y",
    )


CACHED = of(key=(2, H, 7, D), value=(2, H, 7, D))
OTHERS = {
    "all keys": multi(5, 7),
    "scale": multi(5, 7, scale=0.4),
    "bias": multi(5, 7, bias=normal("b", 2 * H * D + H * 8)),
    "lengths": multi(5, 7, key_padding_mask=int32(7, 4)),
    "padding": multi(5, 7, key_padding_mask=int32([1] * 7, [0, 0, 1, 1, 1, 0, 1])),
    "padding of all": multi(
        5, 7, key_padding_mask=int32([1] * 7, [0] * 7), mask_filter_value=-30.0),
    "padding and bias": multi(
        2, 2, key_padding_mask=int32([1, 0], [1, 1]), mask_filter_value=-3.0,
        attention_bias=normal("added", 2, H, 2, 2)),
    "padding of queries": multi(2, 3, key_padding_mask=int32(
        [[1, 1, 0], [0, 1, 1]], [[1, 1, 1], [0, 1, 0]])),
    "bias of all heads": multi(5, 7, attention_bias=normal("added", 2, 1, 5, 7)),
    "bias of all elements": multi(5, 7, attention_bias=normal("added", 1, H, 5, 7)),
    "past": multi(2, 2, P=3),
    "causal past": multi(2, 2, P=3, unidirectional=1),
    "causal": multi(4, 4, unidirectional=1),
    "padded past": multi(2, 2, P=3, key_padding_mask=int32([1] * 5, [0, 1, 1, 1, 1])),
    "keys with heads": multi(5, 7, **CACHED),
    "projected": packed(),
    "projected, causal": packed(unidirectional=1, scale=0.4),
    "projected, past": packed(P=3, unidirectional=1),
    "projected, padding": packed(mask_index=int32([1] * 5, [0, 0, 1, 1, 1])),
    "projected, lengths": packed(mask_index=int32(5, 2)),
    "projected, ends and starts": packed(mask_index=int32(5, 4, 0, 2)),
    "projected, bias": packed(attention_bias=normal("added", 2, H, 5, 5)),
    "projected, narrow values": packed(
        width=2 * H * D + H * 8, qkv_hidden_sizes=[H * D, H * D, H * 8]),
}  # fmt: skip


# -- other operators -----------------------------------------------------------------------------


def row(
    op: str, domain: str = MICROSOFT, outputs: str = "y",
    attributes: Mapping[str, Any] | None = None, **operands: Array | None,
) -> tuple[str, str, Operands, Mapping[str, Any], str]:  # fmt: skip
    return op, domain, operands, attributes or {}, outputs


X = normal("x", 2, 5, E) / 100  # so small that epsilon counts
SKIPPED = {"x": X, "skip": X[::-1], "gamma": normal("gamma", E)}
HEADS = normal("heads", 2, H, 5, D)
TOKENS = normal("tokens", 2, 5, H * D)
PLACES = np.array([[3, 4, 5, 6, 7], [0, 0, 1, 2, 3]])
WRITTEN = {
    "past_cache": normal("cache", 2, HKV, 8, D), "update": normal("update", 2, HKV, 3, D),
    "write_indices": np.array([5, 1]),
}  # fmt: skip
VALID = {
    **of(q=(2, 3, H * D), k=(2, 8, HKV * D), v=(2, 8, HKV * D)), "mask": None, "past_key": None,
    "past_value": None, "nonpad_kv_seqlen": np.array([8, 4]),
}  # fmt: skip
EXPERTS = of(tokens=(2, 5, E), router=(10, 4), w1=(4, H, E), b1=(4, H), w2=(4, E, H), b2=(4, E))
REST = {
    "SimplifiedLayerNormalization": row(
        "SimplifiedLayerNormalization", "", x=X, scale=SKIPPED["gamma"]),
    "SimplifiedLayerNormalization of two axes": row(
        "SimplifiedLayerNormalization", "", "y inverse", {"axis": 1, "epsilon": 1e-4}, x=X,
        scale=normal("scale", 5, E)),
    "RMSNormalization": row("RMSNormalization", "", x=X, scale=SKIPPED["gamma"]),
    "SkipLayerNormalization": row("SkipLayerNormalization", outputs="y   sum", **SKIPPED),
    "SkipLayerNormalization with biases": row(
        "SkipLayerNormalization", outputs="y   sum", attributes={"epsilon": 1e-3}, **SKIPPED,
        **of(beta=(E,), bias=(E,))),
    "SkipSimplifiedLayerNormalization": row(
        "SkipSimplifiedLayerNormalization", outputs="y   sum", **SKIPPED),
    "SkipSimplifiedLayerNormalization with a bias": row(
        "SkipSimplifiedLayerNormalization", outputs="y   sum", attributes={"epsilon": 1e-3},
        **SKIPPED, bias=normal("bias", E)),
    "EmbedLayerNormalization": row(
        "EmbedLayerNormalization", outputs="y lengths", ids=int32(1, 4, 2, 0).reshape(2, 2),
        segments=int32(0, 1, 1, 0).reshape(2, 2),
        **of(words=(6, 8), positions=(3, 8), kinds=(2, 8), gamma=(8,), beta=(8,)),
        mask=int32(1, 1, 0, 1).reshape(2, 2)),
    "Gelu": row("Gelu", "", x=TOKENS),
    "Gelu by tanh": row("Gelu", "", "y", {"approximate": "tanh"}, x=TOKENS),
    "Gelu of ONNX Runtime": row("Gelu", x=TOKENS),
    "BiasGelu": row("BiasGelu", x=TOKENS, bias=normal("bias", H * D)),
    "FastGelu": row("FastGelu", x=TOKENS),
    "FastGelu with a bias": row("FastGelu", x=TOKENS, bias=normal("bias", H * D)),
    "QuickGelu": row("QuickGelu", x=TOKENS),
    "QuickGelu with alpha": row("QuickGelu", attributes={"alpha": 0.8}, x=TOKENS),
    "Swish": row("Swish", "", "y", {"alpha": 0.8}, x=TOKENS),
    "FusedMatMul": row(
        "FusedMatMul", attributes={"alpha": 0.3, "transA": 1, "transB": 1},
        **of(a=(2, 3, 4), b=(2, 5, 3))),
    "FusedMatMul of batches": row(
        "FusedMatMul", attributes={"transBatchA": 1, "transBatchB": 1, "transB": 1},
        **of(a=(2, 3, 4, 5), b=(6, 3, 4, 5))),
    "RotaryEmbedding": row(
        "RotaryEmbedding", x=HEADS, positions=PLACES, **angles()),
    "RotaryEmbedding of tokens": row(
        "RotaryEmbedding", attributes={"interleaved": 1}, x=TOKENS, positions=PLACES, **angles()),
    "RotaryEmbedding from a position": row(
        "RotaryEmbedding", x=HEADS, positions=np.array([4]), **angles()),
    "RotaryEmbedding of some channels": row(
        "RotaryEmbedding", attributes={"num_heads": H, "rotary_embedding_dim": 8}, x=TOKENS,
        positions=PLACES, **angles(8)),
    "RotaryEmbedding of ONNX": row(
        "RotaryEmbedding", "", "y", {"num_heads": H, "rotary_embedding_dim": 8, "interleaved": 1},
        x=TOKENS, **angles(8), positions=PLACES),
    "TensorScatter": row("TensorScatter", "", **WRITTEN),
    "TensorScatter in a circle": row(
        "TensorScatter", "", "y", {"mode": "circular"},
        **{**WRITTEN, "write_indices": PLACES[:, 4]}),
    "MoE": row("MoE", attributes={"k": 2}, **EXPERTS),
    "MoE of weights that sum to 1": row(
        "MoE", attributes={"k": 2, "activation_type": "silu", "normalize_routing_weights": 1},
        **EXPERTS),
    "MoE with gates": row(
        "MoE", attributes={
            "k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.3,
            "activation_beta": 0.7, "swiglu_limit": 1.0},
        **{**EXPERTS, **of(w1=(4, 2 * H, E), b1=(4, 2 * H))}),
    "Attention over valid keys": row(
        "Attention", "", "y", {"q_num_heads": H, "kv_num_heads": HKV, "is_causal": 1}, **VALID),
}  # fmt: skip
ALL = {
    **{f"GroupQueryAttention, {name}": each for name, each in GROUPED.items()},
    **{f"{each[0]}, {name}": each for name, each in OTHERS.items()},
    **REST,
}
