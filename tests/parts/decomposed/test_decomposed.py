"""Attention that a module writes out in operators: one node in the dialect ort, or left alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from agreement import right_graphs
from torch import Tensor, nn

from attn_export import Axis, Subject, build
from attn_export.commands.bundle_graphs import lower_all
from attn_export.commands.lower import lower_file
from attn_export.commands.lower_here import lower_here
from attn_export.errors import GraphError
from attn_export.export.export import export
from attn_export.graph.lower.node_builder import Builder
from attn_export.parts.decomposed import decomposed
from attn_export.parts.decomposed.decomposed import recognise_attention
from attn_export.parts.decomposed.scores import Scores, read_scores

E, H, D = 32, 4, 8
ORT = "model.ort.onnx"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Self-attention of queries, keys and values `[B, H, L, D]`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(E, 3 * E), attend

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in parts)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(D)).softmax(-1) @ v


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * D**-0.5) @ k.mT).softmax(-1) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    return scores.masked_fill(~causal(scores), -torch.inf).softmax(-1) @ v


def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    low = torch.tensor(torch.finfo(scores.dtype).min)
    return torch.where(causal(scores), scores, low).softmax(-1) @ v


def added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    return (torch.full(scores.shape[-2:], -torch.inf).triu(1) + scores).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhld,bhsd->bhls", q, k) / math.sqrt(D)
    return torch.einsum("bhls,bhsd->bhld", scores.softmax(-1), v)


def einsum_of_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhld,bsd->bhls", q, k[:, 0]) / math.sqrt(D)
    return torch.einsum("bhls,bsd->bhld", scores.softmax(-1), v[:, 0])


def batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [part.flatten(0, 1) for part in (q, k, v)]
    empty = torch.zeros(flat[0].shape[0], q.shape[2], k.shape[2])
    scores = torch.baddbmm(empty, flat[0], flat[1].mT, beta=0, alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), flat[2]).unflatten(0, (-1, H))


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT * D**-0.5 / 3) * 3).softmax(-1) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT * D**-0.5).softmax(-1, dtype=torch.float32).to(v.dtype)
    return nn.functional.dropout(scores, 0.1, training=False) @ v


def shared_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part[:, :2].repeat_interleave(2, dim=1) for part in (k, v))
    return plain(q, k, v)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    bias = -(i[None] - i[:, None]).abs() * torch.tensor([1.0, 0.5, 0.2, 0.1])[:, None, None]
    scores = q @ k.mT * D**-0.5 + bias
    return scores.masked_fill(~causal(scores), -1e30).softmax(-1) @ v


def mask_that_is_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + torch.arange(k.shape[2])) * 0.5).softmax(-1) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5 + torch.full((k.shape[2], k.shape[2]), -torch.inf).triu(1)
    sinks = torch.linspace(-1, 2, H).view(1, H, 1, 1).expand(q.shape[0], H, q.shape[2], 1)
    logits = torch.cat([scores, sinks], -1)
    return (logits - logits.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


def weights_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.amax(-1, keepdim=True)


def weights_of_a_batch_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q.flatten(0, 1) @ k.flatten(0, 1).mT).softmax(-1)
    shown = weights.unflatten(0, (-1, H)).amax((1, 3))
    return (weights @ v.flatten(0, 1)).unflatten(0, (-1, H)) + shown[:, None, :, None]


FORMS = [
    plain, scaled_before, filled, kept, added, batched, einsum, einsum_of_one_head, softcap,
    in_float32, shared_heads, biased, mask_that_is_scaled, with_sinks,
    weights_read, weights_of_a_batch_read,
]  # fmt: skip


def subject_of(attend: Attend) -> Subject:
    torch.manual_seed(5)
    axes = {"x": {0: "batch", 1: Axis("query_len", max=64)}}
    return Subject(Layer(attend).eval(), {"x": torch.randn(2, 5, E)}, axes, ["y"])


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


@pytest.mark.parametrize("attend", FORMS, ids=lambda form: form.__name__)
@pytest.mark.every(5)
def test_it_is_one_node_in_ort_and_passes(attend: Attend, tmp_path: Path):
    subject = subject_of(attend)
    graphs = right_graphs(subject, "all")
    assert "Softmax" in {node.op_type for node in graphs["model.onnx"].node}
    found = {node.op_type for node in graphs[ORT].node}
    assert "Softmax" not in found
    assert found & {"MultiHeadAttention", "GroupQueryAttention", "Attention"}
    # The same, of a file alone.
    ir.save(export(subject).model, tmp_path / "model.onnx")
    lower_file(tmp_path / "model.onnx", tmp_path / "alone.onnx", "ort")
    assert "Softmax" not in operators(tmp_path / "alone.onnx")


def scores_with_another_scale(op: Builder, value: ir.Value) -> Scores:
    found = read_scores(op, value)
    return dataclasses.replace(found, scale=found.scale * 1.01)


def test_a_node_that_computes_something_else_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(decomposed, "read_scores", scores_with_another_scale)
    report = build(subject_of(plain), tmp_path / "b", runtimes=["ort-cpu"], dialects=["all"])
    assert report.passed
    assert not (tmp_path / "b" / ORT).exists()
    assert any("as one node, the attention that the module writes out" in n for n in report.notes)
    assert ORT not in json.loads((tmp_path / "b" / "manifest.json").read_text())["graphs"]
    with pytest.raises(GraphError, match="gives other numbers, for random numbers"):
        lower_here(str(tmp_path / "b" / "model.onnx"), str(tmp_path / "alone.onnx"), "ort")
    assert not (tmp_path / "alone.onnx").exists()


class Masked(Layer):
    """A mask of the caller's, filled in with -inf: rows that see no key are NaN."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT * D**-0.5
            return scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v

        self.attend = attend
        return super().forward(x)


