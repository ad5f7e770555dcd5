"""Replay of a bundle's golden vectors in runtimes, on a machine that need not have torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_export.bundle import (
    GOLDEN,
    SPEC,
    dimensions,
    graph_files,
    read_bundle,
    read_manifest,
)
from attn_export.dialect_names import MODEL
from attn_export.errors import GraphError, UsageError
from attn_export.jobs.sign import Trust, opened, state_of
from attn_export.parity.gate import Gate, apply_baseline, cpu_notes, read_baseline, write_baseline
from attn_export.parity.golden import case_folders, check_evidence, read_golden, tried_note
from attn_export.parity.quality_vectors import read_quality
from attn_export.quality import Budget, Quality, parse_budgets
from attn_export.report.progress import Progress
from attn_export.report.statements import check_statements
from attn_export.results import Golden, GraphFile, Report, Signature
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.system_info import environment
from attn_export.temp_folders import scratch
from attn_export.untrusted_files import read_text


def verify(
    bundle: Path | str,
    *,
    graph: Path | str | None = None,
    runtimes: Sequence[str] = (),
    require: Sequence[str] = (),
    atol: float | None = None,
    rtol: float | None = None,
    budgets: Sequence[str] = (),
    recompute: bool = False,
    module: str | None = None,
    sizes: Sequence[str] = (),
    baseline: Path | str | None = None,
    update: bool = False,
    trust: Path | str | None = None,
    oidc_issuer: str | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a bundle's graphs, or another one in their place, against its golden vectors.

    Args:
        bundle: The bundle's folder.
        graph: An ONNX file to run instead of the bundle's own; one that is called as one of
            these is run as that is.
        runtimes: Names of the runtimes. Default: ort-cpu, and ort-cuda where there is a GPU.
        require: Names of runtimes that must run; one that cannot is a failure.
        atol: A gate beside the judge's rule: |r − eager| ≤ atol + rtol·|eager|.
        rtol: See `atol`.
        budgets: Limits for a quantised model's distance from the model in float, in place of those
            of the bundle: ``sqnr>=30``.
        recompute: Compute the truth anew from the stored inputs, and judge by that; the stored
            truth must agree with it. Needs torch.
        module: The user's module that the truth is computed from, as ``PATH.py:FUNCTION``. Of
            bundles of specs it is the spec, with the weights of `model.onnx`.
        sizes: Run random cases of these sizes in place of the golden ones:
            ``["batch=4,query_len=2048"]``. Needs torch.
        baseline: A file that remembers errors: an output that is much worse than there fails.
        update: Write this run's errors into `baseline`, if it passed, and compare nothing.
        trust: A PEM file with the public key of the required signer, or a sigstore identity. The
            files that were signed are copied, and the copy is what runs.
        oidc_issuer: The URL of the issuer that vouches for an identity; None for a key.
        limits: The limits of each runtime's process.
        progress: Receiver of progress.

    Raises:
        UsageError: If a name is unknown, or there is no `baseline` to compare with.
        GraphError: If `graph` cannot be read, or has other inputs or outputs.
        BundleError: If a file of the bundle is missing or was changed, or if `trust` did not sign.
    """
    selection, limited = Selection.of(runtimes, require), parse_budgets(budgets)
    _check_options(recompute=recompute, module=module, sizes=sizes)
    before = read_baseline(Path(baseline)) if baseline and not update else None
    other = Path(graph) if graph else None
    with opened(Path(bundle), Trust.of(trust, oidc_issuer)) as (folder, signature):
        report = _Replay(
            folder, other, selection, limited, Gate(atol, rtol), recompute, module, sizes,
            limits or Limits.default(), progress or Progress(), signature,
        ).report()  # fmt: skip
    # A copy is gone by now.
    report = dataclasses.replace(report, model=other or Path(bundle) / MODEL)
    if before is not None:
        return apply_baseline(report, before)
    if baseline and report.passed:
        write_baseline(Path(baseline), report)
    return report


