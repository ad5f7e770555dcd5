"""Statements about a bundle in standard formats: an in-toto test result and a CycloneDX ML-BOM.

Both are computed from the manifest and `report.json` alone, so that `verify` can compute them again
and compare. They are files of the bundle: the manifest lists them and the signature covers them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
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

# -- the bill of materials: CycloneDX 1.6, https://cyclonedx.org/docs/1.6/json/ -----------------

METRICS = {
    "whole": "relative L2 error of an output against float64",
    "row": "relative L2 error of a row of an output against float64",
    "worst": "relative L2 error as a share of the error allowed",
    "max_abs": "absolute difference from the module in PyTorch",
}
"""Description of each measured error in a verdict. The largest over all cases is stated."""

NAMESPACE = uuid.UUID("6ad0cd6e-4a1f-5c0a-8a53-6f1f6d0d9c2b")
"""Namespace of serial numbers, which depend on the content of a bill of materials only."""


def _bill_of_materials(report: ReportFile, manifest: Manifest) -> dict[str, Any]:
    """Return the bill of materials as a JSON value."""
    files = _model_files(manifest)
    tools = [_package(name, version) for name, version in manifest.versions.items()]
    content = {
        "version": 1,
        "metadata": {
            "component": {
                "type": "machine-learning-model",
                "bom-ref": "model",
                "name": report.name or "attention",
                "modelCard": _model_card(report.verdicts, manifest),
                "components": [_file(name, files[name]) for name in sorted(files)],
            },
        },
        # The packages that built and judged the model, which are no part of it.
        "components": [{**tool, "scope": "excluded"} for tool in tools],
        "dependencies": [{"ref": "model"}],
    }
    number = uuid.uuid5(NAMESPACE, json.dumps(content, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        **content,
    }


def _package(name: str, version: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "version": version,
        # A local version such as 2.13.0+cpu has a plus, which a package URL escapes.
        "purl": f"pkg:pypi/{name}@{version.replace('+', '%2B')}",
    }


def _file(name: str, digest: str) -> dict[str, Any]:
    return {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _model_card(verdicts: Iterable[Verdict], manifest: Manifest) -> dict[str, Any]:
    return {
        "modelParameters": {
            "task": "attention",
            "architectureFamily": "transformer",
            "inputs": [_value(*entry) for entry in manifest.inputs.items()],
            "outputs": [_value(*entry) for entry in manifest.outputs.items()],
        },
        "quantitativeAnalysis": {"performanceMetrics": _metrics(verdicts)},
    }


def _value(name: str, signature: TensorSignature) -> dict[str, str]:
    """Return the format of an input or output."""
    axes = ", ".join(str(axis) or "?" for axis in signature.shape)
    return {"format": f"{name}: {signature.dtype} [{axes}]"}


def _metrics(verdicts: Iterable[Verdict]) -> list[dict[str, str]]:
    """Return the largest errors of each output of each graph in each runtime."""
    largest: dict[tuple[str, str], float] = {}
    for verdict in verdicts:
        source = f"{verdict.runtime}, {verdict.graph}, {verdict.output}"
        for measure in METRICS:
            value = getattr(verdict, measure)
            if value is not None:
                key = (source, measure)
                largest[key] = max(value, largest.get(key, value))
    return [
        {"type": METRICS[measure], "value": f"{value:.6g}", "slice": source}
        for (source, measure), value in largest.items()
    ]


# -- the statements of a bundle -----------------------------------------------------------------

STATEMENT, BOM = f"{EVIDENCE}/test-result.json", f"{EVIDENCE}/bom.cdx.json"

PASSED, NOT_RUN = "passed", "not run"


def add_statements(bundle: Path | str) -> bool:
    """Write the statements of a bundle, which is replaced in one step.

    Returns:
        Whether the bundle had a signature. The new one has none.
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
        except OSError as error:
            raise BundleError(f"{folder / name} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BundleError(
                f"{folder / name} is not valid JSON: {printable(error, 100)}"
            ) from error
        if not same:
            raise BundleError(
                f"{folder / name} does not say what {REPORT} and the digests say; write it again"
            )


def _statements(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    report = read_report(folder)
    return {
        STATEMENT: test_result(report, manifest),
        BOM: _bill_of_materials(report, manifest),
    }


def test_result(report: ReportFile, manifest: Manifest) -> dict[str, Any]:
    """Return an in-toto statement with the predicate of test results.

    https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md

    Returns:
        The statement. Its subjects are the graphs and weights, its configuration is the spec and
        the golden vectors, and each test is a case of a graph in a runtime.
    """
    statuses: dict[str, set[str]] = {}
    for verdict in report.verdicts:
        name = f"{verdict.runtime}/{verdict.graph}/{verdict.case}"
        statuses.setdefault(name, set()).add(verdict.status)
    ran = {name: values - {NOT_RUN} for name, values in statuses.items()}
    passed = [name for name, values in ran.items() if values == {PASSED}]
    failed = [name for name, values in ran.items() if values - {PASSED}]
    if report.passed and (failed or not passed):
        raise BundleError(f"{REPORT} passed, and its verdicts did not; build the bundle again")
    configuration = {
        name: digest
        for name, digest in manifest.files.items()
        if name == SPEC or name.startswith(f"{GOLDEN}/")
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": _descriptors(_model_files(manifest)),
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": "PASSED" if report.passed else "FAILED",
            "configuration": _descriptors(configuration),
            "passedTests": passed,
            "warnedTests": [],
            "failedTests": failed,
        },
    }


def _model_files(manifest: Manifest) -> dict[str, str]:
    """Return the digests of the graphs and of the files with their weights."""
    names = (*manifest.graphs, WEIGHTS)
    return {name: digest for name, digest in manifest.files.items() if name in names}


def _descriptors(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)]
