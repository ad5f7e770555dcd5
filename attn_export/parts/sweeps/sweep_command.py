"""`attn-export sweep`, `worker` and `bisect`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.commands.options import (
    STDOUT,
    json_option,
    option,
    quiet_option,
    with_help,
    with_options,
)
from attn_export.commands.output import echo, messages, write_file
from attn_export.errors import ParityError, RuntimeFailure, UsageError, printable
from attn_export.interruption import message_if_ended

if TYPE_CHECKING:
    from attn_export.parts.sweeps.store import Store
    from attn_export.parts.sweeps.sweep_plan import SweepPlan


WRONG, BROKEN = {"failed"}, {"crashed", "error", "hung", "out of memory"}
"""Verdicts of cells for which the exit code is 6, and 5."""


_tls_options = with_options(
    option(
        "--tls-ca", metavar="FILE", type=Path,
        help="The certificate of the authority that all processes trust, as PEM.",
    ),
    option(
        "--tls-cert", metavar="FILE", type=Path, help="The certificate of this process, as PEM."
    ),
    option("--tls-key", metavar="FILE", type=Path, help="The key of this process, as PEM."),
)  # fmt: skip


@with_help(
    "Many layers", "sweep", "sweep layers.toml --resume", "sweep layers.toml --share 1/4 -o part-1"
)
@option("plan_file", metavar="[SWEEP.toml]", required=False, type=Path)
@option(
    "-o", "--output", metavar="STORE", type=Path,
    help="The folder of the results.  [default: NAME.sweep]",
)  # fmt: skip
@option("--resume", is_flag=True, help="Run the cells that the store does not have.")
@option(
    "--scheduler", metavar="ADDRESS",
    help="A Dask cluster: tcp://HOST:PORT.  [default: processes on this machine]",
)  # fmt: skip
@option(
    "--workers", type=int, least=1, most=1024, metavar="N",
    help="The number of processes on this machine.  [default: its cores]",
)  # fmt: skip
@option(
    "--install", is_flag=True,
    help="First install the releases of runtimes that the plan names, such as ort-cpu==1.27.0.",
)  # fmt: skip
@option(
    "--allow-modules", is_flag=True, help="Let workers run the Python files that the plan names."
)
@option("--share", metavar="I/N", help="Run every N-th layer, from the I-th.")
@option(
    "--matrix", metavar="github", choices=("github",),
    help="Print the plan as a matrix of GitHub Actions, and run nothing.",
)  # fmt: skip
@option(
    "--jobs", type=int, least=1, most=256, default=8, show_default=True, metavar="N",
    help="The number of jobs of the matrix.",
)  # fmt: skip
@option(
    "--merge", "merged", multiple=True, metavar="STORE", type=Path,
    help="Add the results of other stores to --output, and run nothing.",
)  # fmt: skip
@_tls_options
@json_option("Write every cell; - for stdout.")
@quiet_option
def sweep_command(
    plan_file: Path | None,
    output: Path | None,
    resume: bool,
    scheduler: str | None,
    workers: int | None,
    install: bool,
    allow_modules: bool,
    share: str | None,
    matrix: str | None,
    jobs: int,
    merged: tuple[Path, ...],
    json_file: str | None,
    quiet: bool,
    **tls_files: Path | None,
) -> int:
    """Verify many layers in many dialects and runtimes, on this machine or a Dask cluster.

    A cell is one layer in one dialect and runtime. Finished cells are stored at once, and survive
    a killed process. Exit code 6 if numbers are wrong somewhere, 5 if a cell crashed or could not
    be run to its end.
    """
    from attn_export.parts.sweeps.store import Store, merge
    from attn_export.parts.sweeps.sweep_plan import read_plan

    if merged:
        if plan_file is not None or output is None:
            raise UsageError("--merge takes --output and no SWEEP.toml")
        merge(output, merged)
        with Store.open(output) as store:
            return _finish(store, json_file, quiet=quiet)
    if plan_file is None:
        raise UsageError("SWEEP.toml is missing; docs/sweep.md explains it")
    plan = read_plan(plan_file, allow_modules=allow_modules)
    if matrix:
        return _print_matrix(plan, jobs)
    if share is not None:
        plan = plan.share(*_share(share))
    from attn_export.parts.sweeps.cluster import check_address, connected, security
    from attn_export.parts.sweeps.run import run_sweep
    from attn_export.report.progress import progress

    tls = security(**tls_files)
    if scheduler is not None:
        check_address(scheduler, tls)
    if install:
        _install({cell.runtime for cell in plan.cells}, quiet=quiet)
    output = output or Path(f"{plan.name}.sweep")
    ended = f"interrupted; {output} keeps the finished cells: give --resume to run the rest"
    with Store.open(output, new=not resume) as store:
        with progress(quiet=quiet) as bar, message_if_ended(printable(ended)):
            bar.phase("starting the workers")
            with connected(scheduler, tls, workers) as client:
                if not quiet and json_file != STDOUT and _has_dashboard(client):
                    echo(f"dashboard: {client.dashboard_link}")
                run_sweep(plan, store, client, bar)
        return _finish(store, json_file, quiet=quiet)


def _print_matrix(plan: SweepPlan, jobs: int) -> int:
    """Print the plan as a matrix of GitHub Actions, and return the exit code."""
    count = min(jobs, len(plan.sources))
    shares = [{"share": f"{number}/{count}"} for number in range(1, count + 1)]
    echo(json.dumps({"include": shares}))
    return 0


def _install(names: Iterable[str], *, quiet: bool) -> None:
    """Install the runtimes whose names have a release, such as ``ort-cpu==1.27.0``."""
    from attn_export.parts.sweeps.release import MARK, install, release_of

    for name in sorted((name for name in names if MARK in name), key=release_of):
        install(name, messages(quiet=quiet))


def _has_dashboard(client: Any) -> bool:
    import importlib.util

    return bool(importlib.util.find_spec("bokeh") and client.dashboard_link)


def _share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"--share {text[:40]!r} must be I/N with I from 1 to N, as in 1/8")
    return number, count


def _finish(store: Store, json_file: str | None, *, quiet: bool) -> int:
    """Print and write the results; return the exit code."""
    from attn_export.parts.sweeps.store import to_json

    counts = store.counts()
    if json_file:
        write_file(json_file, to_json(store))
    if json_file != STDOUT and not quiet:
        for name, verdicts in counts.items():
            numbers = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            echo(f"{name}: {numbers}")
        echo(f"results: {store.folder}")
    all_verdicts = {verdict for verdicts in counts.values() for verdict in verdicts}
    if all_verdicts & WRONG:
        return ParityError.exit_code
    return RuntimeFailure.exit_code if all_verdicts & BROKEN else 0


@with_help("Many layers", "worker tcp://192.0.2.1:8786")
@option("scheduler", metavar="ADDRESS")
@option("--name", metavar="NAME", help="The name of the worker.  [default: its address]")
@_tls_options
def worker_command(scheduler: str, name: str | None, **tls_files: Path | None) -> int:
    """Run cells of sweeps for the Dask scheduler at ADDRESS, with the runtimes of this machine.

    It runs one cell at a time, and ends with the scheduler.
    """
    from attn_export.parts.sweeps.cluster import security, serve

    serve(scheduler, security(**tls_files), name)
    return 0


# -- bisect -------------------------------------------------------------------------------------


@with_help(
    "Find causes",
    "bisect models/mqa",
    "bisect models/mqa --runtime ort-cpu --good 1.20.1 --bad 1.32.0 --install",
)  # fmt: skip
@option("bundle", type=Path)
@option(
    "--runtime", "name", default="ort-cpu", show_default=True, metavar="NAME", help="The runtime."
)
@option(
    "--dialect", metavar="NAME",
    help="The graph that it runs.  [default: standard, or the only one]",
)  # fmt: skip
@option("--good", metavar="VERSION", help="A release that passes.")
@option("--bad", metavar="VERSION", help="A release that does not.")
@option(
    "--install", is_flag=True,
    help="Choose from all releases that were published, and install those that it runs.",
)  # fmt: skip
@quiet_option
def bisect_command(
    bundle: Path,
    name: str,
    dialect: str | None,
    good: str | None,
    bad: str | None,
    install: bool,
    quiet: bool,
) -> int:
    """Find the release of a runtime in which the verdict on a bundle's graph changed.

    By default all releases are searched, from the oldest to the newest. --good may be newer than
    --bad. Releases are installed by scripts/setup_runtimes NAME==VERSION, or by --install.
    """
    from attn_export.parts.sweeps import release as releases_of
    from attn_export.parts.sweeps.release import MARK, installed, release_of
    from attn_export.parts.sweeps.releases import bisect, change
    from attn_export.report.progress import progress
    from attn_export.runtimes.catalogue import runtime

    say = messages(quiet=quiet)
    ends = [f"{name}{MARK}{version}" for version in (good, bad) if version is not None]
    for release in ends or [f"{name}{MARK}1.0"]:
        runtime(release)  # raises an error for an invalid release
    available = releases_of.published(name) if install else installed()
    releases = {*(item for item in available if item.partition(MARK)[0] == name), *ends}
    if len(ends) == 2:
        oldest, newest = sorted(map(release_of, ends))
        releases = {item for item in releases if oldest <= release_of(item) <= newest}
    with progress(quiet=quiet) as bar:

        def install_shown(item: str) -> None:
            with bar.hidden():  # pip writes to the terminal
                releases_of.install(item, say)

        tried = bisect(
            bundle, sorted(releases), dialect,
            install=install_shown if install else None,
            progress=bar,
        )  # fmt: skip
    if not quiet:
        for result in tried:
            cause = f": {result.cause}" if result.cause else ""
            echo(printable(f"{result.release} {result.verdict}{cause}", 300))
    older, newer = change(tried)
    passing, other = (newer, older) if newer.passed else (older, newer)
    where = "first" if newer.passed else "last"
    echo(f"{passing.release} is the {where} that passes; {other.release} {other.verdict}")
    return 0
