"""Modules that keep something between calls: refused by name where it changes results."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attn_export import Subject, assert_parity
from attn_export.commands.main import run
from attn_export.errors import ExportError

COUNTED = {"calls": 0}


@dataclasses.dataclass
class Record:
    """What an object of a module remembers."""

    calls: int = 0
    keys: torch.Tensor | None = None
    seen: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Keeps(nn.Module):
    """A module with places for all that a function keeps in it."""

    def __init__(self, forward, inner=None):
        super().__init__()
        self.function, self.inner = forward, inner
        self.calls, self.flag, self.keys, self.items = 0, False, None, []
        self.by_size, self.record, self.recent = {}, Record(), deque(maxlen=3)
        self.draws = torch.Generator().manual_seed(0)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(8.0)[:, None].repeat(1, 8))
        self.register_buffer("scale", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        """Call the function."""
        return self.function(self, x)


def attend(x, keys):
    return sdpa(x[:, None], keys[:, None], keys[:, None])[:, 0]


# fmt: off
def own_cache(m, x):
    m.keys = x if m.keys is None else torch.cat([m.keys, x], 1)
    return attend(x, m.keys)


def cache_in_object(m, x):
    m.record.keys = x if m.record.keys is None else torch.cat([m.record.keys, x], 1)
    return attend(x, m.record.keys)


def cache_in_list(m, x):
    m.record.seen.append(x)
    return attend(x, torch.cat(m.record.seen, 1))


def cache_of_decoding(m, x):
    if x.shape[1] > 1 or m.keys is None or m.keys.shape[0] != x.shape[0]:
        m.keys = x
    else:
        m.keys = torch.cat([m.keys, x], 1)
    return attend(x, m.keys)


def number(m, x):
    m.calls += 1
    return x * m.calls


def buffer_replaced(m, x):
    m.counter = m.counter + 1
    return x * m.counter


def buffer_in_place(m, x):
    m.counter.add_(1)
    return x * m.counter


def table_in_place(m, x):
    m.table[0] += x[0, 0]
    return x + m.table[0]


def weight_in_place(m, x):
    m.weight.data += 0.5
    return x * m.weight


def in_dict(m, x):
    m.by_size["n"] = m.by_size.get("n", 0) + 1
    return x * m.by_size["n"]


def in_deque(m, x):
    m.recent.append(float(x.sum()))
    return x + sum(m.recent)


def after_many(m, x):
    m.calls += 1
    return x * (2 if m.calls > 30 else 1)


def after_very_many(m, x):
    m.counter += 1
    return torch.where(m.counter > 5000, 2 * x, x)


def at_large_sizes(m, x):
    m.calls += x.shape[1] > 40
    return x * (1 + m.calls)


def read_at_one_size(m, x):
    m.calls += 1
    return x * (m.calls if x.shape[1] == 1 else 1)


def largest_seen(m, x):
    m.scale = torch.maximum(m.scale, x.abs().max())
    return x / m.scale


def first_seen(m, x):
    if not m.flag:
        m.scale.copy_(x.abs().max())
        m.flag = True
    return x / m.scale


def in_submodule(m, x):
    return m.inner(x) if m.inner is not None else x


def in_global(m, x):
    del m
    COUNTED["calls"] += 1
    return x * COUNTED["calls"]


def raises_later(m, x):
    m.calls += 1
    if m.calls > 4:
        raise RuntimeError("the cache is full")
    return x


def random(m, x):
    return x + torch.rand_like(x)


def random_of_its_own(m, x):
    return x + torch.rand(8, generator=m.draws)


def random_of_numpy(m, x):
    return x + float(np.random.rand())


# what is remembered, but changes nothing

def rotary(m, x):
    if m.keys is None or len(m.keys) < x.shape[1]:
        m.keys = torch.outer(torch.arange(float(x.shape[1])), torch.ones(8)).cos()
    return x * m.keys[: x.shape[1]]


def by_size(m, x):
    if (n := x.shape[1]) not in m.by_size:
        m.by_size[n] = torch.ones(n, n, dtype=torch.bool).tril()
    return x * m.by_size[n][-1, :, None]


def last_map(m, x):
    m.record.keys = x.softmax(-1)
    return m.record.keys


def last_size(m, x):
    if m.calls != x.shape[1]:
        m.calls, m.keys = x.shape[1], torch.arange(float(x.shape[1]))
    return x + m.keys[:, None]
# fmt: on


def subject_of(function) -> Subject:
    inner = Keeps(number) if function is in_submodule else None
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    module = Keeps(function, inner).eval()
    return Subject(module, {"x": x}, {"x": {0: "batch", 1: "n"}}, ["y"])


@pytest.mark.parametrize(("function", "said"), [
    (own_cache, "it keeps keys between calls: make it an input and an output"),
    (cache_in_object, "record.keys"), (cache_in_list, "record.seen"), (cache_of_decoding, "keys"),
    (number, "it keeps calls between calls"), (buffer_replaced, "counter"),
    (buffer_in_place, "counter"), (table_in_place, "table"), (weight_in_place, "weight"),
    (in_dict, "by_size"), (in_deque, "recent"), (after_many, "calls"),
    (after_very_many, "counter"), (at_large_sizes, "calls"), (read_at_one_size, "calls"),
    (largest_seen, "scale"), (first_seen, "scale"), (in_submodule, "inner.calls"),
    (in_global, "as in a global or a closure"), (raises_later, "raises RuntimeError in some calls"),
    (random, "draws random numbers"), (random_of_its_own, "draws"),
    (random_of_numpy, "draws random numbers"),
])  # fmt: skip
def test_state_that_changes_results_is_refused_by_name(function, said: str):
    COUNTED["calls"] = 0
    with pytest.raises(ExportError) as caught:
        subject_of(function)
    assert str(caught.value).startswith("the module ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [rotary, by_size, last_map, last_size])
def test_what_is_only_remembered_is_not_refused(function):
    assert not subject_of(function).notes


def test_what_each_call_changes_without_effect_is_noted():
    def statistics(m, x):
        m.calls += 1
        m.record.seen.append(x.mean())
        return 2 * x

    (note,) = subject_of(statistics).notes
    assert "each call changes calls, record.seen" in note


def test_every_way_in_refuses_a_module_that_keeps_state(tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom attn_export import Subject\n\n"
        "class Counts(torch.nn.Module):\n    calls = 0\n\n    def forward(self, x):\n"
        "        self.calls += 1\n        return x * self.calls\n\n"
        "def subject():\n    x, axes = torch.ones(2, 5, 8), {'x': {0: 'batch', 1: 'n'}}\n"
        "    return Subject(Counts().eval(), {'x': x}, axes, ['y'])\n"
    )
    (tmp_path / "g.onnx").write_bytes(b"")
    mine = ["--module", f"{tmp_path}/mine.py:subject"]
    assert run(["build", *mine, "-o", str(tmp_path / "out"), "--quiet"]) == 3
    assert "it keeps calls between calls" in capsys.readouterr().err
    x = torch.ones(2, 5, 8)
    with pytest.raises(ExportError, match="keeps calls between calls"):
        assert_parity(Keeps(number).eval(), {"x": x}, {"x": {0: "batch", 1: "n"}})
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "g.onnx", "mine.py",
    ]  # fmt: skip
