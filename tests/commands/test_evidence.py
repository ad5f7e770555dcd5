"""Evidence in a bundle: enough cases, and small tolerances."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Cli, small_spec

from attn_export import Subject, build, verify
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.commands.recompute import STORED
from attn_export.errors import BundleError, UsageError
from attn_export.tensorfile import read_tensor, read_tensors, write_tensor, write_tensors

Index = dict[str, Any]


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """Return a bundle that may be changed."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def seal(folder: Path) -> None:
    """Write digests of the files as they are now: anyone can."""
    write_manifest(folder, manifest_content(folder))


def change_index(folder: Path, change: Callable[[Index], None]) -> None:
    path = folder / "golden" / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index, indent=1) + "\n")
    seal(folder)


def allow(error: object) -> Callable[[Index], None]:
    def change(index: Index) -> None:
        for case in index["cases"]:
            for name in case["allowed"]:
                case["allowed"][name] = None if error is None else {"whole": error, "row": error}

    return change


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (math.inf, "is the most for float32"), (0.02, "is the most for float32"),
        (None, "give no tolerance"),
    ],
)  # fmt: skip
def test_a_tolerance_that_hides_faults_never_passes(error, message: str, copy: Path):
    change_index(copy, allow(error))
    report = verify(copy, runtimes=["ort-cpu"])
    assert report.exit_code == 6
    assert not any(verdict.status == "passed" for verdict in report.verdicts)
    assert message in report.verdicts[0].message


@pytest.mark.parametrize("error", [0, -1.0, math.nan, "1e9", True, [1]])
def test_a_tolerance_that_is_no_number_above_0_is_damage(error, copy: Path):
    change_index(copy, allow(error))
    with pytest.raises(BundleError, match=r"index\.json was changed: .*allowed"):
        verify(copy, runtimes=["ort-cpu"])


LACKS: dict[str, tuple[Callable[[Index], bool], str]] = {
    "one case": (lambda case: case["name"] == "base", "of 1 case, none is 'changed_query'"),
    "no base": (lambda case: case["name"] != "base", "none is 'base'"),
    "one change less": (lambda case: case["name"] != "changed_past_key", "'changed_past_key'"),
    "no batch of one": (lambda case: case["sizes"]["batch"] != 1, "none has batch 1"),
    "no single query": (lambda case: case["sizes"]["query_len"] != 1, "none has query_len 1"),
    "no empty past": (lambda case: case["sizes"]["past_len"] != 0, "none has past_len 0"),
    "two sizes": (lambda case: case["sizes"]["batch"] <= 2, "batch has 2 sizes, not 3 or more"),
    "no padding": (lambda case: "left_padding" not in case["contents"], "none has left_padding"),
}


@pytest.mark.parametrize("name", LACKS)
def test_fewer_cases_than_the_rule_asks_for_are_refused(name: str, copy: Path):
    keeps, message = LACKS[name]

    def change(index: Index) -> None:
        index["cases"] = [case for case in index["cases"] if keeps(case)]

    change_index(copy, change)
    with pytest.raises(BundleError, match="prove nothing") as caught:
        verify(copy, runtimes=["ort-cpu"])
    assert message in str(caught.value)


def test_a_budget_in_place_of_tolerances_proves_nothing_of_a_layer(copy: Path):
    change_index(copy, lambda index: index.update(budgets=["sqnr>=0"]))
    with pytest.raises(BundleError, match="has a budget in place of the tolerances"):
        verify(copy, runtimes=["ort-cpu"])
    change_index(copy, lambda index: index.update(budgets=["sqnr>=low"]))
    with pytest.raises(BundleError, match="cannot be read: a budget is"):
        verify(copy, runtimes=["ort-cpu"])


def ignore_all_rows(index: Index) -> None:
    for case in index["cases"]:
        case["ignored_rows"] = list(range(case["sizes"]["batch"]))


def test_rows_that_are_ignored_without_a_reason_are_not_compared(copy: Path):
    change_index(copy, ignore_all_rows)
    for recompute in (False, True):
        with pytest.raises(BundleError, match="ignores batch element 0, whose inputs are finite"):
            verify(copy, runtimes=["ort-cpu"], recompute=recompute)


def test_open_masks_under_the_labels_of_others_are_not_compared(copy: Path):
    index = json.loads((copy / "golden" / "index.json").read_text())
    number = index["inputs"].index("attn_mask")
    for case in index["cases"]:
        path = copy / "golden" / case["folder"] / f"input_{number}.pb"
        if not case["name"].startswith("changed_"):
            write_tensor(path, "attn_mask", np.ones_like(read_tensor(path)[1]))
    seal(copy)
    with pytest.raises(BundleError, match="is said to have"):
        verify(copy, runtimes=["ort-cpu"])


