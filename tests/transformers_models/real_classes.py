"""Real classes of `transformers` with random weights, tiny, as the subjects of their users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import DynamicCache

from attn_export import Subject

B, L, P, E, H, HKV, D = 2, 5, 7, 32, 4, 2, 8
TOKENS = {0: "batch", 1: "query_len"}
PAST = {0: "batch", 2: "past_len"}
TOTAL = {"total_len": "past_len + query_len"}

SMALL = {
    "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 96, "hidden_size": E, "num_attention_heads": H,
}  # fmt: skip
BERT = SMALL | {"intermediate_size": 48}
DECODER = BERT | {"num_key_value_heads": HKV, "head_dim": D}
WINDOW = {"sliding_window": 6}


@dataclasses.dataclass(frozen=True)
class Family:
    """The classes of one kind of model, and how to configure them."""

    config: Callable[..., Any]
    sizes: dict[str, Any]
    model: Callable[..., nn.Module]

    @property
    def kv_heads(self) -> int:
        return self.sizes.get("num_key_value_heads", H)

    def configured(self, implementation: str, layers: int = 1) -> Any:
        config = self.config(num_hidden_layers=layers, **self.sizes)
        config._attn_implementation = implementation
        return config


FAMILIES = {
    "llama": Family(hf.LlamaConfig, DECODER, hf.LlamaModel),
    "mistral": Family(hf.MistralConfig, DECODER | WINDOW, hf.MistralModel),
    "bert": Family(hf.BertConfig, BERT, hf.BertModel),
}


# -- whole models -------------------------------------------------------------------------------

IDS = torch.arange(B * L).reshape(B, L) * 5


def padded(length: int) -> Tensor:
    """Return a mask of ones whose first row is padded on the left."""
    mask = torch.ones(B, length, dtype=torch.int64)
    mask[0, :2] = 0
    return mask


def model(name: str, implementation: str = "sdpa", layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    family = FAMILIES[name]
    return family.model(family.configured(implementation, layers)).eval()


class Decoder(nn.Module):
    """A model that is given its past as pairs of tensors, and returns it so."""

    def __init__(self, decoder: nn.Module, *, windows: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = decoder.config if windows else None

    def forward(self, input_ids, attention_mask, past):
        cache = DynamicCache(past, config=self.config)
        decoded = self.decoder(input_ids=input_ids, attention_mask=attention_mask, cache=cache)
        return decoded.last_hidden_state, [(each.keys, each.values) for each in cache.layers]


PRESENT = ["key_0", "value_0", "key_1", "value_1"]


def decoder(name: str, *, windows: bool = False) -> Subject:
    """Return a whole model of two layers with a cache, whose layers may keep a window only."""
    module = Decoder(model(name, layers=2), windows=windows).eval()
    heads = FAMILIES[name].kv_heads
    past = [(torch.randn(B, heads, P, D), torch.randn(B, heads, P, D)) for _ in range(2)]
    inputs = {"input_ids": IDS, "attention_mask": padded(P + L), "past": past}
    axes = {"input_ids": TOKENS, "attention_mask": {0: "batch", 1: "total_len"}}
    axes |= {f"past.{each}.{part}": PAST for each in range(2) for part in range(2)}
    return Subject(module, inputs, axes, ["last_hidden_state", *PRESENT], relations=TOTAL)
