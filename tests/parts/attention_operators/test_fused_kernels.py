"""PyTorch code for flash_attn and xformers gives what a loop over their formula gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from attn_export import Axis, Subject, build
from attn_export.parts.attention_operators.fused_kernels import TRANSLATIONS

B, L, S, H, HKV, D = 2, 3, 5, 4, 2, 8
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def by_loops(q, k, v, *, causal=False, window=(-1, -1), cap=0.0, slopes=None, scale=None):
    """Return attention `[L, H, D]` of one sequence, from the formula in flash_attn's README."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    right = 0 if causal else window[1]
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        at = i + k.shape[0] - q.shape[0]
        low = 0 if window[0] < 0 else max(0, at - window[0])
        high = k.shape[0] if right < 0 else min(k.shape[0], at + right + 1)
        for h in range(q.shape[1] if low < high else 0):
            shared = h * k.shape[1] // q.shape[1]
            scores = k[low:high, shared] @ q[i, h] * scale
            scores = cap * (scores / cap).tanh() if cap else scores
            if slopes is not None:
                scores = scores - slopes[h] * (at - torch.arange(low, high)).abs()
            out[i, h] = scores.softmax(-1) @ v[low:high, shared]
    return out


def operands(heads: int = HKV) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((B, L, H, D), (B, S, heads, D), (B, S, heads, D))
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all keys": ({}, {}),
    "a scale": ({"softmax_scale": 0.2}, {"scale": 0.2}),
    "causal": ({"causal": True}, {"causal": True}),
    "a window": ({"window_size": (1, 1)}, {"window": (1, 1)}),
    "the past": ({"causal": True, "window_size": (2, 2)}, {"causal": True, "window": (2, 2)}),
    "softcap": ({"softcap": 0.7}, {"cap": 0.7}),
    "ALiBi": ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_flash_attention_of_batches(form: str):
    options, meaning = FORMS[form]
    q, k, v = operands()
    got = TRANSLATIONS["flash_attn.flash_attn_func"](q, k, v, **options)
    expected = torch.stack([by_loops(*each, **meaning) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got, expected)
    packed = torch.stack([k, v], 2)
    assert torch.equal(
        got, TRANSLATIONS["flash_attn.flash_attn_kvpacked_func"](q, packed, **options)
    )


@pytest.mark.parametrize("form", FORMS)
def test_flash_attention_of_sequences_one_after_the_other(form: str):
    options, meaning = FORMS[form]
    q, k, v = (x.flatten(0, 1) for x in operands())
    starts = (torch.tensor([0, 4, 6]), torch.tensor([0, 3, 10]))  # the first has fewer keys
    ends = [each.int() for each in starts]
    got = TRANSLATIONS["flash_attn.flash_attn_varlen_func"](q, k, v, *ends, 4, 7, **options)
    parts = zip(
        *(
            x.tensor_split(s[1:-1])
            for x, s in zip((q, k, v), (starts[0], *starts[1:] * 2), strict=True)
        ),
        strict=True,
    )
    torch.testing.assert_close(got, torch.cat([by_loops(*part, **meaning) for part in parts]))


def test_slopes_of_each_sequence():
    q, k, v = operands()
    slopes = torch.stack([SLOPES, 2 * SLOPES]).double()
    got = TRANSLATIONS["flash_attn.flash_attn_func"](q, k, v, alibi_slopes=slopes)
    expected = [by_loops(*e[:3], slopes=e[3]) for e in zip(q, k, v, slopes, strict=True)]
    torch.testing.assert_close(got, torch.stack(expected))
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (L, S)]
    flat = TRANSLATIONS["flash_attn.flash_attn_varlen_func"](
        *(x.flatten(0, 1) for x in (q, k, v)), *ends, L, S, alibi_slopes=slopes
    )
    torch.testing.assert_close(flat, got.flatten(0, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_with_a_cache(causal: bool):
    q, k, v = operands()
    new_k, new_v, lengths = k[:, :2] * 2, v[:, :2] * 2, torch.tensor([1, 3])
    caches = k.clone(), v.clone()
    got = TRANSLATIONS["flash_attn.flash_attn_with_kvcache"](
        q[:, :2], *caches, new_k, new_v, cache_seqlens=lengths.int(), causal=causal
    )
    for b, n in enumerate(lengths.tolist()):
        whole = [torch.cat([old[b, :n], new[b]]) for old, new in ((k, new_k), (v, new_v))]
        torch.testing.assert_close(got[b], by_loops(q[b, :2], *whole, causal=causal))
        assert torch.equal(caches[0][b, : n + 2], whole[0])


def test_operators_also_return_logarithms_of_sums():
    q, k, v = operands(H)
    out, log_sums, *_ = TRANSLATIONS["flash_attn::_flash_attn_forward"](
        q, k, v, 0.0, 0.5, True, -1, -1, 0.0, None, False
    )
    scores = torch.einsum("blhd,bshd->bhls", q, k) * 0.5
    scores = scores.masked_fill(~torch.ones(L, S, dtype=torch.bool).tril(S - L), -torch.inf)
    torch.testing.assert_close(log_sums, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("bhls,bshd->blhd", scores.softmax(-1), v))


class LowerTriangular:
    def materialize(self, shape, dtype, device):
        return torch.ones(shape, dtype=dtype, device=device).tril().log()


@pytest.mark.parametrize("axes", [3, 4, 5])
@pytest.mark.parametrize("biased", ["", "a tensor", "an object"])
def test_attention_of_xformers(axes: int, biased: str):
    q, k, v = operands(H)
    shape = {3: (D,), 4: (H, D), 5: (2, H // 2, D)}[axes]
    given = [(x[:, :, 0] if axes == 3 else x).reshape(*x.shape[:2], *shape) for x in (q, k, v)]
    heads = [x[:, :, :1] if axes == 3 else x for x in (q, k, v)]
    scores = torch.einsum("blhd,bshd->bhls", *heads[:2]) * 0.3
    bias: Any = None
    if biased:
        sizes = {3: (B, L, S), 4: (B, H, L, S), 5: (B, 2, H // 2, L, S)}[axes]
        bias = torch.randn(sizes, dtype=torch.float64)
        added = bias.reshape(B, -1, L, S)
        if biased == "an object":
            bias = LowerTriangular()
            added = bias.materialize(scores.shape, scores.dtype, "cpu")
        scores = scores + added
    expected = torch.einsum("bhls,bshd->blhd", scores.softmax(-1), heads[2])
    got = TRANSLATIONS["xformers.ops.memory_efficient_attention"](*given, bias, scale=0.3)
    torch.testing.assert_close(got, expected.reshape(given[0].shape))


@pytest.mark.parametrize(
    ("name", "option"),
    [("flash_attn.flash_attn_func", {"dropout_p": 0.1}),
     ("flash_attn.flash_attn_with_kvcache", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
     ("xformers.ops.memory_efficient_attention", {"p": 0.1})],
)  # fmt: skip
def test_options_without_a_translation_are_refused_by_name(name: str, option: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(option))):
        TRANSLATIONS[name](*operands(H), **option)


# -- in modules -------------------------------------------------------------------------------


@pytest.fixture
def stand_in() -> Iterator[ModuleType]:
    """Yield a module named flash_attn, built as it is: an operator that runs on a GPU only."""

    @torch.library.custom_op(
        "flash_attn::_flash_attn_forward", mutates_args=(), device_types="cuda",
        schema="(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal,"
        " int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes,"
        " bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)",
    )  # fmt: skip
    def kernel(q: Tensor, *_: Any, **__: Any) -> Any:
        raise RuntimeError("it needs CUDA")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, window):
            operator = torch.ops.flash_attn._flash_attn_forward
            out, *saved = operator(q, k, v, 0.0, D**-0.5, causal, *window, 0.0, None, False)
            ctx.save_for_backward(q, k, v, *saved)
            return out

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        return Function.apply(q, k, v, causal, window_size)

    made: Any = ModuleType("flash_attn")
    made.flash_attn_func, made.Function, made.kernel = flash_attn_func, Function, kernel
    sys.modules["flash_attn"] = made
    yield made
    del sys.modules["flash_attn"]


class Layer(nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attend = nn.Linear(16, 3 * 2 * D), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D)).unbind(2)
        return self.attend(q, k, v).flatten(2)


@pytest.mark.parametrize(
    ("called", "arguments"),
    [("flash_attn_func", {"causal": True}), ("flash_attn_func", {"window_size": (2, 0)}),
     ("Function", {})],
    ids=["causal", "a window", "the operator"],
)  # fmt: skip
@pytest.mark.every(2)
def test_a_module_that_needs_a_gpu_is_built_as_one_node(
    stand_in: Any, called: str, arguments: dict[str, Any], tmp_path: Path
):
    theirs = getattr(stand_in, called)
    attend = theirs if called != "Function" else lambda *x: theirs.apply(*x, True, (-1, -1))
    module = Layer(lambda q, k, v: attend(q, k, v, **arguments)).eval()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    axes = {"x": {0: "batch", 1: Axis("query_len", max=64)}}
    subject = Subject(module, {"x": x}, axes, ["y"])
    report = build(subject, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard", "ort"])
    assert report.passed, report.notes
    assert any("_flash_attn_forward" in n or "flash_attn_func" in n for n in report.notes)
    graphs = json.loads((tmp_path / "b" / "manifest.json").read_text())["graphs"]
    assert "model.ort.onnx" in graphs
    nodes = onnx.load(tmp_path / "b" / "model.onnx").graph.node
    assert [node.op_type for node in nodes].count("Attention") == 1
    assert not any(node.op_type == "Softmax" for node in nodes)
