"""The job behind `kit`: write a program that loads, runs and tests a bundle in some language."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attn_export.bundle import GOLDEN, MANIFEST, bundle_spec, graph_files, read_bundle
from attn_export.errors import OutputError, UsageError
from attn_export.kits.project import Language, decode_graph_for, facts, graph_for, write_project
from attn_export.kits.project import language as language_of
from attn_export.output_folder import replaceable, take_place, write_list
from attn_export.parity.golden import read_index
from attn_export.report.progress import Progress
from attn_export.temp_folders import folder_beside

BUNDLE = "bundle"


def write_kit(
    language: str,
    bundle: Path,
    output: Path,
    dialect: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a kit: a project with a copy of the bundle.

    Args:
        language: One of `LANGUAGES`.
        bundle: The bundle's folder. It is copied into the kit.
        output: The kit's folder. It must not exist, or be empty, or be an unchanged kit.
        dialect: The dialect of the graph that the kit runs. Default: the fastest that its engine
            runs.
        progress: Receiver of progress.

    Returns:
        The kit's folder.

    Raises:
        UsageError: If the language is unknown, or its kit cannot run the bundle.
        BundleError: If the bundle was changed.
        OutputError: If `output` cannot be written, or holds something else.
    """
    project, progress = language_of(language), progress or Progress()
    _target(output)
    progress.phase("reading the bundle")
    manifest = read_bundle(bundle)
    _refuse_dtypes(language, project, manifest)
    graphs = graph_files(manifest)
    graph = graph_for(graphs, project.dialects, dialect)
    decode = decode_graph_for(graphs, graph)
    spec = bundle_spec(bundle, manifest)
    context = facts(manifest, read_index(bundle / GOLDEN), spec, graph, decode)
    progress.phase("writing the kit")
    try:
        _publish(project, context, bundle, manifest, output)
    except OSError as error:
        raise _unwritable(output, error) from error
    return output


def _target(output: Path) -> Path:
    try:
        return replaceable(output, "kit")
    except OSError as error:
        raise _unwritable(output, error) from error


def _unwritable(output: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write {output}: {error.strerror or error}")


def _refuse_dtypes(name: str, project: Language, manifest: Mapping[str, Any]) -> None:
    ends = {**manifest["inputs"], **manifest["outputs"]}
    for end, entry in ends.items():
        if entry["dtype"] in project.unsupported_dtypes:
            raise UsageError(
                f"{end} is {entry['dtype']}, which the {name} kit cannot hold; the c and cpp kits "
                "can, or build the bundle in float32 or float16"
            )


def _publish(
    project: Language,
    context: Mapping[str, Any],
    bundle: Path,
    manifest: Mapping[str, Any],
    output: Path,
) -> None:
    """Write the kit into a new folder, and replace the output by it in one step."""
    target = _target(output)
    target.parent.mkdir(parents=True, exist_ok=True)
    with folder_beside(target) as folder:
        write_project(project, context, folder)
        for name in (*manifest["files"], MANIFEST):
            (folder / BUNDLE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, folder / BUNDLE / name)
        write_list(folder, "kit")
        take_place(folder, _target(target))
