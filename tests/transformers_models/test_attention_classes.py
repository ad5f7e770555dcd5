"""The attention classes of `transformers`, alone: every kind of mask, with a cache and without."""

from __future__ import annotations

import pytest
import torch
from real_classes import FAMILIES, TOKENS, B, Built, D, E, L, layer
from shared import extended

from attn_export import Subject

CLASSES = [
    ("llama", "sdpa", "bool[B,1,1,S]", True), ("llama", "eager", "float[B,1,L,S]", False),
    ("qwen3", "sdpa", "float[B,1,L,S]", True), ("qwen3", "eager", "float[B,1,1,S]", True),
    ("mistral", "sdpa", "bool[B,1,L,S]", False), ("mistral", "sdpa", "float[B,1,1,S]", True),
    ("gemma2", "eager", "float[B,1,L,S]", True), ("gemma2", "eager", "float[B,1,1,S]", False),
    ("gemma3", "sdpa", "bool[B,1,L,S]", True), ("gemma3", "eager", "float[B,1,L,S]", False),
    ("gpt2", "sdpa", "float[B,1,1,S]", False), ("gpt2", "eager", "float[B,1,L,S]", True),
    ("bert", "sdpa", "bool[B,1,1,S]", True), ("bert", "eager", "float[B,1,1,S]", False),
    ("bert", "sdpa", None, True),
]  # fmt: skip
DEFAULT = {4, 8, 14}
"""The places of three of them: with a cache and without, each way of computing."""


def named(case: tuple[str, str, str | None, bool]) -> str:
    name, implementation, mask, cache = case
    return "-".join((name, implementation, mask or "no mask", "cache" if cache else "no cache"))


@pytest.mark.parametrize(
    "case", extended(CLASSES, lambda case: CLASSES.index(case) in DEFAULT), ids=named
)
@pytest.mark.every(4)
def test_an_attention_class_passes(case, tmp_path):
    name, implementation, mask, cache = case
    built = Built(layer(name, implementation, mask, cache=cache), tmp_path)
    fused = implementation == "sdpa"
    assert built.count("Attention") == fused
    assert built.with_past == (fused and cache)
    assert built.count("Softmax") == (not fused)


def test_a_class_itself_is_a_module_to_build(tmp_path):
    torch.manual_seed(0)
    family = FAMILIES["llama"]
    subject = Subject(
        family.attention(family.configured("sdpa"), layer_idx=0).eval(),
        inputs={
            "hidden_states": torch.randn(B, L, E),
            "position_embeddings": (torch.randn(B, L, D), torch.randn(B, L, D)),
            "attention_mask": None,  # is causal then
        },
        axes={
            "hidden_states": TOKENS, "position_embeddings.0": TOKENS,
            "position_embeddings.1": TOKENS,
        },
        outputs=["output"],
    )  # fmt: skip
    assert Built(subject, tmp_path).count("Attention") == 1
