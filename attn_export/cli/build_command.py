"""`attn-export build`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.bundle import failed_folder
from attn_export.cli.options import (
    PATH,
    SIZE,
    BuildCommand,
    BuildInput,
    budget_option,
    module_option,
    runtime_options,
    spec_options,
)
from attn_export.cli.output import Output, output_options
from attn_export.spec import VARIANTS

if TYPE_CHECKING:
    from attn_export.report.progress import Progress
    from attn_export.results import Report


@click.command("build", cls=BuildCommand)
@click.argument("spec_file", metavar="[SPEC.toml]", required=False, type=PATH)
@click.option("--variant", metavar="|".join(VARIANTS), help="A spec to start from: E 512, H 8.")
@spec_options
@module_option
@click.option(
    "--weights", type=PATH, metavar="FILE",
    help="A safetensors checkpoint, its index, or its folder; config.json beside it is read. A "
    "config.json alone gives random weights.",
)  # fmt: skip
@click.option(
    "--layer", metavar="N",
    help="The layer of the checkpoint, or a prefix of tensor names.  [default: 0]",
)  # fmt: skip
@click.option(
    "--pool-kv-heads", type=SIZE, metavar="N",
    help="Mean-pool the key/value heads of the checkpoint to so many.",
)  # fmt: skip
@click.option(
    "--kv-scales", type=PATH, metavar="FILE",
    help="A .npz or .safetensors file with k_scale and v_scale of the cache.",
)  # fmt: skip
@click.option(
    "--calibrate", type=PATH, metavar="FILE",
    help="A file of hidden states, query [B, L, E], to find these scales from.  [random tokens]",
)  # fmt: skip
@click.option(
    "--dialect", "dialects", multiple=True, metavar="NAME",
    help="standard, portable, ort, cuda, or all that fit.  [all]",
)  # fmt: skip
@runtime_options
@budget_option
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Seed of random weights."
)
@click.option("--output", type=PATH, help="The bundle's folder.  [models/<name>]")
@click.option(
    "--tune", is_flag=True, help="Measure forms of the ort graphs here, and keep the fastest."
)
@click.option(
    "--dry-run/--no-dry-run", default=None, envvar="ATTN_EXPORT_DRY_RUN", show_envvar=True,
    help="Add the CUDA kernels of the graphs to the report.  [if its libraries are built]",
)  # fmt: skip
@click.option(
    "--evidence", is_flag=True, help="Write an in-toto test result and a CycloneDX ML-BOM, too."
)
@output_options
def build_command(
    spec_file: Path | None,
    variant: str | None,
    module: str | None,
    weights: Path | None,
    layer: str | None,
    pool_kv_heads: int | None,
    kv_scales: Path | None,
    calibrate: Path | None,
    output: Path | None,
    tune: bool,
    dry_run: bool | None,
    evidence: bool,
    destinations: Output,
    seed: int,
    dialects: tuple[str, ...],
    runtimes: tuple[str, ...],
    require: tuple[str, ...],
    atol: float | None,
    rtol: float | None,
    budgets: tuple[str, ...],
    **fields: Any,
) -> int:
    """Build a bundle: export, check, run everywhere, judge.

    From SPEC.toml, --variant, dimensions alone (options change single fields), --weights, or
    --module.
    """
    from attn_export.jobs.build import build
    from attn_export.report.progress import progress

    changes = {name: value for name, value in fields.items() if value is not None}
    source = BuildInput(
        spec_file, variant, module, weights, layer, pool_kv_heads, kv_scales, calibrate
    )
    source.check(changes)
    output = output or Path("models") / source.name
    with destinations.refusals(source.name), progress(quiet=destinations.quiet) as bar:
        subject = source.read(changes, bar, seed)
        report = build(
            subject, output, name=source.name, dialects=dialects or ("all",), runtimes=runtimes,
            require=require, atol=atol, rtol=rtol, budgets=budgets, seed=seed, evidence=evidence,
            dry_run=dry_run, progress=bar,
        )  # fmt: skip
        bundle = output if report.passed else failed_folder(output)
        if tune and report.passed:
            report = tune_bundle(bundle, report, bar)
        if any(verdict.status != "passed" for verdict in report.verdicts):
            from attn_export.jobs.explain_failures import explain_failures

            report = explain_failures(report, bundle, progress=bar)
    return destinations.render(report, bundle)


def tune_bundle(bundle: Path, report: Report, bar: Progress) -> Report:
    """Tune a bundle. Return the new report if tuning changed the bundle, else the one passed in.

    Args:
        bundle: The folder of the bundle.
        report: The report of the build.
        bar: Receiver of progress.
    """
    from attn_export.jobs.tune import tune

    result = tune(bundle, progress=bar)
    return report if result.report is None or not result.report.passed else result.report
