"""Tasks that workers of a sweep run: functions of plain data that return plain data."""

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

from attn_export.bundle import MANIFEST, graph_files, read_bundle, read_manifest
from attn_export.errors import AttnExportError, BundleError, OutputError, one_line
from attn_export.results import Report, RuntimeRun, Verdict
from attn_export.spec import AttentionSpec
from attn_export.sweep.sweep_plan import BUNDLE, DRY_RUN, SPEC
from attn_export.temp_folders import scratch

LONGEST: Final = 600
"""The number of characters of a cause."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A bundle that travels to workers.

    Attributes:
        digest: The SHA-256 of its manifest, which holds those of all other files.
        archive: A zip of its files; empty where it was not built.
        refused: Why it was not built; "" where it was.
        seconds: The time of the build.
    """

    digest: str
    archive: bytes
    refused: str = ""
    seconds: float = 0.0


Outcome = dict[str, Any]
"""Fields of a `Row` that a task finds out, by name."""


def build_packed(
    kind: str, content: Mapping[str, Any] | str, dialects: Sequence[str], seed: int
) -> Packed:
    """Build the bundle of a layer, or read one that is there.

    A refusal is a result. What is wrong with the machine is raised, so that another one tries.

    Args:
        kind: `SPEC`, `BUNDLE` or ``"module"``.
        content: As in `sweep_plan.Source`.
        dialects: The dialects of its graphs.
        seed: The seed of its weights.

    Raises:
        OSError: If this machine has no space for it, or otherwise fails.
    """
    started = time.monotonic()
    try:
        if kind == BUNDLE:
            return pack(Path(str(content)))
        with scratch() as folder:
            return dataclasses.replace(
                pack(_built(kind, content, dialects, seed, folder / "bundle")),
                seconds=time.monotonic() - started,
            )
    except OutputError as error:
        raise OSError(one_line(error)) from error
    except AttnExportError as error:
        return Packed("", b"", one_line(error)[:LONGEST] or type(error).__name__)


def _built(
    kind: str, content: Mapping[str, Any] | str, dialects: Sequence[str], seed: int, place: Path
) -> Path:
    """Build a bundle; return its folder, which has another name where numbers are wrong."""
    from attn_export.jobs.build import build
    from attn_export.user_module import load_subject

    if kind == SPEC:
        assert not isinstance(content, str)
        report = build(
            AttentionSpec.from_dict(content), place, dialects=dialects, runtimes=["ort-cpu"],
            seed=seed,
        )  # fmt: skip
    else:
        subject = load_subject(str(content))
        report = build(subject, place, dialects=dialects, runtimes=["ort-cpu"], seed=seed)
    return place if report.passed else place.with_name(f"{place.name}.failed")


def pack(folder: Path) -> Packed:
    """Return a bundle as one archive, after its files were compared with their digests.

    Raises:
        BundleError: If a file is missing or was changed.
    """
    bundle = read_bundle(folder)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name in [MANIFEST, *bundle.manifest["files"]]:
            archive.write(folder / name, name)
    return Packed(_digest(folder), stream.getvalue())


