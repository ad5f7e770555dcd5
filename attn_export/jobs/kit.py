"""The job behind `kit`: write a program that loads, runs and tests a bundle in some language."""

from __future__ import annotations

import shutil
from pathlib import Path

from attn_export.bundle import GOLDEN, MANIFEST, bundle_spec, graph_files, read_bundle
from attn_export.errors import UsageError
from attn_export.kits.project import Language, decode_graph_for, facts, graph_for, write_project
from attn_export.kits.project import language as language_of
from attn_export.output_folder import replaceable, replacement_of, write_errors
from attn_export.parity.golden import read_index
from attn_export.report.progress import Progress
from attn_export.schema import Manifest

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
    with write_errors(output):  # before anything is read
        replaceable(output, "kit")
    progress.phase("reading the bundle")
    manifest = read_bundle(bundle)
    _refuse_dtypes(language, project, manifest)
    graphs = graph_files(manifest)
    graph = graph_for(graphs, project.dialects, dialect)
    decode = decode_graph_for(graphs, graph)
    spec = bundle_spec(bundle, manifest)
    context = facts(manifest, read_index(bundle / GOLDEN), spec, graph, decode)
    progress.phase("writing the kit")
    with replacement_of(output, "kit") as folder:
        write_project(project, context, folder)
        for name in (*manifest.files, MANIFEST):
            (folder / BUNDLE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, folder / BUNDLE / name)
    return output


def _refuse_dtypes(name: str, project: Language, manifest: Manifest) -> None:
    for end, signature in manifest.ends.items():
        if signature.dtype in project.unsupported_dtypes:
            raise UsageError(
                f"{end} is {signature.dtype}, which the {name} kit cannot hold; the c and cpp kits "
                "can, or build the bundle in float32 or float16"
            )
