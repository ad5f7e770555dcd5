"""Command `kit`."""

from __future__ import annotations

from pathlib import Path

from attn_export.commands.options import option, with_help
from attn_export.commands.output import echo
from attn_export.errors import PARAGRAPH, printable


@with_help("Build and ship", "kit cpp models/mqa -o mqa-cpp", "kit web models/mqa -o mqa-web")
@option("language", metavar="LANGUAGE")
@option("bundle", type=Path)
@option(
    "-o", "--output", required=True, type=Path, metavar="DIR",
    help="The folder to write: new, empty, or an unmodified kit.",
)  # fmt: skip
@option(
    "--dialect", metavar="NAME",
    help="The graph that it runs.  [default: the fastest that its engine runs]",
)  # fmt: skip
@option("-q", "--quiet", is_flag=True, help="No progress, and no output but errors.")
def kit_command(language: str, bundle: Path, output: Path, dialect: str | None, quiet: bool) -> int:
    """Write a program that loads, runs and tests a bundle.

    In library (C), rust, go, java, csharp, c, cpp, node, web or python: a project with its own
    build file and README that makes inputs, runs, decodes with the KV cache, and replays the test
    cases.
    """
    from attn_export.code_templates import shell
    from attn_export.commands.verify import checked_bundle
    from attn_export.parts.kits.kit import LANGUAGES, ORT_PLACEHOLDER, write_kit
    from attn_export.parts.kits.native import ort_root
    from attn_export.report.progress import progress

    with progress(quiet=quiet) as bar:
        folder = write_kit(language, bundle, output, dialect, bar, checked_bundle)
    if not quiet:
        commands = " && ".join((f"cd {shell(str(folder))}", *LANGUAGES[language].test))
        library = ort_root()
        if library is not None:
            commands = commands.replace(ORT_PLACEHOLDER, shell(str(library)))
        echo(printable(f"kit: {folder}", PARAGRAPH))
        echo(printable(f"try: {commands}", PARAGRAPH))
    return 0