def test_a_module_without_dynamic_axes_needs_no_other_sizes(tmp_path: Path):
    subject = Subject.from_spec(small_spec(cache="none", attn_mask="none"))
    static = Subject(subject.module, subject.inputs, {}, subject.outputs)
    folder = tmp_path / "b"
    assert build(static, folder, runtimes=["ort-cpu"], dialects=["standard"]).passed
    report = verify(folder, runtimes=["ort-cpu"])
    assert report.passed
    assert "sizes: one, since no axis is dynamic" in report.notes


# -- the reference anew ---------------------------------------------------------------------------


def make_wrong(folder: Path) -> None:
    """Let a bundle agree with itself on a wrong scale."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    next(a for a in node.attribute if a.name == "scale").f *= 1.1
    onnx.save(model, path)
    seal(folder)
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    index = json.loads((folder / "golden" / "index.json").read_text())
    for case in index["cases"]:
        here = folder / "golden" / case["folder"]
        inputs = read_tensors(here, "input", index["inputs"])
        outputs = session.run(index["outputs"], dict(inputs))
        named = dict(zip(index["outputs"], map(np.asarray, outputs), strict=True))
        if case.get("shapes"):  # of some rows
            rows = case["determined"]
            named = {n: a.reshape(-1, a.shape[-1])[rows.get(n, [])] for n, a in named.items()}
        else:
            write_tensors(here, "eager", named)
        write_tensors(here, "output", named)
    seal(folder)


def test_reference_that_was_replaced_is_found_by_computing_it_anew(copy: Path):
    make_wrong(copy)
    assert verify(copy, runtimes=["ort-cpu"]).passed
    report = verify(copy, runtimes=["ort-cpu"], recompute=True)
    assert report.exit_code == 6
    wrong = {verdict.runtime for verdict in report.verdicts if verdict.status == "failed"}
    assert wrong == {STORED, "ort-cpu"}


def larger(index: Index) -> None:
    for case in index["cases"][1:3]:
        for allowed in case["allowed"].values():
            allowed["whole"] *= 1.2
            allowed["row"] *= 1.2


def weaker_labels(index: Index) -> None:
    for case in index["cases"]:
        if case["name"].startswith("outliers"):
            case["contents"] = ["large_logits"]  # which is true, too


def fewer_cases(index: Index) -> None:
    index["cases"] = [case for case in index["cases"] if "sharp" not in case["contents"]]


def reverse_query(folder: Path) -> None:
    """Store another query of the base."""
    index = json.loads((folder / "golden" / "index.json").read_text())
    base = next(case["folder"] for case in index["cases"] if case["name"] == "base")
    path = folder / "golden" / base / "input_0.pb"
    write_tensor(path, "query", read_tensor(path)[1][..., ::-1].copy())
    seal(folder)


def test_evidence_that_is_computed_otherwise_is_damage(copy: Path):
    for change in (larger, weaker_labels, fewer_cases):
        change_index(copy, change)
    assert verify(copy, runtimes=["ort-cpu"]).passed
    reverse_query(copy)
    report = verify(copy, runtimes=["ort-cpu"], recompute=True)
    assert report.exit_code == 7
    assert "are not those that are computed anew" in str(report)
    assert "base: its query is not the one that is computed" in report.notes
    for difference in ("1.2 times what is computed", "is ('large_logits',)", "is missing"):
        assert any(difference in note for note in report.notes), difference
    assert {verdict.status for verdict in report.verdicts} == {"passed"}


def test_a_bundle_of_another_version_is_judged_by_the_cases_of_this_one(copy: Path):
    change_index(copy, fewer_cases)
    content = manifest_content(copy)
    content["versions"]["attn-export"] = "0.0.1"
    write_manifest(copy, content)
    report = verify(copy, runtimes=["ort-cpu"], recompute=True)
    assert report.passed
    about = "built with attn-export 0.0.1: judged by the cases that are computed here"
    assert any(about in note for note in report.notes)
    judged = {v.case for v in report.verdicts if v.runtime == "ort-cpu"}
    assert any(case.startswith("sharp") for case in judged)


def test_a_weight_that_the_spec_asks_for_has_to_be_there(copy: Path):
    model = onnx.load(copy / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "q_proj.weight":
            tensor.name = "q"
    for node in model.graph.node:
        node.input[:] = ["q" if name == "q_proj.weight" else name for name in node.input]
    onnx.save(model, copy / "model.onnx")
    seal(copy)
    with pytest.raises(BundleError, match=r"has no weight q_proj\.weight, which its spec requires"):
        verify(copy, runtimes=["ort-cpu"], recompute=True)


# -- other sizes ------------------------------------------------------------------------------


def test_other_sizes_than_the_golden_ones_are_tried(bundle: Path):
    report = verify(bundle, runtimes=["ort-cpu"], sizes=["batch=4,query_len=600", "past_len=70"])
    assert report.passed
    assert {verdict.case for verdict in report.verdicts} == {
        "shape_B4_P7_L600", "shape_B2_P70_L5",
    }  # fmt: skip
    assert any("query_len 600" in note for note in report.notes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("batch=0", "batch must be 1 or more; got '0'"), ("batch", "batch must be 1 or more"),
        ("batch=²", "batch must be 1 or more; got '²'"), ("batch=-1", "got '-1'"),
        ("heads=3", "'heads' is not an axis; choose from batch, "),
        ("total_len=3", "'total_len' is not an axis"), ("", "'' is not an axis"),
        ("batch=2,batch=3", "batch is given twice"),
        ("query_len=99999999999", "elements"), ("past_len=-1", "past_len must be 0 or more"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_sense_are_refused_in_one_line(sizes: str, message: str, bundle: Path):
    with pytest.raises(UsageError) as caught:
        verify(bundle, runtimes=["ort-cpu"], sizes=[sizes])
    assert f"--sizes {sizes}: " in str(caught.value)
    assert message in str(caught.value)


def test_options_that_contradict_each_other_are_refused(bundle: Path, cli: Cli):
    got = cli("verify", bundle, "--recompute", "--sizes", "batch=3")
    assert (got.returncode, got.stdout) == (2, "")
    assert "choose one" in got.stderr
    got = cli("verify", bundle, "--module", "m.py:make")
    assert (got.returncode, got.stdout) == (2, "")
    assert "--module m.py:make needs --recompute or --sizes" in got.stderr


# -- modules of the users ---------------------------------------------------------------------

MODULE = """
import torch
from torch import nn
from attn_export import Subject

