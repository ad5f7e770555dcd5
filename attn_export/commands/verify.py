"""The job behind `verify`: run a bundle's golden vectors in runtimes, without torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from attn_export.bundle.golden import (
    GoldenEvidence,
    Start,
    check_evidence,
    read_golden,
    stored_cases,
    tried_note,
    with_inputs,
)
from attn_export.bundle.manifest import (
    GOLDEN,
    SPEC,
    dimensions,
    read_bundle,
    read_manifest,
    refuse_exchange,
    shapes_of,
    spec_text,
)
from attn_export.bundle.quality_vectors import claim_notes, read_quality
from attn_export.commands.attestation import attestation
from attn_export.dialect_names import MODEL
from attn_export.errors import UsageError
from attn_export.judge.gate import Gate, apply_baseline, cpu_notes, read_baseline, write_baseline
from attn_export.quality import Budget, parse_budgets
from attn_export.report.progress import Progress
from attn_export.results import Report, Signature
from attn_export.runtimes.pool import Pool, Selection
from attn_export.runtimes.protocol import Limits
from attn_export.schema import GraphFile, Manifest
from attn_export.system_info import environment
from attn_export.temp_folders import scratch


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
    """Run a bundle's graphs, or another graph, and judge the outputs by its golden vectors.

    Args:
        bundle: The bundle's folder.
        graph: An ONNX file to run instead of the bundle's own graphs. If it has the file name of
            one of these, it is run with the same layouts, dtypes and shared buffers.
        runtimes: Names of the runtimes. Default: ort-cpu, and ort-cuda if there is a GPU.
        require: Names of runtimes that must run at least one graph.
        atol: An additional limit: |r − eager| ≤ atol + rtol·|eager|, where r is a runtime's output.
        rtol: See `atol`.
        budgets: Limits for the error of a quantised model against the float model, which replace
            those of the bundle: ``sqnr>=30``.
        recompute: Compute the cases, their truth and the error allowed anew, and judge by them. The
            stored ones must agree with them. Requires torch.
        module: The user's module from which to compute the truth, as ``PATH.py:FUNCTION``.
            Default: the spec of the bundle with the weights of `model.onnx`.
        sizes: Sizes of random cases to run instead of the golden vectors:
            ``["batch=4,query_len=2048"]``. Requires torch.
        baseline: A file with errors of an earlier run. Outputs with much larger errors fail.
        update: Write the errors of this run to `baseline`, if it passes, and do not compare.
        trust: A PEM file with the public key of the required signer, or a sigstore identity. The
            signed files are copied, and the copy is run.
        oidc_issuer: The URL of the issuer of a sigstore identity; None for a key.
        limits: The limits of each runtime's process.
        progress: Receiver of progress.

    Returns:
        The report, with a verdict on each output of each case in each runtime. Its `error` is a
        `BundleError` if stored cases differ from those that are computed anew.

    Raises:
        UsageError: If a name is unknown, or `baseline` does not exist.
        GraphError: If `graph` cannot be read, or has other inputs or outputs.
        BundleError: If a file of the bundle is missing or was changed, or `trust` did not sign it.
    """
    replay = _Replay(
        Path(bundle), Path(graph) if graph else None, Selection.of(runtimes, require),
        parse_budgets(budgets), Gate(atol, rtol), recompute, module, sizes,
        trust, oidc_issuer, limits or Limits.default(), progress or Progress(),
    )  # fmt: skip
    return _with_baseline(replay, Path(baseline), update) if baseline else replay.report()


@dataclasses.dataclass(frozen=True)
class _Replay:
    """One call of `verify`."""

    bundle: Path
    graph: Path | None
    selection: Selection
    budgets: tuple[Budget, ...]
    gate: Gate
    recompute: bool
    module: str | None
    sizes: Sequence[str]
    trust: Path | str | None
    issuer: str | None
    limits: Limits
    progress: Progress

    def __post_init__(self) -> None:
        if self.recompute and self.sizes:
            raise UsageError(
                "--recompute is about the stored cases, --sizes about others; choose one"
            )
        if self.module is not None and not (self.recompute or self.sizes):
            raise UsageError(f"--module {self.module} needs --recompute or --sizes")

    def report(self) -> Report:
        """Check the signature, run the cases, judge the outputs, and return the report."""
        with (
            attestation().signed_files(self.bundle, self.trust, self.issuer) as (folder, signature),
            refuse_exchange(folder),
        ):
            report = self._run(folder, signature)
            if not report.passed:
                read_bundle(folder)  # files may have gone after they were checked
        # Not the path in `folder`, which may have been a temporary copy.
        return dataclasses.replace(report, model=self.graph or self.bundle / MODEL)

    def _run(self, folder: Path, signature: Signature | None) -> Report:
        manifest = read_manifest(folder)
        replacement, axes = self.graph, shapes_of(manifest.ends)
        files = [_described(replacement, manifest)] if replacement else [*manifest.graphs.values()]
        with scratch() as out, Pool(self.selection, files, self.limits) as pool:
            graphs = (replacement.parent if replacement else folder).absolute()
            start = functools.partial(pool.start, graphs, list(manifest.inputs), axes, out=out)
            evidence = self._evidence(folder, manifest, out / GOLDEN, start)
            signature = attestation().check_attested(folder, manifest, signature)
            facts = environment()
            from attn_export.judge.judge import undetermined_note
            from attn_export.judge.replay import buffers_note, judge_pool

            runs, verdicts = judge_pool(
                pool, evidence.goldens, axes, self.gate, self.progress.advance
            )
        if self.budgets and evidence.quality is None:
            raise UsageError(
                f"a budget of {self.budgets[0]}, and nothing to measure it on: {folder} has no "
                "quantised weights, or --sizes is given; leave it out"
            )
        notes = (
            tried_note([golden.case for golden in evidence.goldens]), *buffers_note(files),
            *undetermined_note(evidence.goldens), *cpu_notes(verdicts, evidence.goldens),
            *evidence.notes,
        )  # fmt: skip
        return Report(
            manifest.name, (*evidence.runs, *runs), (*evidence.verdicts, *verdicts), facts, notes,
            dimensions=dimensions(manifest.ends, spec_text(folder, manifest)), error=evidence.error,
            quality=evidence.quality, signature=signature,
        )  # fmt: skip

    def _evidence(
        self, folder: Path, manifest: Manifest, place: Path, start: Start
    ) -> GoldenEvidence:
        """Start the runtimes on cases, and return these with the truth to judge by."""
        inputs, cases = stored_cases(folder / GOLDEN)
        if not self.sizes and not self.recompute:
            self.progress.expect(start(cases))
        # The files of the bundle are checked while the runtimes start and run. numpy is only
        # imported from here on, unless `graph` is given.
        read_bundle(folder)
        if self.sizes:
            from attn_export.commands.recompute import Truth

            truth = Truth(folder, manifest, self.module, self.progress)
            goldens, cases = truth.random_cases(self.sizes, place)
            self.progress.expect(start(cases))
            return GoldenEvidence(goldens)
        from attn_export.judge.labels import check_labels

        # Not by `Roles`: importing the spec would take longer than the checks.
        batch = next((axis for axis, role in manifest.roles.items() if role == "batch"), "batch")
        spec, ours = spec_text(folder, manifest), SPEC in manifest.files
        stored = with_inputs(read_golden(folder / GOLDEN), cases, inputs)
        quality = read_quality(folder / GOLDEN, stored, self.budgets, spec)
        check_evidence(manifest, [g.case for g in stored], ours=ours)
        check_labels(manifest.inputs, stored, ours=ours, batch=batch)
        evidence = GoldenEvidence(stored, quality, claim_notes(quality, self.budgets, spec))
        if not self.recompute:
            return evidence
        from attn_export.commands.recompute import Truth

        truth = Truth(folder, manifest, self.module, self.progress)
        return truth.recompute(evidence, manifest.versions, place, start)


def _with_baseline(replay: _Replay, baseline: Path, update: bool) -> Report:
    """Return a report beside a baseline, or update the baseline if the report passed."""
    earlier = None if update else read_baseline(baseline)
    report = replay.report()
    if earlier is not None:
        return apply_baseline(report, earlier)
    if report.passed:
        write_baseline(baseline, report)
    return report


def _described(path: Path, manifest: Manifest) -> GraphFile:
    """Return the description of a graph that replaces those of a bundle.

    If the bundle has a graph of the same file name, the description is derived from that graph's.
    """
    from attn_export.graph.load import load_proto
    from attn_export.graph.signature_check import match_graph_file

    same_name = [file for file in manifest.graphs.values() if file.name == path.name]
    file = same_name[0] if same_name else GraphFile(path.name)
    return match_graph_file(load_proto(path), path.name, file, manifest.inputs, manifest.outputs)