@dataclasses.dataclass(frozen=True)
class _Replay:
    folder: Path
    graph: Path | None
    selection: Selection
    budgets: tuple[Budget, ...]
    gate: Gate
    recompute: bool
    module: str | None
    sizes: Sequence[str]
    limits: Limits
    progress: Progress
    signature: Signature | None

    def report(self) -> Report:
        """Run the golden vectors, and judge what comes out."""
        folder, manifest = self.folder, read_manifest(self.folder)
        other, progress = self.graph, self.progress
        forms = graph_files(manifest) if other is None else [_form_of(other, manifest)]
        with scratch() as out, Pool(self.selection, forms, self.limits) as pool:
            inputs, cases = case_folders(folder / GOLDEN)
            ends = {**manifest["inputs"], **manifest["outputs"]}
            axes = {name: entry["shape"] for name, entry in ends.items()}
            graphs = (other.parent if other else folder).absolute()
            goldens: list[Golden] = []
            quality: Quality | None = None
            if self.sizes:
                from attn_export.jobs.recompute import Truth

                read_bundle(folder)
                truth = Truth.of(folder, manifest, self.module, progress)
                goldens, cases = truth.at(self.sizes, out / GOLDEN)
            pool.start(graphs, inputs, axes, cases, out)
            # While the runtimes start and run (numpy is imported only from here on): is everything
            # in the bundle as it was written?
            if not self.sizes:
                read_bundle(folder)
                goldens = read_golden(folder / GOLDEN)
                quality = read_quality(folder / GOLDEN, goldens, self.budgets)
                shapes = {name: tuple(entry["shape"]) for name, entry in manifest["inputs"].items()}
                check_evidence(shapes, [g.case for g in goldens], ours=SPEC in manifest["files"])
            check_statements(folder, manifest)
            signature = self.signature or state_of(folder)
            stored = goldens
            if self.recompute:
                from attn_export.jobs.recompute import Truth

                goldens = Truth.of(folder, manifest, self.module, progress).recomputed(
                    stored, cases
                )
            made_with = environment()
            progress.expect(pool.expected())
            from attn_export.parity.replay import judge_pool

            runs, verdicts = judge_pool(pool, goldens, axes, out, self.gate, progress.advance)
        if self.recompute:
            from attn_export.jobs.recompute import judge_stored

            run, of_truth = judge_stored(goldens, stored)
            runs, verdicts = (run, *runs), (*of_truth, *verdicts)
        notes = (tried_note([golden.case for golden in goldens]), *cpu_notes(verdicts, goldens))
        spec = read_text(folder / SPEC) if SPEC in manifest["files"] else ""
        if self.budgets and quality is None:
            raise UsageError(
                f"a budget of {self.budgets[0]}, and nothing to measure it on: {folder} has no "
                "quantised weights, or --sizes is given; leave it out"
            )
        return Report(
            manifest["name"], runs, verdicts, made_with, notes,
            dimensions=dimensions(manifest["inputs"], manifest["outputs"], spec),
            quality=quality, signature=signature,
        )  # fmt: skip


def _check_options(*, recompute: bool, module: str | None, sizes: Sequence[str]) -> None:
    if recompute and sizes:
        raise UsageError("--recompute is about the stored cases, --sizes about others; choose one")
    if module is not None and not (recompute or sizes):
        raise UsageError(f"--module {module} needs --recompute or --sizes")


def _form_of(path: Path, manifest: Mapping[str, Any]) -> GraphFile:
    """Return how to run a graph in place of those of a bundle.

    One that is called as one of the bundle's is run as that is, with all cases that it takes.

    Raises:
        GraphError: If it cannot be read, or has other inputs or outputs than the bundle.
    """
    if not path.is_file():
        raise GraphError(f"cannot read {path}: no such file")
    from attn_export.graph.load import load_proto
    from attn_export.graph.signature_check import End, form_of_file

    named = [form for form in graph_files(manifest) if form.name == path.name]
    form = named[0] if named else GraphFile(path.name)
    inputs, outputs = (
        {name: End(tuple(entry["shape"]), entry["dtype"]) for name, entry in manifest[end].items()}
        for end in ("inputs", "outputs")
    )
    return form_of_file(load_proto(path), path.name, form, inputs, outputs)
