"""Small hybrid models of `transformers`, and its decoders that are given a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from third_party.cached import PAST
from third_party.of_transformers import DECODER, EXPERTS, SIZES, model
from third_party.subjects import TOKENS, E, H, Table, ids, taken
from torch import Tensor, nn

from attn_export import Axis, Subject

SLIDING = {0: "batch", 2: Axis("past_len", max=15)}

LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}  # fmt: skip
MAMBA = {
    "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8,
    "hidden_size": E, "num_hidden_layers": 1, "vocab_size": 50,
}  # fmt: skip


def fixed(kind: str, how: str = "sdpa", **options: Any) -> Subject:
    """Return a subject of a model over tokens of one length, without a cache."""
    module = model(kind, {**DECODER, **options}, how)
    return taken(module, {"input_ids": ids()}, {"input_ids": {0: "batch"}}, use_cache=False)


def free(kind: str, how: str = "sdpa", length: int = 5, **options: Any) -> Subject:
    """Return a subject of a model over tokens of any length, without a cache."""
    module = model(kind, {**DECODER, **options}, how)
    return taken(module, {"input_ids": ids(length=length)}, {"input_ids": TOKENS}, use_cache=False)


def cached(
    kind: str,
    cache: Callable[[Any, Any], Any],
    axes: Any = PAST,
    name: str = "Model",
    axis: Any = "query_len",
    outputs: tuple[str, ...] = ("last_hidden_state",),
    **options: Any,
) -> Subject:
    """Return a subject of a decoder that is given a cache, filled with 6 tokens."""
    module = model(kind, {**DECODER, **options}, "sdpa", name).eval()
    inputs = {"input_ids": ids(length=3), "cache": cache(module, options)}
    every = {"input_ids": {0: "batch", 1: axis}, "cache": axes}
    return Subject(module, inputs, every, list(outputs))


def dynamic(module: Any, _: Any) -> Any:
    cache = hf.DynamicCache(config=module.config)
    with torch.no_grad():
        module(input_ids=ids(length=6), cache=cache)
    return cache


def static(module: Any, _: Any) -> Any:
    cache = hf.StaticCache(config=module.config, max_cache_len=32)
    with torch.no_grad():
        module(input_ids=ids(length=6), cache=cache)
    return cache


def states_of(module: Any, _: Any) -> Any:
    with torch.no_grad():
        return module(input_ids=ids(length=6), use_cache=True).cache


def one_token(
    kind: str, cache: Any = dynamic, layer: int | None = None, past: Any = PAST, **options: Any
) -> Subject:
    """Return a subject of one step of decoding; `layer` is the one whose cache grows."""
    how = "eager" if cache is states_of else "sdpa"
    module = model(kind, {**DECODER, **options}, how).eval()
    inputs = {"input_ids": ids(length=1), "cache": cache(module, options)}
    axes: dict[str, Any] = {"input_ids": {0: "batch"}, "cache": past}
    if layer is not None:
        axes |= {"cache": {0: "batch"}, f"cache.layers.{layer}": past}
    if cache is states_of:
        axes["cache"] = {0: "batch"}
    return Subject(module, inputs, axes, ["last_hidden_state"])


class OneToken(nn.Module):
    """The decoder of a translator, whose cache holds the keys of both kinds of attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(self, decoder_input_ids: Tensor, past_key_values: Any) -> Tensor:
        keys = past_key_values.cross_attention_cache.layers[0].keys
        encoded = keys.new_zeros(keys.shape[0], keys.shape[2], E)  # only its sizes are read
        found: Tensor = self.decoder(
            decoder_input_ids, encoder_hidden_states=encoded, cache=past_key_values
        ).last_hidden_state
        return found


def encoded(kind: str, axis: Any = "past_len") -> Subject:
    """Return a subject of one step of the decoder of a translator; `axis` is that of its past."""
    sizes = {
        **SIZES, "d_model": E, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": H,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": H,
        "decoder_attention_heads": H, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    }  # fmt: skip
    module = model(kind, sizes, "sdpa").eval()
    with torch.no_grad():
        first = module(input_ids=ids(length=5), decoder_input_ids=ids(length=6), use_cache=True)
    inputs = {"decoder_input_ids": ids(length=1), "past_key_values": first.cache}
    axes = {
        "decoder_input_ids": {0: "batch"},
        "past_key_values.self_attention_cache": {0: "batch", 2: axis},
        "past_key_values.cross_attention_cache": {0: "batch", 2: "key_len"},
    }
    return Subject(OneToken(module).eval(), inputs, axes, ["last_hidden_state"])


MODULES: Table = {
    "Qwen3Next, fixed": lambda: fixed(
        "Qwen3Next", **LINEAR, **EXPERTS, shared_expert_intermediate_size=16
    ),
    "Qwen3_5Text, fixed": lambda: fixed("Qwen3_5Text", **LINEAR),
    "Qwen3_5Text, free": lambda: free("Qwen3_5Text", **LINEAR),
    "Mamba2, fixed": lambda: fixed("Mamba2", "eager", **MAMBA),
    "Mamba2, free": lambda: free("Mamba2", "eager", 20, **MAMBA),
    "Mamba, free": lambda: free("Mamba", "eager", state_size=8, time_step_rank=4),
    "Rwkv, fixed": lambda: fixed("Rwkv", "eager", num_hidden_layers=2, context_length=96),
    "Lfm2, free": lambda: free(
        "Lfm2", layer_types=["conv", "full_attention"], num_hidden_layers=2
    ),
    "RecurrentGemma, fixed": lambda: fixed(
        "RecurrentGemma", block_types=["recurrent", "attention"], num_hidden_layers=2,
        attention_window_size=8,
    ),
    "MiniMax, fixed": lambda: fixed(
        "MiniMax", layer_types=["linear_attention", "full_attention"], num_hidden_layers=2,
        block_size=4, **EXPERTS,
    ),
    "Llama, DynamicCache": lambda: cached("Llama", dynamic),
    "Qwen3, DynamicCache of 2 layers": lambda: cached("Qwen3", dynamic, num_hidden_layers=2),
    "Llama, logits, DynamicCache": lambda: cached(
        "Llama", dynamic, name="ForCausalLM", outputs=("logits",)
    ),
    "Llama, StaticCache": partial(
        cached, "Llama", static, {0: "batch"}, axis=Axis("query_len", max=26)
    ),
    "GPT2, DynamicCache": partial(
        cached, "GPT2", dynamic, {0: "batch", 2: Axis("past_len", max=48)},
        axis=Axis("query_len", max=48),
    ),
    "Mistral, one token, sliding": lambda: one_token("Mistral", past=SLIDING, sliding_window=16),
    "Gemma3Text, one token, both": lambda: one_token(
        "Gemma3Text", past=SLIDING, sliding_window=16, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "T5, EncoderDecoderCache": lambda: encoded("T5"),
    "Bart, EncoderDecoderCache": lambda: encoded("Bart", Axis("past_len", max=80)),
    "Qwen3_5Text, one token": lambda: one_token("Qwen3_5Text", layer=1, **LINEAR),
    "Mamba2, one token": lambda: one_token("Mamba2", states_of, **MAMBA),
    "Mamba, one token": lambda: one_token(
        "Mamba", states_of, state_size=8, time_step_rank=4
    ),
    "Lfm2, one token": lambda: one_token(
        "Lfm2", layer=1, layer_types=["conv", "full_attention"], num_hidden_layers=2
    ),
}  # fmt: skip
