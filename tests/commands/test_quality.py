"""Budgets of quantised models: measured by `build`, stored, and judged again by `verify`."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import small_spec
from report_schema import validator
from shared import few_bits_bundle, few_bits_report
from torch.nn import functional as F

from attn_export import build, verify
from attn_export.bundle.manifest import GOLDEN, manifest_content, write_manifest
from attn_export.bundle.quality_vectors import distance, logit_distance
from attn_export.commands.main import run
from attn_export.errors import BundleError, UsageError
from attn_export.quality import Budget
from attn_export.report.ci import github_annotations, to_junit, to_markdown
from attn_export.report.data import to_json
from attn_export.report.html import to_html
from attn_export.report.terminal import to_text
from attn_export.results import Report
from attn_export.tensorfile import read_tensor

ONLY = {"runtimes": ["ort-cpu"], "dialects": ["standard"]}


@pytest.fixture(scope="module")
def bundle() -> Path:
    return few_bits_bundle()


@pytest.fixture(scope="module")
def report() -> Report:
    return few_bits_report()


def test_distances_of_outputs_are_those_of_the_stored_vectors(bundle: Path, report: Report):
    quality = json.loads((bundle / GOLDEN / "quality.json").read_text())
    assert 1 <= len(quality["cases"]) <= 4
    signal = noise = 0.0
    for number in quality["cases"]:
        folder = bundle / GOLDEN / f"test_data_set_{number}"
        f, q = (
            read_tensor(folder / f"{stem}_0.pb")[1].astype(float) for stem in ("float", "output")
        )
        changed = (f != q).any(axis=-1)
        signal += (f[changed] ** 2).sum()
        noise += ((q - f)[changed] ** 2).sum()
    assert report.quality is not None
    assert report.quality.outputs[0].part == "output"
    assert report.quality.outputs[0].sqnr == pytest.approx(
        10 * math.log10(signal / noise), abs=1e-3
    )
    assert {each.part for each in report.quality.outputs} == {
        "output",
        "present_key",
        "present_value",
    }


def test_every_report_shows_the_distance_apart_from_the_errors(report: Report):
    text = to_text(report, "--json FILE")
    assert "quantised against float weights, budget sqnr>=6" in text
    assert "Quantised against float weights" in to_html(report)


def test_a_missed_budget_fails_in_every_format_that_ci_reads(bundle: Path):
    report = verify(bundle, runtimes=["ort-cpu"], budgets=["sqnr>=90"])
    root = ElementTree.fromstring(to_junit(report))
    failed = [
        case.get("name") for case in root.iter("testcase") if case.find("failure") is not None
    ]
    assert failed == ["output", "present_key", "present_value"]
    assert [s.get("failures") for s in root if s.get("name") == "quality.budget"] == ["3"]
    assert "### Beyond the budget" in to_markdown(report)
    assert sum("beyond the budget" in line for line in github_annotations(report)) == 3
    assert to_html(report).count("beyond the budget") == 3
    validator().validate(json.loads(to_json(report)))


def test_of_many_outputs_beyond_a_budget_the_first_are_printed(report: Report):
    sentences = tuple(f"output_{n}: sqnr 3, budget sqnr>=9" for n in range(30))
    many = dataclasses.replace(
        report, quality=dataclasses.replace(report.quality, sentences=sentences)
    )
    said = to_text(many, "--json FILE")
    assert said.count("beyond the budget output_") == 8
    assert "… and 22 more beyond it; --json FILE has all" in said
    assert sum("beyond the budget" in line for line in github_annotations(many)) == 20
    assert to_markdown(many).count("\n- output\\_") == 20
    assert "\n- and 10 more\n" in to_markdown(many)


@pytest.mark.parametrize(
    ("budget", "code"),
    [("sqnr>=12", 0), ("cosine>=0.99999999", 6)],
)
def test_a_stored_reference_is_judged_again_by_any_budget(bundle: Path, budget: str, code: int):
    report = verify(bundle, runtimes=["ort-cpu"], budgets=[budget])
    assert report.exit_code == code, str(report)
    assert all(verdict.status == "passed" for verdict in report.verdicts)
    assert report.quality is not None
    named = {name for said in report.quality.missed for name in said.split(":")[:1]}
    assert named == (set() if code == 0 else {"output", "present_key", "present_value"})
    if code:
        said = report.quality.missed[0]
        assert budget in said
        assert said in str(report)


def test_a_build_beyond_its_budget_fails_and_keeps_the_evidence(tmp_path: Path, capsys):
    place = tmp_path / "b"
    spec = tmp_path / "layer.toml"
    spec.write_text(small_spec(weights_dtype="int4").to_toml(), encoding="utf-8")
    command = ["build", str(spec), "--dialect", "standard", "--runtime", "ort-cpu"]
    assert run([*command, "--budget", "sqnr>=60", "--output", str(place)]) == 6
    said = capsys.readouterr().out
    assert "beyond the budget output: sqnr" in said.replace("\n", " ")
    assert not place.exists()
    kept = json.loads((tmp_path / "b.failed" / "report.json").read_text())
    assert len(kept["quality"]["missed"]) == 3
    assert {verdict["status"] for verdict in kept["verdicts"]} == {"passed"}


@pytest.mark.parametrize(("budget", "code"), [("kl<=0.1", 0), ("top1>=1", 6)])
def test_an_output_is_judged_as_logits_where_a_budget_asks(
    bundle: Path, report: Report, budget: str, code: int
):
    assert report.quality.logits is None
    report = verify(bundle, runtimes=["ort-cpu"], budgets=[budget])
    assert report.exit_code == code, str(report)
    assert [said.split(":")[0] for said in report.quality.missed] == ["output"] * (code == 6)
    content = json.loads(to_json(report))
    validator().validate(content)
    assert 1e-6 < content["quality"]["logits"]["kl"] < 0.1
    assert 0.3 < content["quality"]["logits"]["top1"] < 1
    assert f"output as logits: KL {report.quality.logits.kl:.3g} nats" in to_html(report)


def test_logits_have_the_divergence_of_torch_and_the_share_of_equal_maxima():
    rng = np.random.default_rng(0)
    f = rng.standard_normal((3, 5, 7)) * 3
    q = f + rng.standard_normal(f.shape)
    q[0] = f[0]  # rows that are equal do not count
    f[1, 0, 2] = q[1, 0, 2] = -np.inf
    (found,) = logit_distance({"output": [(f[:2], q[:2]), (f[2:], q[2:])]}, [Budget("kl", 1.0)])
    logs = [torch.from_numpy(x[1:]).flatten(0, 1).log_softmax(-1) for x in (q, f)]
    logs = [x.nan_to_num(neginf=-1e30) for x in logs]
    wanted = F.kl_div(*logs, reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(wanted), rel=1e-9)
    same = f[1:].argmax(-1) == q[1:].argmax(-1)
    assert found.top1 == pytest.approx(same.mean())
    assert logit_distance({"output": [(f, q)]}, [Budget("sqnr", 1.0)]) == ()


@pytest.mark.parametrize("text", ["top1>=95", "cosine>=1.1"])
def test_a_share_beyond_1_is_refused(text: str):
    with pytest.raises(UsageError, match=r"is at most 1, as in \w+>=0.99; got") as error:
        Budget.parse(text)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["sqnr", "sqnr>30", "sqnr>=", "sqnr<=3", "kl>=1", "top1<=1", "kl<=-1", "sqnr>=nan", ""]
)
def test_a_budget_that_is_none_is_refused(text: str):
    with pytest.raises(UsageError, match="a budget is sqnr>=NUMBER") as error:
        Budget.parse(text)
    assert len(str(error.value)) <= 300


def test_a_budget_without_quantised_weights_is_refused(tmp_path: Path, bundle: Path):
    with pytest.raises(UsageError, match="needs quantised weights"):
        build(small_spec(), tmp_path / "b", budgets=["sqnr>=30"], **ONLY)
    with pytest.raises(UsageError, match="nothing to measure it on"):
        verify(bundle, runtimes=["ort-cpu"], budgets=["sqnr>=3"], sizes=["batch=1"])


CLAIM = "the budget sqnr>=6 is the bundle's own claim; --budget sets another"


def test_a_budget_is_the_claim_of_the_bundle_unless_the_user_gives_it(bundle: Path, report: Report):
    assert CLAIM in report.notes
    given = verify(bundle, runtimes=["ort-cpu"], budgets=["sqnr>=6"])
    assert not any("claim" in note for note in given.notes)


def change_quality(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / GOLDEN / "quality.json"
    quality = json.loads(path.read_text())
    change(quality)
    path.write_text(json.dumps(quality))


def lower_budget(folder: Path) -> None:
    change_quality(folder, lambda quality: quality.update(budgets=["sqnr>=1"]))


def use_quantised_as_float(folder: Path) -> None:
    for path in folder.glob(f"{GOLDEN}/*/float_*.pb"):
        shutil.copy(path.with_name(path.name.replace("float", "output")), path)


def forget_float_model(folder: Path) -> None:
    empty: dict[str, list[str]] = {"cases": [], "heads": [], "weights": [], "budgets": []}
    change_quality(folder, lambda quality: (quality.clear(), quality.update(empty)))


def forged(bundle: Path, place: Path, change: Callable[[Path], object]) -> Path:
    shutil.copytree(bundle, place)
    change(place)
    write_manifest(place, manifest_content(place))
    return place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / GOLDEN / "quality.json").unlink(), r"quality\.json is missing"),
        (use_quantised_as_float, "outputs of the float model are those of the quantised one"),
        (lambda folder: change_quality(folder, lambda q: q.update(budgets=[])), "names no budget"),
    ],
)
def test_a_quantised_layer_without_a_float_model_is_not_compared(
    bundle: Path, tmp_path: Path, change, message: str
):
    with pytest.raises(BundleError, match=message):
        verify(forged(bundle, tmp_path / "b", change), runtimes=["ort-cpu"])


def test_the_claims_of_a_bundle_on_its_float_model_are_said(bundle: Path, tmp_path: Path):
    options: dict[str, Any] = {"runtimes": ["ort-cpu"], "recompute": True}
    notes = verify(forged(bundle, tmp_path / "a", lower_budget), **options).notes
    assert "the budget is sqnr>=1, and by default sqnr>=6" in notes
    assert any("distance from them is its own claim" in note for note in notes)
    report = verify(forged(bundle, tmp_path / "b", forget_float_model), runtimes=["ort-cpu"])
    assert report.quality is None
    assert any("the float weights are unknown: the bundle's own claim" in n for n in report.notes)


BROKEN = {
    "a case that is not there": lambda q: q["cases"].append(500),
    "figures and no case": lambda q: q["cases"].clear(),
    "another case": lambda q: q["cases"].append(0 if 0 not in q["cases"] else 1),
    "a budget that is none": lambda q: q["budgets"].append("sqnr>=x"),
    "text for a number": lambda q: q["cases"].append("1"),
    "a further key": lambda q: q.update(more=1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_distances_are_refused_in_one_line(bundle: Path, tmp_path: Path, name: str):
    copy = tmp_path / "b"
    shutil.copytree(bundle, copy)
    path = copy / GOLDEN / "quality.json"
    quality = json.loads(path.read_text())
    BROKEN[name](quality)
    path.write_text(json.dumps(quality))
    write_manifest(copy, manifest_content(copy))
    with pytest.raises(BundleError, match=r"quality\.json cannot be used") as error:
        verify(copy, runtimes=["ort-cpu"])
    assert "\n" not in str(error.value)


def test_the_distance_is_of_the_rows_that_differ():
    f = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    q = np.array([[3.0, 4.5], [1.0, 0.0], [0.0, 0.0]])
    found = distance("x", [(f, q)])
    assert found.sqnr == pytest.approx(20)
    assert found.row == pytest.approx(0.1)
    assert found.cosine == pytest.approx((9 + 18) / (5 * math.hypot(3, 4.5)))
    assert distance("x", [(f, f)]).sqnr == math.inf
