"""Output folders that a build may replace, and others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import small_spec
from torch import nn

from attn_export import Subject, build, verify
from attn_export.errors import ExportError, OutputError, UsageError


class Joined(nn.Module):
    def forward(self, query, memory):
        return query.sum(1) + memory.sum(1)


def joined() -> Subject:
    return Subject(
        Joined().eval(),
        {"query": torch.randn(2, 3, 4), "memory": torch.randn(2, 5, 4)},
        {"query": {0: "batch", 1: "query_len"}, "memory": {0: "batch", 1: "total_len"}},
        ["y"],
    )


@pytest.mark.parametrize("name", ["out", "out.failed"])
@pytest.mark.parametrize("manifest", [None, {"name": "web app"}], ids=["", "with a manifest"])
def test_a_folder_of_others_is_refused_before_any_work(name: str, manifest, tmp_path: Path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious.txt").write_text("mine")
    if manifest:
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(OutputError, match="is no bundle"):
        build(small_spec(), tmp_path / "out")
    assert (tmp_path / name / "precious.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_through_a_link_the_folder_behind_it_is_replaced_and_each_case_has_its_name(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    # total_len is an axis of its own here, not the sum of others.
    report = build(joined(), tmp_path / "link", runtimes=["ort-cpu"], dialects=["standard"])
    assert report.passed
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    index = json.loads((tmp_path / "real" / "golden" / "index.json").read_text())
    names = [case["name"] for case in index["cases"]]
    assert len(names) == len(set(names)) == len({v.case for v in report.verdicts})
    assert verify(tmp_path / "real", runtimes=["ort-cpu"]).passed


@pytest.mark.parametrize("gate", [float("nan"), float("inf"), -1.0])
def test_a_gate_that_lets_everything_through_is_refused(gate: float, bundle: Path):
    for name in ("atol", "rtol"):
        with pytest.raises(UsageError, match=f"{name} must be a finite number"):
            verify(bundle, **{name: gate})


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x.unflatten(1, (-1, 2)).sum(2), "the module raised at|narrowed|capture"),
        (lambda x: {"y": x, "about": "me"}, "returns str in dict; it must return a tensor"),
        (lambda x: (x, 3), "returns int in tuple; it must return a tensor"),
        (lambda x: (x, (x, x)), "returns 3 tensors, but outputs names 1: y"),
    ],
    ids=["even lengths only", "a text", "a number", "too many"],
)
def test_a_fault_of_a_users_module_is_one_line(forward, message: str, tmp_path: Path):
    class Theirs(nn.Module):
        def forward(self, x):
            return forward(x)

    subject = Subject(
        Theirs().eval(), {"x": torch.randn(2, 6, 8)}, {"x": {0: "batch", 1: "query_len"}}, ["y"]
    )
    with pytest.raises((ExportError, UsageError), match=message) as caught:
        build(subject, tmp_path / "b")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
