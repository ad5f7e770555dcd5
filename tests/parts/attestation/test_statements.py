"""Statements about bundles, read as other tools read them, and compared with the report."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shared
from conftest import Cli, small_spec
from google.protobuf import json_format
from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from signing_keys import make_key, sign, signer_of

from attn_export import build, verify
from attn_export.bundle.manifest import (
    MANIFEST,
    REPORT,
    SIGNATURE,
    manifest_content,
    read_manifest,
    write_manifest,
)
from attn_export.errors import AttnExportError, BundleError
from attn_export.output_folder import sha256
from attn_export.parts.attestation.statements import (
    BOM,
    STATEMENT,
    check_statements,
    evidence_command,
)
from attn_export.parts.attestation.statements import test_result as statement_of
from attn_export.results import ReportFile, Verdict

OPTIONS: dict[str, Any] = {"runtimes": ["ort-cpu"], "dialects": ["standard", "portable"]}


@functools.cache
def strict_validator() -> Any:
    """Return CycloneDX's validator of JSON."""
    # Importing it takes 2 s, in every process that imports tests.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


@pytest.fixture(scope="session")
def stated() -> Path:
    """Return a bundle with statements. Read it; copy it before changing it."""

    def make(folder: Path) -> None:
        assert build(small_spec(), folder, name="stated", **OPTIONS).passed
        assert evidence_command(folder, quiet=True) == 0

    return shared.once("stated", make)


@pytest.fixture
def part(stated: Path, tmp_path: Path) -> Path:
    """Return the manifest, the report and the statements of a bundle; they may be changed."""
    for name in (MANIFEST, REPORT, STATEMENT, BOM):
        (tmp_path / "part" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stated / name, tmp_path / "part" / name)
    return tmp_path / "part"


def content(bundle: Path, name: str) -> Any:
    return json.loads((bundle / name).read_text())


# -- the in-toto statement ----------------------------------------------------------------------


def test_the_statement_is_valid_in_toto_about_the_files_as_they_are(stated):
    text = (stated / STATEMENT).read_text()
    found = json_format.Parse(text, statement_pb2.Statement())
    Statement.copy_from_pb(found).validate()
    digests = {subject.name: subject.digest["sha256"] for subject in found.subject}
    assert digests.keys() >= {"model.onnx", "model.portable.onnx"}
    assert digests == {name: sha256(stated / name) for name in digests}


def test_its_predicate_is_a_test_result_that_lists_every_case_that_ran(stated):
    statement, report = content(stated, STATEMENT), content(stated, REPORT)
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    predicate = json_format.ParseDict(statement["predicate"], test_result_pb2.TestResult())
    assert (predicate.result, list(predicate.failed_tests)) == ("PASSED", [])
    ran = {f"{v['runtime']}/{v['graph']}/{v['case']}" for v in report["verdicts"]}
    assert set(predicate.passed_tests) == ran
    given = {each.name: each.digest["sha256"] for each in predicate.configuration}
    assert given == {name: sha256(stated / name) for name in given}
    golden = {f"golden/{p.name}" for p in (stated / "golden").iterdir() if p.is_file()}
    assert given.keys() >= golden | {"spec.toml"}


def test_a_failed_build_states_what_failed(tmp_path):
    report = build(
        small_spec(), tmp_path / "out", runtimes=["ort-cpu"], dialects=["standard"], atol=0.0,
        rtol=0.0,
    )  # fmt: skip
    assert report.exit_code == 6
    evidence_command(tmp_path / "out.failed", quiet=True)
    predicate = content(tmp_path / "out.failed", STATEMENT)["predicate"]
    failed = {f"{v.runtime}/{v.graph}/{v.case}" for v in report.verdicts if v.status == "failed"}
    assert (predicate["result"], set(predicate["failedTests"])) == ("FAILED", failed)
    assert not failed & set(predicate["passedTests"])


@pytest.mark.parametrize("statuses", [[], ["failed"], ["passed", "error"], ["not run"]])
def test_a_report_that_passed_with_other_verdicts_is_contradictory(statuses, stated):
    verdicts = [
        Verdict("ort-cpu", "model.onnx", f"case {n}", "output", status)
        for n, status in enumerate(statuses)
    ]
    manifest = read_manifest(stated)
    with pytest.raises(BundleError, match="passed, and its verdicts did not"):
        statement_of(ReportFile("name", True, verdicts), manifest)
    assert statement_of(ReportFile("name", False, verdicts), manifest)


# -- the bill of materials ----------------------------------------------------------------------


def test_the_bill_of_materials_is_valid_for_the_strict_validator(stated):
    text = (stated / BOM).read_text()
    assert strict_validator().validate_str(text) is None
    assert strict_validator().validate_str(text.replace('"modelCard"', '"modelcard"')) is not None


def test_its_model_card_has_the_largest_errors_of_the_report(stated):
    card = content(stated, BOM)["metadata"]["component"]["modelCard"]
    metrics = card["quantitativeAnalysis"]["performanceMetrics"]
    measured = {(metric["slice"], metric["type"]): float(metric["value"]) for metric in metrics}
    verdicts = [v for v in content(stated, REPORT)["verdicts"] if v["whole"] is not None]
    for verdict in verdicts:
        place = ", ".join(verdict[part] for part in ("runtime", "graph", "output"))
        found = measured[(place, "relative L2 error of an output against float64")]
        assert verdict["whole"] <= found * (1 + 1e-5)
    worst = max(verdict["whole"] for verdict in verdicts)
    assert any(value == pytest.approx(worst, rel=1e-5) for value in measured.values())