class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), factor

    def forward(self, x):
        return self.linear(x) * self.factor

def make(factor=2.0, name="x"):
    torch.manual_seed(0)
    example = {name: torch.randn(2, 5, 8)}
    return Subject(Scaled(factor).eval(), example, {name: {0: "batch", 1: "frames"}}, ["y"])

def other():
    subject = make()
    nn.init.eye_(subject.module.linear.weight)  # products and sums that round nothing
    nn.init.zeros_(subject.module.linear.bias)
    return subject
"""


@pytest.fixture
def users(tmp_path: Path) -> tuple[Path, Path]:
    """Return a bundle of a module of the user's, and its file."""
    file = tmp_path / "mine.py"
    file.write_text(MODULE)
    from attn_export.export.user_module import load_subject

    folder = tmp_path / "b"
    subject = load_subject(f"{file}:make")
    assert build(subject, folder, runtimes=["ort-cpu"], dialects=["standard"]).passed
    return folder, file


def test_reference_of_a_users_module_comes_from_the_module(users: tuple[Path, Path]):
    folder, file = users
    options: dict[str, Any] = {"runtimes": ["ort-cpu"], "recompute": True}
    with pytest.raises(UsageError, match=r"give --module PATH\.py:FUNCTION"):
        verify(folder, **options)
    assert verify(folder, module=f"{file}:make", **options).passed
    other = verify(folder, module=f"{file}:other", **options)
    assert other.exit_code == 7  # the tolerances are not those of this module either
    assert STORED in {verdict.runtime for verdict in other.failures}
    sizes = verify(folder, module=f"{file}:make", runtimes=["ort-cpu"], sizes=["frames=300"])
    assert sizes.passed
    assert {verdict.case for verdict in sizes.verdicts} == {"shape_B2_frames300"}


def test_a_module_with_other_inputs_is_not_that_of_the_bundle(users: tuple[Path, Path]):
    folder, file = users
    file.write_text(MODULE.replace("def forward(self, x)", "def forward(self, z)").replace(
        "self.linear(x)", "self.linear(z)").replace('name="x"', 'name="z"'))  # fmt: skip
    with pytest.raises(UsageError, match="has the inputs z, and the bundle x"):
        verify(folder, runtimes=["ort-cpu"], module=f"{file}:make", recompute=True)
