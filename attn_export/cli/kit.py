"""`attn-export kit`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("kit")
@click.argument("language", metavar="LANGUAGE")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="DIR",
    help="The folder to write: new, empty, or a kit as it was written.",
)  # fmt: skip
@click.option(
    "--dialect", metavar="NAME", help="Which graph it runs.  [the fastest that its engine runs]"
)
@click.option("--quiet", is_flag=True, help="No progress, and no output but errors.")
def kit_command(language: str, bundle: Path, output: Path, dialect: str | None, quiet: bool) -> int:
    """Write a program that loads, runs and tests a bundle.

    In c, cpp, node, web or python: a project with its own build file and README that makes inputs,
    runs, decodes with the KV cache, and replays the golden vectors.
    """
    from attn_export.jobs.kit import write_kit
    from attn_export.kits.languages import LANGUAGES
    from attn_export.report.progress import progress

    with progress(quiet=quiet) as bar:
        folder = write_kit(language, bundle, output, dialect, bar)
    if not quiet:
        commands = " && ".join((f"cd {folder}", *LANGUAGES[language].test))
        click.echo(f"kit: {folder}\ntry: {commands}")
    return 0