def unpacked(packed: Packed, home: Path) -> Path:
    """Return the folder of a bundle below `home`, where it is unpacked once and checked.

    Args:
        packed: The bundle.
        home: The worker's folder of bundles, by digest.

    Raises:
        BundleError: If what arrived is not what was sent.
    """
    place = home / packed.digest
    if place.is_dir():
        return place
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
        part.rename(place)
    except zipfile.BadZipFile as error:
        raise BundleError(f"the bundle {packed.digest[:12]} arrived broken: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return place


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def run_packed(packed: Packed, runtime: str, dialects: Sequence[str]) -> dict[str, Outcome]:
    """Run the graphs of a bundle in one runtime; return what came of each dialect.

    Args:
        packed: The bundle.
        runtime: The runtime, or a dry run.
        dialects: The dialects that are wanted.

    Raises:
        OSError: If this machine has no space for it, or otherwise fails.
    """
    if packed.refused:
        refused = {"verdict": "refused", "cause": f"not built: {packed.refused}"}
        return dict.fromkeys(dialects, refused)
    started = time.monotonic()
    home = _home()
    home.mkdir(parents=True, exist_ok=True)
    folder = unpacked(packed, home)
    has = {file.dialect for file in graph_files(read_manifest(folder))}
    wanted = [dialect for dialect in dialects if dialect in has]
    absent = {"verdict": "refused", "cause": "the bundle has no graph in this dialect"}
    found: dict[str, Outcome] = {name: absent for name in dialects if name not in has}
    try:
        if wanted and runtime.startswith(DRY_RUN):
            found |= _seen(folder, runtime.removeprefix(DRY_RUN), wanted)
        elif wanted:
            found |= verified(folder, runtime, wanted)
    except OutputError as error:
        raise OSError(one_line(error)) from error
    except AttnExportError as error:
        failed = {"verdict": "error", "cause": one_line(error)[:LONGEST]}
        found |= dict.fromkeys(wanted, failed)
    each = (time.monotonic() - started + packed.seconds) / len(dialects)
    return {name: {**found[name], "seconds": round(each, 3)} for name in dialects}


def _home() -> Path:
    """Return the folder of bundles of this worker, which goes with it."""
    from distributed import get_worker

    try:
        return Path(get_worker().local_directory) / "bundles"
    except ValueError as error:  # no worker runs this
        raise AttnExportError("a task of a sweep runs in a worker of a sweep only") from error


# -- verdicts -----------------------------------------------------------------------------------


def verified(folder: Path, runtime: str, dialects: Sequence[str]) -> dict[str, Outcome]:
    """Verify a bundle in one runtime; return what came of each dialect.

    Args:
        folder: The bundle.
        runtime: The runtime.
        dialects: The dialects that are wanted, of those that the bundle has.
    """
    from attn_export.jobs.explain_failures import explain_failures
    from attn_export.jobs.verify import verify

    report = explain_failures(verify(folder, runtimes=[runtime]), folder)
    graphs = {file.name: file.dialect for file in graph_files(read_manifest(folder))}
    return {
        name: _outcome(report, {g for g, dialect in graphs.items() if dialect == name}, folder)
        for name in dialects
    }


def _outcome(report: Report, graphs: set[str], folder: Path) -> Outcome:
    """Return what came of the graphs of one dialect, without the path of the bundle."""
    runs = [run for run in report.runs if run.graph in graphs]
    verdicts = [verdict for verdict in report.verdicts if verdict.graph in graphs]
    wrong = [verdict for verdict in verdicts if verdict.status != "passed"]
    figures = [v.worst for v in verdicts if v.worst is not None and math.isfinite(v.worst)]
    verdict, cause = _verdict(runs, verdicts)
    ours = (text for text in report.explanations if any(f", {name}: " in text for name in graphs))
    if wrong:
        cause = next(ours, cause)
    return {
        "verdict": verdict, "cause": cause.replace(f"{folder}{os.sep}", "")[:LONGEST],
        "version": next((str(run.facts["version"]) for run in runs if "version" in run.facts), ""),
        "worst": max(figures, default=None),
        "cases": len({verdict.case for verdict in verdicts}),
        "wrong": len({verdict.case for verdict in wrong}),
        "smallest": _smallest(wrong),
    }  # fmt: skip


def _verdict(runs: Sequence[RuntimeRun], verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Return the verdict and its reason: wrong numbers, else how a run ended, else passed.

    A runtime that loads a graph and then refuses every case refuses the graph.
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
    """Return the case with the smallest sizes in its name: ``shape_B1_P0_L1``."""
    names = {verdict.case for verdict in wrong}
    sizes = {name: [int(n) for n in re.findall(r"_[A-Z](\d+)", name)] for name in names}
    return min(names, key=lambda name: (math.prod(n + 1 for n in sizes[name]), name), default="")


def _seen(folder: Path, architecture: str, dialects: Sequence[str]) -> dict[str, Outcome]:
    """Return the kernels of a dry run: it has no verdict."""
    from attn_export.jobs.dry_run import dry_run
    from attn_export.report.dry_run_report import attention_of

    observed = dry_run(folder, architectures=[architecture], dialects=dialects)
    graphs = {file.name: file.dialect for file in graph_files(read_manifest(folder))}
    found: dict[str, list[str]] = {name: [] for name in dialects}
    for one in observed:
        lines = found[graphs[one.graph]]
        if one.refused:
            lines.append(f"{one.graph}: refused: {one.refused}")
        lines += [
            f"{one.graph}, {step.name}: {attention_of(one, step)}; {step.launches} launches"
            for step in one.steps
        ]
    return {
        name: {"verdict": "seen", "cause": "; ".join(lines)[:LONGEST]}
        for name, lines in found.items()
    }
