"""Whole models of `transformers`: tokens and padding in, hidden states out, and a cache."""

from __future__ import annotations

import pytest
import torch
from real_classes import (
    HKV,
    IDS,
    PAST,
    TOKENS,
    TOTAL,
    B,
    Built,
    D,
    E,
    L,
    P,
    decoder,
    model,
    padded,
)
from transformers import DynamicCache
from transformers.exporters.exporter_dynamo import register_pytree_node

from attn_export import Subject

EXTENDED = pytest.mark.extended
KEPT = {"use_cache": False, "return_dict": False}
"""Of these `return_dict` goes into the models' ``**kwargs``."""
PADDED = {"input_ids": IDS, "attention_mask": padded(L)}
EMBEDDED = {"inputs_embeds": torch.randn(B, L, E)}


@pytest.mark.parametrize(
    ("name", "implementation", "layers", "inputs", "outputs"),
    [
        ("llama", "sdpa", 1, PADDED | KEPT, ["hidden"]),
        ("qwen3", "sdpa", 1, EMBEDDED | KEPT, ["hidden"]),
        pytest.param("gemma2", "eager", 1, PADDED | KEPT, ["hidden"], marks=EXTENDED),
        # One with a window, one without.
        pytest.param("gemma3", "sdpa", 2, PADDED | KEPT, ["hidden"], marks=EXTENDED),
        # Its table of positions has an end, at which the module raises: no other branch.
        ("bert", "sdpa", 1, PADDED, ["last_hidden_state", "pooler_output"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.extended
def test_a_model_without_a_cache_passes(name, implementation, layers, inputs, outputs, tmp_path):
    tensors = [key for key, value in inputs.items() if isinstance(value, torch.Tensor)]
    axes = dict.fromkeys(tensors, TOKENS)
    subject = Subject(model(name, implementation, layers), inputs, axes, outputs)
    attentions = Built(subject, tmp_path).count("Attention")
    assert attentions == (layers if implementation == "sdpa" else 0)


# With a window, without.
@pytest.mark.parametrize("name", ["mistral", "gpt2"])
@pytest.mark.extended
def test_every_layer_of_a_model_has_its_cache(name, tmp_path):
    built = Built(decoder(name), tmp_path)
    assert (built.count("Attention"), built.with_past) == (2, 2)


@pytest.mark.extended
def test_a_cache_of_theirs_is_an_input_once_pytorch_knows_it(tmp_path):
    register_pytree_node(DynamicCache)  # as `transformers` itself does to export
    past = tuple(torch.randn(B, HKV, P, D) for _ in range(2))
    inputs = {
        "input_ids": IDS, "attention_mask": padded(P + L), "past_key_values": DynamicCache([past])
    }  # fmt: skip
    axes = {
        "input_ids": TOKENS, "attention_mask": {0: "batch", 1: "total_len"},
        "past_key_values.0": PAST, "past_key_values.1": PAST,
    }  # fmt: skip
    outputs = ["hidden", "present_key", "present_value"]
    subject = Subject(model("llama"), inputs, axes, outputs, relations=TOTAL)
    assert Built(subject, tmp_path).with_past == 1
