"""Functions of the gated delta rule, of transformers and of one's own, are recognised by value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from attn_export import Axis, Subject, build
from attn_export.parts.linear_attention.called_rules import capturing

_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "intermediate_size": 32,
}  # fmt: skip
_GATED = {
    "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_KIMI = {
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1],
        "full_attn_layers": [2],
    },
}  # fmt: skip

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "Qwen3-Next": lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**_SIZES, **_GATED), 0),
    "Qwen3.5": lambda: Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**_SIZES, **_GATED), 0),
    "OLMo hybrid": lambda: OlmoHybridGatedDeltaNet(OlmoHybridConfig(**_SIZES, **_GATED), 0),
    "Kimi Linear": lambda: KimiLinearDeltaAttention(KimiLinearConfig(**_SIZES, **_KIMI), 0),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.every(4)
def test_a_module_of_transformers_becomes_one_node(name: str, tmp_path: Path, need):
    need("ort-cpu==1.32.0")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = OTHERS[name]().eval()
        for parameter in module.parameters():  # some are not set before a model sets them
            nn.init.uniform_(parameter, -0.3, 0.3)
        example = {"hidden_states": torch.randn(2, 5, 32)}
    named = {"hidden_states": {0: "batch", 1: Axis("query_len", max=32)}}
    subject = Subject(module, example, named, ["output"])
    report = build(subject, tmp_path / "out", runtimes=["ort-cpu==1.32.0"], dialects=["standard"])
    assert report.passed, [v for v in report.verdicts if v.status != "passed"][:3]
    nodes = onnx.load(tmp_path / "out" / "model.onnx").graph.node
    assert [node.op_type for node in nodes].count("LinearAttention") == 1


# -- functions of one's own ------------------------------------------------------------------------


def own_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, early: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute the rule token by token; `early` has the state decay before it is written."""
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    B, L, H, D = q.shape
    state = q.new_zeros(B, H, D, v.shape[-1]) if initial_state is None else initial_state
    rows = []
    for t in range(L):
        kept = g[:, t].exp()[..., None, None]
        state = state * kept if early else state
        found = torch.einsum("bhdv,bhd->bhv", state, k[:, t])
        new = beta[:, t, :, None] * (v[:, t] - found)
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, t], new)
        state = state if early else state * kept
        rows.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    attended = (D**-0.5 if scale is None else scale) * torch.stack(rows, 1)
    return attended, state if output_final_state else None


def late_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    return own_rule(q, k, v, g, beta, early=False, **options)


def other_operands(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, table: Tensor) -> Any:
    return table


class Net(nn.Module):
    """A layer that calls a function of the rule, with its state in and out."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.projection, self.options = nn.Linear(16, 4 * 3 * 4 + 2 * 4), options

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        *heads, a, b = self.projection(x).split([16, 16, 16, 4, 4], dim=-1)
        q, k, v = (y.unflatten(-1, (4, 4)) for y in heads)
        attended, state = own_rule(
            q, k, v, -nn.functional.softplus(a), b.sigmoid(), initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, **self.options,
        )  # fmt: skip
        return attended.flatten(2), state


def test_a_function_of_ones_own_becomes_a_node_with_its_state(tmp_path: Path, need):
    need("ort-cpu==1.32.0")
    example = {"x": torch.randn(2, 5, 16), "state": torch.randn(2, 4, 4, 4)}
    named = {"x": {0: "batch", 1: Axis("query_len", max=32)}, "state": {0: "batch"}}
    subject = Subject(Net().eval(), example, named, ["output", "new_state"])
    report = build(subject, tmp_path / "out", runtimes=["ort-cpu==1.32.0"], dialects=["standard"])
    assert report.passed
    nodes = {node.op_type: node for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert nodes["LinearAttention"].input[3] == "state"
    assert nodes["LinearAttention"].output[1] == "new_state"


def test_only_functions_with_the_numbers_of_the_rule_are_replaced():
    here = vars(sys.modules[__name__])
    before = dict(here)
    with capturing(Net()):
        assert {name for name in before if here[name] is not before[name]} == {"own_rule"}
    assert all(here[name] is before[name] for name in before)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"early": False}], ids=str)
def test_a_call_with_other_options_is_computed_by_the_function(options: dict):
    net, operands = Net(**options), (torch.randn(2, 3, 16), torch.randn(2, 4, 4, 4))
    expected = net(*operands)
    with capturing(net):
        torch.testing.assert_close(net(*operands), expected)
