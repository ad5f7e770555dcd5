"""Modules as other projects write them: they build, in every dialect, and pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Subject, build
from attn_export.errors import ExportError

E, H, D = 32, 4, 8
STANDARD, PORTABLE, ORT = "model.onnx", "model.portable.onnx", "model.ort.onnx"


class Layer(nn.Module):
    """Self-attention, with something of its own before it."""

    def __init__(self, before: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.before = nn.Linear(E, 3 * E), before or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.before(x.mT).mT)
        return self.attended(q, k, v).transpose(1, 2).flatten(2)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class LearnedBias(Layer):
    """A bias for each distance, learned, as mask: T5, Swin, BEiT."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, H)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        mask = self.bias((i[None] - i[:, None]).clamp(-4, 3) + 4).permute(2, 0, 1)[None]
        return attend(q, k, v, attn_mask=mask)


class Float64Table(Layer):
    """A table of angles in float64: Flux and other models of diffusers."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inverse = 1.0 / 10000 ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
        angles = torch.outer(torch.arange(q.shape[2]), inverse).repeat_interleave(2, 1)
        return attend(q * angles.cos().float(), k * angles.sin().float(), v)


class RepeatedMask(nn.Module):
    """A mask of one row that is repeated for the heads and viewed: diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(E, E), nn.Linear(E, 2 * E)

    def forward(self, x: Tensor, context: Tensor, bias: Tensor) -> Tensor:
        k, v = self.kv(context).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (self.q(x), k, v))
        mask = bias[:, None].repeat_interleave(H, dim=0).view(x.shape[0], H, -1, bias.shape[-1])
        return attend(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def of_x(module: nn.Module) -> Subject:
    inputs, axes = {"x": torch.randn(2, 5, E)}, {"x": {0: "batch", 1: "query_len"}}
    return Subject(module.eval(), inputs, axes, ["y"])


def cross(module: nn.Module) -> Subject:
    inputs = {"x": (2, 5, E), "context": (2, 6, E), "bias": (2, 6)}
    keys = {0: "batch", 1: "key_len"}
    axes = {"x": {0: "batch", 1: "query_len"}, "context": keys, "bias": keys}
    drawn = {name: torch.randn(shape) for name, shape in inputs.items()}
    return Subject(module.eval(), drawn, axes, ["y"])


MODULES: dict[str, Callable[[], Subject]] = {
    "a learned bias": lambda: of_x(LearnedBias()),
    "a table in float64": lambda: of_x(Float64Table()),
    "a mask that is viewed": lambda: cross(RepeatedMask()),
    "a convolution": lambda: of_x(Layer(nn.Conv1d(E, E, 3, padding=1, groups=E))),
    "a norm of groups": lambda: of_x(Layer(nn.GroupNorm(4, E))),
    "a pool": lambda: of_x(Layer(nn.AvgPool1d(3, 1, 1))),
    "a transposed convolution": lambda: of_x(Layer(nn.ConvTranspose1d(E, E, 3, padding=1))),
}


@pytest.mark.parametrize("name", MODULES)
def test_it_passes_in_every_dialect(name: str, tmp_path: Path):
    torch.manual_seed(7)
    report = build(MODULES[name](), tmp_path / "b", runtimes=["ort-cpu"], dialects=["all"])
    assert report.passed, str(report.notes)
    graphs = json.loads((tmp_path / "b" / "manifest.json").read_text())["graphs"]
    assert set(graphs) == {STANDARD, PORTABLE, ORT}


def test_nested_tensors_of_pytorchs_encoder_are_named(tmp_path: Path):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 1)

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y: Tensor = self.encoder(x, src_key_padding_mask=~mask)
            return y

    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    inputs = {"x": torch.randn(2, 5, E), "mask": mask}
    subject = Subject(Padded().eval(), inputs, {"x": {0: "batch"}, "mask": {0: "batch"}}, ["y"])
    with pytest.raises(ExportError, match="enable_nested_tensor=False"):
        build(subject, tmp_path / "b", runtimes=["ort-cpu"])
