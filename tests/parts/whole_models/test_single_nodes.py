"""Norms, rotations and packed products of whole models as few nodes that do the same."""

from __future__ import annotations

import sys
from collections import Counter

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from tiny_decoders import built, tiny_decoder
from transformers.models.llama import modeling_llama

from attn_export import Subject
from attn_export.export.export import export
from attn_export.graph.ir_helpers import nodes_of
from attn_export.graph.lower import DECODE, lower
from attn_export.parts.whole_models.build.single_nodes import SingleNodes


@pytest.mark.parametrize(
    ("kind", "norms", "rotated"),
    [
        ("llama", 5, True),
        ("gemma2", 9, True),  # whose weights are 1 less than the factor
        ("qwen3", 9, True),  # with norms of heads
        ("cohere2", 0, True),  # interleaved pairs, and norms that are no RMS norms
        ("glm", 5, True),  # half of each head
        ("gpt2", 0, False),
    ],
)
@pytest.mark.every(2)
def test_norms_and_rotations_are_found_by_value(kind, norms, rotated):
    model, ids = tiny_decoder(kind), torch.arange(3, 13).reshape(2, 5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    nodes = SingleNodes(model)
    with torch.inference_mode(), nodes.inside(model):
        changed = {name for name, part in model.named_modules() if "forward" in vars(part)}
        own = [vars(sys.modules[type(part).__module__]) for part in model.modules()]
        functions = {
            names["apply_rotary_pos_emb"] for names in own if "apply_rotary_pos_emb" in names
        }
        found = model(ids).logits
    with torch.inference_mode():
        wanted = model(ids).logits
    assert len(changed) == norms
    assert any("single_nodes" in f.__module__ for f in functions) == rotated
    assert not any("forward" in vars(part) for part in model.modules())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_no_node_does_is_left(monkeypatch):
    def backwards(q, k, cos, sin, unsqueeze_dim=1):
        return original(q, k, cos, -sin, unsqueeze_dim)

    original = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
    model = tiny_decoder("llama")
    forward = modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm, "forward", lambda norm, x: forward(norm, x) + 1e-3 * x
    )
    with SingleNodes(model).inside(model):
        assert modeling_llama.apply_rotary_pos_emb is backwards
        assert not any("forward" in vars(part) for part in model.modules())


def test_nodes_are_taken_back_if_a_run_differs():
    model = tiny_decoder("llama")
    nodes, runs = SingleNodes(model), iter((torch.ones(3), torch.zeros(3) + 0.5))
    nodes.prove(lambda: next(runs))
    with nodes.inside(model):
        assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize(
    ("kind", "sums"), [("gemma", 6), pytest.param("qwen2", 5, marks=pytest.mark.extended)]
)
def test_products_of_one_value_are_one_product(kind, sums, tmp_path):
    """A layer has products of q, k and v, of out, gate and up, and down, and a head."""
    standard = {"MatMul": 5, "Add": sums, "Split": 2, "RMSNormalization": 3, "RotaryEmbedding": 2}
    model = tiny_decoder(kind, num_hidden_layers=1, attention_bias=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    subject = Subject.from_model(model)
    exported = export(subject).model
    counts = {name: len(nodes_of(exported, name)) for name in standard}
    path = tmp_path / "model.onnx"
    ir.save(exported, path)
    session = onnxruntime.InferenceSession(path)
    found = session.run(None, {n: x.numpy() for n, x in subject.inputs.items()})
    with torch.inference_mode():
        wanted = subject.call(subject.module, subject.inputs)
    for name, array in zip(subject.outputs, found, strict=True):
        torch.testing.assert_close(torch.from_numpy(array), wanted[name], rtol=1e-4, atol=1e-5)
    assert counts == standard


def test_sums_and_norms_are_one_node_for_onnx_runtime():
    graph = onnx.load(built("mistral") / "model.ort.decode.onnx", load_external_data=False).graph
    counts = Counter(node.op_type for node in graph.node)
    assert (counts["SkipSimplifiedLayerNormalization"], counts["RMSNormalization"]) == (4, 1)
    assert (counts["QuickGelu"], counts["Sigmoid"], counts["Exp"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("kind", "inside", "packed"),
    [
        ("llama", 2, 2),
        ("qwen3", 2, 0),  # norms of heads lie between product and rotation
        pytest.param("mistral", 0, 0, marks=pytest.mark.extended),  # all layers have windows
        pytest.param("glm", 0, 0, marks=pytest.mark.extended),  # half of each head is rotated
    ],
)
def test_a_step_rotates_within_attention(kind, inside, packed):
    """Caches of such layers hold values as keys, others with their last axes swapped."""
    lowered = lower(export(Subject.from_model(tiny_decoder(kind))).model, "ort")[DECODE]
    nodes = [node for node in lowered.model.graph if node.op_type == "GroupQueryAttention"]
    assert [node.attributes.get_int("do_rotary", 0) for node in nodes] == [1] * inside
    assert sum(node.inputs[1] is None for node in nodes) == packed
    assert bool(lowered.file.layouts) == (not inside)
    assert len(nodes_of(lowered.model, "Cos")) == 1  # all layers share the tables
    assert len(nodes_of(lowered.model, "Transpose")) == 0 or not inside
