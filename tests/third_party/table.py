"""Every module of others, and what is known of those that do not pass."""

from __future__ import annotations

from third_party import (
    by_hand,
    cached,
    hybrid,
    of_hybrids,
    of_libraries,
    of_pytorch,
    of_transformers,
    recurrent,
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
}
EVERY: Table = {name: make for table in SOURCES.values() for name, make in table.items()}

REFUSED = {
    "Falcon, ALiBi": "Could not find an implementation for Mul",  # in bfloat16
    "x-transformers, ALiBi": "was fixed at 5 by the module",
    "x-transformers, T5's bias": "was fixed at 5 by the module",
}
"""Modules that do not pass, with a part of what is said."""

NOT_ONE_NODE = {
    "sinks", "channels", "talking", "shared by groups", "best two", "Bloom, eager", "GptOss, eager",
    "DebertaV2, eager", "timm.SwinTransformerBlock",
}  # fmt: skip
"""Modules with a softmax that is not the one of an `Attention` node."""
