"""`attn-export verify`: run a bundle's golden vectors in runtimes, without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Unpack

from attn_export.bundle.golden import (
    GoldenEvidence,
    Start,
    check_evidence,
    read_golden,
    stored_cases,
    with_inputs,
)
from attn_export.bundle.manifest import (
    GOLDEN,
    SPEC,
    bundles_in,
    dimensions,
    read_bundle,
    read_manifest,
    refuse_exchange,
    refuse_other_graphs,
    shapes_of,
    spec_text,
)
from attn_export.bundle.quality_vectors import claim_notes, quantised_parts, read_quality
from attn_export.commands.options import BUDGET, limit_own_memory, option, run_options, with_help
from attn_export.commands.output import Output, output_options
from attn_export.dialect_names import MODEL
from attn_export.errors import BundleError, UsageError, choose, printable
from attn_export.judge.gate import apply_baseline, failed_in, read_baseline, write_baseline
from attn_export.optional_parts import hooks
from attn_export.quality import Budget, kept_notes
from attn_export.report.progress import options_of_call
from attn_export.results import BundleCheck, Report, StoredCase
from attn_export.runtimes.pool import Pool
from attn_export.runtimes.run_options import RunKeywords, RunOptions
from attn_export.schema import GraphFile, Manifest
from attn_export.system_info import environment


@with_help(
    "Judge",
    "verify models/mqa",
    "verify models/mqa --runtime openvino --require ort-cuda --junit junit.xml",
    "verify models/mqa --baseline errors.json --update",
    "verify models/mqa --sizes batch=4,query_len=100",
)  # fmt: skip
@option("bundle", type=Path)
@option("--graph", type=Path, help="Run this ONNX file instead of the bundle's.")
@run_options(BUDGET)
@option(
    "--baseline", type=Path, metavar="FILE",
    help="Also fail where an error is more than 4 times what it was in this file.",
)  # fmt: skip
@option(
    "--recompute", is_flag=True,
    help="Compute the reference anew and judge by that; the stored one must agree. Needs torch.",
)  # fmt: skip
@option(
    "--sizes", multiple=True, metavar="AXIS=N,…",
    help="Run random inputs of these sizes in place of the stored ones. Needs torch.",
)  # fmt: skip
@option(
    "--module", metavar="PATH.py:FUNCTION",
    help="Your module, for --recompute and --sizes of a bundle that was built from it.",
)  # fmt: skip
@option(
    "--case", "cases", multiple=True, metavar="NAME", help="Run this test case alone.",
)  # fmt: skip
@option(
    "--last-failed", type=Path, metavar="FILE",
    help="Run the cases alone that failed in this report, as --json FILE writes it.",
)  # fmt: skip
@option("--update", is_flag=True, help="Write the errors of this run into --baseline.")
@option(
    "--trust", metavar="PUBLIC.pem|IDENTITY",
    help="Fail unless this key, or this identity of sigstore, signed every file of the bundle.",
)  # fmt: skip
@option("--oidc-issuer", metavar="URL", help="Issuer of the identity of --trust.")
@output_options
def verify_command(
    bundle: Path, graph: Path | None, run: RunOptions, destinations: Output, **options: Any
) -> int:
    """Replay a bundle's test cases; needs torch only with --recompute or --sizes."""
    last_failed = options.pop("last_failed")
    if last_failed is not None:
        options["cases"] = (*options["cases"], *failed_in(last_failed))
    if options["update"] and options["baseline"] is None:
        raise UsageError("--update needs --baseline FILE")
    limit_own_memory()
    with destinations.job(bundle.name, run) as run:
        report = verify(bundle, run, graph=graph, **options)
        if not report.passed and not bundles_in(bundle):
            from attn_export.commands.explain_failures import explain_failures

            report = explain_failures(report, bundle, graph, run=run)
    return destinations.render(report, place=None)


