"""Tests of users' modules through the public interface: rewritten, fused and verified."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from agreement import right_graphs
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Report, Subject, build
from attn_export.export.export import export

B, L, P, H, D = 2, 5, 7, 4, 8
E = H * D
TOTAL = {"total_len": "past_len + query_len"}
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def same_weights_every_time() -> None:
    torch.manual_seed(0)


def nodes_of(subject: Subject) -> list[onnx.NodeProto]:
    """Return the nodes of the graph of a subject, which is its module."""
    return list(right_graphs(subject)["model.onnx"].node)


def report_of(subject: Subject, folder: Path) -> Report:
    """Return the report of a bundle that passes."""
    report = build(subject, folder / "b", runtimes=["ort-cpu"], dialects=["standard"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    return report


def attentions(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [node for node in nodes if node.op_type == "Attention"]


def with_past(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the Attention nodes that have a cache: past in, present out."""
    found = [node for node in attentions(nodes) if any(node.input[4:6])]
    assert all(all(node.input[4:6]) and all(node.output[1:3]) for node in found)
    return found


def operators(nodes: list[onnx.NodeProto]) -> list[str]:
    return [node.op_type for node in nodes]


def split(x: Tensor, heads: int) -> Tensor:
    """Split [B, L, heads * D] into [B, heads, L, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """Merge [B, H, L, D] into [B, L, H * D]."""
    return x.transpose(1, 2).flatten(2)


# -- masks --------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Self-attention with a mask; `make` turns the input into what is given to PyTorch."""

    def __init__(self, make=lambda mask: mask) -> None:
        super().__init__()
        self.qkv, self.out, self.make = nn.Linear(E, 3 * E), nn.Linear(E, E), make

    def forward(self, x, mask):
        q, k, v = (split(part, H) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(merge(attend(q, k, v, attn_mask=self.make(mask))))


def masked(shape: list[str | int], dtype: torch.dtype = torch.bool, **options) -> Subject:
    sizes = {"batch": B, "query_len": L}
    mask = torch.ones([sizes.get(axis, axis) for axis in shape], dtype=dtype)
    axes = {axis: name for axis, name in enumerate(shape) if isinstance(name, str)}
    return Subject(
        Masked(**options).eval(),
        {"x": torch.randn(B, L, E), "mask": mask},
        {"x": {0: "batch", 1: "query_len"}, "mask": axes},
        ["y"],
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (["batch", 1, 1, "query_len"], torch.bool), ([1, "query_len"], torch.float32),
        ([H, 1, "query_len"], torch.float32), ([H, "query_len", "query_len"], torch.bool),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.every(4)
def test_a_mask_that_pytorch_broadcasts_passes(shape, dtype):
    assert len(attentions(nodes_of(masked(shape, dtype)))) == 1


def hide_key_0(mask: Tensor) -> Tensor:
    return mask & (torch.arange(mask.shape[-1]) > 0)


# Not -1e9, which absorbs a score in float32 and not in the float64 reference: it has no one
# meaning.
def test_rows_without_any_key_pass(tmp_path):
    def make(mask):
        return torch.where(hide_key_0(mask), 0.0, LOWEST)

    report = report_of(masked(["batch", 1, 1, "query_len"], make=make), tmp_path)
    # With one query there is one key, which is hidden.
    assert any("_L1" in verdict.case for verdict in report.verdicts)


def test_torchs_own_attention_with_padding_passes():
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, x, mask):
            return self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]

    subject = masked(["batch", "query_len"])
    subject = Subject(Padded().eval(), subject.inputs, subject.axes, ["y"])
    nodes = nodes_of(subject)
    assert len(attentions(nodes)) == 1


def test_learned_queries_are_repeated_for_the_batch():
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, H, 3, D))
            self.kv = nn.Linear(E, 2 * E)

        def forward(self, x):
            k, v = (split(part, H) for part in self.kv(x).chunk(2, dim=-1))
            return merge(attend(self.queries, k, v))

    axes = {"x": {0: "batch", 1: "key_len"}}
    nodes = nodes_of(Subject(Pooling().eval(), {"x": torch.randn(B, L, E)}, axes, ["y"]))
    assert operators(nodes).count("Expand") == 1


