"""Options of commands, and those that several commands share.

A command's function keeps its options until the command line makes a command of both, so that
functions in the same files are imported without click.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.errors import OutputError, UsageError, printable

if TYPE_CHECKING:
    import click

Command = Callable[..., Any]
_Decorator = Callable[[Command], Command]

STDOUT = "-"
"""The file name that stands for stdout."""

CPU = "ort-cpu"
"""The runtime of the option --cpu."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A decorator that adds an option or an argument to a command's function.

    Attributes:
        names: The flags, and the name of the parameter; an argument has only a name.
        settings: Those of click; beside them `least` and `most` of a number, and `choices`.
    """

    names: tuple[str, ...]
    settings: dict[str, Any]

    def __call__(self, command: Command) -> Command:
        """Return the function with this option before those that it has."""
        command.__dict__["options"] = (self, *command.__dict__.get("options", ()))
        return command


def option(*names: str, **settings: Any) -> Option:
    """Return an option, or an argument if its name is no flag."""
    return Option(names, settings)


def with_options(*options: _Decorator) -> _Decorator:
    """Return a decorator that adds options to a command, whose help lists them in this order."""
    return lambda command: functools.reduce(lambda c, add: add(c), reversed(options), command)


USES = ("Build and ship", "Judge", "Find causes", "Runtimes and speed", "Many layers")
"""The headings of the commands in the help, in order."""


def with_help(
    use: str,
    *examples: str,
    groups: Mapping[str, Sequence[str]] | None = None,
    short: Sequence[str] = (),
) -> _Decorator:
    """Return a decorator for the help of a command.

    Args:
        use: The heading of the command, one of `USES`.
        *examples: Command lines, without ``attn-export``.
        groups: The names of parameters under each heading; the last one has all others, too.
        short: The names of the parameters that --help lists; --help-all lists the others. Default:
            all.
    """

    def add(command: Command) -> Command:
        command.__dict__.update(use=use, examples=examples, groups=groups or {}, short=short)
        return command

    return add


def _check_folder(_: object, __: object, file: str | None) -> str | None:
    if file and file != STDOUT and not Path(file).absolute().parent.is_dir():
        raise OutputError(f"cannot write {file}: there is no such folder")
    return file


def file_option(flag: str, name: str, help_text: str, *short: str) -> Option:
    """Return an option for a file to write, whose folder must exist."""
    return option(*short, flag, name, metavar="FILE", help=help_text, callback=_check_folder)


def json_option(help_text: str) -> Option:
    """Return the option --json; its value is a file name, or - for stdout."""
    return file_option("--json", "json_file", help_text)


quiet_option = option("-q", "--quiet", is_flag=True, help="Print errors only.")


def removed_option(flag: str, instead: str, **settings: Any) -> Option:
    """Return a hidden option that refuses what earlier versions took, and says what to do."""

    def refuse(_: object, __: object, value: object) -> None:
        if value:
            raise UsageError(f"{flag} was removed in 0.3.0; {instead}")

    return option(flag, hidden=True, expose_value=False, callback=refuse, **settings)


module_option = option(
    "--module", metavar="PATH.py:FUNCTION", help="A function that returns a Subject of your own."
)


def pairs(_: object, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return the values of an option that is NAME=VALUE, by name."""
    found: dict[str, str] = {}
    for text in texts:
        name, __, value = text.partition("=")
        if not name or not value:
            raise UsageError(f"{option.opts[0]} is {option.metavar}; got {text!r}")
        _add_once(found, name, value, option)
    return found


def _add_once(found: dict[str, Any], name: str, value: Any, option: click.Parameter) -> None:
    if name in found:
        raise UsageError(f"{option.opts[0]} gives {printable(name, 60)} twice; leave one out")
    found[name] = value


model_option = option(
    "--model", type=Path, metavar="FOLDER",
    help="The checkpoint of a whole model: config.json and safetensors.",
)  # fmt: skip


def check_folders(**folders: Path | None) -> None:
    """Refuse options that are no folders before torch is imported, which takes seconds."""
    for option, path in folders.items():
        if path is not None and not path.exists():
            raise UsageError(f"--{option} {printable(path)}: there is no such folder")
        if path is not None and not path.is_dir():
            raise UsageError(
                f"--{option} {printable(path)} is a file; give its folder, {printable(path.parent)}"
            )


