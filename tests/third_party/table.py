"""Every module of others, and what is known of those that do not pass."""

from __future__ import annotations

from third_party import (
    by_hand,
    cached,
    hard_to_capture,
    hybrid,
    masks_of_inputs,
    memories,
    newer_masks,
    newer_pytorch,
    of_hybrids,
    of_libraries,
    of_pytorch,
    of_transformers,
    other_operators,
    recurrent,
    sizes_of_others,
    sparse,
    windows,
)
from third_party.subjects import Table

SOURCES = {
    "PyTorch's": of_pytorch.MODULES,
    "as people write them": by_hand.MODULES,
    "transformers'": of_transformers.MODULES,
    "other libraries'": of_libraries.MODULES,
    "loops": recurrent.MODULES,
    "linear and hybrid": hybrid.MODULES,
    "caches": cached.MODULES,
    "transformers' caches and hybrids": of_hybrids.MODULES,
    "of tied sizes": {**sizes_of_others.MODULES, **memories.MODULES, **windows.MODULES},
    "sparse or hard to capture": {**sparse.MODULES, **hard_to_capture.MODULES},
    "FlexAttention": {**newer_masks.MODULES, **masks_of_inputs.MODULES},
    "operators of other libraries": other_operators.MODULES,
    "PyTorch's rarer forms": newer_pytorch.MODULES,
}
EVERY: Table = {name: make for table in SOURCES.values() for name, make in table.items()}

REFUSED = {
    "Falcon, ALiBi": "Could not find an implementation for Mul",  # in bfloat16
    "x-transformers, ALiBi": "was fixed at 5 by the module",
    "x-transformers, T5's bias": "was fixed at 5 by the module",
    "Performer, causal": "relative error",  # ONNX Runtime adds up 1,024 products in float32
    "jit, a scripted part": "a module or function of torch.jit; pass the module from before",
    "TransformerDecoder, a mask that is causal": "the input tgt_mask changes no output",
    "TransformerEncoder with padding": "pass enable_nested_tensor=False to nn.TransformerEncoder",
    "a nested tensor within": "a nested tensor, which cannot be captured; pad the sequences",
    "a mask of all, unnamed": "axes={'other': {2: 'query_len', 3: 'query_len'}}",
    "conformer, unnamed": "write relations={'other_1': '2*query_len - 1'}",
    "pooled square grid": "was fixed at 16 by the module",
    "Qwen2-VL, slices": "was fixed at",
    "BigBird, any length": "attention_type between calls",  # a short input changes it for good
    "quantize_dynamic": "build the float module, and quantize the bundle",
    "loop, stepwise": "a loop by torch._higher_order_ops.scan",
    "Mamba, free": "a loop by torch._higher_order_ops.scan",
    "Qwen3_5Text, free": "to leave out other sizes, write Axis('query_len', max=64)",
}
"""Modules that do not pass, with a part of what is said."""

NOT_ONE_NODE = {
    "sinks", "channels", "talking", "shared by groups", "best two", "Bloom, eager", "GptOss, eager",
    "DebertaV2, eager", "timm.SwinTransformerBlock", "heads in the batch, hidden keys",
    "Longformer", "Longformer, strided", "patches", "patches of two sizes",
    "Swin, masks of windows", "Synthesizer", "products with distances", "points apart",
    "jit, a scripted function",
}  # fmt: skip
"""Modules with a softmax that is not the one of an `Attention` node."""
