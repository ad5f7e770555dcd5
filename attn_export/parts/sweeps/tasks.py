"""Tasks that workers of a sweep run. Their arguments and results are plain, serialisable data."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import os
import re
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from attn_export.bundle.manifest import MANIFEST, failed_folder, read_bundle, read_manifest
from attn_export.errors import AttnExportError, BundleError, OutputError, one_line, printable
from attn_export.parts.sweeps.sweep_plan import BUNDLE, DRY_RUN
from attn_export.results import Report, RuntimeRun, Verdict
from attn_export.spec import AttentionSpec
from attn_export.temp_folders import scratch

LONGEST: Final = 600
"""Largest number of characters of a cause."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A bundle as one value that can be sent to workers.

    Attributes:
        digest: The SHA-256 of its manifest, which holds the digests of all other files.
    """

    digest: str
    archive: bytes
    refused: str = ""
    seconds: float = 0.0


CellFields = dict[str, Any]
"""Fields of a `Row` that a task determines, by name."""


def build_packed(
    kind: str, content: Mapping[str, Any] | str, dialects: Sequence[str], seed: int
) -> Packed:
    """Return the packed bundle of a layer, built or read from its folder.

    The refusal of a layer is a result. A failure of the machine raises an error, so that the
    scheduler tries another worker.
    """
    started = time.monotonic()
    try:
        if kind == BUNDLE:
            return pack(Path(str(content)))
        with scratch() as folder:
            return dataclasses.replace(
                pack(_build(content, dialects, seed, folder / "bundle")),
                seconds=time.monotonic() - started,
            )
    except OutputError as error:
        raise OSError(one_line(error)) from error
    except AttnExportError as error:
        return Packed("", b"", one_line(error)[:LONGEST] or type(error).__name__)


def _build(
    content: Mapping[str, Any] | str, dialects: Sequence[str], seed: int, output: Path
) -> Path:
    """Build a bundle; return its folder, which ends in ``.failed`` if a verdict did not pass."""
    from attn_export.commands.build import build
    from attn_export.export.user_module import load_subject

    report = build(
        load_subject(content) if isinstance(content, str) else AttentionSpec.from_dict(content),
        output, dialects=dialects, runtimes=["ort-cpu"], seed=seed,
    )  # fmt: skip
    return output if report.passed else failed_folder(output)


def pack(folder: Path) -> Packed:
    """Compare the files of a bundle with their digests, and pack them."""
    files = read_bundle(folder).files
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in [MANIFEST, *files]:
            archive.write(folder / name, name)
    return Packed(_digest(folder), stream.getvalue())


def unpack(packed: Packed, home: Path) -> Path:
    """Return the folder of a bundle below `home`; unpack and check it if it is not there yet."""
    folder = home / packed.digest
    if folder.is_dir():
        return folder
    part = home / f"{packed.digest}.{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        with zipfile.ZipFile(io.BytesIO(packed.archive)) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name:
                    raise BundleError(f"the bundle {packed.digest[:12]} has a file outside of it")
            archive.extractall(part)
        if _digest(part) != packed.digest:
            raise BundleError(f"the bundle {packed.digest[:12]} arrived changed; run it again")
        read_bundle(part)
        part.rename(folder)
    except zipfile.BadZipFile as error:
        raise BundleError(f"the bundle {packed.digest[:12]} arrived broken: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def run_packed(packed: Packed, runtime: str, dialects: Sequence[str]) -> dict[str, CellFields]:
    """Run the graphs of a bundle in one runtime; return the fields of each dialect's cell."""
    if packed.refused:
        refused = {"verdict": "refused", "cause": f"not built: {packed.refused}"}
        return dict.fromkeys(dialects, refused)
    started = time.monotonic()
    home = _home()
    home.mkdir(parents=True, exist_ok=True)
    folder = unpack(packed, home)
    available = {file.dialect for file in read_manifest(folder).graphs.values()}
    present = [dialect for dialect in dialects if dialect in available]
    absent = {"verdict": "refused", "cause": "the bundle has no graph in this dialect"}
    fields: dict[str, CellFields] = {name: absent for name in dialects if name not in available}
    try:
        if present and runtime.startswith(DRY_RUN):
            fields |= _run_dry(folder, runtime.removeprefix(DRY_RUN), present)
        elif present:
            fields |= verify_dialects(folder, runtime, present)
    except OutputError as error:
        raise OSError(one_line(error)) from error
    except AttnExportError as error:
        failed = {"verdict": "error", "cause": one_line(error)[:LONGEST]}
        fields |= dict.fromkeys(present, failed)
    seconds = (time.monotonic() - started + packed.seconds) / len(dialects)
    return {name: {**fields[name], "seconds": round(seconds, 3)} for name in dialects}