# -- caches -------------------------------------------------------------------------------------


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Repeat K/V heads as in the models of Hugging Face."""
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, times, length, dim)
    return x.reshape(batch, heads * times, length, dim)


def gqa(q, k, v, attn_mask):
    return attend(q, k, v, attn_mask=attn_mask, enable_gqa=True)


def interleaved(q, k, v, attn_mask):
    times = H // k.shape[1]
    return attend(q, *(x.repeat_interleave(times, dim=1) for x in (k, v)), attn_mask=attn_mask)


def hugging_face(q, k, v, attn_mask):
    return attend(q, *(repeat_kv(x, H // x.shape[1]) for x in (k, v)), attn_mask=attn_mask)


def expanded(q, k, v, attn_mask):
    return attend(q, *(x.expand(-1, H, -1, -1) for x in (k, v)), attn_mask=attn_mask)


class Cached(nn.Module):
    """Self-attention that appends to a cache."""

    def __init__(self, kv_heads: int = H, attend=attend) -> None:
        super().__init__()
        self.kv_heads, self.attend = kv_heads, attend
        self.q, self.out = nn.Linear(E, E), nn.Linear(E, E)
        self.k, self.v = (nn.Linear(E, kv_heads * D) for _ in range(2))

    def forward(self, x, past_key, past_value, attn_mask=None):
        k = torch.cat([past_key, split(self.k(x), self.kv_heads)], dim=2)
        v = torch.cat([past_value, split(self.v(x), self.kv_heads)], dim=2)
        attended = self.attend(split(self.q(x), H), k, v, attn_mask=attn_mask)
        return self.out(merge(attended)), k, v


PAST = {0: "batch", 2: "past_len"}
INPUTS = {"x": {0: "batch", 1: "query_len"}, "past_key": PAST, "past_value": PAST}
MASK = {"attn_mask": {0: "batch", 3: "total_len"}}
OUTPUTS = ["y", "present_key", "present_value"]


def cached(module: nn.Module, kv_heads: int = H, *, mask: bool = True) -> Subject:
    """Return a subject of a module with a cache; the mask is `[B, 1, 1, S]`."""
    inputs = {"x": torch.randn(B, L, E)}
    inputs |= {name: torch.randn(B, kv_heads, P, D) for name in ("past_key", "past_value")}
    if mask:
        inputs["attn_mask"] = torch.ones(B, 1, 1, P + L, dtype=torch.bool)
    axes = INPUTS | (MASK if mask else {})
    return Subject(module.eval(), inputs, axes, OUTPUTS, relations=TOTAL)


@pytest.mark.parametrize("mask", [True, False], ids=["mask", "no mask"])
def test_a_cache_becomes_the_past_of_one_attention(mask):
    nodes = nodes_of(cached(Cached(), mask=mask))
    (node,) = with_past(nodes)
    assert list(node.input[4:6]) == ["past_key", "past_value"]
    assert list(node.output[1:3]) == ["present_key", "present_value"]
    assert operators(nodes).count("Concat") == mask  # for the shape of the mask


@pytest.mark.parametrize(
    ("kv_heads", "how"), [(2, gqa), (1, gqa), (2, interleaved), (2, hugging_face), (1, expanded)]
)
@pytest.mark.every(5)
def test_a_cache_of_shared_heads_too_however_they_are_shared(kv_heads, how):
    nodes = nodes_of(cached(Cached(kv_heads, how), kv_heads))
    assert len(with_past(nodes)) == 1
    assert operators(nodes).count("Expand") == 1  # of the mask


def test_a_causal_mask_made_of_the_keys_length_leaves_the_cache_fused():
    def causal(q, k, v, attn_mask):
        rows, columns = q.shape[2], k.shape[2]
        shown = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        return attend(q, k, v, attn_mask=attn_mask & shown)

    nodes = nodes_of(cached(Cached(attend=causal)))
    assert len(with_past(nodes)) == 1


def test_is_causal_beside_a_cache_keeps_what_it_means_in_pytorch():
    def causal(q, k, v, attn_mask):
        return attend(q, k, v, is_causal=True)

    # Only the keys up to the query's own number are seen: mostly the past.
    nodes = nodes_of(cached(Cached(attend=causal), mask=False))
    assert (len(attentions(nodes)), with_past(nodes)) == (1, [])


def test_every_layer_of_a_model_has_its_cache():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Cached(2, gqa) for _ in range(2)])

        def forward(self, x, attn_mask, key_0, value_0, key_1, value_1):
            y, *first = self.layers[0](x, key_0, value_0, attn_mask)
            z, *second = self.layers[1](x + y, key_1, value_1, attn_mask)
            return z, *first, *second

    names = ["key_0", "value_0", "key_1", "value_1"]
    inputs = {"x": torch.randn(B, L, E), "attn_mask": torch.ones(B, 1, 1, P + L, dtype=torch.bool)}
    inputs |= {name: torch.randn(B, 2, P, D) for name in names}
    axes = {"x": INPUTS["x"], **MASK, **dict.fromkeys(names, PAST)}
    outputs = ["z", *(f"new_{name}" for name in names)]
    nodes = nodes_of(Subject(Model().eval(), inputs, axes, outputs, relations=TOTAL))
    assert [list(node.output[1:3]) for node in with_past(nodes)] == [outputs[1:3], outputs[3:5]]
    assert operators(nodes).count("Expand") == 1  # one mask for both


def test_a_cache_in_one_tensor_is_a_past_as_well():
    class Stacked(Cached):
        def forward(self, x, past, attn_mask):
            y, k, v = super().forward(x, past[0], past[1], attn_mask)
            return y, torch.stack([k, v])

    inputs = {
        "x": torch.randn(B, L, E), "past": torch.randn(2, B, H, P, D),
        "attn_mask": torch.ones(B, 1, 1, P + L, dtype=torch.bool),
    }  # fmt: skip
    axes = {"x": INPUTS["x"], "past": {1: "batch", 3: "past_len"}, **MASK}
    subject = Subject(Stacked().eval(), inputs, axes, ["y", "present"], relations=TOTAL)
    assert len(with_past(nodes_of(subject))) == 1


def test_a_cache_with_the_length_in_front_of_the_heads_stays_a_concat():
    class LengthFirst(Cached):
        def forward(self, x, past_key, past_value, attn_mask):
            q, k, v = (part(x).unflatten(-1, (H, D)) for part in (self.q, self.k, self.v))
            k, v = torch.cat([past_key, k], dim=1), torch.cat([past_value, v], dim=1)
            attended = attend(*(part.transpose(1, 2) for part in (q, k, v)), attn_mask=attn_mask)
            return self.out(merge(attended)), k, v

    subject = cached(LengthFirst())
    past = {name: subject.inputs[name].transpose(1, 2) for name in ("past_key", "past_value")}
    axes = subject.axes | {name: {0: "batch", 1: "past_len"} for name in past}
    subject = Subject(subject.module, subject.inputs | past, axes, OUTPUTS, relations=TOTAL)
    nodes = nodes_of(subject)
    assert (len(attentions(nodes)), with_past(nodes)) == (1, [])


def test_a_cache_without_a_present_output_passes():
    class Forgetful(Cached):
        def forward(self, x, past_key, past_value, attn_mask):
            return super().forward(x, past_key, past_value, attn_mask)[0]

    subject = cached(Forgetful())
    subject = Subject(subject.module, subject.inputs, subject.axes, ["y"], relations=TOTAL)
    nodes = nodes_of(subject)
    assert with_past(nodes) == []


class ShortOrLong(nn.Module):
    """Module with a branch on the batch that changes nothing, and a count of its large calls."""

    large = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] < 64:
            x = x.clone()
        if type(x) is Tensor and isinstance(x.shape[0], int) and x.shape[0] == 64:
            type(self).large += 1
        return x + y


def test_the_end_of_a_range_is_tried_once_for_all_inputs_that_have_the_axis():
    inputs = {name: torch.randn(2, 3) for name in ("x", "y")}
    subject = Subject(ShortOrLong().eval(), inputs, {name: {0: "batch"} for name in inputs}, ["z"])
    export(subject)
    assert ShortOrLong.large == 3  # it raises? is it the module there? is it so beyond its guards?


class ContextualPositions(nn.Module):
    """Attention with position embeddings at sums of gates, which NaN makes no index."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        scores = q @ x.mT
        at, table = scores.sigmoid().cumsum(-1).clamp(max=15), q @ self.table
        low, high = (table.gather(-1, i.long()) for i in (at.floor(), at.ceil()))
        return (scores + low.lerp(high, at - at.floor())).softmax(-1) @ x


