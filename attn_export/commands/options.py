"""Options that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attn_export.errors import OutputError, UsageError

STDOUT = "-"
"""The file name that stands for stdout."""

Command = Callable[..., Any]

PATH = click.Path(path_type=Path)
"""The type of an argument or option that is passed to the command as a `Path`."""

SIZE = click.IntRange(min=1)

CPU = "ort-cpu"
"""The runtime of the option --cpu."""

quiet_option = click.option("--quiet", is_flag=True, help="Print errors only.")


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds options to a command, whose help lists them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def file_option(flag: str, name: str, help_text: str) -> Callable[[Command], Command]:
    """Return an option for a file to write, whose folder must exist."""
    return click.option(flag, name, metavar="FILE", help=help_text, callback=_check_folder)


def _check_folder(_: click.Context, __: click.Parameter, file: str | None) -> str | None:
    if file and file != STDOUT and not Path(file).absolute().parent.is_dir():
        raise OutputError(f"cannot write {file}: there is no such folder")
    return file


def json_option(help_text: str) -> Callable[[Command], Command]:
    """Return the option --json; its value is a file name, or - for stdout."""
    return file_option("--json", "json_file", help_text)


module_option = click.option(
    "--module", metavar="PATH.py:FUNCTION", help="A function that returns a Subject of your own."
)


def pairs(_: object, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return the values of an option that is NAME=VALUE, by name."""
    found = {}
    for text in texts:
        name, __, value = text.partition("=")
        found[name] = value
        if not name or not value:
            raise UsageError(f"{option.opts[0]} is {option.metavar}; got {text!r}")
    return found


fix_input_option = click.option(
    "--fix-input", "fixed", multiple=True, metavar="NAME=VALUE", callback=pairs,
    help="An input of the graph that always has this value, as in use_cache_branch=1.",
)  # fmt: skip


def runtime_options(command: Command) -> Command:
    """Add the options --runtime, --cpu, --require, --atol and --rtol.

    The command gets --cpu NAME as ort-cpu@NAME in `runtimes`.
    """

    @functools.wraps(command)
    def merged(*, runtimes: tuple[str, ...], cpus: tuple[str, ...], **values: Any) -> Any:
        if cpus:
            runtimes = (*(runtimes or (CPU,)), *(f"{CPU}@{name}" for name in cpus))
        return command(runtimes=runtimes, **values)

    add = with_options(
        click.option(
            "--runtime", "runtimes", multiple=True, metavar="NAME",
            help="A runtime to run, or all; -NAME leaves one out of all.  "
            "[default: ort-cpu, and ort-cuda where there is a GPU]",
        ),
        click.option(
            "--cpu", "cpus", multiple=True, metavar="NAME",
            help="An emulated CPU to run ort-cpu on: neoverse-n1, haswell, … or all.",
        ),
        click.option(
            "--require", multiple=True, metavar="NAME", help="Fail if this runtime cannot run."
        ),
        click.option(
            "--atol", type=click.FloatRange(min=0),
            help="Also fail where |runtime - eager| > atol + rtol * |eager|.",
        ),
        click.option(
            "--rtol", type=click.FloatRange(min=0), help="Relative tolerance; see --atol."
        ),
    )  # fmt: skip
    return add(merged)


budget_option = click.option(
    "--budget", "budgets", multiple=True, metavar="MEASURE>=N|MEASURE<=N",
    help="Fail if the quantised layer misses this bound against float32: sqnr>=30 (dB), "
    "cosine>=0.99, row<=0.1, kl<=0.01 (nats), top1>=0.99.  [default: by weights-dtype]",
)  # fmt: skip


def limit_own_memory() -> None:
    """Limit the memory of this process, like that of the runtimes' processes.

    A graph from elsewhere may need values of any size. With the limit, a command that evaluates
    such a graph ends with an error. Without it, the system might kill any other process.
    """
    from attn_export.runtimes.child_main import limit_memory
    from attn_export.runtimes.protocol import Limits

    limit_memory(Limits.default().memory_mib or 0)
