"""Command line: parse arguments, call a job, render its result, return the exit code."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from attn_export.commands.options import PATH, budget_option, limit_own_memory, runtime_options
from attn_export.commands.output import Output, output_options
from attn_export.errors import (
    INTERRUPTED,
    READER_GONE,
    AttnExportError,
    UsageError,
    one_line,
    printable,
)
from attn_export.interruption import MESSAGE
from attn_export.output_folder import check_utf8
from attn_export.system_info import missing_package

TRACEBACK = "ATTN_EXPORT_TRACEBACK"
"""The environment variable that makes internal errors end in a traceback."""

HELP = ("-h", "--help")


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. Errors are one line on stderr."""
    try:
        _check_paths(arguments)
        code = cli.main(list(arguments), prog_name="attn-export", standalone_mode=False)
    except AttnExportError as error:
        return _complain(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return UsageError.exit_code
    except click.ClickException as error:
        return _complain(error.format_message(), UsageError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain(MESSAGE, INTERRUPTED)
    except (BrokenPipeError, SystemExit):
        # The reader of stdout has ended, as in `attn-export … | head`. click and rich raise
        # SystemExit for it, and for nothing else.
        return READER_GONE
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        return _complain(*_unexpected(error))
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error that is not raised on purpose."""
    if isinstance(error, OSError):
        return f"the operating system reports: {one_line(error)}", UsageError.exit_code
    # This is the message of a shared library that does not fit in the address space.
    if isinstance(error, MemoryError) or "failed to map segment" in str(error):
        return "there is too little memory; raise the limit (ulimit -v)", AttnExportError.exit_code
    if isinstance(error, ModuleNotFoundError):
        return missing_package((error.name or "").partition(".")[0]), UsageError.exit_code
    message = f"internal error: {one_line(error)}; report it with the output of {TRACEBACK}=1"
    return message, AttnExportError.exit_code


def _check_paths(arguments: Sequence[str]) -> None:
    """Check that all paths are UTF-8, which engines and file formats need."""
    for text in arguments:
        check_utf8(text)
    if set(HELP) & set(arguments):
        return
    with contextlib.suppress(FileNotFoundError):  # these folders may be missing
        check_utf8(Path.cwd())
        check_utf8(tempfile.gettempdir())


def _complain(message: str, code: int) -> int:
    click.echo(f"attn-export: {printable(message)}", err=True)
    return code


# -- commands ------------------------------------------------------------------------

MODULES = {
    "build": "attn_export.commands.build_command",
    "check": "attn_export.commands.commands",
    "compare": "attn_export.commands.compare_command",
    "explain": "attn_export.commands.compare_command",
    "lower": "attn_export.commands.commands",
    "runtimes": "attn_export.commands.commands",
}
"""The module of each command of the core except `verify`."""


def _of_parts() -> dict[str, str]:
    """Return the module of each command of a part. Commands of the core load no part."""
    from attn_export.parts import parts

    return {name: module for part in parts() for name, module in part.commands.items()}


class Commands(click.Group):
    """Group of all commands, which imports a command's module when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands."""
        return sorted({*self.commands, *MODULES, *_of_parts()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported only now; None if there is none of this name."""
        if cmd_name not in self.commands:
            module = MODULES.get(cmd_name) or _of_parts().get(cmd_name)
            name = f"{cmd_name.replace('-', '_')}_command"
            if module:
                self.add_command(getattr(import_module(module), name))
        return super().get_command(ctx, cmd_name)


@click.group(cls=Commands, context_settings={"help_option_names": HELP, "max_content_width": 100})
@click.version_option(package_name="attn-export")
def cli() -> None:
    """Export PyTorch attention to ONNX, and check that runtimes compute the same.

    Exit codes: 0 passed; 1 too little memory or an internal error; 2 wrong usage; 3 export
    failed; 4 graph refused; 5 a runtime failed or is missing; 6 parity mismatch; 7 bundle damaged
    or not signed; 130 interrupted.
    """


@cli.command("verify")
@click.argument("bundle", type=PATH)
@click.option("--graph", type=PATH, help="Run this ONNX file instead of the bundle's.")
@runtime_options
@budget_option
@click.option(
    "--baseline", type=PATH, metavar="FILE",
    help="Also fail where an error is more than 4 times what it was in this file.",
)  # fmt: skip
@click.option(
    "--recompute", is_flag=True,
    help="Compute the truth anew and judge by that; the stored one must agree. Needs torch.",
)  # fmt: skip
@click.option(
    "--sizes", multiple=True, metavar="AXIS=N,…",
    help="Run random inputs of these sizes in place of the golden ones. Needs torch.",
)  # fmt: skip
@click.option(
    "--module", metavar="PATH.py:FUNCTION",
    help="Your module, for --recompute and --sizes of a bundle that was built from it.",
)  # fmt: skip
@click.option("--update", is_flag=True, help="Write the errors of this run into --baseline.")
@click.option(
    "--trust", metavar="PUBLIC.pem|IDENTITY",
    help="Fail unless this key, or this identity of sigstore, signed every file of the bundle.",
)  # fmt: skip
@click.option("--oidc-issuer", metavar="URL", help="Issuer of the identity of --trust.")
@output_options
def verify_command(bundle: Path, graph: Path | None, destinations: Output, **options: Any) -> int:
    """Replay a bundle's golden vectors; needs no torch without --recompute, --sizes, --module."""
    from attn_export.commands.verify import verify

    if options["update"] and options["baseline"] is None:
        raise UsageError("--update needs --baseline FILE")
    limit_own_memory()
    with destinations.job(bundle.name) as bar:
        report = verify(bundle, graph=graph, progress=bar, **options)
        if any(verdict.status != "passed" for verdict in report.verdicts):
            from attn_export.commands.explain_failures import explain_failures

            report = explain_failures(report, bundle, graph, progress=bar)
    return destinations.render(report, place=None)