def verify(
    bundle: Path | str,
    run: RunOptions | None = None,
    *,
    graph: Path | str | None = None,
    recompute: bool = False,
    module: str | None = None,
    sizes: Sequence[str] = (),
    cases: Sequence[str] = (),
    baseline: Path | str | None = None,
    update: bool = False,
    trust: Path | str | None = None,
    oidc_issuer: str | None = None,
    **keywords: Unpack[RunKeywords],
) -> Report:
    """Run a bundle's graphs, or another graph, and compare the outputs with its test cases.

    Args:
        bundle: The bundle's folder, or a folder of several bundles.
        run: The keywords as one value.
        graph: An ONNX file to run instead of the bundle's own graphs. If it has the file name of
            one of these, it is run with the same layouts, dtypes and shared buffers.
        recompute: Compute the cases, their reference and tolerance anew, and judge by them. The
            stored ones must agree with them. Requires torch.
        module: The user's module from which to compute the reference, as ``PATH.py:FUNCTION``.
            Default: the spec of the bundle with the weights of `model.onnx`.
        sizes: Sizes of random cases to run instead of the stored cases:
            ``["batch=4,query_len=2048"]``. Requires torch.
        cases: The names of the test cases to run; all by default.
        baseline: A file with errors of an earlier run. Outputs with much larger errors fail.
        update: Write the errors of this run to `baseline`, if it passes, and do not compare.
        trust: A PEM file with the public key of the required signer, or a sigstore identity. The
            signed files are copied, and the copy is run.
        oidc_issuer: The URL of the issuer of a sigstore identity; None for a key.
        **keywords: As for `build`. Budgets replace those of the bundle.

    Returns:
        The report. Its `error` is a `BundleError` if stored cases differ from those computed anew.

    Raises:
        UsageError: If a name is unknown, or `baseline` does not exist.
        GraphError: If `graph` cannot be read, or has other inputs or outputs.
        BundleError: If a file is missing or was changed, or `trust` did not sign it.
    """
    if recompute and sizes:
        raise UsageError("--recompute is about the stored cases, --sizes about others; choose one")
    if module is not None and not (recompute or sizes):
        raise UsageError(f"--module {module} needs --recompute or --sizes")
    earlier = read_baseline(Path(baseline)) if baseline and not update else None
    if cases and (sizes or recompute or update):
        raise UsageError("--case is about stored cases alone; leave the other option out")
    evidence = functools.partial(
        _evidence, recompute=recompute, sizes=sizes, module=module, only=cases
    )
    signer = functools.partial(attested, signer=trust, issuer=oidc_issuer)
    with options_of_call(run, keywords) as run:
        replacement = Path(graph) if graph else None
        report = _of_all(Path(bundle), replacement, run, evidence, signer, cases)
    if baseline and update and report.passed:
        write_baseline(Path(baseline), report)
    return report if earlier is None else apply_baseline(report, earlier)


_EvidenceOf = Callable[[Path, Manifest, Pool, Start], GoldenEvidence]


