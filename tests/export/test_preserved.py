"""The state of a user's module is restored after a build, even after one that failed."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from agreement import right_graphs
from torch import Tensor, nn

from attn_export import Subject
from attn_export.errors import ExportError
from attn_export.export.export import export
from attn_export.export.module_state import copy_module, preserve_state


class MaskMadeOnce(nn.Module):
    """Module that keeps the mask of its longest sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.mask is None or self.mask.shape[0] < n:
            self.mask = torch.ones(n, n).tril().bool()
        return (x @ x.mT).masked_fill(~self.mask[:n, :n], float("-inf")).softmax(-1) @ x


def subject_of(module: nn.Module) -> Subject:
    axes = {"x": {0: "batch", 1: "query_len"}}
    return Subject(module.eval(), {"x": torch.randn(2, 5, 16)}, axes, ["y"])


class BufferMadeOnce(MaskMadeOnce):
    """The same with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mask
        self.register_buffer("mask", None, persistent=False)


class BufferRegistered(BufferMadeOnce):
    """The same with a buffer that a call registers, of the size of the call alone."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.mask is None or self.mask.shape[0] != n:
            self.register_buffer("mask", torch.ones(n, n).tril().bool(), persistent=False)
        return super().forward(x)


@pytest.mark.parametrize("kind", [MaskMadeOnce, BufferMadeOnce, BufferRegistered])
@pytest.mark.parametrize("called_with", [None, 5, 40])
@pytest.mark.every(4)
def test_a_mask_that_is_kept_is_made_in_the_graph_and_stays(
    kind: type[MaskMadeOnce], called_with: int | None
):
    module = kind()
    if called_with:
        module(torch.randn(1, called_with, 16))
    mask, buffers = module.mask, dict(module.named_buffers())
    right_graphs(subject_of(module))
    assert module.mask is mask
    assert dict(module.named_buffers()).keys() == buffers.keys()
    assert "register_buffer" not in vars(module)


class BufferMoved(nn.Module):
    """Module that moves a buffer, which no checkpoint has, to its inputs: ctrl of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(x.device, x.dtype)
        return (x * self.table) @ x.mT @ x


def test_a_buffer_that_a_call_assigns_stays_a_buffer():
    module = BufferMoved()
    table = module.table
    right_graphs(subject_of(module))
    assert module._buffers["table"] is table


class MaskCounted(nn.Module):
    """Module that knows by a number that it has a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.mask = 3, torch.ones(3, 3).tril().bool()

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n != self.known:
            self.known, self.mask = n, torch.ones(n, n).tril().bool()
        scores = (x @ x.mT).masked_fill(self.mask.logical_not(), float("-inf"))
        return scores.softmax(-1) @ x


def test_a_module_that_needs_kept_state_is_refused_with_the_remedy():
    module = MaskCounted()
    module(torch.randn(1, 5, 16))
    mask = module.mask
    with pytest.raises(ExportError, match=r"keeps mask from call to call.*make it in each call"):
        export(subject_of(module))
    assert module.mask is mask


def test_attributes_buffers_and_containers_come_back():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.seen, module.known = [1], {"a": 1}
    weight = module[0].weight

    def changed() -> None:
        with preserve_state(module):
            module.seen.append(2)
            module.known["b"] = 2
            module[0].weight = nn.Parameter(torch.zeros(2, 2))
            module[1].register_buffer("more", torch.zeros(1))
            module.later = 3
            raise ValueError("out")

    with pytest.raises(ValueError, match="out"):
        changed()
    assert (module.seen, module.known) == ([1], {"a": 1})
    assert module[0].weight is weight
    assert not hasattr(module[1], "more")
    assert not hasattr(module, "later")


def computed() -> Tensor:
    return torch.ones(2, requires_grad=True) * 2


UNCOPIED = {
    "a Python module": lambda: math,
    "a lock": threading.Lock,
    "a generator": lambda: (i for i in range(3)),
    "a lock in a dict of lists": lambda: {"all": [threading.RLock()]},
    "a tensor computed from weights": computed,
}


@pytest.mark.parametrize("name", UNCOPIED)
def test_an_object_that_cannot_be_copied_is_shared_by_the_copy(name: str):
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].held = UNCOPIED[name]()
    copy = copy_module(module).double()
    assert module[0].weight.dtype == torch.float32
    assert copy[0].weight.dtype == torch.float64
    held, other = module[0].held, copy[0].held
    if isinstance(held, dict):
        held, other = held["all"][0], other["all"][0]
    assert other is held