def _home() -> Path:
    """Return this worker's folder of bundles, which Dask removes when the worker ends."""
    from distributed import get_worker

    try:
        return Path(get_worker().local_directory) / "bundles"
    except ValueError as error:  # this process is not a worker
        raise AttnExportError("a task of a sweep runs in a worker of a sweep only") from error


# -- verdicts -----------------------------------------------------------------------------------


def verify_dialects(folder: Path, runtime: str, dialects: Sequence[str]) -> dict[str, CellFields]:
    """Verify a bundle in one runtime; return the fields of each dialect's cell."""
    from attn_export.commands.explain_failures import explain_failures
    from attn_export.commands.verify import verify

    report = explain_failures(verify(folder, runtimes=[runtime]), folder)
    graphs = {file.name: file.dialect for file in read_manifest(folder).graphs.values()}
    return {
        name: _cell_fields(report, {g for g, dialect in graphs.items() if dialect == name}, folder)
        for name in dialects
    }


def _cell_fields(report: Report, graphs: set[str], folder: Path) -> CellFields:
    """Return the fields of the cell of one dialect; causes leave out the path of `folder`."""
    runs = [run for run in report.runs if run.graph in graphs]
    verdicts = [verdict for verdict in report.verdicts if verdict.graph in graphs]
    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    figures = [v.worst for v in verdicts if v.worst is not None and math.isfinite(v.worst)]
    verdict, cause = _verdict(runs, verdicts)
    if wrong:
        names = [f", {name}: " for name in graphs]
        explanations = (text for text in report.explanations if any(name in text for name in names))
        cause = next(explanations, cause)
    return {
        "verdict": verdict, "cause": printable(cause.replace(f"{folder}{os.sep}", ""), LONGEST),
        "version": next((str(run.facts["version"]) for run in runs if "version" in run.facts), ""),
        "worst": max(figures, default=None),
        "cases": len({verdict.case for verdict in verdicts}),
        "wrong": len({verdict.case for verdict in wrong}),
        "smallest": _smallest(wrong),
    }  # fmt: skip


def _verdict(runs: Sequence[RuntimeRun], verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Return the verdict of a cell and its cause.

    Wrong numbers come first, then a run that ended early, then errors of single cases. If all
    cases of a loaded graph end in an error, the verdict is that the runtime refuses the graph.
    """
    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    failed = next((verdict for verdict in wrong if verdict.status == "failed"), None)
    if failed is not None:
        return "failed", failed.message
    ended = next((run for run in runs if run.outcome != "ran"), None)
    if ended is not None:
        return ended.outcome, ended.reason
    if {verdict.status for verdict in verdicts} == {"error"}:
        return "refused", wrong[0].message
    if wrong or not runs:
        return "failed", wrong[0].message if wrong else "nothing was run"
    return "passed", ""


def _smallest(wrong: Sequence[Verdict]) -> str:
    """Return the case with the smallest sizes, which are in its name: ``shape_B1_P0_L1``."""
    names = {verdict.case for verdict in wrong}
    sizes = {name: [int(n) for n in re.findall(r"_[A-Z](\d+)", name)] for name in names}
    return min(names, key=lambda name: (math.prod(n + 1 for n in sizes[name]), name), default="")


def _run_dry(folder: Path, architecture: str, dialects: Sequence[str]) -> dict[str, CellFields]:
    """Run graphs over stand-ins for CUDA; return the kernels seen, by dialect, as causes."""
    from attn_export.parts.cuda_dry_run.dry_run import dry_run
    from attn_export.parts.cuda_dry_run.dry_run_report import attention_of

    observed = dry_run(folder, architectures=[architecture], dialects=dialects)
    graphs = {file.name: file.dialect for file in read_manifest(folder).graphs.values()}
    lines: dict[str, list[str]] = {name: [] for name in dialects}
    for run in observed:
        of_dialect = lines[graphs[run.graph]]
        if run.refused:
            of_dialect.append(f"{run.graph}: refused: {run.refused}")
        of_dialect += [
            f"{run.graph}, {step.name}: {attention_of(run, step)}; {step.launches} launches"
            for step in run.steps
        ]
    return {
        name: {"verdict": "seen", "cause": printable("; ".join(texts), LONGEST)}
        for name, texts in lines.items()
    }
