"""Operators and functions of other libraries: by PyTorch code, or by functions of onnxscript."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import torch
from agreement import operators, right_graphs
from onnxscript import opset18 as op
from onnxscript import script
from shared import extended
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from attn_export import Subject
from attn_export.commands.main import run
from attn_export.errors import ExportError, UsageError
from attn_export.export.export import export
from attn_export.export.operators import Operators

H, D = 2, 8


# -- operators and functions ------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in the layout `[B, L, H, D]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


def by_numpy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.from_numpy(attend(*(torch.from_numpy(x.numpy()) for x in (q, k, v))).numpy())


LIBRARY = torch.library.Library("theirs", "DEF")
for name, function, key in (
    ("python", attend, "CPU"),
    ("composite", attend, "CompositeImplicitAutograd"),
    ("opaque", by_numpy, "CPU"),
    ("narrow", lambda *x: by_numpy(*(each.float().detach() for each in x)), "CPU"),
):
    LIBRARY.define(f"{name}(Tensor q, Tensor k, Tensor v) -> Tensor")
    LIBRARY.impl(name, function, key)
    if key == "CPU":
        LIBRARY.impl(name, lambda q, *_: torch.empty_like(q), "Meta")
LIBRARY.define("into(Tensor(a!) out, Tensor q, Tensor k, Tensor v) -> ()")


def write(out: Tensor, *operands: Tensor) -> None:
    out.copy_(attend(*operands))


LIBRARY.impl("into", write, "CPU")


@torch.library.custom_op("theirs::written", mutates_args=())
def written(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0) -> Tensor:
    return attend(q, k, v) * factor


@torch.library.custom_op("theirs::outer", mutates_args=())
def outer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return written(q, k, v, 0.5) + q


@torch.library.custom_op("theirs::on_gpus", mutates_args=(), device_types="cuda")
def on_gpus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights


def into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    torch.ops.theirs.into(out, q, k, v)
    return out


def with_autograd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights: Tensor = Softmax.apply(q @ k.mT * D**-0.5)
    return (weights @ v).transpose(1, 2)


@script(op)
def in_onnx(q, k, v):
    scores = op.MatMul(op.Transpose(q, perm=[0, 2, 1, 3]), op.Transpose(k, perm=[0, 2, 3, 1]))
    weights = op.Softmax(op.Mul(scores, 0.35355339), axis=-1)
    return op.Transpose(op.MatMul(weights, op.Transpose(v, perm=[0, 2, 1, 3])), perm=[0, 2, 1, 3])


kernels: Any = ModuleType("their_kernels")
exec("def launch(q, k, v, *, by=None):\n    return by(q, k, v)", vars(kernels))
kernels.launch.__kwdefaults__ = {"by": by_numpy}
launch = kernels.launch

ops = torch.ops.theirs
TAKEN: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "Python code of a custom_op": (written, {}),
    "an argument with a default": (lambda q, k, v: written(q, k, v, factor=0.5), {}),
    "an operator within another": (outer, {}),
    "Python code of a library": (ops.python, {}),
    "an overload": (ops.python.default, {}),
    "a composite operator": (ops.composite, {}),
    "an operator that writes": (into, {}),
    "an autograd Function": (with_autograd, {}),
    "a translation": (ops.opaque, {"theirs::opaque": attend}),
    "a translation of a kernel for GPUs": (on_gpus, {"theirs::on_gpus": attend}),
    "a translation by onnxscript": (ops.opaque, {"theirs::opaque": in_onnx}),
    "onnxscript for an operator in float32": (ops.narrow, {"theirs::narrow": in_onnx}),
    "a Python function": (launch, {"their_kernels.launch": attend}),
}


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.attend = nn.Linear(16, 3 * H * D), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        return self.attend(q, k, v).flatten(2)


def subject_of(module: nn.Module, **options: Any) -> Subject:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    return Subject(module.eval(), {"x": x}, {"x": {0: "batch", 1: "query_len"}}, ["y"], **options)


@pytest.mark.parametrize("name", extended(TAKEN, lambda name: name in [*TAKEN][::2]))
@pytest.mark.every(4)
def test_operators_of_others_are_taken(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "their_kernels", kernels)
    theirs, translations = TAKEN[name]
    subject = subject_of(Layer(theirs), translations=translations)
    assert "Softmax" not in operators(right_graphs(subject, "standard", "ort")["model.ort.onnx"])
    assert bool(subject.operators.notes()) == ("GPUs" in name)


def more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v * 1.01)


@pytest.mark.parametrize(
    ("theirs", "translations", "error", "said"),
    [
        (ops.opaque, {"theirs::opaque": more}, ExportError,
         "the translation of theirs::opaque is not theirs::opaque: with it, y differs from"),
        (launch, {"their_kernels.launch": more}, ExportError,
         "the translation of their_kernels.launch is not their_kernels.launch: with it, y"),
        (written, {"theirs::opaque": attend}, UsageError,
         "translations names theirs::opaque, which the module does not call; it calls theirs::w"),
        (ops.opaque, {}, ExportError, "pass Subject(…, translations={'theirs::opaque': function})"),
        (on_gpus, {}, ExportError, "theirs::on_gpus"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_translations_is_said(
    theirs: Any, translations: Any, error: Any, said: str, monkeypatch: Any
):
    monkeypatch.setitem(sys.modules, "their_kernels", kernels)
    with pytest.raises(error) as caught:
        export(subject_of(Layer(theirs), translations=translations))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert launch.__code__.co_name == "launch"  # with its own code again


FILE = """
import torch
from attn_export import Subject

@torch.library.custom_op("of_a_file::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(2 * x.numpy())

class Twice(torch.nn.Module):
    def forward(self, x):
        return twice(x)

def subject():
    translations = {"of_a_file::twice": lambda x: 2 * x}
    return Subject(Twice().eval(), {"x": torch.ones(2, 3)}, {"x": {0: "n"}}, ["y"],
                   translations=translations)
"""


def test_a_file_of_the_command_line_has_translations(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(FILE)
    options = ["--runtime", "ort-cpu", "--dialect", "standard", "--output", "b", "--quiet"]
    assert run(["build", "--module", "theirs.py:subject", *options]) == 0
    assert operators(onnx.load("b/model.onnx").graph) == ["Mul"]


@pytest.mark.parametrize("given", [{"no operator": attend}, {"theirs::opaque": 3}, {3: attend}])
def test_translations_have_names_and_functions(given: Any):
    with pytest.raises(UsageError, match="translations gives functions to operators or functions"):
        Operators(given)


# -- weights that are computed ----------------------------------------------------------------


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(16, 2)), nn.Parameter(torch.ones(2, 16))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def added(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", Added())


WEIGHTS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "their own": added,
    "spectral_norm by hooks": spectral_norm,
}


@pytest.mark.parametrize("name", extended(WEIGHTS, lambda name: name in [*WEIGHTS][1:3]))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parametrized_weights_are_constants(name: str):
    torch.manual_seed(0)
    module = nn.Sequential(WEIGHTS[name](nn.Linear(16, 16)), Layer(attend))
    inputs, axes = {"input": torch.randn(2, 5, 16)}, {"input": {0: "batch", 1: "query_len"}}
    subject = Subject(module.eval(), inputs, axes, ["y"])
    kinds = operators(right_graphs(subject)["model.onnx"])
    if "hooks" not in name:
        assert not {"Pow", "Sqrt", "Div", "ReduceL2"} & {*kinds}
        assert parametrize.is_parametrized(module[0])
