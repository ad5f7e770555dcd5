"""Mixtures of experts of whole models: one layout of weights for all dialects, and one node."""

from __future__ import annotations

import torch
from tiny_decoders import tiny_decoder

from attn_export import Subject
from attn_export.commands.bundle_graphs import lower_all
from attn_export.export.export import export
from attn_export.graph.ir_helpers import dims


def test_experts_are_one_node_in_ort_and_all_graphs_read_the_same_weights():
    model = tiny_decoder("mixtral", num_hidden_layers=1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    graphs, _ = lower_all(export(Subject.from_model(model)), ("standard", "ort"))
    counts = [sum(node.op_type == "MoE" for node in graph.model.graph) for graph in graphs]
    assert counts == [0, 1, 1]
    gates, factors = model.model.layers[0].mlp.experts.gate_up_proj.detach().chunk(2, 1)
    for graph in graphs:
        stored = {
            str(name).rpartition(".")[2]: value.const_value.numpy()
            for name, value in graph.model.graph.initializers.items()
            if len(dims(value)) == 3 and value.const_value.size > 9
        }
        assert stored.keys() == {"gate_up_proj", "down_proj"}
        assert (stored["gate_up_proj"][:, ::2] == gates.numpy()).all()
        assert (stored["gate_up_proj"][:, 1::2] == factors.numpy()).all()