def test_it_names_the_files_the_inputs_and_the_packages(stated):
    bom, manifest = content(stated, BOM), read_manifest(stated)
    model = bom["metadata"]["component"]
    hashes = {file["name"]: file["hashes"][0]["content"] for file in model["components"]}
    assert hashes == {name: manifest.files[name] for name in hashes}
    assert hashes.keys() >= set(manifest.graphs)
    formats = [end["format"] for end in model["modelCard"]["modelParameters"]["inputs"]]
    assert [text.split(":")[0] for text in formats] == list(manifest.inputs)
    versions = {package["name"]: package["version"] for package in bom["components"]}
    assert versions == manifest.versions


# -- verify -------------------------------------------------------------------------------------


def changed(bundle: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file."""
    value = content(bundle, name)
    change(value)
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    (bundle / name).write_text(text)


LIES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "another result": (STATEMENT, lambda it: it["predicate"].update(result="WARNED")),
    "a test less": (STATEMENT, lambda it: it["predicate"]["passedTests"].pop()),
    "another digest": (STATEMENT, lambda it: it["subject"][0]["digest"].update(sha256="0" * 64)),
    "a subject less": (STATEMENT, lambda it: it["subject"].pop()),
    "a smaller error": (
        BOM,
        lambda it: it["metadata"]["component"]["modelCard"]["quantitativeAnalysis"][
            "performanceMetrics"
        ][0].update(value="0"),
    ),
    "another file": (BOM, lambda it: it["metadata"]["component"]["components"][0].update(name="x")),
    "no statement": (STATEMENT, lambda it: it.clear()),
    "another report": (REPORT, lambda it: it["verdicts"].__delitem__(slice(1, None))),
    "a report that failed": (REPORT, lambda it: it.update(passed=False)),
    "a report with a failure": (REPORT, lambda it: it["verdicts"][0].update(status="failed")),
    "a report without verdicts": (REPORT, lambda it: it.pop("verdicts")),
}


@pytest.mark.parametrize("lie", LIES)
def test_statements_that_differ_from_the_report_are_refused(lie, part):
    manifest = read_manifest(part)
    changed(part, STATEMENT, dict)
    changed(part, BOM, dict)
    check_statements(part, manifest)
    changed(part, *LIES[lie])
    with pytest.raises(BundleError):
        check_statements(part, manifest)


def test_one_of_two_statements_is_refused(part):
    (part / BOM).unlink()
    with pytest.raises(BundleError, match=r"bom\.cdx\.json cannot be read"):
        check_statements(part, read_manifest(part))


def test_verify_refuses_a_bundle_whose_statement_is_another(stated, tmp_path):
    copy = Path(shutil.copytree(stated, tmp_path / "copy"))
    changed(copy, *LIES["a test less"])
    write_manifest(copy, manifest_content(copy))
    with pytest.raises(BundleError, match="does not say what report"):
        verify(copy, runtimes=["ort-cpu"])


def test_a_bundle_with_statements_is_verified_signed_and_built_again(stated, cli: Cli, tmp_path):
    copy = Path(shutil.copytree(stated, tmp_path / "copy"))
    make_key(tmp_path, "own", "P-256")
    before = {name: (copy / name).read_bytes() for name in (STATEMENT, BOM)}
    sign(copy, tmp_path / "own.pem")
    done = cli("verify", copy, "--trust", tmp_path / "own.pub.pem", "--runtime", "ort-cpu")
    assert done.returncode == 0, done.stderr
    assert build(small_spec(), copy, name="stated", **OPTIONS).passed
    assert not (copy / STATEMENT).exists()
    done = cli("evidence", copy)
    assert (done.returncode, done.stdout) == (0, f"{copy / STATEMENT}\n{copy / BOM}\n")
    assert (copy / STATEMENT).read_bytes() == before[STATEMENT]
    with pytest.raises(BundleError, match="unsigned"):
        signer_of(copy, tmp_path / "own.pub.pem")


# -- the command --------------------------------------------------------------------------------


def files(bundle: Path) -> dict[str, bytes]:
    return {
        path.relative_to(bundle).as_posix(): path.read_bytes()
        for path in bundle.rglob("*")
        if path.is_file()
    }


def test_statements_leave_the_other_files_and_remove_the_signature(stated, cli: Cli, tmp_path):
    copy = Path(shutil.copytree(stated, tmp_path / "copy"))
    make_key(tmp_path, "own", "P-256")
    sign(copy, tmp_path / "own.pem")
    before = files(copy)
    done = cli("evidence", copy)
    assert done.returncode == 0, done.stderr
    assert "the signature did not cover these and is gone; sign" in done.stdout
    assert files(copy) == {name: text for name, text in before.items() if name != SIGNATURE}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "own.pem", "own.pub.pem"]


def test_a_bundle_stays_as_it_was_where_its_report_contradicts_itself(stated, tmp_path):
    copy = Path(shutil.copytree(stated, tmp_path / "copy"))
    report = json.loads((copy / REPORT).read_text())
    report["verdicts"][0]["status"] = "failed"
    (copy / REPORT).write_text(json.dumps(report))
    write_manifest(copy, manifest_content(copy))
    (copy / SIGNATURE).write_text("of these files")
    before = files(copy)
    with pytest.raises(BundleError, match="passed, and its verdicts did not"):
        evidence_command(copy, quiet=True)
    assert files(copy) == before
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_changed_bundle_gets_no_statements(stated, tmp_path):
    copy = Path(shutil.copytree(stated, tmp_path / "copy"))
    (copy / "model.onnx").write_bytes(b"another")
    with pytest.raises(AttnExportError, match="was changed"):
        evidence_command(copy, quiet=True)


def test_no_folder_is_made_where_there_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match="not a bundle"):
        evidence_command(tmp_path / "nowhere" / "b", quiet=True)
    assert [*tmp_path.iterdir()] == []
