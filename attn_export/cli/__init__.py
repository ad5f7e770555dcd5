"""The command line: parse, call one job, render, exit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attn_export.cli.options import report_options, runtime_options, spec_options
from attn_export.errors import (
    INTERRUPTED,
    AttnExportError,
    GraphError,
    OutputError,
    UsageError,
    one_line,
)
from attn_export.spec import VARIANTS, AttentionSpec

if TYPE_CHECKING:
    from attn_export.subject import Subject


def run(arguments: Sequence[str]) -> int:
    """Run the command line; the exit code. Errors are one line on stderr."""
    try:
        code = cli.main(list(arguments), prog_name="attn-export", standalone_mode=False)
    except AttnExportError as error:
        return _complain(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return UsageError.exit_code
    except click.ClickException as error:
        return _complain(error.format_message(), UsageError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted; nothing was written", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough (`attn-export … | head`).
        sys.stderr.close()
        return 0
    except OSError as error:
        return _complain(f"the system refused: {one_line(error)}", UsageError.exit_code)
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    click.echo(f"attn-export: {' '.join(message.split())}", err=True)
    return code


# -- commands ------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="attn-export")
def cli() -> None:
    """Export PyTorch attention to ONNX and prove that every runtime computes the same.

    Exit codes: 0 passed; 2 wrong usage; 3 export failed; 4 graph refused; 5 a runtime failed
    or is missing; 6 parity mismatch; 7 bundle damaged.
    """


@cli.command("build")
@click.argument("spec_file", metavar="[SPEC.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--variant", metavar="|".join(VARIANTS), help="A spec to start from: E 512, H 8.")
@spec_options
@click.option(
    "--module", metavar="PATH.py:FUNCTION", help="A function that returns a Subject of your own."
)
@click.option("--dialect", "dialects", multiple=True, metavar="NAME", help="standard, or all.")
@runtime_options
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the weights.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="The bundle's folder.  [models/<name>]"
)
@report_options
def build_command(
    spec_file: Path | None,
    variant: str | None,
    module: str | None,
    output: Path | None,
    json_file: str | None,
    quiet: bool,
    seed: int,
    dialects: tuple[str, ...],
    runtimes: tuple[str, ...],
    require: tuple[str, ...],
    atol: float | None,
    rtol: float | None,
    **fields: Any,
) -> int:
    """Build a bundle: export, check, run everywhere, judge.

    From SPEC.toml, --variant, dimensions alone (options change single fields), or --module.
    """
    from attn_export.jobs.build import build
    from attn_export.report.progress import progress

    changes = {name: value for name, value in fields.items() if value is not None}
    _check_writable(json_file)
    name, subject = _what(spec_file, variant, module, changes)
    output = output or Path("models") / name
    with progress(quiet=quiet) as bar:
        report = build(
            subject, output, name=name, dialects=dialects or ("all",), runtimes=runtimes,
            require=require, atol=atol, rtol=rtol, seed=seed, progress=bar,
        )  # fmt: skip
    place = output if report.passed else output.with_name(output.name + ".failed")
    return _render(report, json_file, quiet=quiet, place=place)


def _what(
    spec_file: Path | None, variant: str | None, module: str | None, changes: dict[str, Any]
) -> tuple[str, AttentionSpec | Subject]:
    """The name of what is built, and the spec or subject."""
    given = [str(source) for source in (spec_file, variant, module) if source]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are given; choose one")
    if module:
        if changes:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in changes)
            raise UsageError(f"{flags} with --module {module}, which brings its own; leave it out")
        from attn_export.user_module import load_subject

        return module.rpartition(":")[2], load_subject(module)
    if spec_file:
        return spec_file.stem, AttentionSpec.from_toml(spec_file, **changes)
    if variant:
        return variant, AttentionSpec.variant(variant, **changes)
    if not changes:
        raise UsageError(
            "nothing to build; give SPEC.toml, --variant mha|mqa|gqa or --module PATH.py:FUNCTION"
        )
    return "attention", AttentionSpec.from_dict(changes)


@cli.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--graph", type=click.Path(path_type=Path), help="Run this ONNX file instead of the bundle's."
)
@runtime_options
@report_options
def verify_command(
    bundle: Path,
    graph: Path | None,
    json_file: str | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Replay a bundle's golden vectors; needs no torch."""
    from attn_export.jobs.verify import verify
    from attn_export.report.progress import progress

    _check_writable(json_file)
    with progress(quiet=quiet) as bar:
        report = verify(bundle, graph=graph, progress=bar, **options)
    return _render(report, json_file, quiet=quiet, place=None)


@cli.command("check")
@click.argument("model", metavar="MODEL.onnx", type=click.Path(path_type=Path))
def check_command(model: Path) -> int:
    """Check any ONNX file; beside a manifest.json, against what was asked for."""
    from attn_export.graph.checks import CHECKS
    from attn_export.jobs.check import check

    findings = check(model)
    for finding in findings:
        click.echo(f"{model}: {finding.check}: {finding.message}")
    if findings:
        return GraphError.exit_code
    click.echo(f"{model}: {len(CHECKS)} checks passed")
    return 0


@cli.command("runtimes")
def runtimes_command() -> int:
    """List the runtimes: which can run here, and why not."""
    from attn_export.runtimes.catalogue import RUNTIMES

    for runtime in RUNTIMES:
        reason = runtime.unavailable()
        state = f"not here: {reason}" if reason else "ready"
        click.echo(f"{runtime.name:<16} {runtime.version() or '-':<10} {state}")
    return 0


def _check_writable(json_file: str | None) -> None:
    """Refuse before the work what could not be written after it."""
    if json_file and json_file != "-" and not Path(json_file).absolute().parent.is_dir():
        raise OutputError(f"cannot write {json_file}: there is no such folder")


def _render(report: Any, json_file: str | None, *, quiet: bool, place: Path | None) -> int:
    from attn_export.report.data import to_json

    if json_file == "-":
        click.echo(to_json(report), nl=False)
        return int(report.exit_code)
    if json_file:
        try:
            Path(json_file).write_text(to_json(report), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {json_file}: {error.strerror}") from error
    if not quiet or not report.passed:
        from rich.console import Console

        from attn_export.report.terminal import print_report

        console = Console(stderr=quiet)
        print_report(report, console)
        if place is not None:
            console.print(
                f"bundle: {place}", highlight=False, markup=False, emoji=False, soft_wrap=True
            )
    return int(report.exit_code)
