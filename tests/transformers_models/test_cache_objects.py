"""Models of `transformers` with their own cache objects as inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from agreement import right_graphs
from real_classes import DECODER, FAMILIES, IDS, SMALL, TOKENS, D, E, H, model
from shared import extended
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from attn_export import Axis, Subject

GROWING = {0: "batch", 2: "past_len"}


def filled(module: nn.Module, cache: hf.Cache) -> hf.Cache:
    with torch.no_grad():
        module(input_ids=IDS[:, :4], past_key_values=cache)
    return cache


def growing() -> Subject:
    module = model("llama", layers=2)
    inputs = {"input_ids": IDS, "past_key_values": filled(module, DynamicCache())}
    axes = {"input_ids": TOKENS, "past_key_values": GROWING}
    return Subject(module, inputs, axes, ["last_hidden_state"])


def empty() -> Subject:
    inputs = {"input_ids": IDS, "past_key_values": DynamicCache()}
    return Subject(model("llama"), inputs, {"input_ids": TOKENS}, ["hidden"])


def static() -> Subject:
    module = model("llama")
    config = FAMILIES["llama"].configured("sdpa")
    cache = filled(module, StaticCache(config=config, max_cache_len=16))
    axes = {
        "input_ids": {0: "batch", 1: Axis("query_len", max=12)},
        "past_key_values": {0: "batch"},
    }
    return Subject(module, {"input_ids": IDS, "past_key_values": cache}, axes, ["hidden"])


class Crossed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": E, "d_kv": D, "d_ff": 48, "num_layers": 1, "num_heads": H}
        config = hf.T5Config(**{**SMALL, **sizes}, decoder_start_token_id=0)
        self.model = hf.T5ForConditionalGeneration(config)

    def forward(self, ids: Tensor, cache: EncoderDecoderCache, mask: Tensor) -> Tensor:
        states = torch.zeros(*mask.shape, E)  # its keys and values are in the cache
        given = BaseModelOutput(last_hidden_state=states)
        logits: Tensor = self.model(
            encoder_outputs=given, decoder_input_ids=ids, past_key_values=cache, attention_mask=mask
        ).logits
        return logits


def crossed() -> Subject:
    module = Crossed().eval()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        given = BaseModelOutput(last_hidden_state=torch.randn(2, 6, E))
        module.model(encoder_outputs=given, decoder_input_ids=IDS[:, :4], past_key_values=cache)
    inputs = {"ids": IDS, "cache": cache, "mask": torch.ones(2, 6, dtype=torch.int64)}
    axes = {
        "ids": TOKENS, "mask": {0: "batch", 1: "key_len"}, "cache.self_attention_cache": GROWING,
        "cache.cross_attention_cache": {0: "batch", 2: "key_len"},
    }  # fmt: skip
    return Subject(module, inputs, axes, ["logits"])


def hybrid() -> Subject:
    config = hf.Qwen3NextConfig(
        **DECODER, num_hidden_layers=2, num_experts=0,
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=D, linear_value_head_dim=D,
    )  # fmt: skip
    module = hf.Qwen3NextForCausalLM(config).eval()
    cache = filled(module, DynamicCache(config=config))
    axes = {
        "input_ids": {0: "batch"}, "past_key_values": {0: "batch"},
        "past_key_values.layers.1": GROWING,
    }  # fmt: skip
    inputs = {"input_ids": IDS[:, :1] + torch.tensor([[0], [9]]), "past_key_values": cache}
    return Subject(module, inputs, axes, ["logits"])


KEPT: dict[Callable[[], Subject], list[str]] = {
    growing: ["key_0", "value_0", "key_1", "value_1"],
    empty: [],
    static: ["key_0", "value_0", "cumulative_length_0"],
    crossed: ["self_key_0", "self_value_0"],
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
