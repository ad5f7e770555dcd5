"""Caches and states as objects, which a module reads, changes in place or returns anew."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from agreement import right_graphs
from shared import extended
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject
from attn_export.errors import UsageError

E, H, D = 16, 2, 8
TOKENS, GROWING = {0: "batch", 1: "query_len"}, {0: "batch", 2: "past_len"}
UP_TO_8 = {0: "batch", 1: Axis("query_len", max=8)}


class KV(NamedTuple):
    k: Tensor
    v: Tensor


@dataclasses.dataclass(frozen=True)
class State:
    """A state of a convolution and a recurrence, of which the last number is a constant."""

    conv: Tensor
    ssm: Tensor
    decay: Tensor


class Slots:
    """Keys and values in slots, of which the first `length` are in use."""

    __slots__ = ("capacity", "k_cache", "length", "v_cache")

    def __init__(self) -> None:
        self.k_cache, self.v_cache = (torch.randn(2, H, 12, D) for _ in range(2))
        self.length, self.capacity = torch.tensor(4), 12


class Window:
    """Keys that grow, and their count as a number."""

    def __init__(self) -> None:
        self.keys, self.count, self.own = torch.randn(2, H, 4, D), 4, self


class Layer(nn.Module):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.step = nn.Linear(E, 3 * E), step

    def forward(self, x: Tensor, **states: Any) -> Any:
        return self.step(self, x, **states)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]


def appended(m: Layer, x: Tensor, kv: KV) -> tuple[Tensor, KV]:
    q, k, v = m.heads(x)
    kv = KV(torch.cat([kv.k, k], 2), torch.cat([kv.v, v], 2))
    return attend(q, *kv).transpose(1, 2).flatten(2), kv


def replaced(m: Layer, x: Tensor, pasts: list[tuple[Tensor, Tensor]]) -> Tensor:
    for index, (k, v) in enumerate(pasts):
        x, kv = appended(m, x, KV(k, v))
        pasts[index] = (kv.k, kv.v)
    return x


def in_dicts(m: Layer, x: Tensor, cache: dict[str, Tensor]) -> dict[str, Any]:
    y, kv = appended(m, x, KV(cache["k"], cache["v"]))
    return {"y": y, "cache": kv._asdict(), "unnamed": y + 1}


def recurrent(_: Layer, x: Tensor, state: State) -> tuple[Tensor, State]:
    window = torch.cat([state.conv, x[:, None]], 1)
    ssm = state.ssm * state.decay + window.sum(1)
    return ssm.tanh(), State(window[:, 1:], ssm, state.decay)


def written(m: Layer, x: Tensor, layers: list[Slots]) -> Tensor:
    for slots in layers:
        q, k, v = m.heads(x)
        at = torch.arange(x.shape[1]) + slots.length
        slots.k_cache[:, :, at], slots.v_cache[:, :, at] = k, v
        slots.length += x.shape[1]
        mask = torch.arange(slots.capacity) <= at[:, None]
        x = x + attend(q, slots.k_cache, slots.v_cache, mask).transpose(1, 2).flatten(2)
    return x


def counted(m: Layer, x: Tensor, window: Window) -> Tensor:
    q, k, _ = m.heads(x)
    at = torch.arange(x.shape[1]) + window.count
    window.keys, window.count = torch.cat([window.keys, k], 2), window.count + x.shape[1]
    mask = torch.arange(window.keys.shape[2]) <= at[:, None]
    return attend(q, window.keys, window.keys, mask).transpose(1, 2).flatten(2)


def copied(m: Layer, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    q, k, _ = m.heads(x)
    cache.index_copy_(2, at, k)
    mask = torch.arange(cache.shape[2]) <= at[:, None]
    return attend(q, cache, cache, mask).transpose(1, 2).flatten(2)


def read(m: Layer, x: Tensor, window: Window) -> Tensor:
    q, *_ = m.heads(x)
    return attend(q, window.keys, window.keys).transpose(1, 2).flatten(2)


def drawn(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
    shapes = {"x": (sizes["batch"], sizes["query_len"], E), "cache": (sizes["batch"], H, 12, D)}
    at = np.arange(sizes["query_len"]) + rng.integers(0, 4)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {"at": at}


def of(step: Callable[..., Any], axes: Any, outputs: Any = ("y",), **states: Any) -> Subject:
    x = torch.randn(2, E) if step is recurrent else torch.randn(2, 3, E)
    return Subject(Layer(step).eval(), {"x": x, **states}, axes, list(outputs))


def pair() -> KV:
    return KV(torch.randn(2, H, 4, D), torch.randn(2, H, 4, D))


CASES: dict[str, tuple[Callable[[], Subject], dict[str, str]]] = {
    "a named tuple that is returned anew": (
        lambda: of(appended, {"x": TOKENS, "kv": GROWING}, ("y", "kv"), kv=pair()),
        {"past_key": "present_key", "past_value": "present_value"},
    ),
    "a dataclass with a constant": (
        lambda: of(
            recurrent, {"x": {0: "batch"}, "state": {0: "batch"}}, ("y", "state"),
            state=State(torch.randn(2, 3, E), torch.randn(2, E), torch.tensor(0.5)),
        ),
        {"past_conv": "present_conv", "past_ssm": "present_ssm"},
    ),
    "slots that are written in place": (
        lambda: of(written, {"x": UP_TO_8, "layers": {0: "batch"}}, layers=[Slots(), Slots()]),
        {
            f"past_{name}_{layer}": f"present_{name}_{layer}"
            for layer in (0, 1) for name in ("key", "length", "value")
        },
    ),
    "a list of tuples that are replaced": (
        lambda: of(replaced, {"x": TOKENS, "pasts": GROWING}, pasts=[tuple(pair())]),
        {"pasts.0.0": "present_pasts.0.0", "pasts.0.1": "present_pasts.0.1"},
    ),
    "a dict that is returned in its place": (
        lambda: of(
            in_dicts, {"x": TOKENS, "cache": GROWING}, ("y", "cache"), cache=pair()._asdict()
        ),
        {"cache.k": "present_cache.k", "cache.v": "present_cache.v"},
    ),
    "a number that is a size": (
        lambda: of(counted, {"x": TOKENS, "window": GROWING}, window=Window()),
        {"past_key": "present_key"},
    ),
    "a plain tensor that is written in place": (
        lambda: Subject(
            Layer(copied).eval(), drawn,
            {"x": UP_TO_8, "cache": {0: "batch"}, "at": {0: "query_len"}}, ["y"],
        ),
        {"cache": "present_cache"},
    ),
    "an object that is only read": (
        lambda: of(read, {"x": TOKENS, "window.keys": {0: "batch", 2: "key_len"}}, window=Window()),
        {},
    ),
}  # fmt: skip
IN_SHORT = {"slots that are written in place", "a number that is a size"}


@pytest.mark.parametrize("name", CASES)
def test_tensors_in_objects_are_named_and_what_changes_is_an_output(name: str):
    subject, states = CASES[name][0](), CASES[name][1]
    assert subject.results.states == {output: past for past, output in states.items()}
    assert set(subject.outputs) == {"y", *states.values(), *subject.outputs[1:]}
    assert set(states) <= set(subject.inputs)
    assert subject.roles.caches == subject.results.states


@pytest.mark.parametrize("name", extended(CASES, lambda name: name in IN_SHORT))
@pytest.mark.every(3)
def test_its_graph_is_right(name: str):
    right_graphs(CASES[name][0]())


def test_the_objects_of_the_user_are_as_before():
    slots = Slots()
    keys, before = slots.k_cache, slots.k_cache.clone()
    subject = of(written, {"x": UP_TO_8, "layers": {0: "batch"}}, layers=[slots])
    subject.call(subject.module, subject.inputs)
    assert slots.k_cache is keys
    assert torch.equal(keys, before)
    assert int(slots.length) == 4


def test_what_changes_and_is_no_tensor_is_said():
    subject = of(counted, {"x": TOKENS, "window": {0: "batch"}}, window=Window())
    assert any("changes window.count, which is no tensor" in note for note in subject.notes)
    subject = CASES["a plain tensor that is written in place"][0]()
    assert any("changes cache in place; its value after" in note for note in subject.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": threading.Lock()}, "window is lock, which cannot be copied"),
        ({"window": [Window(), threading.local()]}, "window.1 is _local, which cannot be copied"),
        (
            {"outputs": ["y", "z", "w"]},
            "returns 1 tensor and changes 1 in its arguments, but outputs",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(changes: dict[str, Any], message: str):
    def called() -> None:
        subject = of(counted, {"x": TOKENS}, **({"window": Window()} | changes))
        subject.call(subject.module, subject.inputs)

    with pytest.raises(UsageError, match=re.escape(message)):
        called()