def _of_all(
    bundle: Path,
    replacement: Path | None,
    run: RunOptions,
    evidence_of: _EvidenceOf,
    signer: Callable[[Path], AbstractContextManager[tuple[Path, BundleCheck]]],
    cases: Sequence[str],
) -> Report:
    """Return the report on a bundle, or one on all bundles in a folder that have the cases."""
    if replacement is None:
        refuse_other_graphs(bundle)
    bundles, reports = bundles_in(bundle) or {"": bundle}, {}
    if cases:
        bundles = _having(bundles, cases)
    with contextlib.ExitStack() as stack:

        def opened(path: Path) -> tuple[contextlib.ExitStack, _Opened]:
            own = stack.enter_context(contextlib.ExitStack())
            return own, own.enter_context(_opened(path, replacement, run, signer))

        # The processes of a bundle's runtimes start while those of the one before it run.
        following = map(opened, bundles.values())
        next_bundle = next(following)
        for name, path in bundles.items():
            (own, this), next_bundle = next_bundle, next(following, next_bundle)
            with own:
                report = _run(this, replacement, evidence_of)
            # Not the path of the copy that may have been checked.
            reports[name] = dataclasses.replace(
                report, model=replacement or path / MODEL, name=printable(path.absolute().name)
            )
    report = reports.get("") or Report.joined(bundle.absolute().name, reports)
    for budget in run.budgets:
        if report.quality is None or not report.quality.measures(budget):
            raise UsageError(
                f"a budget of {budget}, and nothing to measure it on: {bundle} has no quantised "
                "weights or no logits, or --sizes is given; leave it out"
            )
    return report


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A bundle whose runtimes have started: its folder, or that of a copy that was checked."""

    folder: Path
    check: BundleCheck
    manifest: Manifest
    pool: Pool


@contextlib.contextmanager
def _opened(
    bundle: Path,
    replacement: Path | None,
    run: RunOptions,
    signer: Callable[[Path], AbstractContextManager[tuple[Path, BundleCheck]]],
) -> Iterator[_Opened]:
    with signer(bundle) as (folder, check), refuse_exchange(folder):
        manifest = read_manifest(folder)
        files = [_described(replacement, manifest)] if replacement else [*manifest.graphs.values()]
        with Pool(run, files) as pool:
            yield _Opened(folder, check, manifest, pool)


def _run(opened: _Opened, replacement: Path | None, evidence_of: _EvidenceOf) -> Report:
    """Run the cases, judge the outputs, and return the report."""
    folder, manifest, pool = opened.folder, opened.manifest, opened.pool
    axes = shapes_of(manifest.ends)
    graphs = (replacement.parent if replacement else folder).absolute()
    start = functools.partial(
        pool.start, graphs, list(manifest.inputs), axes, caches=manifest.next_inputs
    )
    evidence = evidence_of(folder, manifest, pool, start)
    signature = opened.check()
    facts = environment()
    from attn_export.commands.judge_graphs import judge_goldens

    spec = spec_text(folder, manifest)
    if replacement is None:
        _check_claims(folder, manifest, spec, pool)
    judged = judge_goldens(pool, evidence.goldens, axes, manifest.batch, evidence.quality)
    quality, notes = judged.quality, (*judged.notes, *evidence.notes)
    claims = claim_notes(quality, pool.run.budgets, "") if not evidence.quality else ()
    report = Report(
        manifest.name, (*evidence.runs, *judged.runs), (*evidence.verdicts, *judged.verdicts),
        facts, (*notes, *claims),
        dimensions=dimensions(manifest.ends, spec),
        error=evidence.error, quality=quality, signature=signature,
    )  # fmt: skip
    if not report.passed:
        read_bundle(folder)  # files may have gone after they were checked
    return report


def _having(bundles: Mapping[str, Path], cases: Sequence[str]) -> dict[str, Path]:
    """Return the bundles that have some of these cases; each case must be in one of them."""
    for path in bundles.values():
        read_manifest(path)  # says what is no bundle
    names = {name: {c.name for c in stored_cases(p / GOLDEN)[1]} for name, p in bundles.items()}
    known = sorted(set().union(*names.values()))
    if unknown := [name for name in cases if name not in known]:
        shown = printable(unknown[0], 60)
        raise UsageError(f"there is no case {shown!r}; {choose(unknown[0], known)}")
    return {name: path for name, path in bundles.items() if names[name] & {*cases}}


def _evidence(
    folder: Path,
    manifest: Manifest,
    pool: Pool,
    start: Start,
    *,
    recompute: bool,
    sizes: Sequence[str],
    module: str | None,
    only: Sequence[str],
) -> GoldenEvidence:
    """Start the runtimes on cases, and return these with the reference to judge by."""
    run, place = pool.run, pool.out / GOLDEN
    inputs, cases = stored_cases(folder / GOLDEN)
    chosen = [case for case in cases if not only or case.name in only]
    if not sizes and not recompute:
        run.progress.expect(start(chosen))
    # The files of the bundle are checked while the runtimes start and run. numpy is only
    # imported from here on, unless `graph` is given.
    read_bundle(folder)
    if sizes:
        from attn_export.commands.recompute import Recomputation

        reference = Recomputation(folder, manifest, module, run.progress)
        goldens, cases = reference.random_cases(sizes, place)
        run.progress.expect(start(cases))
        return GoldenEvidence(goldens)
    evidence = _stored_evidence(folder, manifest, inputs, cases, run.budgets)
    if only:
        left = [golden for golden in evidence.goldens if golden.case.name in only]
        return dataclasses.replace(evidence, goldens=left)
    if not recompute:
        return evidence
    from attn_export.commands.recompute import Recomputation

    reference = Recomputation(folder, manifest, module, run.progress)
    return reference.recompute(evidence, manifest.versions, place, start)


def checked_bundle(bundle: Path) -> Manifest:
    """Return the manifest of a bundle; raise BundleError if `verify` would, running nothing."""
    manifest = read_bundle(bundle)
    refuse_other_graphs(bundle)
    with attested(bundle, None, None) as (folder, check):
        _stored_evidence(folder, manifest, *stored_cases(folder / GOLDEN))
        _check_claims(folder, manifest, spec_text(folder, manifest), None)
        check()
    return manifest


def _check_claims(folder: Path, manifest: Manifest, spec: str, pool: Pool | None) -> None:
    from attn_export.judge.claims import check_claims

    plain_layer = SPEC in manifest.files and not quantised_parts(spec)
    check_claims(folder, manifest, pool, plain_layer=plain_layer)


def _stored_evidence(
    folder: Path, manifest: Manifest, inputs: list[str], cases: Sequence[StoredCase],
    budgets: Sequence[Budget] = (),
) -> GoldenEvidence:  # fmt: skip
    """Return the golden vectors of a bundle; raise BundleError if they prove nothing."""
    from attn_export.judge.golden_index_check import check_labels
    from attn_export.judge.ignored_rows import rows_note

    spec, ours = spec_text(folder, manifest), SPEC in manifest.files
    stored = with_inputs(read_golden(folder / GOLDEN), cases, inputs)
    quality, goldens = read_quality(folder / GOLDEN, stored, budgets, spec)
    stored = [*goldens]
    if ours and stored[0].budgets:
        raise BundleError(
            f"the stored test cases prove nothing: {folder / GOLDEN} has a budget in place of the "
            "tolerances, which a layer always has; build the bundle again"
        )
    check_evidence(manifest, [g.case for g in stored], ours=ours)
    check_labels(manifest, stored, ours=ours, batch="batch" if ours else manifest.batch)
    if stored[0].budgets:
        from attn_export.judge.claims import within_limits

        stored = within_limits(folder, manifest, stored)
    if quality is not None:
        quality = dataclasses.replace(quality, kept=manifest.kept)
    notes = (
        *claim_notes(quality, budgets, spec), *kept_notes(manifest.kept),
        *(() if ours else rows_note(stored)),
    )  # fmt: skip
    return GoldenEvidence(stored, quality, notes)


def _described(path: Path, manifest: Manifest) -> GraphFile:
    """Return the description of a graph that replaces those of a bundle.

    If the bundle has a graph of the same file name, the description is derived from that graph's.
    """
    from attn_export.graph.load import load_proto
    from attn_export.graph.signature_check import match_graph_file

    file = manifest.graphs.get(path.name) or GraphFile(path.name)
    return match_graph_file(load_proto(path), path.name, file, manifest.inputs, manifest.outputs)


@contextlib.contextmanager
def attested(
    bundle: Path, signer: Path | str | None, issuer: str | None
) -> Iterator[tuple[Path, BundleCheck]]:
    """Yield the folder to read a bundle from, and the check of the rest.

    `signer` and `issuer` are those of --trust and --oidc-issuer.
    """
    for of_part in hooks("attested"):
        with of_part(bundle, signer, issuer) as found:
            yield found
        return
    if signer is not None or issuer is not None:
        raise UsageError(
            "--trust needs the part attestation, which is missing; install attn-export whole"
        )
    yield bundle, lambda: None
