"""A stack of layers that share one set of weights (as ALBERT's do), and the same stack unshared."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from built import Built, built, close
from shared import extended
from torch import Tensor, nn

from attn_export import Attention, AttentionSpec

pytestmark = pytest.mark.xdist_group("test_shared_weights")  # what it makes is shared

E, H, LAYERS = 64, 4, 2
SMALL = 8
"""Elements of an initialiser that may be a shape, or a number of the arithmetic."""

SPEC = AttentionSpec(embed_dim=E, num_heads=H, num_kv_heads=2, causal=True)


class PlainAttention(nn.Module):
    """Attention without this package: linear layers around PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E // H)).permute(2, 0, 3, 1, 4)  # [B, H, L, D]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, make_attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(E), nn.LayerNorm(E)
        self.attention = make_attention()
        self.up, self.down = nn.Linear(E, 2 * E), nn.Linear(2 * E, E)
        for norm in (self.attention_norm, self.norm):  # at 1 and 0 they would all be one
            nn.init.normal_(norm.weight, 1.0, 0.3)
            nn.init.normal_(norm.bias, 0.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Sequential):
    """Layers one after the other; the same one over and over, if they are shared."""

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self:
            tokens = layer(tokens)
        return tokens


ATTENTIONS = {"ours": lambda: Attention(SPEC), "plain": PlainAttention}


def shared(make_attention: Callable[[], nn.Module]) -> Stack:
    return Stack(*[Layer(make_attention)] * LAYERS)


def unshared(make_attention: Callable[[], nn.Module]) -> Stack:
    return Stack(*(Layer(make_attention) for _ in range(LAYERS)))


@dataclasses.dataclass(frozen=True)
class Stacks:
    """The modules and their graphs, by how they were made."""

    modules: dict[str, Stack]
    graphs: dict[str, Built]


@pytest.fixture(scope="module", params=extended(ATTENTIONS, lambda name: name == "plain"))
def stacks(request: pytest.FixtureRequest, tmp_path_factory) -> Stacks:
    modules, graphs = {}, {}
    for make in (shared, unshared):
        torch.manual_seed(0)
        name, module = make.__name__, make(ATTENTIONS[request.param])
        modules[name], graphs[name] = module, graph_of(module, tmp_path_factory.mktemp(name))
    return Stacks(modules, graphs)


def graph_of(module: Stack, folder: Path) -> Built:
    axes = {"tokens": {0: "batch", 1: "query_len"}}
    return built(module, folder, {"tokens": torch.randn(2, 5, E)}, axes, ["output"])


def stored(graph: Built) -> list[np.ndarray]:
    """Return the weights in the file."""
    arrays = map(onnx.numpy_helper.to_array, graph.graph.initializer)
    return [array for array in arrays if array.size > SMALL]


def copies(graph: Built, parameter: Tensor) -> int:
    """Return the number of copies of a parameter in the file, transposed ones included."""
    wanted = (parameter.detach().numpy(), parameter.detach().numpy().T)
    return sum(any(np.array_equal(array, w) for w in wanted) for array in stored(graph))


@pytest.mark.parametrize("make", ["shared", "unshared"])
@pytest.mark.every(4)
def test_each_parameter_is_stored_once(stacks: Stacks, make: str):
    parameters = stacks.modules[make].named_parameters()
    found = {name: copies(stacks.graphs[make], parameter) for name, parameter in parameters}
    assert set(found.values()) == {1}, found


def test_shared_layers_take_the_space_of_one_layer(stacks: Stacks):
    size = {make: graph.file.stat().st_size for make, graph in stacks.graphs.items()}
    layer = sum(4 * p.numel() for p in stacks.modules["shared"].parameters())
    nodes = size["shared"] - layer
    assert 0 < nodes < layer / 4, "the rest of the file is small beside the weights"
    assert size["unshared"] == pytest.approx(LAYERS * layer + nodes, rel=0.02)


def test_shared_weights_are_one_initializer_that_every_layer_reads(stacks: Stacks):
    parameters = list(stacks.modules["shared"].parameters())
    assert len(stored(stacks.graphs["shared"])) == len(parameters)
    assert len(stored(stacks.graphs["unshared"])) == LAYERS * len(parameters)
    weights = {i.name for i in stacks.graphs["shared"].graph.initializer if len(i.dims) == 2}
    for name in weights:
        readers = [node for node in stacks.graphs["shared"].graph.node if name in node.input]
        assert len(readers) == LAYERS, name


def test_every_layer_is_one_attention_node(stacks: Stacks):
    for make, graph in stacks.graphs.items():
        assert graph.count("Softmax") == 0, make
        assert graph.count("Attention") == LAYERS, make


@torch.no_grad()
def test_each_graph_is_its_stack(stacks: Stacks):
    for B, L in ((1, 1), (3, 2), (2, 30)):
        tokens = torch.randn(B, L, E, generator=torch.Generator().manual_seed(L))
        outputs = {make: graph.run(tokens=tokens)[0] for make, graph in stacks.graphs.items()}
        for make, output in outputs.items():
            close(output, stacks.modules[make](tokens))
        assert (outputs["shared"] - outputs["unshared"]).abs().max() > 0.1


def test_layers_attend_to_the_past_alone(stacks: Stacks):
    """Check that later tokens do not reach earlier outputs."""
    tokens = torch.randn(2, 9, E, generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 6:] += torch.randn(2, 3, E, generator=torch.Generator().manual_seed(2))
    for graph in stacks.graphs.values():
        before, after = (graph.run(tokens=x)[0] for x in (tokens, changed))
        close(after[:, :6], before[:, :6])
        assert ((after - before)[:, 6:].abs().amax(-1) > 0.1).all()


@pytest.mark.extended
def test_layers_that_happen_to_hold_the_same_weights_are_stored_once_too(tmp_path: Path):
    torch.manual_seed(0)
    of_one = shared(ATTENTIONS["ours"])
    alike = Stack(*(copy.deepcopy(layer) for layer in of_one))
    assert len(list(alike.parameters())) == LAYERS * len(list(of_one.parameters()))
    graph = graph_of(alike, tmp_path)
    assert {copies(graph, parameter) for parameter in alike.parameters()} == {1}
    assert len(stored(graph)) == len(list(of_one.parameters()))
    tokens = torch.randn(2, 7, E)
    with torch.no_grad():
        close(graph.run(tokens=tokens)[0], of_one(tokens))
