"""Inputs that a function of the user's draws: packed sequences, sorted ids, sparse masks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

import numpy as np
import pytest
import torch
from agreement import right_graphs
from hostile.user_inputs import give
from torch import Tensor, nn
from torch.nn import functional as F

from attn_export import Subject
from attn_export.cases.draw import draw_inputs
from attn_export.cases.input_patterns import VALUES, DrawnCase, InputPattern
from attn_export.errors import AttnExportError, ExportError, UsageError
from attn_export.export.export import export
from attn_export.export.nested import InputTree
from attn_export.export.trees import Axis
from attn_export.export.user_module import load_subject
from attn_export.interface import Traits

AXES = {"x": {0: "tokens"}, "ends": {0: "sequences"}}


class Packed(nn.Module):
    """Attention of tokens within their own sequence; `ends` are the offsets of the sequences."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        row = torch.arange(x.shape[0])
        own = (row[:, None] >= ends[None]).sum(-1)
        mask = own[:, None] == own[None]
        return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)[0]


def packed(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
    ends = np.sort(rng.integers(1, sizes["tokens"], sizes["sequences"], endpoint=True))
    return {"x": rng.standard_normal((sizes["tokens"], 8)), "ends": ends}


def refusing_one(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
    if sizes["tokens"] < 3:
        raise IndexError("too few tokens")
    return packed(sizes, rng)


def changed(**values: Any) -> Any:
    """Return `packed` with some inputs replaced, at other sizes than those of the example."""
    calls: list[int] = []

    def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
        calls.append(1)
        return packed(sizes, rng) | (values if len(calls) > 1 else {})

    return draw


def test_each_case_has_the_inputs_of_the_function():
    subject = Subject(Packed().eval(), packed, AXES, ["y"])
    right_graphs(subject)
    cases = subject.plan().cases
    assert len(cases) > 20
    for case in cases:
        assert case.inputs["x"].dtype == np.float32
        assert (np.diff(case.inputs["ends"]) >= 0).all(), case.name
        assert case.inputs["ends"].max() <= case.sizes["tokens"], case.name
    most = max(abs(case.inputs["x"]).max() for case in cases)
    assert most > 100, "contents still change numbers"


@pytest.mark.parametrize("content", VALUES, ids=lambda content: content.name)
def test_patterns_are_written_into_inputs_of_any_layout(content: InputPattern):
    def changed(layout: Any) -> np.ndarray:
        def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
            return {"input": layout(torch.from_numpy(rng.standard_normal((sizes["n"], 4, 6))))}

        subject = Subject(nn.Identity().eval(), draw, {"input": {0: "n"}}, ["y"])
        inputs, sizes = subject.input_descriptions(), {"n": 5}
        drawn = draw_inputs(inputs, sizes, seed_words=("case",))
        content.change(DrawnCase(drawn, inputs, Traits(), sizes, np.random.default_rng(0)))
        return drawn["input"]

    plain = changed(lambda x: x.float())
    permuted = changed(lambda x: x.float().permute(2, 0, 1).contiguous().permute(1, 2, 0))
    np.testing.assert_array_equal(permuted, plain)


def test_two_builds_draw_alike():
    one, other = (Subject(Packed().eval(), packed, AXES, ["y"]).plan().cases for _ in range(2))
    for mine, theirs in zip(one, other, strict=True):
        assert all(np.array_equal(mine.inputs[n], theirs.inputs[n]) for n in mine.inputs)


def test_torch_draws_alike_too_and_its_own_state_stays():
    def draw(sizes: Mapping[str, int], _: np.random.Generator) -> dict[str, Any]:
        return {"input": torch.randn(sizes["batch"], 4)}

    module = nn.Linear(4, 2).eval()
    before = torch.get_rng_state()
    subjects = [Subject(module, draw, {"input": {0: "batch"}}, ["y"])] * 2
    one, other = (s.draw({"batch": 3}, "word")["input"] for s in subjects)
    assert torch.equal(one, other)
    assert not torch.equal(one, subjects[0].draw({"batch": 3}, "other")["input"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_file_of_the_users_may_have_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom attn_export import Subject\n"
        "def draw(sizes, rng):\n"
        "    return {'input': rng.standard_normal((sizes['batch'], 4)).astype('float32')}\n"
        "def subject():\n"
        "    module = torch.nn.Linear(4, 2).eval()\n"
        "    return Subject(module, inputs=draw, axes={'input': {0: 'batch'}}, outputs=['y'])\n"
    )
    assert load_subject(f"{file}:subject").draw({"batch": 7}, "word")["input"].shape == (7, 4)


@pytest.mark.parametrize(
    ("function", "axes", "kind", "says"),
    [
        (lambda *_: 3, {}, UsageError, "returns int; return a dict of inputs by name"),
        (changed(ends=np.array([1, 2])), AXES, UsageError, "ends has shape [2]; return"),
        (changed(ends=np.array([1.5])), AXES, UsageError, "ends is torch.float32, and torch.int64"),
        (changed(more=np.array([1])), AXES, UsageError, "it returns x, ends, more, and in"),
        (changed(x=np.zeros((3, 3, 8))), AXES, UsageError, "x has shape [3, 3, 8]; return ["),
        (refusing_one, AXES, ExportError, "Axis('tokens', min=3)"),
        (lambda s, _: {"x": np.zeros((s["nothing"], 8))}, AXES, ExportError, "raised at tokens="),
        (
            lambda s, r: packed(s, r) | {"ends": np.full(s["sequences"], 2)}, AXES, UsageError,
            "draws ends alike 8 times, so no case could show a fault with it; vary it with rng",
        ),
    ],
)  # fmt: skip
def test_a_wrong_function_is_one_line(function, axes, kind, says):
    def used() -> None:
        subject = Subject(Packed().eval(), function, axes, ["y"])
        export(subject)
        subject.plan()

    with pytest.raises(AttnExportError, match=re.escape(says)) as raised:
        used()
    assert isinstance(raised.value, kind)
    assert len(str(raised.value)) <= 300
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", range(60))
@pytest.mark.filterwarnings("ignore")
def test_odd_inputs_and_functions_are_taken_or_refused_in_one_line(number: int):
    assert give(number)


@pytest.mark.parametrize(("kind", "says"), [
    (lambda x: x.to("meta"), "x is a tensor without values"),
    (lambda x: x.to_sparse(), "x is a sparse_coo tensor; pass a dense one"),
    (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "x is a quantized tensor"),
    (lambda x: torch.nested.nested_tensor([x[0], x[0, :1]]), "x is a nested tensor"),
    (lambda _: np.array([[1], [1, 2]], object), "returns an array: TypeError"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_is_like_no_array_is_named(kind, says: str):
    def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> dict[str, Any]:
        del rng
        return {"x": kind(torch.ones(sizes["tokens"], 8)), "ends": torch.ones(sizes["sequences"])}

    with pytest.raises(UsageError, match=says):
        Subject(Packed().eval(), draw, AXES, ["y"])


def test_inputs_of_any_name_have_keywords():
    names = ["class", "_class", "1x", "_1x", "a b", "a_b", "None", "file", "é", ""]
    keywords = InputTree.flatten({name: torch.ones(1) for name in names}).keywords
    assert list(keywords.values()) == names
    assert [word for word in keywords if not word.isidentifier() or iskeyword(word)] == []


def test_axes_keep_their_bounds():
    axes = {"x": {0: Axis("tokens", min=3, max=20)}, "ends": {0: "sequences"}}
    subject = Subject(Packed().eval(), refusing_one, axes, ["y"])
    export(subject)
    sizes = [case.sizes["tokens"] for case in subject.plan().cases]
    assert (min(sizes), max(sizes)) == (3, 20)
