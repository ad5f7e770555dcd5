"""Contents of the drawing of an attention node, for graphs that are built."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from conftest import small_spec

from attn_export.export.export import export
from attn_export.export.subject import Subject
from attn_export.graph.neighbourhood import Lane, Neighbourhood, neighbourhood, read_neighbourhood


def drawn(**changes: object) -> Neighbourhood:
    found = neighbourhood(export(Subject.from_spec(small_spec(**changes))).model)
    assert found is not None
    return found


def names(lane: Lane) -> list[str]:
    return [step.name for step in lane.steps]


def by_role(lanes: tuple[Lane, ...]) -> dict[str, list[str]]:
    return {lane.role: names(lane) for lane in lanes}


def test_every_input_leads_back_to_an_input_of_the_graph():
    found = drawn(rotary="half")
    moved = "Reshape, Transpose"
    assert by_role(found.before) == {
        "query": ["query", "q_proj", moved, "rotary"],
        "key": ["query", "k_proj", moved, "rotary"],
        "value": ["query", "v_proj", moved],
        "attn_mask": ["attn_mask", "Expand"],
        "past_key": ["past_key"],
        "past_value": ["past_value"],
    }
    assert by_role(found.after) == {
        "output": ["Transpose, Reshape", "out_proj", "output"],
        "present_key": ["present_key"],
        "present_value": ["present_value"],
    }
    assert (found.count, found.facts[0]) == (1, "causal")
    assert found.axes == {"B": "batch", "L": "query_len", "S": "total_len", "P": "past_len"}


def test_a_module_is_one_step_with_all_that_it_does():
    query = drawn(rotary="half").before[0]
    rotary = query.steps[-1]
    assert rotary.operators == ("Slice", "Mul", "Sub", "Add", "Concat")
    assert rotary.beside == ("Cos", "Sin")
    assert rotary.shape == "[B, 4, L, 8]"
    assert [node for node in rotary.nodes if node.startswith("rotary/Mul")] == [
        "rotary/Mul", "rotary/Mul_2", "rotary/Mul_3", "rotary/Mul_4",
    ]  # fmt: skip
    assert [step.kind for step in query.steps] == ["input", "nodes", "nodes", "nodes"]


def test_a_cache_in_place_is_written_on_the_way_of_the_key():
    found = drawn(cache="in-place")
    scatter = found.before[1].steps[-1]
    assert scatter.name == "TensorScatter"
    assert scatter.beside == ("past_key", "past_length")
    assert scatter.gives == ("present_key",)
    assert by_role(found.before)["nonpad_kv_seqlen"] == ["past_length", "Add"]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)
        self.out, self.more = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, L, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, L, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(B, L, 16))
        return x + self.more(x)


@pytest.fixture(scope="module")
def model() -> ir.Model:
    module = torch.nn.Sequential(*(Layer() for _ in range(3))).eval()
    axes = {"input": {0: "batch", 1: "tokens"}}
    return export(Subject(module, {"input": torch.randn(2, 5, 16)}, axes, ["y"])).model


def test_of_several_layers_the_first_is_drawn_and_the_rest_is_said(model: ir.Model):
    found = neighbourhood(model)
    assert found is not None
    assert found.count == 3
    queries, keys, _ = (lane.steps for lane in found.before)
    assert [step.name for step in queries] == ["input", "0.norm", "0.qkv", "0"]
    assert queries[:3] == keys[:3]  # what they have in common is one box
    assert queries[3] != keys[3]
    (output,) = found.after
    assert [step.kind for step in output.steps] == ["nodes", "nodes", "nodes", "rest"]
    # A module that has both sides of the attention in it is not one step.
    assert output.steps[0].operators == ("Transpose", "Reshape")
    assert output.steps[2].beside == ("input",)
    assert "tokens" in queries[0].shape


def test_without_attention_or_file_there_is_no_drawing(tmp_path: Path, model: ir.Model):
    plain = model.clone()
    for node in plain.graph:
        node.domain = "elsewhere" if node.op_type == "Attention" else node.domain
    assert neighbourhood(plain) is None
    assert read_neighbourhood(None) is None
    assert read_neighbourhood(tmp_path / "model.onnx") is None


def test_a_bundle_s_graph_is_read_as_it_was_built(bundle: Path):
    read = read_neighbourhood(bundle / "model.onnx")
    assert read is not None
    assert by_role(read.before)["query"] == ["query", "q_proj", "Reshape, Transpose"]
