"""Models of `transformers` with their own cache objects as inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from agreement import right_graphs
from real_classes import DECODER, IDS, TOKENS, D, model
from shared import extended
from torch import nn
from transformers import DynamicCache

from attn_export import Subject

GROWING = {0: "batch", 2: "past_len"}


def filled(module: nn.Module, cache: hf.Cache) -> hf.Cache:
    with torch.no_grad():
        module(input_ids=IDS[:, :4], cache=cache)
    return cache


def growing() -> Subject:
    module = model("llama", layers=2)
    inputs = {"input_ids": IDS, "cache": filled(module, DynamicCache())}
    axes = {"input_ids": TOKENS, "cache": GROWING}
    return Subject(module, inputs, axes, ["last_hidden_state"])


def hybrid() -> Subject:
    config = hf.Qwen3NextConfig(
        **DECODER, num_hidden_layers=2, num_experts=0,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=D, linear_value_head_dim=D,
    )  # fmt: skip
    module = hf.Qwen3NextForCausalLM(config).eval()
    cache = filled(module, DynamicCache(config=config))
    axes = {
        "input_ids": {0: "batch"}, "cache": {0: "batch"},
        "cache.layers.1": GROWING,
    }  # fmt: skip
    inputs = {"input_ids": IDS[:, :1] + torch.tensor([[0], [9]]), "cache": cache}
    return Subject(module, inputs, axes, ["logits"])


KEPT: dict[Callable[[], Subject], list[str]] = {
    growing: ["key_0", "value_0", "key_1", "value_1"],
    hybrid: ["conv_states_0_0", "recurrent_states_0_0", "key_1", "value_1"],
}
"""What the next step takes, by the function that makes a subject."""


@pytest.mark.parametrize("make", extended(KEPT, lambda make: make is growing))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.every(3)
def test_its_tensors_are_inputs_and_outputs_and_it_passes(make):
    torch.manual_seed(0)
    subject = make()
    assert subject.roles.caches == {f"present_{name}": f"past_{name}" for name in KEPT[make]}
    right_graphs(subject)
