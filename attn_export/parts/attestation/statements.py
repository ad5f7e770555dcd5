"""`attn-export evidence`: an in-toto test result and a CycloneDX ML-BOM of a bundle.

Both are computed from the manifest and `report.json` alone, so that `verify` can compute them again
and compare. They are files of the bundle: the manifest lists them and the signature covers them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from attn_export.bundle.manifest import (
    EVIDENCE,
    GOLDEN,
    REPORT,
    SIGNATURE,
    SPEC,
    copy_bundle,
    dimensions,
    manifest_content,
    read_manifest,
    read_report,
    refuse_exchange,
    staging,
    write_manifest,
)
from attn_export.commands.options import option, quiet_option, with_help
from attn_export.commands.output import echo
from attn_export.dialect_names import WEIGHTS
from attn_export.errors import PARAGRAPH, BundleError, one_line, printable
from attn_export.results import ReportFile, Verdict
from attn_export.schema import Manifest
from attn_export.untrusted_files import read_text

STATEMENT, BOM = f"{EVIDENCE}/test-result.json", f"{EVIDENCE}/bom.cdx.json"

_METRICS = {
    "whole": "relative L2 error of an output against float64",
    "row": "relative L2 error of a row of an output against float64",
    "worst": "relative L2 error as a share of the error allowed",
    "max_abs": "absolute difference from the module in PyTorch",
}
"""Description of each measured error in a verdict. The largest over all cases is stated."""

_NAMESPACE = uuid.UUID("6ad0cd6e-4a1f-5c0a-8a53-6f1f6d0d9c2b")
"""Namespace of serial numbers, which depend on the content of a bill of materials only."""


@with_help("Build and ship", "evidence models/mqa")
@option("bundle", type=Path)
@quiet_option
def evidence_command(bundle: Path, quiet: bool) -> int:
    """Write what a bundle's report says for other tools: an in-toto test result and an ML-BOM.

    They are BUNDLE/evidence/, and `verify` compares them with the report. A signature, which does
    not cover them, is removed: sign it again.
    """
    read_manifest(bundle)  # no folder is made for a bundle that is not there
    with staging(bundle) as stage:
        with refuse_exchange(bundle):
            copy_bundle(bundle, stage.folder)
            write_statements(stage.folder)
        was_signed = (bundle / SIGNATURE).exists()
        stage.publish()
    if not quiet:
        for name in (STATEMENT, BOM):
            echo(printable(str(bundle / name), PARAGRAPH))
        if was_signed:
            echo("the signature did not cover these and is gone; sign the bundle again")
    return 0


def write_statements(folder: Path) -> None:
    """Write the statements of a bundle that has none, and its manifest again."""
    (folder / EVIDENCE).mkdir()
    for name, text in _statements(folder, read_manifest(folder)).items():
        (folder / name).write_text(text, encoding="utf-8")
    write_manifest(folder, manifest_content(folder))


def check_statements(folder: Path, manifest: Manifest) -> None:
    """Check that the statements of a bundle, if it has any, are what its report makes them."""
    if not {STATEMENT, BOM} & manifest.files.keys():
        return
    for name, text in _statements(folder, manifest).items():
        try:
            same = read_text(folder / name) == text
        except (OSError, ValueError) as error:
            raise BundleError(f"{folder / name} cannot be read: {one_line(error)}") from error
        if not same:
            raise BundleError(
                f"{folder / name} does not say what {REPORT} and the digests say; write it again"
            )


def _statements(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return the texts of both statements, which are compared byte for byte."""
    report = read_report(folder)
    made = {STATEMENT: test_result(report, manifest), BOM: _bill_of_materials(report, manifest)}
    return {n: json.dumps(c, indent=1, ensure_ascii=False) + "\n" for n, c in made.items()}


def test_result(report: ReportFile, manifest: Manifest) -> dict[str, Any]:
    """Return an in-toto statement whose tests are the cases of each graph in each runtime.

    https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
    """
    ran: dict[str, set[str]] = {}
    for verdict in report.verdicts:
        name = f"{verdict.runtime}/{verdict.graph}/{verdict.case}"
        ran.setdefault(name, set()).update({verdict.status} - {"not run"})
    passed = [name for name, statuses in ran.items() if statuses == {"passed"}]
    failed = [name for name, statuses in ran.items() if statuses - {"passed"}]
    if report.passed and (failed or not passed):
        raise BundleError(f"{REPORT} passed, and its verdicts did not; build the bundle again")
    given = [name for name in manifest.files if name == SPEC or name.startswith(f"{GOLDEN}/")]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": _descriptors(_model_files(manifest), manifest),
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": "PASSED" if report.passed else "FAILED",
            "configuration": _descriptors(given, manifest),
            "passedTests": passed,
            "warnedTests": [],
            "failedTests": failed,
        },
    }


def _model_files(manifest: Manifest) -> list[str]:
    """Return the graphs and the files with their weights."""
    return sorted(manifest.files.keys() & {*manifest.graphs, WEIGHTS})


def _descriptors(names: Collection[str], manifest: Manifest) -> list[dict[str, Any]]:
    return [{"name": n, "digest": {"sha256": manifest.files[n]}} for n in sorted(names)]


def _bill_of_materials(report: ReportFile, manifest: Manifest) -> dict[str, Any]:
    """Return a bill of materials in CycloneDX 1.6, https://cyclonedx.org/docs/1.6/json/."""
    inputs, outputs = (
        [{"format": f"{name}: {text}"} for name, text in dimensions(ends).items()]
        for ends in (manifest.inputs, manifest.outputs)
    )
    card = {
        "modelParameters": {
            "task": "attention",
            "architectureFamily": "transformer",
            "inputs": inputs,
            "outputs": outputs,
        },
        "quantitativeAnalysis": {"performanceMetrics": _metrics(report.verdicts)},
    }
    files = {n: [{"alg": "SHA-256", "content": manifest.files[n]}] for n in _model_files(manifest)}
    model = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": report.name or "attention",
        "modelCard": card,
        "components": [{"type": "file", "name": n, "hashes": h} for n, h in files.items()],
    }
    content = {
        "version": 1,
        "metadata": {"component": model},
        # The packages that built and judged the model, which are no part of it.
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}",
                "name": name,
                "version": version,
                # A local version such as 2.13.0+cpu has a plus, which a package URL escapes.
                "purl": f"pkg:pypi/{name}@{version.replace('+', '%2B')}",
                "scope": "excluded",
            }
            for name, version in manifest.versions.items()
        ],
        "dependencies": [{"ref": "model"}],
    }
    number = uuid.uuid5(_NAMESPACE, json.dumps(content, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        **content,
    }


def _metrics(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """Return the largest errors of each output of each graph in each runtime."""
    largest: dict[tuple[str, str], float] = {}
    for verdict in verdicts:
        for measure, description in _METRICS.items():
            if (value := getattr(verdict, measure)) is not None:
                key = description, f"{verdict.runtime}, {verdict.graph}, {verdict.output}"
                largest[key] = max(value, largest.get(key, value))
    return [{"type": t, "value": f"{v:.6g}", "slice": s} for (t, s), v in largest.items()]
