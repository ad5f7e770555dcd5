"""What a build in float16 says of values that leave it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from attn_export import Subject, build


class ScaledNorm(nn.Module):
    """A root mean square norm of values that are made larger."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square."""
        loud = x * self.factor
        return loud * torch.rsqrt((loud * loud).mean(-1, keepdim=True) + 1e-6)


def notes_of(module: nn.Module, folder: Path) -> list[str]:
    x = torch.randn(2, 5, 16).to(torch.float16)
    subject = Subject(
        module.eval(), inputs={"x": x}, axes={"x": {0: "batch", 1: "query_len"}}, outputs=["y"]
    )
    report = build(subject, folder, runtimes=["ort-cpu"], dialects=["standard"])
    return [note for note in report.notes if note.startswith("leaves float16")]


def test_a_build_names_the_value_that_leaves_float16(tmp_path: Path):
    (note,) = notes_of(ScaledNorm(500.0), tmp_path / "loud")
    assert "attn-export range" in note
    assert "65504" in note
    assert "e+0" in note


def test_a_build_that_fits_float16_says_nothing(tmp_path: Path):
    assert notes_of(ScaledNorm(1.0), tmp_path / "quiet") == []
