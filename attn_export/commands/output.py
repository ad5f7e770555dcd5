"""Destinations of a report: the terminal, files, and the CI system."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.commands.options import (
    STDOUT,
    Command,
    file_option,
    json_option,
    option,
    quiet_option,
    with_options,
)
from attn_export.errors import AttnExportError, UsageError, printable
from attn_export.output_folder import write_errors, write_whole

if TYPE_CHECKING:
    from attn_export.results import Report
    from attn_export.runtimes.run_options import RunOptions


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Write a text to stdout or stderr, in what a terminal there can show."""
    import click

    click.echo(text, err=err, nl=nl)


def messages(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that writes a line to stderr, or ignores it if `quiet` is set."""

    def say(text: str) -> None:
        if not quiet:
            echo(text, err=True)

    return say


@dataclasses.dataclass(frozen=True)
class Output:
    """Destinations of a report, as the command line names them.

    Attributes:
        json_file: The file for JSON, `STDOUT`, or None.
        junit_file: The file for JUnit XML, or None.
        html_file: The file for HTML, or None.
        quiet: Whether to print nothing but errors and failed reports.
        verbose: Whether to print each step on a line instead of a progress bar, and all that
            reports hold of failures and notes.
    """

    json_file: str | None
    junit_file: str | None
    html_file: str | None
    quiet: bool
    verbose: bool

    @contextlib.contextmanager
    def job(self, name: str, run: RunOptions) -> Iterator[RunOptions]:
        """Yield the options with a progress bar; write a report of an error that is raised.

        After a `UsageError` nothing is written, because the job did not start.
        """
        from attn_export.report.progress import progress

        try:
            with progress(quiet=self.quiet, verbose=self.verbose) as bar:
                yield dataclasses.replace(run, progress=bar)
        except UsageError:
            raise
        except AttnExportError as error:
            if self.json_file or self.junit_file or self.html_file:
                from attn_export.results import Report
                from attn_export.system_info import environment

                report = Report(printable(name), (), (), environment(), (), error=error)
                self._write_files(report)
            raise

    def render(self, report: Report, place: Path | None) -> int:
        """Write and print a report.

        Returns:
            The exit code.
        """
        self._write_files(report)
        _report_to_github(report, may_print=self.json_file != STDOUT)
        if self.json_file != STDOUT and not (self.quiet and report.passed):
            self._print(report, place)
        return report.exit_code

    def _write_files(self, report: Report) -> None:
        if self.json_file:
            write_file(self.json_file, report.to_json())
        if self.junit_file:
            from attn_export.report.ci import to_junit

            write_file(self.junit_file, to_junit(report))
        if self.html_file:
            write_file(self.html_file, report.to_html())

    def _print(self, report: Report, place: Path | None) -> None:
        from rich.console import Console

        from attn_export.report.terminal import print_report

        print_report(report, Console(stderr=self.quiet), verbose=self.verbose)
        if place is not None:
            echo(f"bundle: {printable(place)}", err=self.quiet)


def output_options(command: Command) -> Command:
    """Add the options --json, --junit, --html, --quiet and --verbose.

    The command gets their values as `destinations`, an `Output`.
    """

    @functools.wraps(command)
    def merged(
        *,
        json_file: str | None,
        junit_file: str | None,
        html_file: str | None,
        quiet: bool,
        verbose: bool,
        **values: Any,
    ) -> Any:
        destinations = Output(json_file, junit_file, html_file, quiet, verbose)
        return command(destinations=destinations, **values)

    add = with_options(
        json_option("Write the report as JSON; - for stdout."),
        file_option(
            "--junit", "junit_file", "Write the report as JUnit XML, as CI systems read it."
        ),
        file_option("--html", "html_file", "Write the report as an HTML page."),
        quiet_option,
        option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Print each step on a line, each failure, and notes in full.",
        ),
    )
    return add(merged)


def write_file(file: str, text: str | bytes) -> None:
    """Write a file in one step, or to stdout."""
    if file == STDOUT:
        echo(text, nl=False)
        return
    with write_errors(file):
        write_whole(Path(file), text)


def _report_to_github(report: Report, *, may_print: bool) -> None:
    """Write the summary and an annotation for each failure, in a job of GitHub Actions.

    https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands
    """
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    # Annotations are lines on stdout.
    annotates = os.environ.get("GITHUB_ACTIONS") == "true" and may_print
    if not summary and not annotates:
        return
    if summary:
        with write_errors(summary), Path(summary).open("a", encoding="utf-8") as file:
            file.write(report.to_markdown())
    if annotates:
        from attn_export.report.ci import github_annotations

        for line in github_annotations(report):
            echo(line)
