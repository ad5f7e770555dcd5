"""Statements about a bundle in standard formats: an in-toto test result and a CycloneDX ML-BOM.

Both are computed from the manifest and `report.json` alone, so that `verify` can compute them again
and compare. They are files of the bundle: the manifest lists them and the signature covers them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from attn_export.bundle.manifest import (
    EVIDENCE,
    GOLDEN,
    REPORT,
    SIGNATURE,
    SPEC,
    copy_bundle,
    manifest_content,
    read_manifest,
    read_report,
    refuse_exchange,
    staging,
    write_manifest,
)
from attn_export.dialect_names import WEIGHTS
from attn_export.errors import BundleError, printable
from attn_export.results import ReportFile, Verdict
from attn_export.schema import Manifest, TensorSignature
from attn_export.untrusted_files import parse_json, read_text

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


def add_statements(bundle: Path | str) -> bool:
    """Write the statements of a bundle, which is replaced in one step without its signature.

    Returns:
        Whether the bundle had a signature.
    """
    bundle = Path(bundle)
    read_manifest(bundle)  # no folder is made for a bundle that is not there
    with staging(bundle) as stage:
        with refuse_exchange(bundle):
            copy_bundle(bundle, stage.folder)
            write_statements(stage.folder)
        was_signed = (bundle / SIGNATURE).exists()
        stage.publish()
    return was_signed


def write_statements(folder: Path) -> None:
    """Write the statements of a bundle that has none, and its manifest again."""
    (folder / EVIDENCE).mkdir()
    for name, content in _statements(folder, read_manifest(folder)).items():
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    write_manifest(folder, manifest_content(folder))


def check_statements(folder: Path, manifest: Manifest) -> None:
    """Check that the statements of a bundle, if it has any, match its files and its report."""
    if not {STATEMENT, BOM} & manifest.files.keys():
        return
    for name, content in _statements(folder, manifest).items():
        try:
            same = parse_json(read_text(folder / name)) == content
        except (OSError, ValueError) as error:
            why = printable(getattr(error, "strerror", "") or f"no valid JSON: {error}", 120)
            raise BundleError(f"{folder / name} cannot be read: {why}") from error
        if not same:
            raise BundleError(
                f"{folder / name} does not say what {REPORT} and the digests say; write it again"
            )


def _statements(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    report = read_report(folder)
    return {STATEMENT: test_result(report, manifest), BOM: _bill_of_materials(report, manifest)}


def test_result(report: ReportFile, manifest: Manifest) -> dict[str, Any]:
    """Return an in-toto statement with the predicate of test results.

    Its subjects are the graphs and weights, its configuration is the spec and the golden vectors,
    and each test is a case of a graph in a runtime.
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
    card = {
        "modelParameters": {
            "task": "attention",
            "architectureFamily": "transformer",
            "inputs": _values(manifest.inputs),
            "outputs": _values(manifest.outputs),
        },
        "quantitativeAnalysis": {"performanceMetrics": _metrics(report.verdicts)},
    }
    content = {
        "version": 1,
        "metadata": {
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": report.name or "attention",
                "modelCard": card,
                "components": [
                    {
                        "type": "file",
                        "name": name,
                        "hashes": [{"alg": "SHA-256", "content": manifest.files[name]}],
                    }
                    for name in _model_files(manifest)
                ],
            },
        },
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


def _values(ends: Mapping[str, TensorSignature]) -> list[dict[str, str]]:
    """Return the formats of inputs or outputs."""
    shapes = {name: ", ".join(str(axis) or "?" for axis in end.shape) for name, end in ends.items()}
    return [{"format": f"{name}: {end.dtype} [{shapes[name]}]"} for name, end in ends.items()]


def _metrics(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """Return the largest errors of each output of each graph in each runtime."""
    largest: dict[tuple[str, str], float] = {}
    for verdict in verdicts:
        source = f"{verdict.runtime}, {verdict.graph}, {verdict.output}"
        for measure in _METRICS:
            value = getattr(verdict, measure)
            if value is not None:
                key = (source, measure)
                largest[key] = max(value, largest.get(key, value))
    return [
        {"type": _METRICS[measure], "value": f"{value:.6g}", "slice": source}
        for (source, measure), value in largest.items()
    ]
