"""`attn-export bisect`: the release of a runtime in which a verdict changed."""

from __future__ import annotations

from pathlib import Path

import click

from attn_export.cli.output import messages
from attn_export.errors import RuntimeFailure, printable


@click.command("bisect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--runtime", "name", default="ort-cpu", show_default=True, metavar="NAME", help="The runtime."
)
@click.option(
    "--dialect", default="standard", show_default=True, metavar="NAME", help="Which graph it runs."
)
@click.option("--good", metavar="VERSION", help="A release that passes.")
@click.option("--bad", metavar="VERSION", help="A release that does not.")
@click.option(
    "--install", is_flag=True,
    help="Choose from all releases that were published, and install those that it runs.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="Print errors only.")
def bisect_command(
    bundle: Path,
    name: str,
    dialect: str,
    good: str | None,
    bad: str | None,
    install: bool,
    quiet: bool,
) -> int:
    """Find the release of a runtime in which the verdict on a bundle's graph changed.

    Without --good and --bad between the oldest and the newest release. Releases are installed by
    scripts/setup_runtimes NAME==VERSION, or by --install.
    """
    from attn_export.report.progress import progress
    from attn_export.runtimes.catalogue import runtime
    from attn_export.runtimes.install_folder import InstallError
    from attn_export.runtimes.install_releases import install_release, published
    from attn_export.runtimes.release import MARK, installed, release_of
    from attn_export.sweep.bisect import bisect, change

    say = messages(quiet=quiet)
    ends = [f"{name}{MARK}{version}" for version in (good, bad) if version is not None]
    for release in ends or [f"{name}{MARK}1.0"]:
        runtime(release)  # refuses what is no release
    try:
        listed = published(name) if install else installed()
        mine = {*(each for each in listed if each.partition(MARK)[0] == name), *ends}
        if len(ends) == 2:
            oldest, newest = sorted(map(release_of, ends))
            mine = {each for each in mine if oldest <= release_of(each) <= newest}
        with progress(quiet=quiet) as bar:
            tried = bisect(
                bundle, sorted(mine), dialect,
                install=(lambda each: install_release(each, say)) if install else None,
                progress=bar,
            )  # fmt: skip
    except InstallError as error:
        raise RuntimeFailure(str(error)) from error
    if not quiet:
        for each in tried:
            cause = f": {each.cause}" if each.cause else ""
            click.echo(printable(f"{each.release} {each.verdict}{cause}", 300))
    older, newer = change(tried)
    passing, other = (newer, older) if newer.passed else (older, newer)
    where = "first" if newer.passed else "last"
    click.echo(f"{passing.release} is the {where} that passes; {other.release} {other.verdict}")
    return 0
