"""Modules in the style of other projects: they build in every dialect, and pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import right_graphs
from shared import extended
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject
from attn_export.errors import ExportError, UsageError
from attn_export.export.export import export

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


class Relative(nn.Module):
    """Relative positions from a slice of a table, which ends silently: Conformer."""

    def __init__(self, rows: int, *, centred: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(rows, E))
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        start = len(self.table) // 2 - t + 1 if self.centred else 0  # below 0, it is from the end
        scores = x @ self.table[start : start + 2 * t - 1].T
        n = scores.shape[-1]
        shifted = nn.functional.pad(scores, (0, 1)).reshape(b, -1)[:, t - 1 :]
        shifted = nn.functional.pad(shifted, (0, t - 1))[:, : t * n].reshape(b, t, n)[..., :t]
        return (x @ x.mT + shifted).softmax(-1) @ x


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


class Positions(Layer):
    """A table of positions that ends."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.positions = nn.Embedding(count, E)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions(torch.arange(x.shape[1])))


class Spread(Layer):
    """A norm over the tokens, which needs two of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.instance_norm(x.mT).mT)


class Branching(Layer):
    """Another computation below 8 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.shape[1] >= 8 else y * 2


def of_x(module: nn.Module, axis: str | Axis | Dim = "query_len", length: int = 5) -> Subject:
    inputs, axes = {"x": torch.randn(2, length, E)}, {"x": {0: "batch", 1: axis}}
    return Subject(module.eval(), inputs, axes, ["y"])


def cross(module: nn.Module) -> Subject:
    inputs = {"x": (2, 5, E), "context": (2, 6, E), "bias": (2, 6)}
    keys = {0: "batch", 1: "key_len"}
    axes = {"x": {0: "batch", 1: "query_len"}, "context": keys, "bias": keys}
    drawn = {name: torch.randn(shape) for name, shape in inputs.items()}
    return Subject(module.eval(), drawn, axes, ["y"])


MODULES: dict[str, Callable[[], Subject]] = {
    "a learned bias": lambda: of_x(LearnedBias()),
    "a mask that is viewed": lambda: cross(RepeatedMask()),
    "a pool": lambda: of_x(Layer(nn.AvgPool1d(3, 1, 1))),
}


@pytest.mark.parametrize("name", extended(MODULES, lambda name: name != "a mask that is viewed"))
def test_it_passes_in_every_dialect(name: str):
    torch.manual_seed(7)
    assert right_graphs(MODULES[name](), "all").keys() == {STANDARD, PORTABLE, ORT}


def test_nested_tensors_of_pytorchs_encoder_are_named():
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
        export(subject)


@pytest.mark.parametrize(
    ("module", "axis", "length", "bounds"),
    [
        (Positions(30), Axis("query_len", max=30), 5, [1, 30]),
        (Positions(64), Dim("query_len", min=2, max=64), 5, [2, 64]),
        (Spread(), "query_len", 5, [2, None]),
        (Positions(130), Axis("query_len", min=100, max=130), 120, [100, 130]),
    ],
    ids=["a table of 30", "a Dim", "two or more", "far from the usual sizes"],
)
@pytest.mark.every(3)
def test_cases_keep_within_the_bounds_of_an_axis_and_reach_them(
    module: nn.Module, axis: str | Axis | Dim, length: int, bounds: list[int | None]
):
    subject = of_x(module, axis, length)
    export(subject)
    tried = {case.sizes["query_len"] for case in subject.plan().cases}
    assert min(tried) == bounds[0]
    assert max(tried) == bounds[1] or bounds[1] is None


@pytest.mark.parametrize(
    ("module", "axis", "bound"),
    [
        (Positions(30), "query_len", "max=30"),
        (Relative(16), "query_len", "max=8"),
        (Relative(17, centred=True), "query_len", "max=9"),
        (Spread(), Axis("query_len", min=1), "min=2"),
    ],
    ids=["the end of a table", "a slice beyond a table", "one before a table", "too few tokens"],
)
def test_a_module_that_is_right_at_some_sizes_is_refused_with_the_bound(
    module: nn.Module, axis: str | Axis, bound: str
):
    with pytest.raises(ExportError, match=rf"write Axis\('query_len', {bound}\)"):
        export(of_x(module, axis))


def test_the_last_of_two_axes_that_are_too_long_together_has_the_bound():
    class Past(nn.Module):
        def forward(self, x: Tensor, past: Tensor) -> Tensor:
            k = torch.cat([past, x], 1)
            return attend(x + table[: k.shape[1]][past.shape[1] :], k, k)

    table = torch.randn(70, E)
    inputs = {"x": torch.randn(2, 3, E), "past": torch.randn(2, 4, E)}
    axes = {"x": {0: "batch", 1: "query_len"}, "past": {0: "batch", 1: "past_len"}}
    with pytest.raises(ExportError, match=r"write Axis\('past_len', max=\d+\)"):
        export(Subject(Past().eval(), inputs, axes, ["y"]))


@pytest.mark.parametrize(
    "bounds", [{"min": 2}, {"min": 5, "max": 20}, {"min": 7}], ids=["2 up", "5 to 20", "7 up"]
)
def test_a_branch_within_the_bounds_is_found(bounds: dict[str, int]):
    """Check bounds that exclude the smallest size on the other side of a branch."""
    with pytest.raises(ExportError, match="branch"):
        export(of_x(Branching(), Axis("query_len", **bounds), 12))


def test_a_branch_outside_the_bounds_is_none():
    export(of_x(Branching(), Axis("query_len", min=8), 12))


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        (Axis("query_len", min=9, max=30), "is 5 in the example, and 9 to 30 by its bounds"),
        (Axis("query_len", min=9, max=3), "must allow two sizes or more: 0 <= min < max"),
        (Axis("query_len", min=-1), "must allow two sizes or more: 0 <= min < max"),
        (Axis("", max=9), "must give names to axes by number"),
    ],
)
def test_bounds_that_cannot_be_are_refused(axis: Axis, says: str):
    with pytest.raises(UsageError, match=says):
        of_x(Layer(), axis)
