"""Foreign modules, exported by `torch.onnx.export` without any pass of attn-export."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

E, H, D = 32, 4, 8

Axes = Mapping[int, str]
CACHE = {0: "batch", 2: "past_len"}
TOKENS = {0: "batch", 1: "query_len"}


class MultiHead(nn.Module):
    """Self-attention by PyTorch's `MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Grouped(nn.Module):
    """Two K/V heads, a cache that is concatenated, and a causal mask by arange."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, E), nn.Linear(E, 2 * D), nn.Linear(E, 2 * D)
        self.out = nn.Linear(E, E, bias=False)

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = torch.cat([past_key, k], dim=2), torch.cat([past_value, v], dim=2)
        L, P = x.shape[1], past_key.shape[2]
        mask = torch.arange(P + L) <= torch.arange(P, P + L)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)), k, v


class Decoder(nn.Module):
    """Two layers with a cache each, normalisation and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Grouped(), Grouped()])
        self.norms = nn.ModuleList([nn.LayerNorm(E), nn.RMSNorm(E)])
        self.up, self.down = nn.Linear(E, 2 * E), nn.Linear(2 * E, E)

    def forward(self, x: Tensor, k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor) -> list[Tensor]:
        presents = []
        for layer, norm, past in zip(self.layers, self.norms, ((k0, v0), (k1, v1)), strict=True):
            y, *present = layer(norm(x), *past)
            presents += present
            x = x + y
        return [x + self.down(F.gelu(self.up(x)) * torch.sigmoid(self.up(x))), *presents]


class Half(nn.Module):
    """float16, causal by SDPA's own argument."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A module, its inputs by name, and their axes."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, tuple[int | str, ...]]
    dtype: torch.dtype = torch.float32
    outputs: tuple[str, ...] = ("y",)

    def draw(self, batch: int, query_len: int, past_len: int) -> dict[str, np.ndarray]:
        sizes = {"batch": batch, "query_len": query_len, "past_len": past_len}
        random = torch.Generator().manual_seed(batch + query_len + past_len)
        return {
            name: torch.randn([sizes.get(x, x) for x in shape], generator=random)  # type: ignore[arg-type]
            .to(self.dtype)
            .numpy()
            for name, shape in self.inputs.items()
        }


X = ("batch", "query_len", E)
PAST = ("batch", 2, "past_len", D)
HEADS = ("batch", H, "query_len", D)

FOREIGN = {
    "MultiheadAttention": Foreign(MultiHead, {"x": X}),
    "grouped with a cache": Foreign(
        Grouped, {"x": X, "past_key": PAST, "past_value": PAST}, outputs=("y", "key", "value")
    ),
    "two layers": Foreign(
        Decoder, {"x": X, **dict.fromkeys(("k0", "v0", "k1", "v1"), PAST)},
        outputs=("y", "nk0", "nv0", "nk1", "nv1"),
    ),
    "float16": Foreign(Half, {"q": HEADS, "k": HEADS, "v": HEADS}, torch.float16),
}  # fmt: skip


@functools.cache
def exported(name: str, opset: int = 23) -> ir.Model:
    """Return the graph of one of them by PyTorch's exporter. Read it only."""
    foreign = FOREIGN[name]
    torch.manual_seed(0)
    dims = {label: Dim(label, min=0 if label == "past_len" else 1, max=64)
            for label in ("batch", "query_len", "past_len")}  # fmt: skip
    example = tuple(torch.from_numpy(array) for array in foreign.draw(2, 3, 4).values())
    axes = tuple(
        {axis: dims[label] for axis, label in enumerate(shape) if isinstance(label, str)}
        for shape in foreign.inputs.values()
    )
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            program = torch.onnx.export(
                foreign.make().eval(), example, dynamo=True, opset_version=opset,
                dynamic_shapes=axes, input_names=list(foreign.inputs), verbose=False,
                output_names=list(foreign.outputs),
            )  # fmt: skip
        finally:
            logging.disable(logging.NOTSET)
    assert program is not None
    return program.model