fix_input_option = option(
    "--fix-input", "fixed", multiple=True, metavar="NAME=VALUE", callback=pairs,
    help="An input of the graph that always has this value, as in use_cache_branch=1.",
)  # fmt: skip

# -- the options of runs ------------------------------------------------------------------------

RUNS = (
    option(
        "--runtime", "runtimes", multiple=True, metavar="NAME",
        help="A runtime to run, or all; -NAME leaves one out of all.  "
        "[default: ort-cpu, and ort-cuda where there is a GPU]",
    ),
    option(
        "--cpu", "cpus", multiple=True, metavar="NAME",
        help="An emulated CPU to run ort-cpu on: neoverse-n1, haswell, … or all.",
    ),
    option("--require", multiple=True, metavar="NAME", help="Fail if this runtime cannot run."),
    option(
        "--atol", type=float, least=0,
        help="Also fail where |runtime - eager| > atol + rtol * |eager|.",
    ),
    option("--rtol", type=float, least=0, help="Relative tolerance; see --atol."),
    option(
        "--memory", metavar="SIZE",
        help="The memory of each runtime's process, as in 8GiB. A graph whose weights take more "
        "than an eighth of it runs in slices.  [default: 3/4 of what there is]",
    ),
    option(
        "--whole", is_flag=True, help="Run every graph whole, however large its weights are.",
    ),
)  # fmt: skip

BUDGET = option(
    "--budget", "budgets", multiple=True, metavar="MEASURE>=N|MEASURE<=N",
    help="Fail if what is quantised misses this bound against float32: sqnr>=30 (dB), "
    "cosine>=0.99, row<=0.1, kl<=0.01 (nats), top1>=0.99.  [default of layers: by weights-dtype]",
)  # fmt: skip

SEARCH_MORE = option(
    "--search-more", is_flag=True,
    help="Search for causes to the end, however long that takes.",
)  # fmt: skip


def run_options(*others: Option) -> _Decorator:
    """Return a decorator for the options of runs and others, such as `BUDGET`.

    The command gets them as `run`, a `RunOptions`, in which --cpu NAME is the runtime ort-cpu@NAME,
    and what is left out is that of pyproject.toml.
    """

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def merged(runtimes: tuple[str, ...], cpus: tuple[str, ...], **values: Any) -> Any:
            from attn_export.configuration import read_configuration
            from attn_export.runtimes.run_options import RunKeywords, RunOptions

            if cpus:
                runtimes = (*(runtimes or (CPU,)), *(f"{CPU}@{name}" for name in cpus))
            names = values.keys() & RunKeywords.__annotations__.keys()
            given: Any = {name: values.pop(name) for name in names}
            table = read_configuration(Path.cwd())
            runtimes = runtimes or tuple(table.runtimes)
            given["require"] = given["require"] or table.require
            given["budgets"] = given["budgets"] or table.budgets
            if "baseline" in values and table.baseline:
                values["baseline"] = values["baseline"] or Path(table.baseline)
            run = RunOptions.of(runtimes=runtimes, **given)
            return command(run=run, **values)

        return with_options(*RUNS, *others)(merged)

    return add


def limit_own_memory() -> None:
    """Limit the memory of this process, like that of the runtimes' processes.

    A graph from elsewhere may need values of any size. With the limit, a command that evaluates
    such a graph ends with an error. Without it, the system might kill any other process.
    """
    from attn_export.runtimes.child_main import limit_memory
    from attn_export.runtimes.protocol import Limits

    limit_memory(Limits.default().memory_mib or 0)


def ranges(
    _: object, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, tuple[int, int]]:
    """Return the least and the largest value by name, of texts ``NAME=LOW:HIGH``."""
    found: dict[str, tuple[int, int]] = {}
    for name, limits in map(_range, texts):
        _add_once(found, name, limits, option)
    return found


def _range(text: str) -> tuple[str, tuple[int, int]]:
    name, _, span = text.partition("=")
    low, _, high = span.partition(":")
    try:
        limits = int(low), int(high)
    except ValueError:
        limits = None
    if not name or limits is None or limits[0] > limits[1]:
        raise UsageError(f"--range is NAME=LOW:HIGH, two whole numbers; got {text!r}")
    return name, limits
