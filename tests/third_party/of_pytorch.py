"""Attention of PyTorch's own library."""

from __future__ import annotations

from typing import Any

import torch
from third_party.subjects import KEYS, TOKENS, D, E, H, Table, taken, tokens
from torch import Tensor, nn

from attn_export import Subject


class Itself(nn.Module):
    """Self-attention by `nn.MultiheadAttention`."""

    def __init__(self, options: dict[str, Any], **call: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=True, **options)
        self.call = call

    def forward(self, x: Tensor, hidden: Tensor | None = None, mask: Tensor | None = None):
        return self.attention(x, x, x, key_padding_mask=hidden, attn_mask=mask, **self.call)


class Causal(nn.Module):
    """A layer of PyTorch's that is given a causal mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, mask, is_causal=True)


def itself(outputs: tuple[str, ...] = ("output", "weights"), **options: Any) -> Subject:
    call = {key: options.pop(key) for key in ("need_weights", "average_attn_weights")
            if key in options}  # fmt: skip
    module = Itself(options, **call).eval()
    return Subject(module, {"x": torch.randn(2, 5, E)}, {"x": TOKENS}, list(outputs))


def hidden_keys(options: dict[str, Any] | None = None) -> Subject:
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, 3:] = True
    inputs = {"x": torch.randn(2, 5, E), "hidden": hidden}
    module = Itself(options or {}).eval()
    return Subject(module, inputs, dict.fromkeys(inputs, TOKENS), ["output", "weights"])


def added_mask() -> Subject:
    inputs = {"x": torch.randn(2, 5, E), "mask": torch.randn(5, 5)}
    axes = {"x": TOKENS, "mask": {0: "query_len", 1: "query_len"}}
    module = Itself({}, need_weights=False).eval()
    return Subject(module, inputs, axes, ["output"])


def cross(**options: Any) -> Subject:
    inputs = {"query": (2, 5, E), "key": (2, 6, 24), "value": (2, 6, 20)}
    axes = {"query": TOKENS, "key": KEYS, "value": KEYS}
    module = nn.MultiheadAttention(E, H, kdim=24, vdim=20, batch_first=True, **options)
    drawn = {name: torch.randn(shape) for name, shape in inputs.items()}
    return taken(module, drawn, axes)


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(E, H, 48, batch_first=True, **options)


def decoder(module: nn.Module, first: str = "tgt", second: str = "memory") -> Subject:
    inputs = {first: torch.randn(2, 5, E), second: torch.randn(2, 6, E)}
    return Subject(module.eval(), inputs, {first: TOKENS, second: KEYS}, ["output"])


def decoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(E, H, 48, batch_first=True, **options)


def sequence_first() -> Subject:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, H)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return found

    axes = {"x": {0: "query_len", 1: "batch"}}
    return Subject(First().eval(), {"x": torch.randn(5, 2, E)}, axes, ["output"])


def jagged_scores() -> Subject:
    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.2)

    inputs = {name: torch.randn(2, heads, 5, D) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    keys = {0: "batch", 2: "key_len"}
    axes = {"q": {0: "batch", 2: "query_len"}, "k": keys, "v": keys}
    inputs["k"], inputs["v"] = torch.randn(2, 2, 6, D), torch.randn(2, 2, 6, D)
    return Subject(Scores().eval(), inputs, axes, ["output"])


MODULES: Table = {
    "MultiheadAttention": itself,
    "MultiheadAttention, weights per head": lambda: itself(average_attn_weights=False),
    "MultiheadAttention without weights": lambda: itself(("output",), need_weights=False),
    "MultiheadAttention without bias": lambda: itself(bias=False),
    "MultiheadAttention, learned keys": lambda: itself(add_bias_kv=True),
    "MultiheadAttention, a key of zeros": lambda: itself(add_zero_attn=True),
    "MultiheadAttention, hidden keys": hidden_keys,
    "MultiheadAttention, hidden and learned keys": lambda: hidden_keys({"add_bias_kv": True}),
    "MultiheadAttention, an added mask": added_mask,
    "MultiheadAttention, other sizes of keys": cross,
    "MultiheadAttention, sequence first": sequence_first,
    "scaled_dot_product_attention, shared heads": jagged_scores,
    "TransformerEncoderLayer": lambda: tokens(layer(), name="src"),
    "TransformerEncoderLayer, norm first": lambda: tokens(layer(norm_first=True), name="src"),
    "TransformerEncoderLayer, causal": lambda: tokens(Causal(layer())),
    "TransformerEncoder": lambda: tokens(
        nn.TransformerEncoder(layer(activation="gelu"), 2, enable_nested_tensor=False), name="src"
    ),
    "TransformerDecoderLayer": lambda: decoder(decoder_layer()),
    "TransformerDecoder": lambda: decoder(
        nn.TransformerDecoder(decoder_layer(norm_first=True), 2, nn.LayerNorm(E))
    ),
    "Transformer": lambda: decoder(
        nn.Transformer(E, H, 1, 1, 48, batch_first=True), first="tgt", second="src"
    ),
}
