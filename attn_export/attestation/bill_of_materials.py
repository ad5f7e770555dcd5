"""The bill of materials of a bundle: CycloneDX 1.6, with a model card of the measured errors.

https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from attn_export.schema import ReportedVerdict, ReportFile

METRICS = {
    "whole": "relative L2 error of an output against float64",
    "row": "relative L2 error of a row of an output against float64",
    "worst": "relative L2 error as a share of the error allowed",
    "max_abs": "absolute difference from the module in PyTorch",
}
"""Measured errors of a verdict. Stated is the largest one over all cases."""

NAMESPACE = uuid.UUID("6ad0cd6e-4a1f-5c0a-8a53-6f1f6d0d9c2b")
"""Namespace of serial numbers: the same bill of materials has the same one."""


def bill_of_materials(
    report: ReportFile, manifest: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """Return the bill of materials as a JSON value.

    Args:
        report: The report.
        manifest: The manifest; its digests are not read.
        files: SHA-256 of the graphs and weights, by name.
    """
    versions = manifest["versions"]
    tools = [_package(name, versions[name]) for name in versions]
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
        # What built and judged the model, and is no part of it.
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


def _model_card(verdicts: Iterable[ReportedVerdict], manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "modelParameters": {
            "task": "attention",
            "architectureFamily": "transformer",
            "inputs": [_end(name, end) for name, end in manifest["inputs"].items()],
            "outputs": [_end(name, end) for name, end in manifest["outputs"].items()],
        },
        "quantitativeAnalysis": {"performanceMetrics": _metrics(verdicts)},
    }


def _end(name: str, end: Mapping[str, Any]) -> dict[str, str]:
    axes = ", ".join(str(axis) or "?" for axis in end["shape"])
    return {"format": f"{name}: {end['dtype']} [{axes}]"}


def _metrics(verdicts: Iterable[ReportedVerdict]) -> list[dict[str, str]]:
    """Return the largest errors of each output of each graph in each runtime."""
    largest: dict[tuple[str, str], float] = {}
    for verdict in verdicts:
        place = f"{verdict.runtime}, {verdict.graph}, {verdict.output}"
        for measure in METRICS:
            value = getattr(verdict, measure)
            if value is not None:
                key = (place, measure)
                largest[key] = max(value, largest.get(key, value))
    return [
        {"type": METRICS[measure], "value": f"{value:.6g}", "slice": place}
        for (place, measure), value in largest.items()
    ]
