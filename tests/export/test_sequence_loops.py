"""Modules that loop over a sequence with PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop

from attn_export import Axis, Subject
from attn_export.errors import ExportError
from attn_export.export.export import export
from attn_export.export.loops import run_plainly

Step = Callable[["Loops", Tensor], Tensor]


class Loops(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.decay = step, nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


def recurrent(m: Loops, x: Tensor) -> Tensor:
    def step(h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        h = h * m.decay.sigmoid() + u
        return h, h.tanh()

    return scan(step, torch.zeros_like(x[:, 0]), x, dim=1, reverse=True)[1]


def combined(_: Loops, x: Tensor) -> Tensor:
    def combine(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return associative_scan(combine, (x.sigmoid(), x), dim=1, combine_mode="generic")[1]


def halved(m: Loops, x: Tensor) -> Tensor:
    def more(i: Tensor, y: Tensor) -> Tensor:
        return (i < 20) & (y.abs().max() > 1)

    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, y * 0.5 + m.decay * 0.1

    return while_loop(more, step, (torch.tensor(0), x))[1]


def softmax(_: Loops, x: Tensor) -> Tensor:
    """Return the last running softmax of each channel, summed; a scan of a loop of no steps."""

    def more(i: Tensor, _: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        return i > 0

    def step(i: Tensor, pair: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Any]:
        return i - 1, {"pair": (pair["pair"][0] / 2, pair["pair"][1] + 1)}

    def added(carry: tuple[Tensor, Tensor], u: Tensor) -> tuple[Any, dict[str, Tensor]]:
        total, most = carry
        top = torch.maximum(most, u)
        total = total * (most - top).exp() + (u - top).exp()
        return (total, top), {"sum": total.clone(), "scaled": (u - top).exp() / total}

    first = torch.zeros_like(x[:, 0])
    (total, _), of_each = scan(added, (first, first - 9), x, dim=1)
    of_none = while_loop(more, step, (torch.tensor(0), {"pair": (total, first)}))[1]["pair"]
    return of_each["scaled"] + of_none[0][:, None] / of_each["sum"]


LOOPS: dict[Step, str] = {recurrent: "Scan", combined: "Scan", halved: "Loop", softmax: "Scan"}


def of(step: Step) -> Subject:
    axes = {"x": {0: "batch", 1: "query_len"}}
    return Subject(Loops(step).eval(), {"x": torch.randn(2, 5, 4)}, axes, ["y"])


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
@pytest.mark.every(3)
def test_it_becomes_one_node_with_a_body(step: Step):
    subject, x = of(step), torch.randn(3, 7, 4)
    model = export(subject).model
    assert [node.op_type for node in model.graph].count(LOOPS[step]) == 1
    with torch.inference_mode():
        wanted = subject.call(subject.module, {"x": x})["y"]
    (found,) = InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
def test_a_run_in_python_is_that_of_pytorch(step: Step):
    module, x = Loops(step).eval(), torch.randn(2, 5, 4)
    with torch.inference_mode():
        assert torch.allclose(run_plainly(module, {"x": x}, nullcontext()), module(x), atol=1e-6)


def views(_: Loops, x: Tensor) -> Tensor:
    one, two = x.unbind(-1)[:2]

    def step(h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        return h + u[..., 0] * one[:, 0] + two[:, 0], u.clone()

    return scan(step, x[:, 0, 0].clone(), x, dim=1)[1]


def other_type(_: Loops, x: Tensor) -> Tensor:
    return scan(lambda h, u: (h + u.double(), u.clone()), x[:, 0].clone(), x, dim=1)[1]


def indexed(_: Loops, x: Tensor) -> Tensor:
    def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, y + x[:, i]

    return while_loop(lambda i, _: i < x.shape[1], step, (torch.tensor(0), x[:, 0].clone()))[1]


REFUSED: dict[Step, str] = {
    views: "reads two views of one tensor; make them copies by x.clone()",
    other_type: "a loop whose values change shape, type or strides in a step; start it with",
    indexed: "a tensor as an index in a loop; write x.index_select(1, i.view(1))",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_a_refused_loop_is_explained(step: Step):
    with pytest.raises(ExportError) as caught:
        export(of(step))
    assert REFUSED[step] in str(caught.value)


class Tags(nn.Module):
    """The sum over all paths through 5 tags, `[B, L, 5]`."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        def step(total: Tensor, u: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            new = torch.logsumexp(total[..., None] + self.moves, 1) + u[0]
            return torch.where(u[1][:, None], new, total), new.clone()

        return scan(step, x[:, 0].clone(), (x[:, 1:], mask[:, 1:]), dim=1)[0]


def test_the_length_of_the_example_may_be_that_of_a_constant():
    inputs = {"x": torch.randn(2, 5, 5), "mask": torch.tensor([[True] * 5, [True] * 4 + [False]])}
    axis = {0: "batch", 1: Axis("query_len", min=2)}
    subject = Subject(Tags().eval(), inputs, dict.fromkeys(inputs, axis), ["y"])
    model = export(subject).model
    assert [str(value.shape[1]) for value in model.graph.inputs] == ["query_len"] * 2
