"""Real classes of `transformers` with random weights, tiny, as the subjects of their users."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.bert import modeling_bert as bert
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from attn_export import Subject, build

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
GEMMA = DECODER | WINDOW | {"query_pre_attn_scalar": 11}
EVERY_SECOND = {"sliding_window_pattern": 2}


@dataclasses.dataclass(frozen=True)
class Family:
    """The classes of one kind of model, and how to configure them."""

    config: Callable[..., Any]
    sizes: dict[str, Any]
    model: Callable[..., nn.Module]
    attention: Callable[..., nn.Module]
    rotary: Callable[..., nn.Module] | None = None
    rotary_options: tuple[str, ...] = ()

    @property
    def kv_heads(self) -> int:
        return self.sizes.get("num_key_value_heads", H)

    def configured(self, implementation: str, layers: int = 1) -> Any:
        config = self.config(num_hidden_layers=layers, **self.sizes)
        config._attn_implementation = implementation
        return config


FAMILIES = {
    "llama": Family(
        hf.LlamaConfig, DECODER, hf.LlamaModel, llama.LlamaAttention, llama.LlamaRotaryEmbedding
    ),
    "qwen3": Family(
        hf.Qwen3Config, DECODER, hf.Qwen3Model, qwen3.Qwen3Attention, qwen3.Qwen3RotaryEmbedding
    ),
    "mistral": Family(
        hf.MistralConfig, DECODER | WINDOW, hf.MistralModel,
        mistral.MistralAttention, mistral.MistralRotaryEmbedding,
    ),
    "gemma2": Family(
        hf.Gemma2Config, GEMMA, hf.Gemma2Model,
        gemma2.Gemma2Attention, gemma2.Gemma2RotaryEmbedding,
    ),
    "gemma3": Family(
        hf.Gemma3TextConfig, GEMMA | EVERY_SECOND, hf.Gemma3TextModel,
        gemma3.Gemma3Attention, gemma3.Gemma3RotaryEmbedding, ("sliding_attention",),
    ),
    "gpt2": Family(hf.GPT2Config, SMALL, hf.GPT2Model, gpt2.GPT2Attention),
    "bert": Family(hf.BertConfig, BERT, hf.BertModel, bert.BertAttention),
}  # fmt: skip


# -- an attention alone -------------------------------------------------------------------------


class Layer(nn.Module):
    """An attention with its rotary positions and its cache."""

    def __init__(self, family: Family, implementation: str) -> None:
        super().__init__()
        config = family.configured(implementation)
        self.attention = family.attention(config, layer_idx=0)
        self.rotary = family.rotary(config) if family.rotary else None
        self.rotary_options = family.rotary_options

    def forward(self, x, attn_mask=None, position_ids=None, past_key=None, past_value=None):
        cache = DynamicCache([(past_key, past_value)]) if past_key is not None else None
        options = {}
        if self.rotary is not None:
            options["position_embeddings"] = self.rotary(x, position_ids, *self.rotary_options)
        y, _ = self.attention(x, attention_mask=attn_mask, past_key_values=cache, **options)
        return y if cache is None else (y, cache.layers[0].keys, cache.layers[0].values)


def layer(name: str, implementation: str, mask: str | None, *, cache: bool) -> Subject:
    """Return an attention alone; the mask is as in a spec: ``bool[B,1,L,S]``, or None."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    inputs: dict[str, Any] = {"x": torch.randn(B, L, E)}
    axes = {"x": TOKENS}
    if family.rotary:
        inputs["position_ids"] = torch.arange(B * L).reshape(B, L) * 7
        axes["position_ids"] = TOKENS
    if mask:
        inputs["attn_mask"], axes["attn_mask"] = _mask(mask, cache=cache)
    outputs = ["output"]
    if cache:
        past = ("past_key", "past_value")
        inputs |= {name: torch.randn(B, family.kv_heads, P, D) for name in past}
        axes |= dict.fromkeys(past, PAST)
        outputs += ["present_key", "present_value"]
    module = Layer(family, implementation).eval()
    return Subject(module, inputs, axes, outputs, relations=TOTAL if cache and mask else None)


def _mask(mask: str, *, cache: bool) -> tuple[Tensor, dict[int, str]]:
    dtype, _, shape = mask.rstrip("]").partition("[")
    names = {"B": "batch", "L": "query_len", "S": "total_len" if cache else "query_len"}
    sizes = {"B": B, "L": L, "S": P + L if cache else L, "1": 1}
    letters = shape.split(",")
    example = torch.ones([sizes[letter] for letter in letters], dtype=getattr(torch, dtype))
    return example, {axis: names[x] for axis, x in enumerate(letters) if x in names}


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
        decoded = self.decoder(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache
        )
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


# -- what came of it ----------------------------------------------------------------------------


class Built:
    """A bundle that passed, whose axes are all free that were to be."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        report = build(subject, folder / "b", runtimes=["ort-cpu"], dialects=["standard"])
        assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
        self.nodes = list(onnx.load(folder / "b" / "model.onnx").graph.node)
        manifest = json.loads((folder / "b" / "manifest.json").read_text())
        for name, dynamic in subject.axes.items():
            shape = enumerate(manifest["inputs"][name]["shape"])
            assert {axis: size for axis, size in shape if isinstance(size, str)} == dynamic

    def count(self, operator: str) -> int:
        return sum(node.op_type == operator for node in self.nodes)

    @property
    def with_past(self) -> int:
        """The number of Attention nodes that take the past and give the present."""
        attentions = [node for node in self.nodes if node.op_type == "Attention"]
        return sum(all(n.input[4:6]) and all(n.output[1:3]) for n in attentions if n.input[4:6])
