"""Modules and faults of users that once led to wrong results or wrong messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import right_graphs
from torch import Tensor, nn

from attn_export import AttentionSpec, Subject, build
from attn_export.commands.main import run
from attn_export.errors import ExportError, UsageError
from attn_export.export.export import export
from attn_export.export.user_module import load_subject

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
TOKENS = {0: "batch", 1: "query_len"}


class Does(nn.Module):
    def __init__(self, function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8).to(dtype), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear, x)


def of(function: Callable[..., Any], outputs: Any = ("y",), x: Tensor = X) -> Subject:
    return Subject(Does(function, x.dtype).eval(), {"x": x}, {"x": TOKENS}, list(outputs))


BRANCHES: dict[str, Callable[[Tensor], bool]] = {
    "a length between those tried": lambda x: x.shape[1] == 13,
    "a length beyond those tried": lambda x: x.shape[1] == 100,
    "multiples of 64": lambda x: x.shape[1] % 64 == 0,
    "a product": lambda x: x.shape[0] * x.shape[1] > 400,
    "all elements": lambda x: x.numel() > 8192,
    "a square": lambda x: x.shape[1] ** 2 > 10000,
    "one of several": lambda x: x.shape[1] in (100, 200),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_sizes_that_no_case_has_is_refused_with_its_line(name: str):
    branch = BRANCHES[name]

    def branching(f: nn.Linear, x: Tensor) -> Tensor:
        if branch(x):
            return x * 2
        return f(x)

    with pytest.raises(ExportError, match=r"a branch on a size \(test_modules_of_users.py:\d+\)"):
        export(of(branching))


def test_a_condition_whose_sides_are_the_same_is_none():
    export(of(lambda f, x: f(x) + 0 if x.shape[1] == 13 else f(x)))


def test_a_branch_that_computes_the_same_is_none():
    def contiguous(f: nn.Linear, x: Tensor) -> Tensor:
        return f(x.contiguous() if x.shape[0] >= 64 else x.clone())

    export(of(contiguous))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.07, 2.0])
def test_a_module_that_looks_at_its_dtype_is_refused(dtype, factor: float):
    with pytest.raises(ExportError, match=r"does other things in .*float16 than in float32"):
        export(of(lambda f, x: f(x) * factor if x.dtype == dtype else f(x), x=X.to(dtype)))


def test_a_module_of_fixed_types_is_refused_with_the_reason():
    def fixed(f: nn.Linear, x: Tensor) -> Tensor:
        return f(x.float().to(torch.bfloat16))

    with pytest.raises(ExportError, match=r"in its float32 copy, the module raised.* write .to"):
        export(of(fixed, x=X.to(torch.bfloat16)))


class Attends(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "parts", [torch.randn(2, 4, 24).chunk(3, -1), (X, X, X)], ids=["views", "one tensor"]
)
def test_examples_that_share_memory_are_inputs_of_their_own(parts: Any):
    inputs = dict(zip("qkv", parts, strict=True))
    subject = Subject(Attends().eval(), inputs, dict.fromkeys("qkv", TOKENS), ["y"])
    right_graphs(subject)


def test_a_dict_is_named_by_its_keys_whatever_their_order():
    right_graphs(of(lambda f, x: {"b": f(x), "a": x * 2}, outputs=["a", "b"]))


@pytest.mark.parametrize("last", [lambda x: x > 0, lambda x: x.argmax(-1)], ids=["bool", "int"])
def test_a_module_may_give_no_floats(last: Callable[[Tensor], Tensor]):
    right_graphs(of(lambda f, x: last(f(x))))


def test_a_window_of_one_key_has_a_mask_that_matters():
    spec = AttentionSpec(
        embed_dim=16, num_heads=2, causal=True, window_left=0, cache="append", attn_mask="bool[L,S]"
    )
    export(Subject.from_spec(spec))


def test_differences_below_half_precision_fail_nothing(tmp_path: Path):
    spec = AttentionSpec(
        embed_dim=16, num_heads=4, head_dim=6, bias="q,v", add_bias_kv=True, cache="append",
        dtype="bfloat16",
    )  # fmt: skip
    assert build(spec, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"]).passed


def test_a_module_that_rounds_within_is_said_to_be_far_from_its_reference(tmp_path: Path):
    subject = of(lambda f, x: f(x.to(torch.bfloat16).float()))
    report = build(subject, tmp_path / "b", runtimes=["ort-cpu"], dialects=["standard"])
    assert report.passed
    assert any("from the float64 reference, more than its type explains" in n for n in report.notes)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "outputs as text": ({"outputs": "scores"}, "outputs must be a list of names"),
    "a number as output": ({"outputs": [3]}, "got 3 in it"),
    "an output with an escape": ({"outputs": ["\x1b[31m"]}, "must have 1 to 255 printable"),
    "an output of two lines": ({"outputs": ["y\n"]}, r"the name 'y\n' must have 1 to 255"),
    "an output twice": ({"outputs": ["a", "a"]}, "names 'a' twice"),
    "an output like a weight": ({"outputs": ["linear.bias"]}, "is a weight of the module too"),
    "no axes": ({"axes": None}, "axes must be a dict such as {'query': {0: 'batch'}}; got None"),
    "axes as a list": ({"axes": {"x": ["batch"]}}, "got ['batch']"),
    "an axis by text": ({"axes": {"x": {"0": "batch"}}}, "got '0': 'batch'"),
    "a sum of no axis": (
        {"relations": {"t": "query_len + past"}},
        "'past' is not an axis of an input",
    ),
    "a sum of text": ({"relations": {"t": "query_len + ²"}}, "'²' is not an axis of an input"),
    "an example against its sum": (
        {"relations": {"batch": "query_len + 1"}},
        "is 6 in the example, where 'batch' is 2",
    ),
    "an axis without a name": ({"axes": {"x": {0: 3}}}, "got 0: 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_fault_in_a_subject_is_named(name: str):
    changes, message = WRONG[name]
    given = {"inputs": {"x": X}, "axes": {"x": TOKENS}, "outputs": ["y"]} | changes
    with pytest.raises(UsageError) as caught:
        Subject(Does(lambda f, x: f(x)).eval(), **given)
    assert message in str(caught.value)


GOOD = """
import torch
from attn_export import Subject
def f():
    return Subject(torch.nn.Linear(2, 2).eval(), {'input': torch.ones(2, 2)}, {}, ['y'])
"""


@pytest.mark.parametrize("name", ["json.py", "torch.py"])
def test_a_file_may_be_called_like_a_package(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(GOOD)
    export(load_subject(f"{name}:f"))


def test_a_file_that_exits_is_no_verdict(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("import sys\ndef f():\n    sys.exit(0)\n")
    assert run(["build", "--module", "x.py:f"]) == 3
    assert "raised at x.py:3: SystemExit: 0" in capsys.readouterr().err
    assert not (tmp_path / "models").exists()