class PositiveFeatures(torch.nn.Module):
    """Linear attention with the features of Performer, whose maximum is that of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("projection", torch.randn(8, 16))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        projected = x @ self.projection / 8**0.25
        return (projected - x.square().sum(-1, keepdim=True) / 2 - projected.max()).exp() + 1e-4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.features(x), self.features(x)
        return (q @ (k.transpose(1, 2) @ x)) / (q @ k.sum(1)[..., None])


def test_a_module_that_spreads_nan_over_the_batch_is_judged_without_it(tmp_path: Path):
    inputs, axes = {"x": torch.randn(2, 3, 8)}, {"x": {0: "batch", 1: Axis("query_len", max=64)}}
    report = report_of(Subject(PositiveFeatures().eval(), inputs, axes, ["y"]), tmp_path)
    assert any("NaN of a batch element reaches others in the module" in n for n in report.notes)


def test_a_module_that_raises_at_nan_is_judged_without_it(tmp_path: Path):
    inputs, axes = {"x": torch.randn(2, 3, 8)}, {"x": {0: "batch", 1: Axis("query_len", max=64)}}
    subject = Subject(ContextualPositions().eval(), inputs, axes, ["y"])
    report = report_of(subject, tmp_path)
    assert any("the module raises where inputs are NaN or infinite" in n for n in report.notes)