def test_a_mask_of_the_caller_stays_a_mask(tmp_path: Path):
    tokens = {0: "batch", 1: "query_len"}
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    inputs, axes = {"x": torch.randn(2, 5, E), "mask": mask}, {"x": tokens, "mask": tokens}
    subject = Subject(Masked(plain).eval(), inputs, axes, ["y"])
    ir.save(export(subject).model, tmp_path / "model.onnx")
    lower_file(tmp_path / "model.onnx", tmp_path / "alone.onnx", "ort")  # it compares numbers
    assert "Softmax" not in operators(tmp_path / "alone.onnx")


class Static(Layer):
    """A cache that the module writes at positions of the caller's."""

    def forward(self, x: Tensor, position: Tensor, past_key: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        key = past_key.index_copy(1, position, x)
        seen = torch.arange(key.shape[1]) <= position[:, None]
        scores = (x @ key.mT).masked_fill(~seen, -1e30)
        return scores.softmax(-1) @ key, key


def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    B, L, C = sizes["batch"], sizes["query_len"], sizes["capacity"]
    x, past = rng.standard_normal((B, L, E)), rng.standard_normal((B, C, E))
    return {"x": x, "position": rng.integers(0, C - L + 1) + np.arange(L), "past_key": past}


def test_a_cache_that_is_not_bound_has_a_note():
    length, capacity = Axis("query_len", min=1, max=8), Axis("capacity", min=16, max=99)
    axes = {"x": {0: "batch", 1: length}, "position": {0: length}}
    axes["past_key"] = {0: "batch", 1: capacity}
    subject = Subject(Static(plain).eval(), draw, axes, ["y", "present_key"])
    _, notes = lower_all(export(subject), ("standard",))
    (note,) = (note for note in notes if "past_key is written" in note)
    assert "not bound in place" in note


def filled_with_little(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(~causal(scores), -30.0).softmax(-1) @ v


def over_the_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


@pytest.mark.parametrize(
    "attend",
    [filled_with_little, over_the_queries],
    ids=lambda form: form.__name__,
)
def test_something_else_is_left_alone(attend: Attend):
    model = export(subject_of(attend)).model
    before = [node.op_type for node in model.graph]
    assert recognise_attention(model) == 0
    assert [op for op in before if op == "Softmax"] == ["Softmax"]
    assert np.count_nonzero([node.op_type == "Attention" for node in model.graph]) == 0


def test_a_chain_of_sums_ends_the_search_at_once():
    """Search both sides of forty sums of a value with itself, which have 2^40 ways."""
    x = ir.val("x", ir.DataType.FLOAT, [2, 4, 5, 8])
    nodes, value = [], x
    for _ in range(40):
        nodes.append(ir.node("Add", [value, value]))
        value = nodes[-1].outputs[0]
        value.shape, value.dtype = x.shape, x.dtype
    nodes.append(ir.node("Softmax", [value], {"axis": -1}))
    nodes.append(ir.node("MatMul", [nodes[-1].outputs[0], x]))
    graph = ir.Graph([x], nodes[-1].outputs, nodes=nodes, opset_imports={"": 23}, name="sums")
    assert recognise_attention(ir.Model(graph, ir_version=10)) == 0


@pytest.mark.parametrize("op_type", ["MatMul", "Add", "Where", "Cast", "Mul"])
def test_a_node_that_lacks_an_input_is_no_part_of_attention(op_type: str):
    x = ir.val("x", ir.DataType.FLOAT, [2, 4, 5, 8])
    broken = ir.node(op_type, [None])
    broken.outputs[0].shape, broken.outputs[0].dtype = x.shape, x.dtype
    softmax = ir.node("Softmax", broken.outputs, {"axis": -1})
    product = ir.node("MatMul", [softmax.outputs[0], x])
    nodes = [broken, softmax, product]
    graph = ir.Graph([x], product.outputs, nodes=nodes, opset_imports={"": 23}, name="broken")
    assert recognise_attention(ir.Model(graph, ir_version=10)) == 0
